# SPDX-License-Identifier: Apache-2.0

"""Call users' methods, report one that does not return (H70), and do long work between their calls in turns.

A call that returns soon costs only an entry in a list. At most one timer runs, during a call or shortly after it, and
checks whether a report is due. So a busy coordinator pays for one timer per ``report_s``, and an idle one for none.

Long work on the event loop is done in steps: other work of the loop gets a turn after each. A thread would not help,
because what takes long here holds the interpreter lock. A coordinator takes one message at a time, so the order of what
happens to it stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

from anyio.lowlevel import checkpoint

from actors import ExitRaised
from actors.clock import Clock, Scheduled
from actors.coordination.interface import OperatorCoordinator
from actors.exits import Abandoned, contained
from actors.waiting_at import raised_at, waiting_at
from protocol.describing import describe, is_a, traceback_of
from protocol.wire.messages import describe_wait
from protocol.wire.state import Steps, run_steps

T = TypeVar("T")

TRACEBACK_BYTES_MAX = 8192


_NUMBERS: dict[str, dict[str, int]] = {
    name: {
        argument: place
        for place, (argument, kind) in enumerate(method.__annotations__.items())
        if kind in ("int", "bool") and argument != "return"
    }
    for name, method in vars(OperatorCoordinator).items()
    if isinstance(method, FunctionType)
}
"""Which arguments of a method a report contains, and their places: numbers only, never what the user has sent."""

_EPSILON_S = 1e-9


class Call:
    """One call of a user's method that has not returned. ``began_at`` is a reading of the watch's clock."""

    __slots__ = ("_args", "awaited", "began_at", "cancelled", "method", "report_due_s", "reported")

    def __init__(self, method: str, args: tuple[Any, ...], awaited: object, began_at: float, report_s: float) -> None:
        self.method = method
        self.awaited = awaited
        self.began_at = began_at
        self.report_due_s = report_s
        self.reported = False
        self.cancelled = False
        self._args = args

    @property
    def arguments(self) -> dict[str, int]:
        """The names and values of those arguments that are numbers."""
        args = self._args
        numbers = {name: args[place] for name, place in _NUMBERS.get(self.method, {}).items() if place < len(args)}
        attempt = getattr(args[1], "attempt", None) if self.method == "subtask_ready" and len(args) > 1 else None
        return numbers if attempt is None else {**numbers, "attempt": attempt.attempt}

    @property
    def name(self) -> str:
        """Say ``handle_request(subtask=1, attempt=0)``."""
        return f"{self.method}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"

    @property
    def place(self) -> str:
        """Where it waits now: file, line and function."""
        return waiting_at(self.awaited) or "a place that is not known"


class CallWatch:
    """The open calls of one operator's coordinator. Watching begins with ``attach``. Loop only."""

    def __init__(self) -> None:
        self._report_s = 0.0
        self._open: list[Call] = []
        self._clock: Clock | None = None
        self._log: Any = None
        self._on_report: Callable[[Call | None], None] = _tell_nobody
        self._timer: Scheduled | None = None
        self._timer_at = 0.0
        self._closed = True
        self.on_end: Callable[[Call], None] | None = None
        """Called with each call that has returned or raised; for a trace, while there is one."""

    def attach(self, clock: Clock, log: Any, report_s: float, on_report: Callable[[Call | None], None]) -> None:
        """Watch the calls of this task, and of the tasks that it starts, from here on.

        A call is reported in ``log`` once it has been awaited for ``report_s`` seconds of ``clock``, then at twice that
        time, and so on. After each report ``on_report`` is called with the oldest open call. It is called with None
        once no call that was reported is open any more.
        """
        self._clock, self._log, self._report_s, self._on_report = clock, log, report_s, on_report
        self._closed = False
        current_watch.set(self)

    def begin(self, method: str, args: tuple[Any, ...], awaited: object) -> Call:
        """A method is about to be awaited."""
        clock = self._clock
        assert clock is not None
        now = clock.now()
        call = Call(method, args, awaited, now, self._report_s)
        self._open.append(call)
        if not self._closed and (self._timer is None or self._timer_at > now + self._report_s):
            self._look_at(now + self._report_s, now)  # the timer may be set for a later report of another call
        return call

    def end(self, call: Call) -> None:
        """The call has returned or raised."""
        self._open.remove(call)
        if self.on_end is not None:
            self.on_end(call)
        if call.reported and not call.cancelled:
            awaited_s = round(self.age_s(call), 3)
            self._log.info("coordinator method returned", method=call.method, **call.arguments, awaited_s=awaited_s)
        if call.reported and not any(other.reported for other in self._open):
            self._on_report(None)

    def cancelled(self, call: Call, error: BaseException) -> None:
        """The call did not return in time, for example at the end of its operator, and was cancelled or abandoned."""
        call.cancelled = True
        self._log.warning(
            "coordinator method abandoned" if is_a(error, Abandoned) else "coordinator method cancelled",
            method=call.method,
            **call.arguments,
            awaited_s=round(self.age_s(call), 3),
            waiting_at=raised_at(error),
        )

    def age_s(self, call: Call) -> float:
        assert self._clock is not None
        return self._clock.now() - call.began_at

    @property
    def oldest(self) -> Call | None:
        """The call that has been open for longest."""
        return self._open[0] if self._open else None

    @property
    def inside(self) -> bool:
        """Whether the caller is a method of the coordinator, or was called by one, in its own task."""
        return any(getattr(call.awaited, "cr_running", False) for call in self._open)

    def describe(self) -> str:
        """What the coordinator is doing, for the text of a timeout; empty if no method is being awaited."""
        call = self.oldest
        if call is None:
            return ""
        return describe_wait(call.name, self.age_s(call), call.place)

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_report = _tell_nobody

    def _look(self) -> None:
        clock = self._clock
        assert clock is not None
        self._timer = None
        now = clock.now()
        reported = False
        for call in self._open:
            if now - call.began_at >= call.report_due_s - _EPSILON_S:
                self._report(call, now)
                reported = True
        if self._open:
            self._look_at(min(call.began_at + call.report_due_s for call in self._open), now)
        if reported:
            self._on_report(self.oldest)

    def _look_at(self, due: float, now: float) -> None:
        assert self._clock is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._clock.call_later(max(due - now, 0.0), self._look), due

    def _report(self, call: Call, now: float) -> None:
        call.reported = True
        while now - call.began_at >= call.report_due_s - _EPSILON_S:
            call.report_due_s *= 2
        self._log.warning(
            "coordinator method has not returned",
            method=call.method,
            **call.arguments,
            awaited_s=round(now - call.began_at, 3),
            waiting_at=call.place,
        )


def _tell_nobody(call: Call | None) -> None:
    pass


current_watch: ContextVar[CallWatch | None] = ContextVar("headgate_call_watch", default=None)


async def call_user(method: str, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a user's method. Whatever it raises leaves here as an ``Exception``, so it ends nothing else.

    Anything that is not an ``Exception`` becomes an ``ExitRaised`` that names ``method``. The cancellation of something
    that the method awaited becomes a ``RuntimeError``. The call itself is included, so wrong arguments raise here too.
    The coordinator's ``CallWatch`` reports a call that does not return.
    """
    watch = current_watch.get()
    open_call: Call | None = None
    try:
        awaited = call(*args)
        if watch is not None:
            open_call = watch.begin(method, args, awaited)
        return await awaited
    except Exception:
        raise
    except BaseException as error:
        try:
            failure = contained(method, error)
        except (asyncio.CancelledError, Abandoned):
            if watch is not None and open_call is not None:
                watch.cancelled(open_call, error)
            raise
        if is_a(error, asyncio.CancelledError):
            failure = RuntimeError(str(failure))
        raise failure from error
    finally:
        if watch is not None and open_call is not None:
            watch.end(open_call)


async def call_each(method: str, calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Call the same method of several users' objects, each of them whatever the others raise.

    Then raise what was raised: alone, or in an ``ExceptionGroup``. A cancellation of the caller passes immediately.
    """
    failures: list[Exception] = []
    for call in calls:
        try:
            await call()
        except BaseException as error:
            failures.append(contained(method, error))
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"several raised in {method}", failures)


def is_fatal(error: BaseException) -> bool:
    """Whether ``error`` always fails the job, even in methods whose other exceptions are only reported."""
    if type(error) is RuntimeError and isinstance(error.__cause__, asyncio.CancelledError):
        return True
    return is_a(error, ExitRaised | MemoryError | RecursionError)


def true_cause(error: BaseException) -> BaseException:
    """The exception that the user's code raised; the cause of an ``ExitRaised``."""
    cause = error.__cause__
    if is_a(error, ExitRaised) and cause is not None and not is_a(cause, asyncio.CancelledError):
        return cause
    return error


def traceback_text(error: BaseException) -> str:
    """The traceback of ``error`` as text that can be encoded: its end, at most 8 KiB of UTF-8."""
    encoded = (traceback_of(error) or describe(error)).encode("utf-8", "backslashreplace")
    if len(encoded) <= TRACEBACK_BYTES_MAX:
        return encoded.decode()
    mark = b"...\n"
    end = encoded[len(mark) - TRACEBACK_BYTES_MAX :].decode("utf-8", "ignore")  # the cut may be inside a character
    return mark.decode() + end


FIRST_STEPS = 16
"""How many steps a constructor does by itself. Each takes a millisecond or less."""


async def in_turns(steps: Steps[T]) -> T:
    """Do all steps, with a turn for others after each, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await checkpoint()


class Begun:
    """Work that a constructor begins, and ``start`` finishes in turns. The first steps are done right away."""

    __slots__ = ("_is_over", "_steps")

    def __init__(self, steps: Steps[None]) -> None:
        self._steps = steps
        self._is_over = any(next(steps, self) is self for _ in range(FIRST_STEPS))

    async def finish(self) -> None:
        """Do what is left. Raises what the work raises."""
        if not self._is_over:
            self._is_over = True
            await in_turns(self._steps)

    def finish_now(self) -> None:
        """Do what is left without a turn for others: for work that is short."""
        if not self._is_over:
            self._is_over = True
            run_steps(self._steps)
