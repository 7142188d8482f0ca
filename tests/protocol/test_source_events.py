# SPDX-License-Identifier: Apache-2.0

"""Events between a source coordinator and its readers, told apart from the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.source_events import (
    BacklogReported,
    NoMoreSplits,
    SplitAt,
    SplitRequested,
    SplitsAdded,
    backlog_event,
    no_more_splits_event,
    parse_source_event,
    split_from_value,
    split_request_event,
    split_to_value,
    splits_event,
)
from tests.exploration.freezing import freeze

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


def test_a_backlog_comes_back_with_its_splits_and_a_damaged_one_is_the_users_own() -> None:
    assert parse_source_event(backlog_event([("a", 3), (1, 0)])) == BacklogReported((("a", 3), (1, 0)))
    assert parse_source_event([backlog_event([])[0], [["a", "many"]]]) is None
    assert parse_source_event([backlog_event([])[0], ["a"]]) is None
