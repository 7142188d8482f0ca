# SPDX-License-Identifier: Apache-2.0

"""The assertions of Flink's own tests of its split assignment tracker (R120). S numbers: see the parity list."""

from __future__ import annotations

from itertools import count

from protocol.splits import SplitAssignmentTracker


def assign(tracker: SplitAssignmentTracker[int], subtasks: int, first: int) -> None:
    """Give subtask i its i + 1 consecutive splits, numbered from ``first``."""
    numbers = count(first)
    for subtask in range(subtasks):
        tracker.record(subtask, [next(numbers) for _ in range(subtask + 1)])


def a_tracker_with_two_assignments() -> SplitAssignmentTracker[int]:
    tracker: SplitAssignmentTracker[int] = SplitAssignmentTracker()
    assign(tracker, 3, 0)
    assign(tracker, 2, 6)
    return tracker


def a_tracker_with_two_checkpoints() -> SplitAssignmentTracker[int]:
    tracker: SplitAssignmentTracker[int] = SplitAssignmentTracker()
    assign(tracker, 2, 0)
    tracker.on_checkpoint(100)
    assign(tracker, 2, 3)
    tracker.on_checkpoint(101)
    return tracker


def test_assignments_add_up_per_subtask_in_order() -> None:  # S129
    tracker = a_tracker_with_two_assignments()
    assert [tracker.assigned(subtask) for subtask in range(3)] == [[0, 6], [1, 2, 7, 8], [3, 4, 5]]


def test_a_checkpoint_takes_over_what_is_open() -> None:  # S131
    tracker: SplitAssignmentTracker[int] = SplitAssignmentTracker()
    assign(tracker, 3, 0)
    tracker.on_checkpoint(123)
    assert [tracker.get_and_remove(subtask, 123) for subtask in range(3)] == [[], [], []]
    assert [tracker.get_and_remove(subtask, 122) for subtask in range(3)] == [[0], [1, 2], [3, 4, 5]]


def test_a_completed_checkpoint_is_forgotten_and_a_later_one_is_not() -> None:  # S132
    tracker = a_tracker_with_two_checkpoints()
    assert [tracker.assigned(subtask) for subtask in range(2)] == [[0, 3], [1, 2, 4, 5]]
    tracker.on_checkpoint_complete(100)
    assert [tracker.assigned(subtask) for subtask in range(2)] == [[3], [4, 5]]


def test_a_reset_before_every_checkpoint_gives_all_back() -> None:  # S133
    assert a_tracker_with_two_checkpoints().get_and_remove(0, 99) == [0, 3]


def test_a_reset_to_a_checkpoint_gives_back_what_came_after_it() -> None:  # S134
    assert a_tracker_with_two_checkpoints().get_and_remove(0, 100) == [3]
