# SPDX-License-Identifier: Apache-2.0

"""A clock that tests advance, and a wait until nothing is left to run. Public through ``actors.testing``."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable

from actors.clock import Scheduled
from protocol.arguments import WAIT, checked


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
