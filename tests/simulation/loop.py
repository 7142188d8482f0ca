# SPDX-License-Identifier: Apache-2.0

"""An event loop without a clock and without I/O: the world sets the time and chooses the turns.

Ready callbacks run in the order in which they became ready, as in any loop. Timers wait in a heap that the world
reads.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CANCELS_MAX = 20


class SimulatedLoop(asyncio.AbstractEventLoop):
    """``now`` reads the time, in seconds. ``errors``: uncaught exceptions. I/O is refused."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.errors: list[dict[str, Any]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they began

    # --- the world's side -----------------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Run the ready callbacks, and all that become ready meanwhile."""
        ready = self._ready
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop, and run everything that follows."""
        self.call_soon(function, *args)
        self.run_until_idle()

    def next_deadline(self) -> float | None:
        """Return when the first timer is due, or None if there is none."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def fire_timers(self) -> None:
        """Run every timer that is due, in the order of their times."""
        while (due := self.next_deadline()) is not None and due <= self.time():
            self._ready.append(heapq.heappop(self._timers)[2])
            self.run_until_idle()

    def kill(self) -> None:
        """Cancel everything where it stands. Some tasks must be cancelled more than once."""
        for _ in range(CANCELS_MAX):
            for task in list(self._tasks):
                task.cancel()
            self.run_until_idle()
            if not self._tasks:
                break

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now()

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def get_task_factory(self) -> None:
        """Return None: there is no task factory."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Accept a cancelled timer: ``TimerHandle.cancel`` notifies its loop. The heap drops it when its time comes."""
