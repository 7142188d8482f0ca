# SPDX-License-Identifier: Apache-2.0

"""Measure how long a coroutine holds the event loop, step by step.

A coroutine that awaits for an hour does no harm. One that computes for half a second stops every other actor. To tell
them apart, each step of a task is timed, from where it resumes to where it next suspends. The timing wraps everything
that the task does, so a message that is handled without suspending costs nothing extra.
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
    """Awaitable: runs ``coroutine`` and calls ``held(seconds)`` at the end of each step longer than ``limit_s``.

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
        """Run the coroutine no further, whatever it does about its cancellation. Awaiting this then returns None.

        ``Abandoned`` is thrown into it. If it ignores that too, it stays where it is, because nothing runs it any more.
        """
        self.abandoned = True
        if self._task is not None:
            self._task.cancel()

    @property
    def place(self) -> str:
        """Where the coroutine waits now."""
        return waiting_at(self._coroutine)

    def _leave(self) -> None:
        with suppress(BaseException):  # whatever it raises, it does not run any more
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
