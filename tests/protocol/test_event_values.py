# SPDX-License-Identifier: Apache-2.0

"""Dates, numbers, sets, tuples and NumPy values come out of an event as they went in (H62, H95, H96)."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.describing import show
from protocol.errors import EventEncodeError, RemoteProtocolError
from protocol.wire import leaf_values
from protocol.wire.codec import DEFAULT_LIMITS, WireLimits, decode_event, decode_event_in_steps, encode_event, run_steps
from protocol.wire.extension_types import CONTAINER_TYPES, ExtensionType
from tests.fuzz.target import within_memory
from tests.protocol.test_codec import SMALL, either_msgpack, scalars

__all__ = ["either_msgpack"]  # a fixture, for the tests that name it

both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
YEAR_2, YEAR_9998 = datetime(2, 1, 1), datetime(9998, 1, 1)  # noqa: DTZ001 - Hypothesis wants naive ones
offsets = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59)).map(timezone)
leaves = st.one_of(
    st.datetimes(),
    st.datetimes(YEAR_2, YEAR_9998, timezones=offsets | st.just(UTC)),
    st.dates(),
    st.times(),
    st.times(timezones=st.just(UTC) | offsets),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.integers(-128, 127).map(np.int8),
    st.floats(allow_nan=False).map(np.float64),
    st.booleans().map(np.bool_),
)
hashable = st.recursive(
    scalars | leaves,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
events = st.recursive(
    scalars | leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.sets(hashable, max_size=5)
        | st.frozensets(hashable, max_size=5)
        | st.dictionaries(hashable, inner, max_size=5)
    ),
    max_leaves=20,
)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, with their types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.usefixtures("either_msgpack")
@both
@given(events, st.integers(1, 40))
def test_a_value_comes_out_as_it_went_in_with_its_type(value: Any, step_bytes: int) -> None:  # H95, H96
    data = encode_event(value)
    assert alike(decode_event(data), value)
    assert alike(run_steps(decode_event_in_steps(data, step_bytes=step_bytes)), value)


@both
@given(events)
def test_what_one_end_sends_the_other_accepts_whatever_the_limits(value: Any) -> None:  # H62, H95
    for limits in (SMALL, WireLimits(event_containers_max=2, event_map_entries_max=1, event_nesting_max=2)):
        try:
            data = encode_event(value, limits)
        except EventEncodeError:
            with contextlib.suppress(EventEncodeError), pytest.raises(RemoteProtocolError):
                decode_event(encode_event(value), limits)
        else:
            assert alike(decode_event(data, limits), value)


def whole(event: Any) -> Any:
    return event


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    "value",
    [
        datetime.max,  # noqa: DTZ901
        datetime.min.replace(tzinfo=UTC),
        datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001
        time(23, 59, 59, 999_999, tzinfo=timezone(timedelta(microseconds=-1))),
        timedelta.min,
        timedelta.max,
        Decimal("-0.00"),
        Decimal("1E+999999999999999999"),
        Decimal("NaN123"),
        Decimal("-sNaN"),
        Decimal("-Infinity"),
        UUID(int=0),
        np.float32("nan"),
        np.datetime64("2026-01-01T00:00", "ns"),
        np.timedelta64("NaT"),
        np.complex128(1 + 2j),
    ],
    ids=repr,
)
def test_extreme_values_survive_exactly(value: Any) -> None:  # H96
    for event, get in (
        (value, whole),
        ({"a": [value]}, lambda event: event["a"][0]),
        ((0, value), lambda event: event[1]),
    ):
        back: Any = get(decode_event(encode_event(event)))
        assert type(back) is type(value)
        assert repr(back) == repr(value)
        assert getattr(back, "fold", 0) == getattr(value, "fold", 0)


def test_a_region_arrives_as_its_offset() -> None:  # H96
    summer = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = decode_event(encode_event(summer))
    assert back == summer
    assert back.tzinfo == timezone(timedelta(hours=2))
    assert decode_event(encode_event(datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")))).tzinfo is UTC
    with pytest.raises(EventEncodeError, match=r"the event\['t'\] cannot be encoded: .*Europe/Berlin has no offset"):
        encode_event({"t": time(12, tzinfo=ZoneInfo("Europe/Berlin"))})


def test_a_subclass_of_a_leaf_is_refused() -> None:  # H96
    class Moment(datetime):
        pass

    with pytest.raises(EventEncodeError, match=r"the event\[0\] is of type .*Moment.*convert it"):
        encode_event([Moment(2026, 1, 1)])


def test_what_was_not_awaited_is_refused_with_that_advice() -> None:  # H165
    async def ask() -> int:
        return 1

    question = ask()
    with pytest.raises(EventEncodeError, match=r"the event\[0\] is of type .*coroutine, .*: await it first"):
        encode_event([question])
    question.close()


def test_bytes_like_values_arrive_as_bytes() -> None:
    assert decode_event(encode_event([bytearray(b"x"), memoryview(b"y")])) == [b"x", b"y"]
    assert decode_event(encode_event(bytearray(b"x"))) == b"x"


def test_equal_sets_have_equal_bytes() -> None:  # splits are compared by their bytes
    numbers: list[Any] = [f"{number}" for number in range(100)] + list(range(50)) + [date(2026, 1, 1)]
    backwards: set[Any] = set()
    for number in reversed(numbers):
        backwards.add(number)
    assert encode_event(set(numbers)) == encode_event(backwards)
    assert encode_event({"b", "a"}) == encode_event({"a", "b"})


# --- NumPy --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((3, 4), np.float32)),
        np.arange(10.0)[::3],
        np.arange(4, dtype=">i4"),
        np.array(1.5),
        np.empty((0, 3), np.int16),
        np.array([True, False]),
        np.array(["2026", "NaT"], "datetime64[s]"),
        np.zeros(3, np.complex64),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_arrives_contiguous_writable_and_separate(array: Any) -> None:  # H96
    data = encode_event({"a": array})
    back = decode_event(data)["a"]
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    assert back.flags.c_contiguous
    assert back.flags.aligned
    back.fill(0)
    np.testing.assert_array_equal(decode_event(data)["a"], array)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, "datetime64[25s]"),
        np.longdouble(1),
        np.str_("text"),
        np.ma.masked_array([1]),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}",
)
def test_numpy_values_of_other_kinds_are_refused_with_their_place(value: Any) -> None:  # H96
    with pytest.raises(EventEncodeError, match=r"event\['a'\] (cannot be encoded: NumPy values of dtype|is of type)"):
        encode_event({"a": value})


def test_an_array_that_is_too_large_is_refused_before_it_is_copied() -> None:  # H62, H96
    huge = np.broadcast_to(np.float64(1), (2**20, 2**20))
    with pytest.raises(EventEncodeError, match=r"an array of 8796093022208 bytes exceeds the limit"):
        encode_event([huge])
    with pytest.raises(EventEncodeError, match="33 dimensions"):
        encode_event(np.zeros((1,) * 33))


def array_bytes(name: bytes, shape: tuple[int, ...], data: bytes) -> bytes:
    dimensions = b"".join(size.to_bytes(8, "little") for size in shape)
    return bytes((len(name),)) + name + bytes((len(shape),)) + dimensions + data


@pytest.mark.parametrize(
    ("code", "data"),
    [
        *((code, b"") for code in range(128) if code not in CONTAINER_TYPES),
        *((code, b"\x00" * 5) for code in range(128)),
        (ExtensionType.DATETIME, leaf_values._DATETIME.pack(2026, 13, 1, 0, 0, 0, 0, 0)),
        (ExtensionType.DATETIME, leaf_values._DATETIME.pack(2026, 1, 1, 0, 0, 0, 0, 2)),
        (ExtensionType.DATETIME, leaf_values._DATETIME.pack(2026, 1, 1, 0, 0, 0, 0, 0) + (2**62).to_bytes(8, "big")),
        (ExtensionType.DATE, leaf_values._DATE.pack(0, 1, 1)),
        (ExtensionType.TIME, leaf_values._TIME.pack(24, 0, 0, 0, 0)),
        (ExtensionType.TIMEDELTA, leaf_values._TIMEDELTA.pack(1, 86_400, 0)),
        (ExtensionType.TIMEDELTA, leaf_values._TIMEDELTA.pack(2**31 - 1, 0, 0)),
        (ExtensionType.DECIMAL, b"1" * 4097),
        (ExtensionType.DECIMAL, b"1_0"),
        (ExtensionType.DECIMAL, b" 1"),
        (ExtensionType.DECIMAL, b"\xd9\xa1"),
        (ExtensionType.DECIMAL, b"1E" + b"9" * 19),
        (ExtensionType.UUID, bytes(17)),
        (ExtensionType.NUMPY_SCALAR, b"\x03<f8" + bytes(7)),
        (ExtensionType.NUMPY_SCALAR, b"\x02|O" + bytes(8)),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"|O", (1,), bytes(8))),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<U1", (1,), bytes(4))),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"|V8", (1,), bytes(8))),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (2,), bytes(8))),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (2**61,), b"")),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (2**32, 2**32), b"")),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (0, 2**63), b"")),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (0,), b"")[:-1]),
        (ExtensionType.NUMPY_ARRAY, array_bytes(b"<f8", (1,) * 33, bytes(8))),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_data_that_is_not_a_value_is_a_remote_error(code: int, data: bytes) -> None:  # H62, H96
    leaf = msgpack.packb(msgpack.ExtType(code, data))
    for event in (leaf, b"\x91" + leaf, b"\x81\x01" + leaf, b"\x81" + leaf + b"\x01", b"\x92\xc7\x00\x02" + leaf):
        with pytest.raises(RemoteProtocolError):
            within_memory(decode_event, event, 200)


# --- marks --------------------------------------------------------------------------------------------------------

TUPLE, SET, FROZENSET, REGISTERED, PART = (
    bytes((0xC7, 0, code))
    for code in (
        ExtensionType.TUPLE,
        ExtensionType.SET,
        ExtensionType.FROZENSET,
        ExtensionType.REGISTERED,
        ExtensionType.PART_EVENT,
    )
)


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    "data",
    [
        TUPLE,  # by itself
        b"\x92\x01" + TUPLE,  # not at the head
        b"\x92" + TUPLE * 2,
        b"\x81\x01" + TUPLE,
        b"\x81" + TUPLE + b"\x01",
        b"\x92" + SET + TUPLE,
        b"\x92" + SET + b"\x90",  # a list cannot be in a set
        b"\x92" + FROZENSET + b"\x80",
        b"\x81\x91" + SET + b"\x01",  # nor can a set be a key
        b"\x91" + REGISTERED,
        b"\x92" + REGISTERED + b"\x01",
        b"\x92" + REGISTERED + b"\xa1x",
        b"\x93" + PART + b"\xa1p\x01",  # the envelope of earlier releases: a message says whose its event is (H150)
        b"\x91" + PART,
        b"\x91\x93" + PART + b"\xa1p\x01",
        b"\xd6\xff" + bytes(4),  # msgpack's own time stamp
        b"\x91\xd6\xff" + bytes(4),
        b"\x92" + TUPLE + b"\xd6\xff" + bytes(4),
        b"\x92" + REGISTERED + b"\xd6\xff" + bytes(4),
        b"\xc8\x00\x04\xff" + bytes(4),
        b"\x91\xc9\x00\x00\x00\x04\xff" + bytes(4),
    ],
    ids=bytes.hex,
)
def test_a_mark_where_it_means_nothing_is_a_remote_error(data: bytes) -> None:  # H62, H95
    for decode in (decode_event, lambda data: run_steps(decode_event_in_steps(data))):
        with pytest.raises(RemoteProtocolError):
            within_memory(decode, data, 200)


def nested(wrap: Callable[[Any], Any], depth: int, inside: Any) -> Any:
    value = inside
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("inside", [1, (), date(2026, 1, 1), UUID(int=1)], ids=["scalar", "empty", "leaf", "uuid"])
@pytest.mark.parametrize(
    "wrap",
    [lambda value: (value,), lambda value: frozenset((value,)), lambda value: {1: (value,)}],
    ids=["t", "f", "d"],
)
def test_nesting_counts_through_extensions_on_both_ends(wrap: Callable[[Any], Any], inside: Any) -> None:  # H62, H95
    limits = WireLimits(event_nesting_max=6)
    levels = 3 if isinstance(wrap(1), dict) else 6
    allowed = levels - (1 if inside == () else 0)
    if levels == 3 and inside == ():
        allowed = 2
    event = nested(wrap, allowed, inside)
    assert alike(decode_event(encode_event(event, limits), limits), event)
    event = nested(wrap, allowed + 1, inside)
    with pytest.raises(EventEncodeError, match="nests deeper than 6"):
        encode_event(event, limits)
    with pytest.raises(RemoteProtocolError, match="nests deeper than 6"):
        decode_event(encode_event(event), limits)


def test_counts_of_tuples_and_sets_are_bounded_on_both_ends() -> None:  # H62, H95
    limits = WireLimits(event_containers_max=300, event_items_max=2000, event_map_entries_max=400)
    for within, beyond, here, there in (
        ([()] * 299, [()] * 300, "more than 300 lists", "more than 300 lists"),
        (((0,) * 1999), ((0,) * 2000), "more than 2000", "exceeds max_|more than 2000"),
        (set(range(400)), set(range(401)), "401 entries, and a set at most 400", "more than 400 members"),
        ([(0,) * 19] * 95, [(0,) * 19] * 96, "more than 2000 entries", "more than 2000 entries"),
    ):
        assert alike(decode_event(encode_event(within, limits), limits), within)
        with pytest.raises(EventEncodeError, match=here):
            encode_event(beyond, limits)
        with pytest.raises(RemoteProtocolError, match=there):
            decode_event(encode_event(beyond), limits)


@pytest.mark.parametrize("kind", [set, dict.fromkeys], ids=["set", "dict"])
@pytest.mark.parametrize(
    "member", [lambda n: Decimal(1 + n * (2**61 - 1)), lambda n: UUID(int=1 + n * (2**61 - 1))], ids=["Decimal", "UUID"]
)
def test_members_that_all_have_one_hash_are_refused(kind: Any, member: Callable[[int], Any]) -> None:  # H62, H95
    """Comparing thousands of them with each other would hold the event loop."""
    assert len({hash(member(number)) for number in range(100)}) == 1
    few = kind([member(number) for number in range(16)])
    assert alike(decode_event(encode_event(few)), few)
    leaves = [msgpack.ExtType(*leaf_values.encode_leaf(member(number), 99) or ()) for number in range(17)]
    if kind is set:
        data = msgpack.packb([msgpack.ExtType(ExtensionType.SET, b""), *leaves])
        with pytest.raises(EventEncodeError, match="have the same hash"):
            encode_event(kind([member(number) for number in range(17)]))
    else:
        data = msgpack.packb(dict.fromkeys(leaves))
    with pytest.raises(RemoteProtocolError, match="17 members of a set or keys of a dict have the same hash"):
        decode_event(data)


def test_a_large_event_with_extensions_is_decoded_in_steps() -> None:  # H62
    event = [(number, date(2026, 1, 1), UUID(int=number)) for number in range(5000)]
    data = encode_event(event)
    steps = decode_event_in_steps(data)
    assert sum(1 for _ in steps) > len(data) / 8192
    assert decode_event(data) == event


def test_values_of_numpy_need_it_only_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:  # H96
    data = encode_event(np.float64(1))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(RemoteProtocolError, match="numpy cannot be imported here: install it"):
        decode_event(data)


@given(st.binary(max_size=60), st.sampled_from(sorted(ExtensionType)))
def test_arbitrary_data_is_a_value_or_a_remote_error(data: bytes, code: ExtensionType) -> None:  # H62, H96
    event = bytes(msgpack.packb([msgpack.ExtType(code, data)]))
    try:
        value = decode_event(event)
    except RemoteProtocolError:
        return
    encode_event(value, DEFAULT_LIMITS)


def test_the_place_of_a_number_or_a_text_that_cannot_be_sent_is_named() -> None:
    """H21"""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(300):
        odd = chance.choice([2**64, -(2**63) - 1, 10**400, "a\ud800"])
        value: Any = odd
        path = ""
        for _ in range(chance.randrange(1, 6)):
            if chance.random() < 0.5:
                before = [chance.choice([1, "x", None, [2], {"k": b"y"}]) for _ in range(chance.randrange(4))]
                value, path = [*before, value, 2.5], f"[{len(before)}]{path}"
            else:
                value, path = {"first": [1], "it": value}, f"['it']{path}"
        with pytest.raises(EventEncodeError) as refused:
            encode_event(value)
        assert str(refused.value).startswith(f"the event{path} cannot be encoded: "), value
        assert show(odd, 40) in str(refused.value)
    with pytest.raises(EventEncodeError, match=r"the event\[the key 'a\\ud800'\] cannot be encoded"):
        encode_event({"a\ud800": 1})
