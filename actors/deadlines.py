# SPDX-License-Identifier: Apache-2.0

"""Deadlines that are nearly always met, and so must cost nearly nothing.

An event loop pays for each timer, even for one that is cancelled a moment later. Most asks of a program share a few
timeouts, and deadlines with the same timeout come due in the order in which they were set. So there is one lane for
each timeout: a dictionary in that order, and one timer of the clock, for its first entry.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.clock import Clock, Scheduled

IDLE_LANES_MAX = 64
"""With more lanes than this, an empty lane is dropped immediately (for timeouts that never repeat)."""
ROUNDING_S = 1e-9
"""A timer that fires this much too early is on time; floats do not add up exactly."""


class _Lane:
    __slots__ = ("entries", "scheduled")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[float, Callable[[], object]]] = {}
        self.scheduled: Scheduled | None = None


class Deadlines:
    """All deadlines of one system, on its clock. Loop-only."""

    __slots__ = ("_clock", "_lanes", "_next")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[float, _Lane] = {}
        self._next = 0

    def start(self, timeout_s: float, expire: Callable[[], object]) -> int:
        """Call ``expire`` after ``timeout_s`` seconds, unless cancelled; returns the key for ``cancel``."""
        lane = self._lanes.get(timeout_s)
        if lane is None:
            lane = self._lanes[timeout_s] = _Lane()
        self._next = key = self._next + 1
        lane.entries[key] = (self._clock.now() + timeout_s, expire)
        if lane.scheduled is None:
            lane.scheduled = self._clock.call_later(timeout_s, lambda: self._fire(timeout_s))
        return key

    def cancel(self, timeout_s: float, key: int) -> None:
        """The deadline was met. Does nothing if it has expired."""
        lane = self._lanes.get(timeout_s)
        if lane is None:
            return
        lane.entries.pop(key, None)
        if not lane.entries and len(self._lanes) > IDLE_LANES_MAX:
            self._give_up(timeout_s, lane)

    def close(self) -> None:
        """Cancel every timer; nothing expires any more."""
        for timeout_s, lane in tuple(self._lanes.items()):
            self._give_up(timeout_s, lane)

    def _give_up(self, timeout_s: float, lane: _Lane) -> None:
        if lane.scheduled is not None:
            lane.scheduled.cancel()
        del self._lanes[timeout_s]

    def _fire(self, timeout_s: float) -> None:
        lane = self._lanes[timeout_s]
        lane.scheduled = None
        now = self._clock.now()
        while lane.entries:
            key, (due_at, expire) = next(iter(lane.entries.items()))
            if due_at > now + ROUNDING_S:
                lane.scheduled = self._clock.call_later(due_at - now, lambda: self._fire(timeout_s))
                return
            del lane.entries[key]
            expire()
        del self._lanes[timeout_s]
