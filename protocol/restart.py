# SPDX-License-Identifier: Apache-2.0

"""Decides whether a failed job is run again, and after how long (H15).

A strategy is a value; ``RestartBackoff`` applies it. ``RestartBackoff`` is notified when the job starts and when it
fails, and returns how long to wait. It reads no clock: ``now`` is a reading of any monotonic clock, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from protocol.arguments import FACTOR, WAIT, check_fields, checked_names


@checked_names
@dataclass(frozen=True, slots=True)
class FixedDelay:
    """Run again ``delay_s`` seconds after each failure, at most ``restarts_max`` times. None: without a limit."""

    restarts_max: int | None = 3
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, delay_s=WAIT)


@checked_names
@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Wait ``initial_s`` seconds after the first failure, then ``multiplier`` times longer each, up to ``maximum_s``.

    After a job has run for ``reset_after_s`` seconds without a failure, delay and count start again. At most
    ``restarts_max`` failures in a row are tolerated. None: any number.
    """

    initial_s: float = 1.0
    maximum_s: float = 60.0
    multiplier: float = 2.0
    reset_after_s: float = 600.0
    restarts_max: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, initial_s=WAIT, maximum_s=WAIT, reset_after_s=WAIT, multiplier=FACTOR)
        if self.maximum_s < self.initial_s:
            raise ValueError(f"maximum_s must be at least initial_s ({self.initial_s!r}), not {self.maximum_s!r}")


RestartStrategy = FixedDelay | ExponentialDelay
NO_RESTART = FixedDelay(restarts_max=0)
"""Never run a failed job again."""
DEFAULT_RESTART = FixedDelay()
"""Run again up to three times, one second after each failure."""


class RestartBackoff:
    """Counts the restarts of one job. ``restarts``: how many were allowed since the last reset."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self._strategy = strategy
        self._began_at = inf
        self.restarts = 0

    def begun(self, now: float) -> None:
        """The job is starting, for the first time or again."""
        self._began_at = now

    def failed(self, now: float) -> float | None:
        """The job has failed. Return how many seconds to wait before the next start, or None to give up."""
        strategy = self._strategy
        if isinstance(strategy, ExponentialDelay) and now - self._began_at >= strategy.reset_after_s:
            self.restarts = 0
        if strategy.restarts_max is not None and self.restarts >= strategy.restarts_max:
            return None
        self.restarts += 1
        if isinstance(strategy, FixedDelay):
            return strategy.delay_s
        delay_s = strategy.initial_s
        for _ in range(self.restarts - 1):
            delay_s *= strategy.multiplier
            if delay_s >= strategy.maximum_s:
                return strategy.maximum_s
        return delay_s
