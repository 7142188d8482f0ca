# SPDX-License-Identifier: Apache-2.0

"""Log lines that a peer can cause, and repeat without end: counted per kind, and written at a bounded rate.

The rule, for each kind of line by itself: the first 20 lines are written as they come. In the 10 s from the first one
on, further lines are only counted, and at the end of that time one line says how many there were. After such a flood
the next interval is twice as long, up to 640 s; after an interval without one, everything begins again. So a flood of
one kind soon costs 21 lines in ten minutes, and a few lines are written without delay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.clock import Clock, Scheduled

__all__ = ["LINES_MAX", "CountedLog", "LimitedLog", "LineLimit", "Suppressed"]

LINES_MAX = 20
INTERVAL_S = 10.0
INTERVAL_MAX_S = 640.0

Kind = tuple[str, str]
"""The level of a line and its event, which is a fixed phrase."""


@dataclass(frozen=True, slots=True)
class Suppressed:
    """How many lines of a kind were not written in the last ``interval_s`` seconds."""

    kind: Kind
    count: int
    interval_s: float


@dataclass(slots=True)
class _Interval:
    ends_at: float
    length_s: float
    written: int = 0
    suppressed: int = 0


class LineLimit:
    """Decides which lines are written; see the module. It has no clock: the caller says what time it is, in seconds.

    ``lines_max`` lines of a kind are written in each interval, which begins with the first of them.
    """

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        if lines_max < 1:
            raise ValueError(f"lines_max must be at least 1, is {lines_max}")
        self._lines_max = lines_max
        self._intervals: dict[Kind, _Interval] = {}

    def admit(self, kind: Kind, now: float) -> bool:
        """Whether to write this line. If not, it is counted. Call ``take_due`` first if its deadline has passed."""
        interval = self._intervals.get(kind)
        if interval is None or (now >= interval.ends_at and not interval.suppressed):
            interval = self._intervals[kind] = _Interval(now + INTERVAL_S, INTERVAL_S)
        if interval.written < self._lines_max:
            interval.written += 1
            return True
        interval.suppressed += 1
        return False

    def next_deadline(self) -> float | None:
        """When the next count is due; None if nothing has been suppressed."""
        return min((each.ends_at for each in self._intervals.values() if each.suppressed), default=None)

    def take_due(self, now: float) -> list[Suppressed]:
        """Return the counts of the intervals that are over, and begin longer ones for these kinds."""
        due = []
        for kind, interval in list(self._intervals.items()):
            if now < interval.ends_at:
                continue
            if interval.suppressed:
                due.append(Suppressed(kind, interval.suppressed, interval.length_s))
                length_s = min(2 * interval.length_s, INTERVAL_MAX_S)
                self._intervals[kind] = _Interval(now + length_s, length_s)
            else:
                del self._intervals[kind]
        return due

    def take_all(self) -> list[Suppressed]:
        """Return every count, and forget all kinds."""
        intervals, self._intervals = self._intervals, {}
        return [
            Suppressed(kind, interval.suppressed, interval.length_s)
            for kind, interval in intervals.items()
            if interval.suppressed
        ]


class LimitedLog:
    """Writes lines to ``log``, a structlog logger, within a ``LineLimit``. Loop only.

    The counts are written as ``similar lines suppressed``, at the level of the lines, when they are due on ``clock``.
    """

    def __init__(self, log: Any, clock: Clock, lines_max: int = LINES_MAX) -> None:
        self._log = log
        self._clock = clock
        self._limit = LineLimit(lines_max)
        self._timer: Scheduled | None = None

    def warning(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("warning", event, keys)

    def info(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("info", event, keys)

    def error(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("error", event, keys)

    def close(self) -> None:
        """Write the counts that are not due yet. Lines may still follow. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell(self._limit.take_all())

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        if self._limit.admit((level, event), self._clock.now()):
            getattr(self._log, level)(event, **keys)
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        deadline = self._limit.next_deadline()
        self._timer = None
        if deadline is not None:
            self._timer = self._clock.call_later(max(0.0, deadline - self._clock.now()), self._time_is_up)

    def _time_is_up(self) -> None:
        self._tell(self._limit.take_due(self._clock.now()))
        self._arm()

    def _tell(self, counts: list[Suppressed]) -> None:
        _tell(self._log, counts)


class CountedLog:
    """Like ``LimitedLog``, without a timer: the counts that are due are written before the next line. Any thread."""

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic, lines_max: int = LINES_MAX) -> None:
        self._log = log
        self._now = now
        self._limit = LineLimit(lines_max)
        self._lock = threading.RLock()  # a collected object may write a line while another one is being written

    def warning(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("warning", event, keys)

    def error(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("error", event, keys)

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        with self._lock:
            now = self._now()
            counts, admitted = self._limit.take_due(now), self._limit.admit((level, event), now)
        _tell(self._log, counts)
        if admitted:
            getattr(self._log, level)(event, **keys)


def _tell(log: Any, counts: list[Suppressed]) -> None:
    for each in counts:
        level, event = each.kind
        getattr(log, level)("similar lines suppressed", line=event, count=each.count, within_s=round(each.interval_s))
