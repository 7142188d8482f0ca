# SPDX-License-Identifier: Apache-2.0

"""Events between a source coordinator and its readers, told apart from the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.source_events import (
    NoMoreSplits,
    SplitRequested,
    SplitsAdded,
    no_more_splits_event,
    parse_source_event,
    split_request_event,
    splits_event,
)
from tests.exploration.freezing import freeze

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([split_request_event()[0], splits_event([])[0], no_more_splits_event()[0]])


@given(values | st.lists(names | values, max_size=3))
def test_any_value_is_a_source_event_or_the_users_own(value: Any) -> None:
    builders: dict[type, Callable[[Any], list[Any]]] = {
        SplitRequested: lambda _: split_request_event(),
        SplitsAdded: lambda event: splits_event(event.splits),
        NoMoreSplits: lambda _: no_more_splits_event(),
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
