# SPDX-License-Identifier: Apache-2.0

"""Time, as actors see it.

Everything in this package that waits for *logical* time (timers, ask deadlines, restart back-off) uses a ``Clock``,
so that a test can replace it. Two things deliberately do not: the shutdown deadline and the slow-handler watch. They
guard the real process, and a virtual clock that is not advanced must not switch them off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Scheduled(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Take the call back. Does nothing if it has run or was cancelled before."""


class Clock(Protocol):
    """A monotonic clock that can call back. Loop-only: call it from the event loop's thread."""

    def now(self) -> float:
        """Seconds from an arbitrary fixed point; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Scheduled:
        """Call ``callback`` on the loop after ``delay_s`` seconds. Calls due at the same time keep their order."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds of this clock."""
        ...


class LoopClock:
    """The event loop's own clock. Needs a running loop when it is built."""

    __slots__ = ("_loop", "now")

    now: Callable[[], float]

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Scheduled:
        return self._loop.call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
