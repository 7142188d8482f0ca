# SPDX-License-Identifier: Apache-2.0

"""Both halves of a checkpoint belong to one cut (H32); a subtask with copies has no half (H13)."""

from __future__ import annotations

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import SubtaskFailed, SubtaskFinished
from protocol.wire.messages import Positions, SubtaskState
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, accepted, kinds, snapshot_of, stored


def cut_at(dialogue: Dialogue, events_taken: dict[int, Positions]) -> Dialogue:
    """Checkpoint 1 of A, up to its cut."""
    dialogue.close(1, A)
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c", events_taken))
    return dialogue


# --- positions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events_sent", [(2,), (4,), (2, 1)], ids=["doubled", "lost", "of another part"])
def test_a_snapshot_that_does_not_fit_the_cut_aborts_and_counts(events_sent: Positions) -> None:
    # H32, H45: an event is in neither half, or in both.
    dialogue = cut_at(Dialogue(1).run(A), {A.task_attempt_id: (3,)})
    effects = dialogue.tell(t.SubtaskAcknowledged(A, 1, b"a", (), events_sent))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.RaiseGlobalFailure]
    assert f"{A}: {', '.join(map(str, events_sent))} of its events had left" in str(effects[0])
    assert "had taken 3 at the cut" in str(effects[0])


def test_the_positions_of_one_attempt_are_not_those_of_another() -> None:
    # H32, H1: by task attempt id
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    taken: dict[int, Positions] = {A.task_attempt_id: (1,), B.task_attempt_id: (2,)}
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c", taken))
    assert dialogue.tell(t.SubtaskAcknowledged(B, 1, b"b", (), (2,))) == []
    assert kinds(dialogue.tell(t.SubtaskAcknowledged(A, 1, b"a", (), (2,)))) == [t.NotifyCheckpointAborted]


def test_an_attempt_that_sent_nothing_stands_where_it_restored() -> None:
    # H32: the positions go on along the restored history.
    restored = t.CompletedCheckpoint(4, 1, b"c", {0: snapshot_of(0, b"zero", events_sent=(7,))})
    dialogue = Dialogue(1, restored=restored, tolerated_failures=1).run(A)
    dialogue.close(5, A).tell(t.CoordinatorSnapshotTaken(5, b"c"))
    assert stored(dialogue.tell(t.SubtaskAcknowledged(A, 5, b"a", (), (7,)))).subtask_states[0].events_sent == (7,)
    dialogue.tell(t.CheckpointStored(5))
    dialogue.close(6, A).tell(t.CoordinatorSnapshotTaken(6, b"c", {A.task_attempt_id: (9,)}))
    assert kinds(dialogue.tell(t.SubtaskAcknowledged(A, 6, b"a", (), (7,)))) == [t.NotifyCheckpointAborted]


def test_a_final_state_of_before_the_cut_is_compared_at_the_cut() -> None:  # H32, H47
    for taken, ends in ((5, [t.StoreCheckpoint]), (4, [t.NotifyCheckpointAborted])):
        dialogue = Dialogue(1, tolerated_failures=1).run(A)
        dialogue.tell(t.SubtaskFinalState(A, b"final", (5,)), SubtaskFinished(A))
        assert dialogue.tell(t.CheckpointTriggered(1)) == [t.SnapshotCoordinator(1)]
        effects = dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c", {A.task_attempt_id: (taken,)}))
        assert kinds(effects) == ends


def test_a_final_state_of_after_the_cut_is_compared_when_it_comes() -> None:  # H32, H47
    for sent, ends in ((5, [t.ReopenSubtask, t.StoreCheckpoint]), (6, [t.ReopenSubtask, t.NotifyCheckpointAborted])):
        dialogue = cut_at(Dialogue(1, tolerated_failures=1).run(A), {A.task_attempt_id: (5,)})
        assert kinds(dialogue.tell(t.SubtaskFinalState(A, b"final", (sent,)))) == ends


def test_a_subtask_at_rest_takes_part_with_its_restored_part_unchanged() -> None:
    # H32, H47, H52: several states and a position per state; nothing has been sent since.
    restored = t.CompletedCheckpoint(
        4, 3, b"c", {subtask: snapshot_of(subtask, b"%d" % subtask, b"h", events_sent=(7,)) for subtask in range(3)}
    )
    dialogue = Dialogue(2, restored=restored).run(B)
    dialogue.cut(5, B)
    checkpoint = stored(dialogue.acknowledge(5, B))
    assert checkpoint.parallelism == 2
    assert checkpoint.subtask_states[0].states == (SubtaskState(0, b"0"), SubtaskState(2, b"2"))
    assert [held.sender for held in checkpoint.subtask_states[0].held] == [0, 2]


# --- copies -----------------------------------------------------------------------------------------------


def test_a_second_live_attempt_aborts_pending_checkpoints() -> None:
    # H13: it is undecided whose snapshot would count. The checkpoint does not fail (H45).
    dialogue = Dialogue(tolerated_failures=0).run(A, B).cut(1, A, B)
    assert dialogue.tell(accepted(A2)) == [
        t.NotifyCheckpointAborted(1, "subtask 0 has 2 concurrent attempts"),
        t.RestoreAttempt(A2, -1, (), (), ()),
    ]


def test_while_a_subtask_has_two_attempts_no_checkpoint_starts() -> None:  # H13
    dialogue = Dialogue().run(A, B)
    dialogue.tell(accepted(A2))
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.RefuseCheckpoint(1, "subtask 0 has 2 concurrent attempts")]
    dialogue.tell(SubtaskFailed(A2, FAILED))
    assert t.NotifyCheckpointComplete(2) in dialogue.complete(2, A, B)


def test_an_attempt_next_to_a_finished_one_hinders_nothing() -> None:
    # H13, H47: the final state belongs to the subtask.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    dialogue.close(1, B)
    assert kinds(dialogue.tell(accepted(A2))) == [t.RestoreAttempt]
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c"))
    assert stored(dialogue.acknowledge(1, B)).subtask_states[0] == snapshot_of(0, b"final")
