# SPDX-License-Identifier: Apache-2.0

"""A checkpoint restored with another parallelism (H52)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import OperatorReset
from protocol.barrier_tracker.rescale import rescaled
from protocol.errors import LocalProtocolError
from protocol.wire.messages import HeldEvent, SubtaskState
from tests.protocol.barrier_tracker_kit import A, B, Dialogue, accepted, snapshot_of


def checkpoint_of(parallelism: int, *subtasks: int) -> t.CompletedCheckpoint:
    parts = {
        subtask: snapshot_of(subtask, b"s%d" % subtask, b"h%d" % subtask, b"i%d" % subtask, events_sent=(5,))
        for subtask in subtasks
    }
    return t.CompletedCheckpoint(4, parallelism, b"coordinator", parts)


def whose(snapshot: t.SubtaskSnapshot) -> list[int]:
    return [state.subtask for state in snapshot.states]


def test_with_fewer_subtasks_one_takes_over_the_parts_of_several() -> None:
    # H52: part j goes to j modulo the new parallelism.
    checkpoint = rescaled(checkpoint_of(5, 4, 2, 0, 1, 3), 2)
    assert (checkpoint.checkpoint_id, checkpoint.parallelism) == (4, 2)
    assert checkpoint.coordinator_state == b"coordinator"
    assert {subtask: whose(part) for subtask, part in checkpoint.subtask_states.items()} == {0: [0, 2, 4], 1: [1, 3]}


def test_held_events_keep_their_sender_and_their_order() -> None:  # H52, H31
    part = rescaled(checkpoint_of(3, 2, 0, 1), 1).subtask_states[0]
    assert part.held == tuple(HeldEvent(j, payload % j) for j in range(3) for payload in (b"h%d", b"i%d"))


def test_positions_start_again() -> None:
    # H32: they belong to the history of one old subtask.
    assert rescaled(checkpoint_of(2, 0, 1), 3).subtask_states[0].events_sent == ()


def test_with_more_subtasks_the_new_ones_have_no_part() -> None:  # H52, H47
    checkpoint = rescaled(checkpoint_of(2, 0, 1), 4)
    assert checkpoint.subtask_states == {
        0: snapshot_of(0, b"s0", b"h0", b"i0"),
        1: snapshot_of(1, b"s1", b"h1", b"i1"),
    }


def test_an_empty_part_stays_empty() -> None:  # H47
    assert rescaled(checkpoint_of(3, 1), 2).subtask_states.keys() == {1}


def test_with_the_same_parallelism_nothing_changes() -> None:
    # H32: nor do the positions.
    checkpoint = checkpoint_of(2, 0, 1)
    assert rescaled(checkpoint, 2) == checkpoint


def test_what_was_never_restored_is_handed_on() -> None:
    # H52: subtask 1 was idle with two states while the others went on.
    once = rescaled(checkpoint_of(4, 0, 1, 2, 3), 2)
    again = t.CompletedCheckpoint(9, 2, b"c", {0: snapshot_of(0, b"new"), 1: once.subtask_states[1]})
    assert rescaled(again, 1).subtask_states[0].states == (
        SubtaskState(0, b"new"),
        SubtaskState(1, b"s1"),
        SubtaskState(3, b"s3"),
    )


def test_two_states_of_one_subtask_that_would_meet_are_refused() -> None:
    # H52: one of them would be lost in the merge.
    mixed = t.CompletedCheckpoint(
        9, 3, b"c", {0: t.SubtaskSnapshot((SubtaskState(0, b"a"), SubtaskState(2, b"old"))), 2: snapshot_of(2, b"new")}
    )
    with pytest.raises(LocalProtocolError, match="Restore it with 3"):
        rescaled(mixed, 2)


@pytest.mark.parametrize(("parallelism", "asked"), [(2, 2), (2, 0)])
def test_a_part_without_a_place_is_refused(parallelism: int, asked: int) -> None:  # H50
    with pytest.raises(LocalProtocolError, match="of parallelism 2"):
        rescaled(checkpoint_of(parallelism, *((2,) if asked else (0,))), asked)


def test_a_parallelism_that_a_file_only_claims_costs_nothing() -> None:
    # H50, H81: it is compared with the subtasks that are there.
    checkpoint = replace(checkpoint_of(2, 0, 1), parallelism=1_000_000)
    tracemalloc.start()
    try:
        assert set(rescaled(checkpoint, 2).subtask_states) == {0, 1}
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_new_application_restores_a_checkpoint_of_another_parallelism() -> None:
    # H52, H4: ids go on above it.
    dialogue = Dialogue(2, restored=checkpoint_of(3, 0, 1, 2))
    assert dialogue.tell(accepted(A)) == [
        t.RestoreAttempt(
            A,
            4,
            (SubtaskState(0, b"s0"), SubtaskState(2, b"s2")),
            (HeldEvent(0, b"h0"), HeldEvent(0, b"i0"), HeldEvent(2, b"h2"), HeldEvent(2, b"i2")),
            (),
            True,
            partitions_before=3,
        )
    ]
    [restore] = dialogue.tell(accepted(B))
    assert isinstance(restore, t.RestoreAttempt)
    assert restore.states == (SubtaskState(1, b"s1"),)
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(t.CheckpointTriggered(4))
    assert dialogue.tell(OperatorReset("words", "x")) == [t.OperatorResetToCheckpoint(4, b"coordinator", True)]
