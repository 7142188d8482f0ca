# SPDX-License-Identifier: Apache-2.0

"""The tracker against a model that keeps the whole history (H56, R120), and its edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.splits import SplitAssignmentTracker

steps = st.lists(
    st.tuples(st.just("record"), st.integers(0, 2))
    | st.tuples(st.just("checkpoint"), st.just(0))
    | st.tuples(st.just("complete"), st.integers(0, 3))
    | st.tuples(st.just("reset"), st.integers(0, 2)),
    max_size=40,
)


@given(steps)
def test_a_reset_gives_back_exactly_what_was_assigned_since_the_restored_checkpoint(
    steps: list[tuple[str, int]],
) -> None:
    # The model remembers every assignment with the checkpoint that covers it (None: not covered yet).
    tracker: SplitAssignmentTracker[int] = SplitAssignmentTracker()
    log: list[tuple[int, int, int | None]] = []
    newest, completed, next_split = 0, -1, 0
    for step, argument in steps:
        if step == "record":
            tracker.record(argument, [next_split])
            log.append((argument, next_split, None))
            next_split += 1
        elif step == "checkpoint":
            newest += 1
            tracker.on_checkpoint(newest)
            log = [(s, split, newest if covered is None else covered) for s, split, covered in log]
        elif step == "complete":
            completed = max(completed, newest - argument)
            tracker.on_checkpoint_complete(completed)
        else:
            since = [e for e in log if e[0] == argument and (e[2] is None or e[2] > completed)]
            expected = [split for _, split, covered in sorted(since, key=lambda e: e[2] or 10**9)]
            assert tracker.assigned(argument) == expected
            assert tracker.get_and_remove(argument, completed) == expected
            assert tracker.get_and_remove(argument, completed) == []
            log = [e for e in log if e not in since]
        tracker.check_invariants()


def test_a_split_recorded_twice_comes_back_once() -> None:
    tracker: SplitAssignmentTracker[str] = SplitAssignmentTracker()
    tracker.record(0, ["a", "b"])
    tracker.record(0, ["a", "c"])
    assert tracker.get_and_remove(0, -1) == ["a", "b", "c"]


def test_an_aborted_checkpoint_does_not_keep_its_splits() -> None:  # R121
    tracker: SplitAssignmentTracker[str] = SplitAssignmentTracker()
    tracker.record(0, ["a"])
    tracker.on_checkpoint(1)
    tracker.on_checkpoint_complete(1)
    tracker.record(0, ["b"])
    tracker.on_checkpoint(2)  # aborted: the tracker is not told
    tracker.record(0, ["c"])
    assert tracker.get_and_remove(0, 1) == ["b", "c"]


@pytest.mark.parametrize("checkpoint_id", [-1, 3, 4])
def test_a_checkpoint_id_that_does_not_rise_is_refused_and_changes_nothing(checkpoint_id: int) -> None:  # H4
    tracker: SplitAssignmentTracker[str] = SplitAssignmentTracker()
    tracker.on_checkpoint(4)
    tracker.on_checkpoint_complete(4)
    tracker.record(0, ["a"])
    with pytest.raises(LocalProtocolError, match="ids must increase"):
        tracker.on_checkpoint(checkpoint_id)
    tracker.check_invariants()
    assert tracker.get_and_remove(0, 4) == ["a"]
