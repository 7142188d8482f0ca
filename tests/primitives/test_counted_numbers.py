# SPDX-License-Identifier: Apache-2.0

"""What tasks may count and observe: every kind of number, and what nobody else may send in a task's name (H156)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from math import inf, isfinite, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Distribution, SubtaskContext
from headgate.testing import PartEvent, running_operator
from protocol.describing import as_json
from protocol.errors import RemoteProtocolError
from protocol.wire.events import decode_event, encode_event
from protocol.wire.state import run_steps
from spark_bridge.primitives.counters.book import (
    BITS_MAX,
    NAMES_MAX,
    Book,
    Total,
    added_up,
    bucket_of,
    middle_of,
    plus,
)
from spark_bridge.subtask.parts import COUNTERS
from tests.primitives.histories import Counting, until_done

pytestmark = pytest.mark.anyio


class Level(IntEnum):
    HIGH = 3


class Raising:
    def __index__(self) -> int:
        raise RuntimeError("as it was told")

    def __float__(self) -> float:
        raise RuntimeError("as it was told")


INTEGERS = {
    "an int": (7, 7),
    "True": (True, 1),
    "2**70": (2**70, 2**70),
    "-2**70": (-(2**70), -(2**70)),
    "an IntEnum": (Level.HIGH, 3),
    "an array of no dimension": (np.array(5), 5),
    "bool_": (np.bool_(True), 1),
    **{kind.__name__: (kind(100), 100) for kind in (np.int8, np.int16, np.int32, np.int64)},
    **{kind.__name__: (kind(200), 200) for kind in (np.uint8, np.uint16, np.uint32, np.uint64)},
}
FLOATS = {
    "a float": (1.5, 1.5),
    "-0.0": (-0.0, 0.0),
    "a Decimal": (Decimal("1.5"), 1.5),
    "a Fraction": (Fraction(3, 2), 1.5),
    "an array of a float": (np.array(1.5), 1.5),
    **{kind.__name__: (kind(1.5), 1.5) for kind in (np.float16, np.float32, np.float64, np.longdouble)},
}
NOT_FINITE = {
    "NaN": nan,
    "infinity": inf,
    "-infinity": -inf,
    "NumPy's NaN": np.float32("nan"),
    "NumPy's infinity": np.float64("inf"),
    "Decimal's NaN": Decimal("NaN"),
    "a signaling NaN": Decimal("sNaN"),
    "a Decimal above all floats": Decimal("1e400"),
    "a Fraction above all floats": Fraction(10**400),
}
NO_NUMBERS = {
    "a text": "3",
    "bytes": b"3",
    "None": None,
    "a list": [3],
    "a complex number": 1j,
    "NumPy's complex number": np.complex64(1),
    "NumPy's text": np.str_("3"),
    "NumPy's bytes": np.bytes_(b"3"),
    "a duration": np.timedelta64(3, "s"),
    "a date": np.datetime64("2026-11-27"),
    "an array": np.array([3]),
    "an array of floats": np.array([3.0]),
    "one that raises": Raising(),
}


@pytest.mark.parametrize(("given", "plain"), [*INTEGERS.values(), *FLOATS.values()], ids=[*INTEGERS, *FLOATS])
def test_every_kind_of_number_is_counted_as_one_of_python(given: Any, plain: int | float) -> None:  # H156
    book = Book()
    book.count("n", given)
    assert (book.counts["n"], type(book.counts["n"])) == (plain, type(plain))
    book.observe("o", given)
    distribution = book.values()["o"]
    assert isinstance(distribution, Distribution)
    assert (distribution.minimum, type(distribution.minimum)) == (float(plain), float)
    decode_event(encode_event(book.as_value()))


@pytest.mark.parametrize("given", NOT_FINITE.values(), ids=NOT_FINITE)
@pytest.mark.parametrize("method", ["count", "observe"])
def test_what_is_not_finite_is_refused_with_the_call_and_the_name(method: str, given: Any) -> None:  # H156
    book = Book()
    with pytest.raises(ValueError, match=rf"^{method}\('loss', \.\.\.\) takes a finite number, not .*: leave it out"):
        getattr(book, method)("loss", given)
    assert not book, "a refused number changes nothing"


@pytest.mark.parametrize("given", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("method", ["count", "observe"])
def test_anything_but_a_number_is_refused_with_the_call_and_the_name(method: str, given: Any) -> None:  # H156
    book = Book()
    with pytest.raises(TypeError, match=rf"^{method}\('loss', \.\.\.\) takes a number, not .*: convert it first"):
        getattr(book, method)("loss", given)
    assert not book


def test_an_integer_that_is_too_long_to_be_written_is_refused() -> None:
    book = Book()
    book.count("n", 2**BITS_MAX - 1)
    with pytest.raises(ValueError, match=r"at most 4096 bits, not one of 4097: divide it first"):
        book.count("n", 2**BITS_MAX)
    with pytest.raises(ValueError, match=r"no float is as large as this integer of 4096 bits"):
        book.observe("o", 2**BITS_MAX - 1)


@pytest.mark.parametrize(
    "name", ["", " ", "\t\n", "\u2003\xa0", "n" * 201, "\ud800", None, 3, b"n", [], ["n"]], ids=repr
)
def test_a_name_that_cannot_travel_or_be_seen_is_refused(name: Any) -> None:  # H156
    for call in (Book().count, Book().observe):
        with pytest.raises(ValueError, match="the name must be a str of 1 to 200 characters, without lone surrogates"):
            call(name, 1)


def test_a_text_of_another_type_is_the_same_name() -> None:
    book = Book()
    book.count(np.str_("n"), 1)
    book.count("n", 1)
    assert book.counts == {"n": 2}
    assert [type(name) for name in book.counts] == [str]


HUGE = [2**BITS_MAX - 1, -(2**BITS_MAX - 1), 10**400, 2**1024, 1.7e308, -1.7e308, 1.5, 2**53 + 1, 5e-324]
COUNTED = st.lists(
    st.one_of(
        st.sampled_from(HUGE),
        st.integers(-(2**BITS_MAX) + 1, 2**BITS_MAX - 1),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=8,
)


def is_finite(number: int | float) -> bool:
    return type(number) is int or (type(number) is float and isfinite(number))


def is_rounded(number: int | float, exactly: Fraction, largest: Fraction) -> bool:
    """Whether the number is the exact one, up to the rounding of a few floats, or of integers beyond all of them."""
    return abs(Fraction(number) - exactly) <= largest * Fraction(1, 2**48) + 8 * Fraction(5e-324)


@given(COUNTED)
def test_a_sum_never_raises_and_is_finite_and_right(numbers: list[int | float]) -> None:  # H156
    total: int | float = 0
    for number in numbers:
        total = plus(total, number)
        assert is_finite(total)
    if all(type(number) is int for number in numbers):
        assert (total, type(total)) == (sum(numbers), int)
    exactly = [Fraction(number) for number in numbers]
    assert is_rounded(total, sum(exactly, Fraction()), sum(map(abs, exactly), Fraction()))


def test_integers_and_floats_of_any_size_add_up() -> None:  # H156
    assert plus(10**400, 1.5) == 10**400 + 1
    assert plus(1.7e308, 1.7e308) == 2 * int(1.7e308)
    assert plus(plus(1.7e308, 1.7e308), -1.7e308) == 1.7e308
    assert plus(plus(10**400, 1.5), -(10**400)) == 1
    assert plus(2**1023, 1.7e308) == 2**1023 + int(1.7e308)


@given(st.lists(COUNTED, max_size=4))
def test_books_add_up_to_what_can_be_sent_stored_and_shown(tasks: list[list[int | float]]) -> None:  # H156
    books = [Book() for _ in tasks]
    for book, numbers in zip(books, tasks, strict=True):
        for number in numbers:
            book.count("n", number)
            if type(number) is float:
                book.observe("o", number)
        sent = Book.from_value(decode_event(encode_event(book.as_value())))
        assert run_steps(sent.check_in_steps()).values() == book.values()
    whole = added_up(books)
    assert Book.from_bytes(whole.to_bytes()).values() == whole.values()
    for count in whole.counts.values():
        assert is_finite(count)
        json.loads(as_json(count))
    if "o" in whole.observed:
        distribution = whole.values()["o"]
        assert isinstance(distribution, Distribution)
        assert not isnan(distribution.sum)
        assert not isnan(distribution.mean)


@given(COUNTED, COUNTED)
def test_what_is_taken_back_from_a_total_leaves_nothing_behind(stays: list[int | float], goes: list[Any]) -> None:
    # H156
    alone, total = Total(), Total()
    for number in stays:
        alone.add(number)
    for number in (*goes, *stays, *(-one for one in goes)):
        total.add(number)
    assert total.number == alone.number
    assert is_finite(total.number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_bucket_of_every_float_has_a_middle_close_to_it(value: float) -> None:
    middle = middle_of(bucket_of(value))
    assert middle == pytest.approx(value, rel=0.0101, abs=1e-307)


async def test_integers_of_any_size_add_up_over_tasks_and_survive_a_checkpoint() -> None:  # H156
    def counting(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
        for record in records:
            context.count("huge", np.int64(2**62))
            context.count("huge", 2**70)
            context.count("mixed", 2**1100 if record else 0.5)
            yield record

    async with running_operator(parallelism=2) as world:
        tasks = [await world.launch_operator(subtask, counting, [subtask]) for subtask in range(2)]
        await until_done(world, tasks)
        assert world.counters() == {"huge": 2 * (2**62 + 2**70), "mixed": 2**1100}
        assert world.counter_totals() == world.counters()

    class CountingHuge(Counting):
        def process(self, records: Iterator[int]) -> Iterator[int]:
            for _ in records:
                self.context.count("huge", 2**70)
            yield from super().process(records)

    async with running_operator(parallelism=2, mode="streaming") as world:
        for subtask in range(2):
            await world.launch_operator(subtask, CountingHuge, [1])
            await world.advance(5.0)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    async with running_operator(parallelism=1, mode="streaming", restored=restored) as world:
        await world.launch_operator(0, CountingHuge)
        assert world.counters()["huge"] == 2**71


@pytest.mark.parametrize(
    ("stays", "goes", "both"),
    [(1.7e308, 1.7e308, 2 * int(1.7e308)), (0.1, 1e300, 1e300), (1.5, 10**400, 10**400 + 1), (2**70, 0.5, 2.0**70)],
    ids=["above all floats", "floats", "an integer above all floats", "an integer and a float"],
)
async def test_a_sum_of_anything_is_right_again_when_the_attempt_is_lost(
    stays: int | float, goes: int | float, both: int | float
) -> None:  # H156
    def counting(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
        for _ in records:
            context.count("n", goes if context.subtask else stays)
            context.wait_for_event(timeout_s=5.0)
            yield 1

    async with running_operator(parallelism=2) as world:
        first = await world.launch_operator(0, counting, [1])
        second = await world.launch_operator(1, counting, [1])
        await world.advance(1.0)
        assert world.counter_totals() == {"n": both}
        await world.kill(second)
        assert world.counter_totals() == {"n": stays}
        await until_done(world, [first])


FORGED: dict[str, Any] = {
    "NaN": [None, [{"n": nan}, {}]],
    "infinity": [None, [{"n": inf}, {}]],
    "a distribution of infinity": [None, [{}, {"o": [1, inf, 1.0, 1.0, {}]}]],
    "a name of blanks": [None, [{" ": 1}, {}]],
    "a text": [None, [{"n": "3"}, {}]],
    "a huge integer": [None, [{"n": hex(2**9000)}, {}]],
    "a huger integer": [None, [{"n": "0x" + "f" * 100_000}, {}]],
    "a bool": [None, [{"n": True}, {}]],
    "a list": [None, [{"n": [1]}, {}]],
    "an empty name": [None, [{"": 1}, {}]],
    "a long name": [None, [{"n" * 201: 1}, {}]],
    "a number as a name": [None, [{3: 1}, {}]],
    "many names": [None, [{f"n{number}": 1 for number in range(NAMES_MAX + 1)}, {}]],
    "no lists": [None, [1, 2]],
    "nothing": None,
    "more": [None, [{}, {}], 3],
    "a checkpoint that is a text": ["first", [{}, {}]],
    "a distribution of too few": [None, [{}, {"o": [1, 1.0]}]],
    "a distribution that was observed -1 times": [None, [{}, {"o": [-1, 1.0, 1.0, 1.0, {}]}]],
    "a distribution of texts": [None, [{}, {"o": [1, "1", 1.0, 1.0, {}]}]],
    "a distribution of NaN": [None, [{}, {"o": [1, nan, 1.0, 1.0, {}]}]],
    "a bucket that is a text": [None, [{}, {"o": [1, 1.0, 1.0, 1.0, {"+x": 1}]}]],
    "a bucket beyond all floats": [None, [{}, {"o": [1, 1.0, 1.0, 1.0, {"+99999999": 1}]}]],
    "a bucket with a number of another script": [None, [{}, {"o": [1, 1.0, 1.0, 1.0, {"+\u0663": 1}]}]],
    "a bucket of a text": [None, [{}, {"o": [1, 1.0, 1.0, 1.0, {"+3": "1"}]}]],
    "a bucket of a number": [None, [{}, {"o": [1, 1.0, 1.0, 1.0, {3: 1}]}]],
}


@pytest.mark.parametrize("report", FORGED.values(), ids=FORGED)
async def test_a_forged_report_fails_its_task_and_no_other(report: Any) -> None:  # H156
    async with running_operator(parallelism=2) as world:
        honest = await world.launch_operator(0, Counting, range(3))
        forger = await world.launch(1)
        forger.send(PartEvent(COUNTERS, report))
        await world.settle()
        assert forger.outcome == "killed"
        assert not world.cancelled_jobs
        await until_done(world, [honest])
        assert world.counters()["records"] == 3


def test_names_over_several_reports_are_bounded() -> None:  # H156
    known = Book()
    known.counts = {f"n{number}": 1 for number in range(NAMES_MAX)}
    newer = Book()
    newer.counts = {"one more": 1}
    with pytest.raises(RemoteProtocolError, match="1001 names"):
        known.replace(run_steps(newer.check_in_steps())).check_names()


def _values(random_: random.Random) -> Callable[[], Any]:
    leaves: list[Callable[[], Any]] = [
        lambda: random_.choice(
            [nan, inf, -inf, -0.0, 2**63, -(2**63), 0, True, None, "x", "0x1", "-0xff", b"", [], {}]
        ),
        lambda: random_.randrange(-(2**64), 2**64),
        lambda: {random_.choice(["a", "", 3, None, "+3", "-5", "0"]): random_.choice([1, 1.5, nan, "x", None])},
        lambda: [
            random_.randrange(3),
            1.0,
            0.5,
            random_.choice([1.0, nan, "1"]),
            {"+1": random_.choice([1, -1, 2**60])},
        ],
    ]

    def make() -> Any:
        return random_.choice(leaves)()

    return make


@pytest.mark.parametrize("seed", range(300))
def test_a_random_report_is_a_book_that_can_be_shown_or_an_error_of_the_peer(seed: int) -> None:  # H156
    random_ = random.Random(seed)
    make = _values(random_)
    counts = {random_.choice(["a", "b", "", 3]): make() for _ in range(random_.randrange(3))}
    observed = {random_.choice(["o", 3]): make() for _ in range(random_.randrange(2))}
    value = random_.choice([[counts, observed], [counts, observed], [counts], make()])
    try:
        book = run_steps(Book.from_value(value).check_in_steps())
    except (ValueError, RemoteProtocolError):
        return
    again = Book.from_value(decode_event(encode_event(added_up([book, book]).as_value())))
    for shown in again.values().values():
        if isinstance(shown, Distribution) and shown.count:
            shown.quantile(0.5)
