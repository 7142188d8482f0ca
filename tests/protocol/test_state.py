# SPDX-License-Identifier: Apache-2.0

"""The encoder of states: any length, in steps, and every value with its type (H164)."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from operator import length_hint
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate
from protocol.errors import EventEncodeError, LocalProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.state import (
    CHUNK_ENTRIES,
    COPY_BYTES,
    MAGIC,
    OLD,
    decode_state,
    decode_state_in_steps,
    drain,
    encode_state,
    encode_state_in_steps,
    is_state_of,
    join_in_steps,
    run_steps,
)
from tests.exploration.freezing import freeze

KIND = "a test"


@headgate.event("tests.state.Order")
@dataclass(eq=False)
class Order:
    number: int

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody compares users' values")

    __hash__ = None  # type: ignore[assignment]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=20), values | st.lists(values, max_size=40), max_size=5))
def test_every_field_comes_back_as_it_was(fields: dict[str, Any]) -> None:  # H164
    state = encode_state(KIND, fields)
    assert is_state_of(KIND, state)
    assert freeze(list(decode_state(KIND, state).items())) == freeze(list(fields.items()))


def test_an_entry_keeps_its_type_whatever_an_event_can_have() -> None:  # H164
    entries = [
        ("a tuple", 1),
        [np.arange(3), "array first"],
        np.float32(1.5),
        dt.datetime(2026, 11, 26, 12, tzinfo=dt.UTC),
        dt.date(2026, 11, 26),
        Decimal("1.50"),
        UUID(int=7),
        {1, 2},
        frozenset({"a"}),
        {(1, 2): b"bytes"},
        Order(7),
    ]
    assert repr(decode_state(KIND, encode_state(KIND, {"entries": entries}))["entries"]) == repr(entries)


def steps_of(steps: Generator[None, None, Any]) -> tuple[int, Any]:
    """How many steps there are, and the result."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


@pytest.mark.parametrize("count", [300_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_list_may_have_more_entries_than_an_event_and_takes_steps_of_bounded_size(count: int) -> None:  # H164
    """The steps are counted: none has more than ``CHUNK_ENTRIES`` entries."""
    entries = [("file", number) for number in range(count)]
    with pytest.raises(EventEncodeError):
        encode_event(entries)
    steps, state = steps_of(encode_state_in_steps(KIND, {"entries": entries}))
    assert steps >= count // CHUNK_ENTRIES
    steps, fields = steps_of(decode_state_in_steps(KIND, state))
    assert steps >= count // CHUNK_ENTRIES
    assert fields == {"entries": entries}


def test_what_an_iterator_yields_is_taken_while_it_is_encoded() -> None:
    entries = iter(range(5000))
    steps = encode_state_in_steps(KIND, {"entries": entries})
    next(steps)
    assert 5000 - length_hint(entries) < 100, "the first chunk is small, because entries may be large"
    assert decode_state(KIND, run_steps(steps))["entries"] == list(range(5000))


def test_one_entry_has_the_limits_of_a_checkpoint() -> None:  # H164
    """A position is never sent, so it may be deeper and larger than an event, and so may what contains it."""
    deep: Any = []
    for _ in range(DEFAULT_LIMITS.event_nesting_max + 20):
        deep = [deep]
    wide = list(range(DEFAULT_LIMITS.event_items_max + 1))
    mapping = {str(number): number for number in range(DEFAULT_LIMITS.event_map_entries_max + 1)}
    lists: list[Any] = [[] for _ in range(DEFAULT_LIMITS.event_containers_max + 1)]
    for value in (deep, wide, mapping, lists):
        with pytest.raises(EventEncodeError):
            encode_event(value)
        assert decode_state(KIND, encode_state(KIND, {"one": [["split", value]]})) == {"one": [["split", value]]}


def test_large_bytes_are_copied_in_steps() -> None:  # H164
    """A state in a state, such as that of a source in a hybrid source."""
    inner = random.Random(1).randbytes(5 * COPY_BYTES + 3)
    steps, state = steps_of(encode_state_in_steps(KIND, {"0": inner, "1": b""}))
    assert steps >= 5
    steps, fields = steps_of(decode_state_in_steps(KIND, state))
    assert steps >= 5
    assert fields == {"0": inner, "1": b""}
    steps, joined = steps_of(join_in_steps([b"a", inner, b"", memoryview(inner)]))
    assert (steps, joined) == (12, b"a" + inner + inner)


def test_entries_of_very_different_sizes_come_back_in_order() -> None:
    random_ = random.Random(3)
    entries = [random_.randbytes(random_.choice((0, 10, 1000, 300_000))) for _ in range(300)]
    assert decode_state(KIND, encode_state(KIND, {"entries": entries})) == {"entries": entries}


def test_a_state_of_before_is_the_field_old() -> None:  # H164
    assert decode_state(KIND, encode_event({"pending": [1]})) == {OLD: {"pending": [1]}}


def test_another_kind_a_later_version_and_other_bytes_are_refused() -> None:
    state = encode_state("a stream's plan", {"a": 1})
    assert not is_state_of(KIND, state)
    with pytest.raises(LocalProtocolError, match="not that of a test, but that of a stream's plan"):
        decode_state(KIND, state)
    later = MAGIC + b"\x02" + encode_state(KIND, {})[len(MAGIC) + 1 :]
    with pytest.raises(LocalProtocolError, match="has version 2, and this release reads version 1: restore it with a"):
        decode_state(KIND, later)
    for other in (b"\xc1headgate-chain-1", b"", b"{}", b"x", encode_event([1]), MAGIC, MAGIC[:5]):
        with pytest.raises(LocalProtocolError, match="a test"):
            decode_state(KIND, other)


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_state_is_refused_or_another_state(seed: int) -> None:
    """And raises nothing else, whichever byte is wrong or missing."""
    random_ = random.Random(seed)
    state = bytearray(encode_state(KIND, {"a": [1, "x", (2, 3)], "b": b"bytes", "c": {"d": np.arange(2)}}))
    if random_.random() < 0.5:
        del state[random_.randrange(len(state)) :]
    else:
        state[random_.randrange(len(state))] = random_.randrange(256)
    with suppress(LocalProtocolError):
        decode_state(KIND, bytes(state))


def test_a_value_that_an_event_cannot_have_is_named() -> None:
    with pytest.raises(EventEncodeError, match=r"is of type builtins\.object"):
        encode_state(KIND, {"entries": [1, object()]})


def test_draining_takes_all_values_in_order_and_leaves_none() -> None:
    left = list(range(2500))
    assert [chunk[0] for chunk in drain(left)] == [0, 1024, 2048]
    assert left == []


def test_an_old_release_says_that_it_cannot_read_a_new_state() -> None:
    """A state begins with a byte that begins no msgpack value."""
    with pytest.raises(Exception, match="not msgpack"):
        decode_event(encode_state(KIND, {}))
