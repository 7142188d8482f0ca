# SPDX-License-Identifier: Apache-2.0

"""When permits of a global rate may be used: pure, on the times that it is given.

A bucket holds up to ``burst`` permits and fills with ``per_s`` permits a second. Instead of counting them, the schedule
knows when the bucket would be full again, and so the moment from which the next permit may be used. This is the generic
cell rate algorithm (ITU-T I.371). A permit is handed out with that moment, which may lie ahead: the task that gets it
waits until then, and asks once.

A permit that was not used can be given back. If it was the last one, it is as if it had never been handed out.
Otherwise it is handed out again as long as it is valid: until the moment at which the bucket would have been full.
"""

from __future__ import annotations

from bisect import insort
from math import inf

AHEAD_S = 0.1
"""Permits are handed out at most this far into the future, so that a task that dies takes few with it."""
LATE_MIN = 5
"""Below so many permits in ``EXPIRY_S``, none is handed out ahead of need: a round trip is short beside the wait."""
EXPIRY_S = 0.05
"""A permit that is held ahead of need expires this long after the moment from which it may be used. So permits do not
pile up in a task."""


class RateSchedule:
    """The moments from which permits may be used. Times are seconds of one clock, and never go back.

    In any ``w`` seconds, at most ``burst + per_s * w`` permits can be used, although each may be used until it expires:
    as many as that makes late are kept back from the burst.

    A *permit* is a number: when the bucket would have been full if nobody had taken it.
    """

    __slots__ = ("_full_at", "_interval_s", "_late_s", "_returned", "_slack_s", "shares")

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        late = int(per_s * EXPIRY_S)
        self.shares = burst > late >= LATE_MIN
        """Whether permits may be handed out ahead of need. Otherwise each is used the moment that it is due."""
        self._slack_s = (burst - (late if self.shares else 0) - 1) * self._interval_s
        self._late_s = EXPIRY_S if self.shares else 0.0
        self._full_at = -inf
        self._returned: list[float] = []  # ascending

    def due(self, now: float) -> float:
        """From when the permit may be used that ``take`` would hand out."""
        while self._returned and not self.is_valid(self._returned[0], now):
            del self._returned[0]
        return max(now, self.due_of(self._returned[0] if self._returned else max(self._full_at, now)))

    def take(self, now: float) -> float:
        """Hand out a permit, which may be used from ``due`` on."""
        self.due(now)
        if self._returned:
            return self._returned.pop(0)
        permit = max(self._full_at, now)
        self._full_at = permit + self._interval_s
        return permit

    def due_of(self, permit: float) -> float:
        """From when the permit may be used, unless it was handed out later."""
        return permit - self._slack_s

    def is_valid(self, permit: float, now: float) -> bool:
        """Whether the permit can be used by somebody else, if it is given back now and was not the last one."""
        return now <= permit + self._late_s

    def is_last(self, permit: float) -> bool:
        """Whether none was handed out after it."""
        return permit + self._interval_s == self._full_at

    def give_back(self, permit: float) -> None:
        """Take back a permit that was not used."""
        insort(self._returned, permit)
        while self._returned and self.is_last(self._returned[-1]):
            self._full_at = self._returned.pop()
