# SPDX-License-Identifier: Apache-2.0

"""The code of an actor as it runs: its steps, and the work that it starts and does not wait for.

A coroutine that awaits for an hour does no harm. One that computes for half a second stops every other actor. To tell
them apart, each step of a task is timed, from where it resumes to where it next suspends. The timing wraps everything
that the task does, so a message that is handled without suspending costs nothing extra.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import anyio

from actors.exits import Abandoned
from actors.mailbox import Envelope
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


class Background:
    """One piece of background work; its outcome comes back to its actor as a message. Loop-only.

    It is cancelled when its actor stops or restarts.
    """

    __slots__ = ("done", "name", "scope", "steps")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        """Whether it has ended, in whatever way."""
        self.scope = anyio.CancelScope()
        self.steps: Steps[Any] | None = None  # runs the work

    def cancel(self) -> None:
        """Cancel the work. No message comes back from it, even if one is already in the mailbox.

        Does nothing if the work has ended and its message was handled.
        """
        self.scope.cancel()

    def abandon(self, log: Any) -> None:
        """Runtime only: log the work that has ignored its cancellation, and run it no further."""
        if self.steps is not None and not self.steps.abandoned:
            log.error("background work ignored its cancellation", what=self.name, waiting_at=self.steps.place)
            self.steps.abandon()

    @property
    def cancelled(self) -> bool:
        """Whether it has been cancelled."""
        return self.scope.cancel_called


class ResultEnvelope(Envelope):
    """The outcome of background work; void if the work was cancelled since."""

    __slots__ = ("_work",)

    def __init__(self, message: object, work: Background) -> None:
        self.message = message
        self._work = work

    def open(self) -> bool:
        return not self._work.cancelled

    def undeliverable(self, error: Exception) -> bool:
        return not self._work.cancelled
