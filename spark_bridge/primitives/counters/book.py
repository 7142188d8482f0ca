# SPDX-License-Identifier: Apache-2.0

"""The counts of one attempt, one subtask or one operator: plain values that can be added.

A distribution counts values in buckets whose bounds grow by ``GROWTH``. So each quantile is within 1 % of an exact one,
and distributions add up bucket by bucket, in any order, to the same result. This is the idea of DDSketch (Masson, Rim
and Lee, VLDB 2019).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, isfinite, log
from operator import index
from typing import Any, SupportsFloat, SupportsIndex, TypeGuard

from protocol.arguments import FRACTION, checked
from protocol.describing import as_float, is_encodable, show
from protocol.errors import RemoteProtocolError
from protocol.wire.state import Steps

NAME_CHARS_MAX = 200
NAMES_MAX = 1000
"""How many different names one attempt may use: a name per record would fill the memory of the driver."""
BUCKETS_MAX = 2**16
"""How many buckets all distributions of one attempt may have: those of about 200 that span three decades."""
BUCKETS_A_STEP = 2**9
BITS_MAX = 4096
"""Of an integer that is counted. Python writes no integer of more than 4300 digits as text, not even a sum of these."""
TIMES_MAX = 2**53
"""How often one attempt may observe: anything above it is forged."""
GROWTH = 1.02
_LOG_GROWTH = log(GROWTH)
_ZERO = "0"
_SMALLEST = 2**1074
"""One divided by the smallest float."""

Observed = list[Any]
"""``[count, sum, min, max, {bucket: count}]``. The keys of the buckets are texts, since JSON has no others."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values that tasks passed to ``context.observe`` under one name.

    ``quantile(0.99)`` is within 1 % of the exact value. ``sum``, ``minimum`` and ``maximum`` are exact, up to rounding;
    ``sum`` is infinite if no float is as large.
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

    def count(self, name: str, by: SupportsIndex | SupportsFloat) -> None:
        """Add to a count. Raises ``ValueError`` for an unsuitable name or number, ``TypeError`` for what is none."""
        if type(by) is not int or by.bit_length() > BITS_MAX:
            by = _number("count", name, by)
        name = self._checked(name, self.counts, self.observed, "observe")
        self.counts[name] = plus(self.counts.get(name, 0), by)

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None:
        """Add a value to a distribution. Raises as ``count`` does."""
        if type(value) is not float or not isfinite(value):
            value = _float("observe", name, value if type(value) is int else _number("observe", name, value))
        name = self._checked(name, self.observed, self.counts, "count")
        known = self.observed.get(name) or [0, 0.0, inf, -inf, {}]
        bucket = bucket_of(value)
        if bucket not in known[4] and self.buckets >= BUCKETS_MAX:
            raise ValueError(
                f"the distributions of a task may have {BUCKETS_MAX} buckets, each for values that differ by less than "
                f"2 %, and {show(name, 80)} needs one more: observe under fewer names"
            )
        self.observed[name] = known
        known[0] += 1
        known[1] = plus(known[1], value)
        known[2] = min(known[2], value)
        known[3] = max(known[3], value)
        known[4][bucket] = known[4].get(bucket, 0) + 1

    def _checked(self, name: object, known: dict[str, Any], other: dict[str, Any], taken_by: str) -> str:
        """The name as a plain ``str``. Only a new one is looked at."""
        if type(name) is str and name in known:
            return name
        if not _is_name(name):
            raise ValueError(
                f"the name must be a str of 1 to {NAME_CHARS_MAX} characters, without lone surrogates and not only of "
                f"blanks, not {show(name, 80)}"
            )
        name = str.__str__(name)
        if name in other:
            raise ValueError(f"{name!r} is a name that {taken_by}() uses already: choose another one")
        if name not in known and len(known) + len(other) >= NAMES_MAX:
            raise ValueError(
                f"a task may use {NAMES_MAX} names for counts and distributions, and {name!r} is one more: use a few "
                "fixed names, and no names that are made of data"
            )
        return name

    @property
    def buckets(self) -> int:
        """How many buckets all distributions have."""
        return sum([len(one[4]) for one in self.observed.values()])

    def add(self, other: Book) -> None:
        """Add the counts of another one to this."""
        for name, count in other.counts.items():
            self.counts[name] = plus(self.counts.get(name, 0), count)
        for name, (count, total, least, most, buckets) in other.observed.items():
            known = self.observed.setdefault(name, [0, 0.0, inf, -inf, {}])
            known[0] += count
            known[1] = plus(known[1], total)
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
            found[name] = Distribution(count, as_float(total), least, most, tuple(middles))
        return dict(sorted(found.items()))

    def as_value(self) -> list[Any]:
        """A value that msgpack and JSON can carry; see ``from_value``. An integer above 64 bits is a text."""
        observed = {name: [times, _packed(total), *rest] for name, (times, total, *rest) in self.observed.items()}
        return [{name: _packed(count) for name, count in self.counts.items()}, observed]

    @classmethod
    def from_value(cls, value: Any) -> Book:
        """Raises ``ValueError`` for anything that ``as_value`` does not return."""
        book = cls()
        match value:
            case [dict(counts), dict(observed)]:
                book.counts = {name: _unpacked(count) for name, count in counts.items()}
                book.observed = {name: _unpacked_distribution(one) for name, one in observed.items()}
                return book
            case _:
                raise ValueError(f"not the counts of a task: {show(value, 80)}")

    def check_in_steps(self) -> Steps[Book]:
        """Return this book. Raises ``RemoteProtocolError`` if no task counts like this: then it was forged (H156)."""
        self.check_names()
        looked_at = 0
        for name in (*self.counts, *self.observed):
            if not _is_name(name):
                raise RemoteProtocolError(f"a count with the name {show(name, 80)}")
        for name, count in self.counts.items():
            if not _is_sum(count):
                raise RemoteProtocolError(f"the count {show(name, 80)} is {show(count, 80)}")
        for name, (times, *figures, buckets) in self.observed.items():
            if not (_is_times(times) and all(map(_is_sum, figures))):
                raise RemoteProtocolError(f"the distribution {show(name, 80)} has impossible figures")
            for bucket, number in buckets.items():
                if not (type(bucket) is str and _BUCKET.fullmatch(bucket) and _is_times(number)):
                    raise RemoteProtocolError(f"the distribution {show(name, 80)} has impossible buckets")
                looked_at += 1
                if looked_at % BUCKETS_A_STEP == 0:
                    yield
        return self

    def check_names(self) -> Book:
        """Return this book. Raises ``RemoteProtocolError`` if it has more names or buckets than a task may use."""
        count = len(self.counts) + len(self.observed)
        if count > NAMES_MAX:
            raise RemoteProtocolError(f"{count} names of counts and distributions, which are more than {NAMES_MAX}")
        if self.buckets > BUCKETS_MAX:
            raise RemoteProtocolError(f"{self.buckets} buckets of distributions, which are more than {BUCKETS_MAX}")
        return self

    def to_bytes(self) -> bytes:
        """The book as a state; empty if it is."""
        return json.dumps(self.as_value()).encode() if self else b""

    @classmethod
    def from_bytes(cls, state: bytes) -> Book:
        """The book of which ``to_bytes`` returned ``state``."""
        return cls.from_value(json.loads(state)) if state else cls()


def plus(one: int | float, other: int | float) -> int | float:
    """The sum of two finite numbers, which is finite too: an integer if no float is as large.

    So the sum of what was counted is never infinite, and nothing that is taken back from it makes it NaN.
    """
    try:
        total = one + other
    except OverflowError:  # an integer above all floats, and a float
        total = inf
    # A float that matters beside so large a number is an integer, and the fraction of another one is too small to.
    return int(one) + int(other) if type(total) is float and not isfinite(total) else total


class Total:
    """A sum from which numbers can be taken back, as if they had never been added: it is exact."""

    __slots__ = ("_floats", "_integers")

    def __init__(self) -> None:
        self._integers = 0
        self._floats = 0  # every float is an integer times the smallest one

    def add(self, number: int | float) -> None:
        """Add a finite number."""
        if type(number) is int:
            self._integers += number
        else:
            above, below = number.as_integer_ratio()  # below is a power of 2
            self._floats += above * (_SMALLEST // below)

    @property
    def number(self) -> int | float:
        """The sum, rounded only now; see ``plus``."""
        if not self._floats:
            return self._integers
        try:
            floats: int | float = self._floats / _SMALLEST
        except OverflowError:  # no float is as large
            floats = self._floats // _SMALLEST
        return plus(self._integers, floats)


def _number(method: str, name: object, given: Any) -> int | float:
    """A number of Python for one of any kind: an int for what is an integer, otherwise a float."""
    number: int | float
    try:
        number = given if type(given) is float else index(given)
    except Exception:  # not an integer; or whatever a type of the user's raises
        number = _real(method, name, given)
    if type(number) is float and isfinite(number):
        return number
    if type(number) is int:
        if number.bit_length() <= BITS_MAX:
            return number
        raise ValueError(
            f"{_call(method, name)} takes an integer of at most {BITS_MAX} bits, not one of {number.bit_length()}: "
            "divide it first, or leave it out"
        )
    raise ValueError(
        f"{_call(method, name)} takes a finite number, not {show(given, 80)}: leave it out, or count how many there are"
    )


def _real(method: str, name: object, given: Any) -> int | float:
    # Without an import of NumPy. Its texts, complex numbers and dates have __float__ too, and so have longer arrays.
    kind = getattr(getattr(given, "dtype", None), "kind", "f")
    if not isinstance(given, str | bytes | bytearray) and kind in ("b", "f") and getattr(given, "ndim", 0) == 0:
        try:
            return int(given) if kind == "b" else float(given)
        except (ValueError, OverflowError):  # a signaling NaN, or a fraction above all floats
            return inf
        except Exception:  # as above
            pass
    raise TypeError(f"{_call(method, name)} takes a number, not {show(given, 80)}: convert it first") from None


def _float(method: str, name: object, number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"{_call(method, name)} takes a finite number, and no float is as large as this integer of "
            f"{int(number).bit_length()} bits: leave it out"
        ) from None


def _call(method: str, name: object) -> str:
    return f"{method}({show(name, 80)}, ...)"


def _packed(count: int | float) -> int | float | str:
    return hex(count) if type(count) is int and not -(2**63) <= count < 2**64 else count


def _unpacked(count: Any) -> int | float:
    if type(count) is str and _HEX.fullmatch(count):
        return int(count, 16)
    if not _is_finite(count):
        raise ValueError(f"not a count of a task: {show(count, 80)}")
    number: int | float = count
    return number


_HEX = re.compile(f"-?0x[0-9a-f]{{1,{BITS_MAX}}}")
_BUCKET = re.compile("0|[+-]-?[0-3]?[0-9]{1,4}")  # from the smallest float, "+-37617", to the largest, "+35844"


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and len(name) <= NAME_CHARS_MAX and bool(str.strip(name)) and is_encodable(name)


def _is_finite(number: object) -> bool:
    return type(number) is int or (type(number) is float and isfinite(number))


def _is_sum(number: object) -> bool:
    """Whether a task can have counted or observed this: its own sum may be twice as long as one number."""
    return _is_finite(number) and not (type(number) is int and number.bit_length() > 2 * BITS_MAX)


def _is_times(number: object) -> bool:
    return type(number) is int and 0 <= number <= TIMES_MAX


def _unpacked_distribution(value: Any) -> Observed:
    match value:
        case [int(times), total, int() | float() as least, int() | float() as most, dict(buckets)]:
            return [times, _unpacked(total), least, most, buckets]
        case _:
            raise ValueError(f"not the counts of a task: {show(value, 80)}")


def bucket_of(value: float) -> str:
    """The bucket of a value: the exponent of its bound, with its sign; ``"0"`` for zero."""
    if value == 0:
        return _ZERO
    return ("+" if value > 0 else "-") + str(ceil(log(abs(value)) / _LOG_GROWTH))


def middle_of(bucket: str) -> float:
    """The value that differs by the same ratio from both bounds of the bucket."""
    if bucket == _ZERO:
        return 0.0
    # In this order, the largest bucket of a float does not overflow: its upper bound may.
    middle: float = 2 / (GROWTH + 1) * GROWTH * GROWTH ** (int(bucket[1:]) - 1)
    return middle if bucket[0] == "+" else -middle


def added_up(books: Iterable[Book]) -> Book:
    """Return the sum of the books."""
    total = Book()
    for book in books:
        total.add(book)
    return total
