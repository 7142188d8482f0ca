# SPDX-License-Identifier: Apache-2.0

"""Virtual time: a clock that tests advance, which takes over asyncio's time for the tasks of one deterministic system.

Code under test calls ``anyio.sleep``, ``asyncio.timeout`` or ``asyncio.to_thread`` directly. This module redirects
these calls to the kit's clock, but only for tasks that belong to the system: a context variable marks them, and every
task that they start inherits it. The test itself, and everything else on the same loop, keeps real time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from anyio._core._eventloop import get_async_backend

from actors.clock import Clock, Scheduled
from protocol.arguments import WAIT, checked
from protocol.describing import name_of, type_name

T = TypeVar("T")


async def settle() -> None:
    """Let the loop run until nothing is ready. Code that waits for I/O, threads or real time keeps waiting."""
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    if ready is None:  # a foreign loop does not show what is ready: run many turns instead of just enough
        for _ in range(100):
            await asyncio.sleep(0)
        return
    await asyncio.sleep(0)
    while ready:  # noqa: ASYNC110 - it is the loop's own idleness that is waited for, and that has no event
        await asyncio.sleep(0)


class VirtualClock:
    """A ``Clock`` that stands still until it is advanced. Starts at ``start_s`` seconds."""

    __slots__ = ("_calls", "_now", "_number", "between")

    @checked(start_s=WAIT)
    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._number = 0
        self._calls: list[tuple[float, int, _Call]] = []
        self.between: Callable[[], Awaitable[object]] = settle
        """Awaited before and after each call that comes due, so that its consequences happen at its time."""

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Scheduled:
        call = _Call(callback)
        self._number += 1
        heapq.heappush(self._calls, (self._now + max(0.0, delay_s), self._number, call))
        return call

    async def sleep(self, delay_s: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = self.call_later(delay_s, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            call.cancel()

    def next_due_s(self) -> float | None:
        """When the next call is due, in seconds of this clock; None if there is none."""
        while self._calls and self._calls[0][2].callback is None:
            heapq.heappop(self._calls)
        return self._calls[0][0] if self._calls else None

    @checked(by_s=WAIT)
    async def advance(self, by_s: float) -> None:
        """Let ``by_s`` seconds pass. Calls that come due run in the order of their times, each at its time.

        Raises ``ValueError`` if ``by_s`` is negative.
        """
        until = self._now + by_s
        await self.between()
        while (due := self.next_due_s()) is not None and due <= until:
            call = heapq.heappop(self._calls)[2]
            self._now = max(self._now, due)
            callback, call.callback = call.callback, None
            if callback is not None:
                callback()
            await self.between()
        self._now = until


class _Call:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


THREAD_LIMIT_S = 30.0
"""How long, in real seconds, a function may take in a worker thread before the call fails."""

_current: contextvars.ContextVar[VirtualLoop | None] = contextvars.ContextVar("headgate_virtual_loop", default=None)


class VirtualLoop:
    """The time and the threads that the tasks of one system see. Loop only.

    ``enter`` marks the calling context, and with it every task that is started inside. After ``close`` time runs by
    itself: whenever nothing else moves, the next timer fires. So sleeps and timeouts never delay the end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._timers: set[_Timer] = set()
        self._closing = False
        self._pumping = False
        self._ended_at = 0.0

    def now(self) -> float:
        return max(self._clock.now(), self._ended_at)

    @contextmanager
    def enter(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self._loop, context or contextvars.copy_context())
        timer.scheduled = self._clock.call_later(when - self.now(), lambda: self._fire(timer))
        self._timers.add(timer)
        self._pump_soon()
        return timer

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` in a separate thread while the loop stands still.

        Raises ``RuntimeError`` if it takes more than ``THREAD_LIMIT_S`` real seconds; the thread is left behind.
        """
        outcome: list[T] = []
        errors: list[BaseException] = []
        context = contextvars.copy_context()

        def call() -> None:
            try:
                outcome.append(context.run(function, *args))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call, name="headgate virtual worker", daemon=True)
        thread.start()
        thread.join(THREAD_LIMIT_S)
        if thread.is_alive():
            raise RuntimeError(
                f"{_name(function)} has not returned from its worker thread within {THREAD_LIMIT_S:g} s. In a "
                "deterministic system nothing else moves meanwhile, so a function that waits for the event loop waits "
                "forever: give it what it needs as arguments"
            )
        if errors:
            raise errors[0]
        return outcome[0]

    def close(self) -> None:
        """From here on time runs by itself. Idempotent."""
        self._closing = True
        self._pump_soon()

    def _fire(self, timer: _Timer) -> None:
        self._timers.discard(timer)
        if not timer.cancelled() and not self._loop.is_closed():
            self._loop.call_soon(timer.run, context=timer.context)

    def _pump_soon(self) -> None:
        if self._closing and not self._pumping and self._timers:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Fire the earliest timer once nothing else is ready."""
        self._pumping = False
        self._timers = {timer for timer in self._timers if not timer.cancelled()}
        if self._timers and not getattr(self._loop, "_ready", None):
            timer = min(self._timers, key=lambda one: one.when())
            timer.scheduled.cancel()
            self._ended_at = max(self.now(), timer.when())
            self._fire(timer)
        self._pump_soon()


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, partial) and function.args:  # asyncio.to_thread runs it in the caller's context
        return _name(function.args[0])
    return name_of(function)


class _Timer(asyncio.TimerHandle):
    __slots__ = ("call", "context", "scheduled")

    scheduled: Scheduled

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.context = context
        self.call = (callback, args)

    def run(self) -> None:
        if not self.cancelled():
            callback, args = self.call
            callback(*args)

    def cancel(self) -> None:
        self.scheduled.cancel()
        asyncio.Handle.cancel(self)  # a `TimerHandle` would tell its loop, which never had it, and uvloop's refuses


class _Redirection:
    """The replaced methods of one loop, and how many systems use them now."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.users = 0
        self._loop = loop

    def install(self) -> None:
        loop: Any = self._loop
        real_time, real_call_at, real_call_later = loop.time, loop.call_at, loop.call_later
        real_run_in_executor = loop.run_in_executor

        def time() -> float:
            virtual = _current.get()
            return float(real_time()) if virtual is None else virtual.now()

        def call_at(when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
            virtual = _current.get()
            call = real_call_at if virtual is None else virtual.call_at
            return call(when, callback, *args, context=context)

        def call_later(delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
            virtual = _current.get()
            if virtual is None:
                return real_call_later(delay, callback, *args, context=context)
            return virtual.call_at(virtual.now() + delay, callback, *args, context=context)

        def run_in_executor(executor: Any, function: Callable[..., Any], *args: Any) -> Any:
            virtual = _current.get()
            if virtual is None:
                return real_run_in_executor(executor, function, *args)
            done = loop.create_future()
            try:
                done.set_result(virtual.run(function, *args))
            except Exception as error:
                done.set_exception(error)
            return done

        try:
            loop.time, loop.call_at, loop.call_later = time, call_at, call_later
            loop.run_in_executor = run_in_executor
        except AttributeError as error:
            raise RuntimeError(
                f"a deterministic system needs asyncio's own event loop, not {type_name(loop)}: run the test on "
                "the default loop"
            ) from error

    def remove(self) -> None:
        loop: Any = self._loop
        del loop.time, loop.call_at, loop.call_later, loop.run_in_executor


class _AnyioThreads:
    """``anyio.to_thread.run_sync`` has separate worker threads, so its backend is replaced as well."""

    def __init__(self) -> None:
        self.users = 0
        self._real: Any = None
        self._backend: Any = None

    def install(self) -> None:
        backend: Any = get_async_backend()
        self._backend = backend
        self._real = backend.__dict__["run_sync_in_worker_thread"]
        real = backend.run_sync_in_worker_thread

        async def run_sync_in_worker_thread(
            cls: Any, function: Callable[..., Any], args: tuple[Any, ...], *more: Any, **options: Any
        ) -> Any:
            virtual = _current.get()
            if virtual is None:
                return await real(function, args, *more, **options)
            await cls.checkpoint()
            return virtual.run(function, *args)

        backend.run_sync_in_worker_thread = classmethod(run_sync_in_worker_thread)

    def remove(self) -> None:
        self._backend.run_sync_in_worker_thread = self._real


_redirections: dict[asyncio.AbstractEventLoop, _Redirection] = {}
_anyio_threads = _AnyioThreads()
_lock = threading.Lock()


@contextmanager
def virtual_loop(clock: VirtualClock) -> Iterator[VirtualLoop]:
    """The running loop, redirected for everything that ``VirtualLoop.enter`` marks. May be nested.

    Raises ``RuntimeError`` for a loop whose methods cannot be replaced, such as uvloop's.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        redirection = _redirections.get(loop) or _Redirection(loop)
        if redirection.users == 0:
            redirection.install()
            _redirections[loop] = redirection
        if _anyio_threads.users == 0:
            _anyio_threads.install()
        redirection.users += 1
        _anyio_threads.users += 1
    virtual = VirtualLoop(loop, clock)
    try:
        yield virtual
    finally:
        virtual.close()
        with _lock:
            redirection.users -= 1
            _anyio_threads.users -= 1
            if redirection.users == 0:
                redirection.remove()
                del _redirections[loop]
            if _anyio_threads.users == 0:
                _anyio_threads.remove()
