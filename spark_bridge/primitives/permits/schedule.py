# SPDX-License-Identifier: Apache-2.0

"""When permits of a global rate may be used: pure, on the times that it is given.

A bucket holds up to ``burst`` permits and fills with ``per_s`` permits a second. Instead of counting them, the schedule
knows when the bucket would be full again, and so the moment from which the next permit may be used. This is the generic
cell rate algorithm (ITU-T I.371). A permit is handed out with that moment, which may lie ahead: the task that gets it
waits until then, and asks once.
"""

from __future__ import annotations

__all__ = ["AHEAD_S", "EXPIRY_S", "RateSchedule"]

AHEAD_S = 0.1
"""Permits are handed out ahead of need at most this far into the future, so that a task that dies takes few with it."""
LATE_MIN = 5
"""Below so many permits in ``EXPIRY_S``, none is handed out ahead: a round trip is short beside the wait for one."""
EXPIRY_S = 0.05
"""A permit expires this long after the moment from which it may be used. So permits do not pile up in a task."""


class RateSchedule:
    """The moments from which permits may be used. Times are seconds of one clock. One thread at a time.

    In any ``w`` seconds, at most ``burst + per_s * w`` permits can be used, although each may be used until it expires:
    as many as that makes late are kept back from the burst.
    """

    __slots__ = ("_full_at", "_interval_s", "_slack_s", "shares")

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._interval_s = 1.0 / per_s
        late = int(per_s * EXPIRY_S)
        self.shares = burst > late >= LATE_MIN
        """Whether permits may be handed out ahead of need. Otherwise each is used the moment that it is due."""
        self._slack_s = (burst - (late if self.shares else 0) - 1) * self._interval_s
        self._full_at = now

    def take(self, now: float, count: int) -> list[float]:
        """Hand out up to ``count`` permits, at least one; return how long from now each may not yet be used."""
        delays: list[float] = []
        while not delays or (len(delays) < count and self._full_at - self._slack_s - now <= AHEAD_S):
            self._full_at = max(self._full_at, now)
            delays.append(max(0.0, self._full_at - self._slack_s - now))
            self._full_at += self._interval_s
        return delays
