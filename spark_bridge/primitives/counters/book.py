# SPDX-License-Identifier: Apache-2.0

"""The counts of one attempt, one subtask or one operator: plain values that can be added.

A distribution counts values in buckets whose bounds grow by ``GROWTH``. So each quantile is within 1 % of an exact one,
and distributions add up bucket by bucket, in any order, to the same result. This is the idea of DDSketch (Masson, Rim
and Lee, VLDB 2019).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, isfinite, log
from typing import Any

from protocol.arguments import FRACTION, checked
from protocol.describing import show

__all__ = ["Book", "Distribution", "Observed", "added_up"]

NAME_CHARS_MAX = 200
NAMES_MAX = 1000
"""How many different names one attempt may use: a name per record would fill the memory of the driver."""
GROWTH = 1.02
_LOG_GROWTH = log(GROWTH)
_ZERO = "0"

Observed = list[Any]
"""``[count, sum, min, max, {bucket: count}]``. The keys of the buckets are texts, since JSON has no others."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values that tasks passed to ``context.observe`` under one name.

    ``quantile(0.99)`` is within 1 % of the exact value. ``sum``, ``minimum`` and ``maximum`` are exact, up to rounding.
    """

    count: int
    sum: float
    minimum: float
    maximum: float
    buckets: tuple[tuple[float, int], ...]
    """The middle of each bucket that has values, in ascending order, with their number."""

    @property
    def mean(self) -> float:
        """The sum divided by the count."""
        return self.sum / self.count

    @checked(fraction=FRACTION)
    def quantile(self, fraction: float) -> float:
        """Return the value below which ``fraction`` (from 0 to 1) of all values lie."""
        rank = fraction * (self.count - 1)
        for middle, count in self.buckets:
            rank -= count
            if rank < 0:
                return min(max(middle, self.minimum), self.maximum)
        return self.maximum


class Book:
    """Counts and distributions with their names. Not thread-safe."""

    __slots__ = ("counts", "observed")

    def __init__(self) -> None:
        self.counts: dict[str, int | float] = {}
        self.observed: dict[str, Observed] = {}

    def count(self, name: str, by: int | float) -> None:
        """Add to a count. Raises ``ValueError`` for an unsuitable name."""
        known = self.counts.get(name)
        if known is None:
            self._check_new(name, self.observed, "observe")
            known = 0
        try:
            self.counts[name] = known + by
        except TypeError:
            raise TypeError(f"count({name!r}, ...) adds a number, not {by!r:.80}: convert it first") from None

    def observe(self, name: str, value: float) -> None:
        """Add a value to a distribution. Raises ``ValueError`` for an unsuitable name, and for what is not finite."""
        try:
            finite = isfinite(value)
        except TypeError:
            raise TypeError(f"observe({name!r}, ...) takes a number, not {show(value, 80)}: convert it first") from None
        if not finite:
            raise ValueError(f"observe({name!r}, ...) takes a finite number, not {value!r}: leave it out, or count it")
        known = self.observed.get(name)
        if known is None:
            self._check_new(name, self.counts, "count")
            known = self.observed[name] = [0, 0.0, inf, -inf, {}]
        known[0] += 1
        known[1] += value
        known[2] = min(known[2], value)
        known[3] = max(known[3], value)
        bucket = bucket_of(value)
        known[4][bucket] = known[4].get(bucket, 0) + 1

    def _check_new(self, name: object, other: Iterable[str], taken_by: str) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise ValueError(f"the name must be a str of 1 to {NAME_CHARS_MAX} characters, not {show(name, 80)}")
        if name in other:
            raise ValueError(f"{name!r} is a name that {taken_by}() uses already: choose another one")
        if len(self.counts) + len(self.observed) >= NAMES_MAX:
            raise ValueError(
                f"a task may use {NAMES_MAX} names for counts and distributions, and {name!r} is one more: use a few "
                "fixed names, and no names that are made of data"
            )

    def add(self, other: Book) -> None:
        """Add the counts of another one to this."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, (count, total, least, most, buckets) in other.observed.items():
            known = self.observed.setdefault(name, [0, 0.0, inf, -inf, {}])
            known[0] += count
            known[1] += total
            known[2] = min(known[2], least)
            known[3] = max(known[3], most)
            for bucket, number in buckets.items():
                known[4][bucket] = known[4].get(bucket, 0) + number

    def replace(self, newer: Book) -> Book:
        """Return a book with the entries of this one, except those that ``newer`` has too."""
        book = Book()
        book.counts = {**self.counts, **newer.counts}
        book.observed = {**self.observed, **newer.observed}
        return book

    def __bool__(self) -> bool:
        return bool(self.counts or self.observed)

    def values(self) -> dict[str, int | float | Distribution]:
        """What users see, sorted by their names."""
        found: dict[str, int | float | Distribution] = dict(self.counts)
        for name, (count, total, least, most, buckets) in self.observed.items():
            middles = sorted((middle_of(bucket), number) for bucket, number in buckets.items())
            found[name] = Distribution(count, total, least, most, tuple(middles))
        return dict(sorted(found.items()))

    def as_value(self) -> list[Any]:
        """A value that msgpack and JSON can carry; see ``from_value``."""
        return [self.counts, self.observed]

    @classmethod
    def from_value(cls, value: Any) -> Book:
        """Raises ``ValueError`` for anything that ``as_value`` does not return."""
        book = cls()
        match value:
            case [dict(counts), dict(observed)] if all(_is_observed(one) for one in observed.values()):
                book.counts, book.observed = counts, observed
                return book
            case _:
                raise ValueError(f"not the counts of a task: {show(value, 80)}")

    def to_bytes(self) -> bytes:
        """The book as a state; empty if it is."""
        return json.dumps(self.as_value()).encode() if self else b""

    @classmethod
    def from_bytes(cls, state: bytes) -> Book:
        """The book of which ``to_bytes`` returned ``state``."""
        return cls.from_value(json.loads(state)) if state else cls()


def _is_observed(value: Any) -> bool:
    match value:
        case [int(), int() | float(), int() | float(), int() | float(), dict()]:
            return True
        case _:
            return False


def bucket_of(value: float) -> str:
    """The bucket of a value: the exponent of its bound, with its sign; ``"0"`` for zero."""
    if value == 0:
        return _ZERO
    return ("+" if value > 0 else "-") + str(ceil(log(abs(value)) / _LOG_GROWTH))


def middle_of(bucket: str) -> float:
    """The value that differs by the same ratio from both bounds of the bucket."""
    if bucket == _ZERO:
        return 0.0
    middle: float = 2 * GROWTH ** int(bucket[1:]) / (GROWTH + 1)
    return middle if bucket[0] == "+" else -middle


def added_up(books: Iterable[Book]) -> Book:
    """Return the sum of the books."""
    total = Book()
    for book in books:
        total.add(book)
    return total
