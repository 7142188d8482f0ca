# SPDX-License-Identifier: Apache-2.0

"""Decides which parallelism an operator needs for what its sources have not read yet (H199).

``Autoscale`` is a value; an ``Autoscaler`` applies it. An ``Autoscaler`` is asked about once a second while the
operator runs, and is notified if what it has asked for was refused. It reads no clock: ``now`` is a reading of any
monotonic clock, in seconds.

The algorithm is that of the Horizontal Pod Autoscaler of Kubernetes, as KEDA uses it for the lag of a queue: the
backlog divided by what one subtask is to have, rounded up, with a tolerance of 10 % and with a stabilization window for
each direction. A window begins with the current parallelism, so that nothing changes before it has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import ceil, inf
from operator import ge, le
from typing import NamedTuple

from protocol.arguments import PARALLELISM, POSITIVE, WAIT, check_fields, checked_names
from protocol.restart import ExponentialDelay, RestartBackoff

__all__ = ["Autoscale", "Autoscaler", "Decision"]

TOLERANCE = 0.1
"""The part by which the backlog may differ from what the current parallelism is for."""
GAP_S = 10.0
"""After a longer time without a figure, the windows begin anew."""
TRIED_AGAIN = ExponentialDelay(initial_s=10.0, maximum_s=600.0)
"""When a change that was refused is tried again."""


@checked_names
@dataclass(frozen=True, slots=True)
class Autoscale:
    """Give an operator in streaming mode as many subtasks as its backlog needs, from ``min`` to ``max``.

    About once a second while the operator runs, the sidecar divides what its sources have not read yet by what one
    subtask is to have, and rounds up. That many subtasks are wanted. ``rescale`` is called if more were wanted for all
    of ``up_after_s`` seconds, with the smallest number in that time; or if fewer were wanted for all of
    ``down_after_s``, with the largest. A difference of up to 10 % changes nothing. This is the algorithm of the
    Horizontal Pod Autoscaler of Kubernetes, as KEDA uses it for queues. Each change ends the tasks and starts them
    again, so the times are longer than there.

    Give one of these two. The other one decides nothing:

    - ``backlog_per_subtask`` is in the units of the readers: bytes for ``FileSource``, records for ``KafkaSource``. It
      needs readers that report their backlog, and an enumerator that reports that of the splits which it has not handed
      out, if there are any.
    - ``splits_per_subtask`` counts splits: those that the enumerator has not handed out, and those that are being read.
      It is for splits that end.

    If an operator has several sources, the largest figure counts. Nothing changes while a figure is missing, for
    example because a subtask does not run. ``Sidecar.status`` says why.

    Within ``pause_s`` after a change, also one by ``rescale``, there is no other one. A change that is refused is tried
    again after 10 s, and then twice as long each time, up to 10 min. It never fails the job. The operator does not grow
    beyond the tasks that Spark can run at the same time, unless Spark allocates executors dynamically.
    """

    min: int
    max: int
    _: KW_ONLY
    backlog_per_subtask: float | None = None
    splits_per_subtask: float | None = None
    up_after_s: float = 60.0
    down_after_s: float = 300.0
    pause_s: float = 60.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            min=PARALLELISM,
            max=PARALLELISM,
            backlog_per_subtask=POSITIVE,
            splits_per_subtask=POSITIVE,
            up_after_s=WAIT,
            down_after_s=WAIT,
            pause_s=WAIT,
        )
        if self.max < self.min:
            raise ValueError(f"max must be at least min ({self.min}), not {self.max}")
        if (self.backlog_per_subtask is None) == (self.splits_per_subtask is None):
            raise ValueError(
                "Autoscale() needs either backlog_per_subtask, in the units of the readers, or splits_per_subtask: "
                "give one of them"
            )

    @property
    def per_subtask(self) -> float:
        """What one subtask is to have, in the unit that was chosen."""
        return self.backlog_per_subtask or self.splits_per_subtask or inf


class Decision(NamedTuple):
    """``wanted``: how many subtasks the backlog needs now; None without a figure. ``to``: the parallelism to change to;
    None to stay. ``why``: the reason of both, for people."""

    wanted: int | None
    to: int | None
    why: str


class Autoscaler:
    """Applies an ``Autoscale`` to one operator."""

    def __init__(self, policy: Autoscale) -> None:
        self.policy = policy
        self._parallelism: int | None = None
        self._changed_at = self._sampled_at = self._again_at = -inf
        self._smallest = _Window(policy.up_after_s, le)
        self._largest = _Window(policy.down_after_s, ge)
        self._refusals = RestartBackoff(TRIED_AGAIN)

    def decide(self, now: float, parallelism: int, backlog: int | None, slots: int | None = None) -> Decision:
        """Return what to do. ``parallelism`` is the current one, no matter who has chosen it.

        ``backlog`` is what is not read yet; None if that is not known. ``slots``: how many tasks can run at the same
        time; None if that is not known, or can grow.
        """
        if parallelism != self._parallelism:
            self._changed_at = -inf if self._parallelism is None else now
            self._parallelism, self._sampled_at, self._again_at = parallelism, -inf, -inf
            self._refusals = RestartBackoff(TRIED_AGAIN)
        if backlog is None:
            return Decision(None, None, "the backlog is not known")
        if now - self._sampled_at > GAP_S:
            self._smallest.begin(now, parallelism)
            self._largest.begin(now, parallelism)
        self._sampled_at = now
        wanted, why = self._wanted(parallelism, backlog, slots)
        more, fewer = self._smallest.add(now, wanted), self._largest.add(now, wanted)
        to = more if more > parallelism else fewer if fewer < parallelism else None
        if to is None:
            if wanted != parallelism:
                after_s = self.policy.up_after_s if wanted > parallelism else self.policy.down_after_s
                why += f", but not for {after_s:g} s yet"
            return Decision(wanted, None, why)
        if now - self._changed_at < self.policy.pause_s:
            return Decision(wanted, None, f"{why}, but the last change was less than {self.policy.pause_s:g} s ago")
        if now < self._again_at:
            return Decision(wanted, None, f"{why}, but the last change was refused, and is tried again later")
        return Decision(wanted, to, why)

    def refused(self, now: float) -> None:
        """What ``decide`` has asked for was refused, or has failed."""
        self._again_at = now + (self._refusals.failed(now) or 0.0)

    def _wanted(self, parallelism: int, backlog: int, slots: int | None) -> tuple[int, str]:
        """How many subtasks the backlog needs, and why."""
        policy, each = self.policy, self.policy.per_subtask
        unit = "" if policy.splits_per_subtask is None else "splits "
        why = f"{backlog:,} {unit}left to read, at {each:,.10g} for each subtask"
        is_right = abs(backlog - parallelism * each) <= TOLERANCE * parallelism * each
        needed = parallelism if is_right else ceil(backlog / each)
        wanted = max(policy.min, min(policy.max, needed))
        if wanted != needed:
            why += f", from {policy.min} to {policy.max} subtasks"
        if slots is not None and wanted > max(slots, parallelism):
            wanted = max(slots, parallelism)
            why += f", while Spark can run {slots} tasks at the same time"
        return wanted, why


class _Window:
    """The extreme of the numbers of the last ``seconds``: that which ``wins`` against all others.

    Only those are kept that can still be the extreme, so there are no more than different numbers.
    """

    def __init__(self, seconds: float, wins: Callable[[int, int], bool]) -> None:
        self._seconds = seconds
        self._wins = wins
        self._kept: deque[tuple[float, int]] = deque()

    def begin(self, now: float, number: int) -> None:
        self._kept.clear()
        self._kept.append((now, number))

    def add(self, now: float, number: int) -> int:
        """Add a number, and return the extreme."""
        while self._kept and self._wins(number, self._kept[-1][1]):
            self._kept.pop()
        self._kept.append((now, number))
        while now - self._kept[0][0] > self._seconds:
            self._kept.popleft()
        return self._kept[0][1]
