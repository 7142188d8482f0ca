# SPDX-License-Identifier: Apache-2.0

"""Events between a source coordinator and its readers, told apart from the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.source_events import (
    BacklogReported,
    NoMoreSplits,
    SplitAt,
    SplitRequested,
    SplitsAdded,
    backlog_event,
    no_more_splits_event,
    parse_source_event,
    parse_stream_batch,
    split_from_value,
    split_request_event,
    split_to_value,
    splits_event,
)
from spark_bridge.primitives.shared_value.encoding import difference
from spark_bridge.primitives.work_queue.messages import id_of_key, parse_report, parse_return
from spark_bridge.sinks.two_phase.parts import parse_prepared
from tests.exploration.freezing import freeze


class Incomparable:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody compares users' values")

    def __bool__(self) -> bool:
        raise AssertionError("nobody asks for the truth of users' values")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Incomparable({self.number})"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [event[0] for event in (split_request_event(), splits_event([]), no_more_splits_event(), backlog_event([]))]
    + [split_to_value(SplitAt(0, 0))[0]]
)


@given(values | st.lists(names | values, max_size=3))
def test_any_value_is_a_source_event_or_the_users_own(value: Any) -> None:
    builders: dict[type, Callable[[Any], list[Any]]] = {
        SplitRequested: lambda _: split_request_event(),
        SplitsAdded: lambda event: splits_event(event.splits),
        NoMoreSplits: lambda _: no_more_splits_event(),
        BacklogReported: lambda event: backlog_event(event.backlogs),
    }
    event = parse_source_event(value)
    if event is not None:
        assert freeze(builders[type(event)](event)) == freeze(value)


def test_every_source_event_comes_back_as_itself() -> None:
    events = [split_request_event(), splits_event([1, "a"]), splits_event([]), no_more_splits_event()]
    assert [type(parse_source_event(event)).__name__ for event in events] == [
        "SplitRequested",
        "SplitsAdded",
        "SplitsAdded",
        "NoMoreSplits",
    ]


@given(values, values)
def test_a_split_comes_back_with_its_position(split: Any, position: Any) -> None:
    at = SplitAt(split, position)
    found = split_from_value(split_to_value(at))
    assert isinstance(found, SplitAt)
    assert freeze([found.split, found.position]) == freeze([split, position])


ARRAY_FIRST: list[Any] = [
    [np.arange(3)],
    [np.arange(3), []],
    [np.arange(3), 1, 2],
    (np.arange(3), "second"),
    [np.arange(3), "stream", 1, 2],
    np.arange(3),
    [Incomparable(1), Incomparable(2), Incomparable(3)],
]
"""What begins with a value that cannot be compared, in each length that an event of ours has."""


@pytest.mark.parametrize("event", ARRAY_FIRST, ids=repr)
def test_what_begins_with_a_value_that_cannot_be_compared_is_the_users_own(event: Any) -> None:  # H164
    assert parse_source_event(event) is None
    assert parse_stream_batch(event) is None
    assert split_from_value(split_to_value(event)) is event
    parsed = parse_source_event(splits_event([event, SplitAt(event, event)]))
    assert isinstance(parsed, SplitsAdded)
    assert parsed.splits[0] is event
    assert parsed.splits[1].split is parsed.splits[1].position is event
    assert parse_return(event) is None
    assert parse_prepared("sink", "target", event) is None
    with pytest.raises(RemoteProtocolError, match="not a report"):
        parse_report(event)


def test_a_shared_dict_with_arrays_is_compared_by_what_would_be_sent() -> None:
    old = {"a": np.arange(3), "b": np.arange(3), "c": 1, "d": [np.float64("nan")], "e": 0}
    new = {"a": np.arange(3), "b": np.arange(4), "c": True, "d": [np.float64("nan")], "e": 0}
    changes = difference(old, new)
    assert changes is not None
    assert repr(changes) == repr(({"b": np.arange(4), "c": True}, []))


def test_a_key_of_a_work_queue_is_any_value() -> None:
    keys = [np.arange(3), np.arange(3.0), (1, "a"), [1, "a"], {"a": np.arange(2)}]
    assert len({id_of_key(key) for key in keys}) == len(keys)
    assert id_of_key(np.arange(3)) == id_of_key(np.arange(3))


def test_a_backlog_comes_back_with_its_splits_and_a_damaged_one_is_the_users_own() -> None:
    assert parse_source_event(backlog_event([("a", 3), (1, 0)])) == BacklogReported((("a", 3), (1, 0)))
    assert parse_source_event([backlog_event([])[0], [["a", "many"]]]) is None
    assert parse_source_event([backlog_event([])[0], ["a"]]) is None
