# SPDX-License-Identifier: Apache-2.0

"""Whether numbered events came once and in order, and how long they took."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

UP, DOWN = "up", "down"
"""The direction of an event: to the coordinator, or to a subtask."""
STORIES_MAX = 20


@dataclass
class Tally:
    """What one side has seen. ``stories`` has the first violations in words."""

    events: int = 0
    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    faults: int = 0
    stories: list[str] = field(default_factory=list)

    def fault(self, story: str) -> None:
        """Count something that must not happen and is none of the others."""
        self.faults += 1
        self.tell(story)

    def tell(self, story: str) -> None:
        if len(self.stories) < STORIES_MAX:
            self.stories.append(story)

    def add(self, other: Tally | dict[str, Any]) -> None:
        """Add the counts of another side."""
        other = other if isinstance(other, Tally) else Tally(**other)
        self.events += other.events
        self.lost += other.lost
        self.doubled += other.doubled
        self.out_of_order += other.out_of_order
        self.faults += other.faults
        for story in other.stories:
            self.tell(story)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.out_of_order or self.faults)


class Sequence:
    """The events of one subtask in one direction, numbered from 0, as their receiver sees them.

    A number that is skipped counts as lost, and as out of order instead if it comes later. Any other number that came
    before counts as doubled.
    """

    __slots__ = ("_missing", "_tally", "_what", "expected")

    def __init__(self, tally: Tally, what: str, expected: int = 0) -> None:
        self.expected = expected
        self._tally = tally
        self._what = what
        self._missing: set[int] = set()

    def take(self, number: int) -> None:
        """Judge the event with this number."""
        tally, expected = self._tally, self.expected
        tally.events += 1
        if number == expected:
            self.expected += 1
            return
        tally.tell(f"{self._what}: event {number} came, and {expected} was the next")
        if number > expected:
            self._missing.update(range(expected, number))
            tally.lost += number - expected
            self.expected = number + 1
        elif number in self._missing:
            self._missing.remove(number)
            tally.lost -= 1
            tally.out_of_order += 1
        else:
            tally.doubled += 1

    def end(self, sent: int) -> None:
        """Compare with how many were sent: those that never came are lost."""
        if sent != self.expected:
            self._tally.tell(f"{self._what}: {sent} events were sent, and {self.expected} came")
            self._tally.lost += max(0, sent - self.expected)
            self._tally.doubled += max(0, self.expected - sent)

    def rewind(self, position: int) -> None:
        """The subtask returns to a checkpoint, so the event with this number is the next one."""
        self.expected = position
        self._missing = {number for number in self._missing if number < position}


class Durations:
    """A histogram of durations in buckets 1 % wide, so that its size does not depend on how many there are."""

    STEP = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.max_ms = 0.0

    def add(self, duration_s: float) -> None:
        ms = max(duration_s * 1000, 0.001)
        self._buckets[round(math.log(ms) / self.STEP)] += 1
        self.max_ms = max(self.max_ms, ms)

    @property
    def count(self) -> int:
        return self._buckets.total()

    def percentile_ms(self, fraction: float) -> float:
        """The nearest-rank percentile, exact to 0.5 %; 0.0 if there is no duration."""
        rank = int(fraction * self.count)
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank < 0:
                return min(math.exp(bucket * self.STEP), self.max_ms)
        return self.max_ms
