"""Measure how long a coroutine holds the event loop, step by step.

A coroutine that awaits for an hour harms nobody; one that computes for half a second stops every other actor.
To tell the two apart the steps of a task are timed one by one: from where it is resumed to where it next
suspends. That is done once, around everything that the task does, so a message that is handled without a
suspension costs nothing extra.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from actors.exits import Abandoned
from actors.waiting_at import waiting_at

T = TypeVar("T")


class Steps(Generic[T]):
    """Awaitable: runs ``coroutine`` and calls ``held(seconds)`` at the end of each step longer than
    ``limit_s``.

    ``began_at`` is when the current step began, on ``timer``.
    """

    __slots__ = ("_coroutine", "_held", "_limit_s", "_task", "_timer", "abandoned", "began_at")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        timer: Callable[[], float],
        limit_s: float,
        held: Callable[[float], None],
    ) -> None:
        self._coroutine = coroutine
        self._timer = timer
        self._limit_s = limit_s
        self._held = held
        self.began_at = timer()
        self.abandoned = False
        self._task: asyncio.Task[Any] | None = None

    def abandon(self) -> None:
        """Run the coroutine no further, whatever it does about its cancellation; awaiting this then returns None.

        It is told by ``Abandoned``. If it ignores that too it stays where it is, for nothing runs it any more.
        """
        self.abandoned = True
        if self._task is not None:
            self._task.cancel()

    @property
    def place(self) -> str:
        """Where the coroutine waits now."""
        return waiting_at(self._coroutine)

    def _leave(self) -> None:
        with suppress(BaseException):  # whatever it says about it, it does not run any more
            self._coroutine.throw(Abandoned())

    def __await__(self) -> Generator[Any, Any, T]:
        send, throw, timer, limit_s = self._coroutine.send, self._coroutine.throw, self._timer, self._limit_s
        sent: Any = None
        thrown: BaseException | None = None
        self._task = asyncio.current_task()
        while True:
            self.began_at = began_at = timer()
            try:
                yielded = send(sent) if thrown is None else throw(thrown)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                held_s = timer() - began_at
                if held_s > limit_s:
                    self._held(held_s)
            sent = thrown = None
            try:
                sent = yield yielded
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as exception:
                if self.abandoned:
                    self._leave()
                    return cast(T, None)
                thrown = exception
