# SPDX-License-Identifier: Apache-2.0

"""When permits of a global rate may be used: pure, on the times that it is given.

A bucket holds up to ``burst`` permits and fills with ``per_s`` permits a second. Instead of counting them, the schedule
knows when the bucket would be full again, and so the moment from which the next permit may be used. This is the generic
cell rate algorithm (ITU-T I.371). A permit is handed out with that moment, which may lie ahead: the task that gets it
waits until then, and asks once.

A permit has a weight: how much of the bucket it takes. It is an interval of a time line, on which no two overlap, and
as long as the rate needs to fill its weight in again. It may be used from the moment from which a whole burst reaches
to its end, and until its beginning. So all that is used in ``w`` seconds lies in ``w`` seconds and a burst of the line.

A permit that was not used can be given back, or a part of its weight. If it was the last one, it is as if it had never
been handed out. Otherwise it is handed out again as long as it is valid: until the moment at which the bucket would
have been full.
"""

from __future__ import annotations

from bisect import insort
from math import ceil, inf
from typing import NamedTuple

AHEAD_S = 0.1
"""Permits are handed out at most this far into the future, so that a task that dies takes few with it."""
LATE_MIN = 5
"""Below so many permits in ``EXPIRY_S``, none is handed out ahead of need: a round trip is short beside the wait."""
EXPIRY_S = 0.05
"""A permit that is held ahead of need expires this long after the moment from which it may be used. So permits do not
pile up in a task."""
_ROUNDING = 1e-6
"""Of the interval of one permit: what the sum of several may differ from that of their weights."""


class Permit(NamedTuple):
    """An interval of the time line, from when the bucket would have been full if nobody had taken it."""

    start: float
    end: float


class RateSchedule:
    """The moments from which permits may be used. Times are seconds of one clock, and never go back.

    In any ``w`` seconds, permits of a weight of at most ``burst + per_s * w`` can be used, although those of weight 1
    that are held ahead may be used until they expire: as many as that makes late are kept back from the burst.
    """

    __slots__ = ("_free", "_full_at", "_interval_s", "_kept_s", "_late_s", "_span_s", "_valid_from", "shares")

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        late = ceil(per_s * EXPIRY_S - _ROUNDING)
        self.shares = burst > late >= LATE_MIN
        """Whether permits may be handed out ahead of need. Otherwise each is used the moment that it is due."""
        self._late_s, self._kept_s = (EXPIRY_S, late * self._interval_s) if self.shares else (0.0, 0.0)
        self._span_s = burst * self._interval_s - self._kept_s
        self._full_at = self._valid_from = -inf
        self._free: list[Permit] = []  # what was given back and is not the end of the line, ascending

    def due(self, now: float, weight: int = 1) -> float:
        """From when the permit may be used that ``take`` would hand out."""
        return max(now, self.due_of(self._find(now, weight)[1]))

    def take(self, now: float, weight: int = 1) -> Permit:
        """Hand out a permit, which may be used from ``due`` on."""
        index, permit = self._find(now, weight)
        if index is None:
            self._full_at = permit.end
        else:
            whole = self._free.pop(index)
            if permit.end < whole.end:
                self._free.insert(index, Permit(permit.end, whole.end))
        return permit

    def due_of(self, permit: Permit) -> float:
        """From when the permit may be used, unless it was handed out later."""
        return permit.end - self._span_s

    def is_valid(self, permit: Permit, now: float) -> bool:
        """Whether the permit can be used by somebody else, if it is given back now and was not the last one."""
        return now <= permit.end - self._interval_s + self._late_s

    def is_last(self, permit: Permit) -> bool:
        """Whether none was handed out after it."""
        return permit.end == self._full_at

    def give_back(self, permit: Permit) -> None:
        """Take back a permit that was not used."""
        if permit.start < self._valid_from:
            return  # it was handed out under other rules
        insort(self._free, permit)
        index = self._free.index(permit)
        for first in (index, index - 1):
            if 0 <= first < len(self._free) - 1 and self._free[first].end == self._free[first + 1].start:
                self._free[first : first + 2] = [Permit(self._free[first].start, self._free[first + 1].end)]
        if self._free and self.is_last(self._free[-1]):
            self._full_at = self._free.pop().start

    def shorten(self, permit: Permit, weight: int) -> Permit:
        """Take back what a permit has above ``weight``; return what is left of it."""
        end = permit.start + weight * self._interval_s
        if end >= permit.end:
            return permit
        self.give_back(Permit(end, permit.end))
        return Permit(permit.start, end)

    def add(self, now: float, weight: int) -> None:
        """So much was used without a permit: what is taken from now on comes after it."""
        self._full_at = max(self._full_at, now) + weight * self._interval_s

    def stop_sharing(self, now: float) -> None:
        """Hand out none ahead of need from now on, so that a single permit may have the weight of the whole burst.

        Those that are held may still be used late, so the line has a gap after them.
        """
        if self.shares:
            self._span_s += self._kept_s
            self._full_at = self._valid_from = max(self._full_at, now) + self._late_s
            self._free.clear()
            self.shares, self._late_s = False, 0.0

    def _find(self, now: float, weight: int) -> tuple[int | None, Permit]:
        """The earliest free interval of this weight, and in which of those given back it lies; None: after all."""
        length_s = weight * self._interval_s
        while self._free and not self.is_valid(self._free[0], now):
            del self._free[0]
        for index, free in enumerate(self._free):
            start = max(free.start, now - self._late_s)
            if start + length_s <= free.end + self._interval_s * _ROUNDING:
                return index, Permit(start, min(start + length_s, free.end))
        start = max(self._full_at, now)
        return None, Permit(start, start + length_s)
