# SPDX-License-Identifier: Apache-2.0

"""Several concurrent checkpoints (H43), including savepoints (H49)."""

from __future__ import annotations

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import OperatorReset, RunEnded, SubtaskFailed, SubtaskReady, SubtaskReset
from protocol.barrier_tracker.pending import Phase
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, accepted, kinds, snapshot_of, stored


def several(concurrent_max: int = 2, parallelism: int = 2, tolerated_failures: int = 0) -> Dialogue:
    return Dialogue(parallelism, concurrent_max=concurrent_max, tolerated_failures=tolerated_failures)


# --- the order among them ---------------------------------------------------------------------------------


def test_as_many_as_allowed_run_at_the_same_time_and_one_more_waits() -> None:  # H43
    dialogue = several().run(A, B)
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(A, 1), t.CloseSubtask(B, 1)]
    assert dialogue.tell(t.CheckpointTriggered(2)) == [t.CloseSubtask(A, 2), t.CloseSubtask(B, 2)]
    assert dialogue.tell(t.CheckpointTriggered(3)) == []
    assert dialogue.tell(t.CheckpointTriggered(4)) == [
        t.RefuseCheckpoint(
            4,
            "checkpoint 3 waits already, and only one may: ask again when an earlier one has ended, or let more be "
            "taken at one time with CheckpointConfig.concurrent_max",
        )
    ]
    assert dialogue.tracker.pending_ids == (1, 2)
    assert dialogue.tell(t.AbortRequested(1, "enough")) == [
        t.NotifyCheckpointAborted(1, "enough"),
        t.CloseSubtask(A, 3),
        t.CloseSubtask(B, 3),
    ]
    assert dialogue.tracker.pending_ids == (2, 3)


def test_the_coordinator_is_asked_for_one_snapshot_after_the_other() -> None:
    # H43: a cut cannot come before the cut of a lower checkpoint.
    dialogue = several(3).run(A).close(1, A)
    assert dialogue.tell(t.CheckpointTriggered(2), t.SubtaskClosed(A, 2)) == [t.CloseSubtask(A, 2)]
    assert dialogue.tell(t.CheckpointTriggered(3), t.SubtaskClosed(A, 3)) == [t.CloseSubtask(A, 3)]
    assert dialogue.tell(t.CoordinatorSnapshotTaken(1, b"1")) == [t.SnapshotCoordinator(2)]
    assert dialogue.tell(t.CoordinatorSnapshotTaken(2, b"2")) == [t.SnapshotCoordinator(3)]
    assert kinds(dialogue.acknowledge(1, A)) == [t.StoreCheckpoint]


def test_a_cut_that_failed_lets_the_next_one_be_asked_for() -> None:  # H43, H44
    dialogue = several(tolerated_failures=1).run(A).close(1, A).close(2, A)
    assert kinds(dialogue.tell(t.CoordinatorSnapshotFailed(1, "no"))) == [
        t.NotifyCheckpointAborted,
        t.SnapshotCoordinator,
    ]
    assert kinds(dialogue.tell(t.CoordinatorSnapshotTaken(1, b"late"))) == [t.ReportStale]
    assert dialogue.tell(t.CoordinatorSnapshotTaken(2, b"2")) == []
    assert kinds(dialogue.acknowledge(2, A)) == [t.StoreCheckpoint]


def test_each_takes_its_own_reports() -> None:
    # H44: by id, never "the latest".
    dialogue = several().run(A, B).cut(1, A, B).cut(2, A, B)
    assert dialogue.acknowledge(1, A) == []
    assert dialogue.acknowledge(2, B) == []
    assert stored(dialogue.acknowledge(1, B)).checkpoint_id == 1
    assert stored(dialogue.acknowledge(2, A)).subtask_states[1] == snapshot_of(1, b"1 at 2", b"held")
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
    assert dialogue.tell(t.CheckpointStored(2)) == [t.NotifyCheckpointComplete(2)]


def test_an_abort_of_one_leaves_the_others_alone() -> None:  # H44, G4
    dialogue = several(3).run(A).cut(1, A).cut(2, A).cut(3, A)
    assert dialogue.tell(t.AbortRequested(2, "enough")) == [t.NotifyCheckpointAborted(2, "enough")]
    assert dialogue.tracker.pending_ids == (1, 3)
    assert kinds(dialogue.tell(t.AbortRequested(2, "again"))) == [t.ReportStale]
    assert dialogue.tracker.pending_ids == (1, 3)
    assert kinds(dialogue.acknowledge(2, A)) == [t.ReportStale]
    assert stored(dialogue.acknowledge(1, A)).checkpoint_id == 1


@pytest.mark.parametrize("lower_is", [Phase.ACKNOWLEDGING, Phase.STORING])
def test_one_that_completes_subsumes_the_lower_ones(lower_is: Phase) -> None:
    # H43: completed ids increase, so a lower one cannot complete any more; this is not a failure (H45).
    dialogue = several().run(A, B).cut(1, A, B).store(2, A, B)
    if lower_is is Phase.STORING:
        dialogue.acknowledge(1, A, B)
    assert dialogue.tracker.phase is lower_is
    written = lower_is is Phase.STORING
    assert dialogue.tell(t.CheckpointStored(2)) == [
        t.NotifyCheckpointAborted(1, "subsumed by checkpoint 2", in_doubt=written),
        *([t.DiscardCheckpoint(1)] if written else []),
        t.NotifyCheckpointComplete(2),
        *([t.NotifyCheckpointDiscarded(1)] if written else []),  # H64
    ]
    assert kinds(dialogue.tell(t.CheckpointStored(1))) == [t.ReportStale]
    assert dialogue.tracker.restore_id == 2


def test_one_that_completes_leaves_the_higher_ones_alone() -> None:  # H43
    dialogue = several().run(A).store(1, A).cut(2, A)
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
    dialogue.acknowledge(2, A)
    assert dialogue.tell(t.CheckpointStored(2)) == [t.NotifyCheckpointComplete(2)]


def test_each_takes_its_own_time() -> None:  # H48
    dialogue = several(tolerated_failures=1).run(A).close(1)
    dialogue.now = 4.0
    dialogue.close(2)
    assert dialogue.tracker.next_deadline() == 10.0
    assert kinds(dialogue.wait(6.0)) == [t.NotifyCheckpointAborted]
    assert dialogue.tracker.pending_ids == (2,)
    assert dialogue.tracker.next_deadline() == 14.0


def test_one_that_waits_for_its_turn_says_so_when_its_time_is_over() -> None:  # H43, H48
    dialogue = several(tolerated_failures=1).run(A).close(1, A).close(2, A)
    effects = dialogue.wait(10.0)
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.NotifyCheckpointAborted, t.RaiseGlobalFailure]
    assert "the coordinator has not returned its snapshot" in str(effects[0])
    assert "an earlier snapshot" in str(effects[1])


# --- who takes part ---------------------------------------------------------------------------------------


def test_an_attempt_is_withheld_until_every_one_without_it_has_asked_for_its_snapshot() -> None:
    # The invariant: everything between it and the coordinator comes after both cuts.
    dialogue = several().run(A)
    dialogue.tell(accepted(B), t.CheckpointTriggered(1), t.CheckpointTriggered(2))
    assert dialogue.tell(SubtaskReady(B)) == []
    assert dialogue.tell(t.SubtaskClosed(A, 1), t.SubtaskClosed(A, 2)) == [t.SnapshotCoordinator(1)]
    assert dialogue.tell(t.CoordinatorSnapshotTaken(1, b"1")) == [t.SnapshotCoordinator(2), SubtaskReady(B)]


def test_a_withheld_attempt_takes_part_in_the_next_one() -> None:
    # H47: nothing was exchanged with it yet, but its first events come before the cut of 2.
    dialogue = several().run(A)
    dialogue.tell(accepted(B), t.CheckpointTriggered(1), SubtaskReady(B))
    assert dialogue.tell(t.CheckpointTriggered(2)) == [t.CloseSubtask(A, 2), t.CloseSubtask(B, 2)]
    assert dialogue.tell(t.SubtaskClosed(A, 1)) == [t.SnapshotCoordinator(1), SubtaskReady(B)]
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"1"), t.SubtaskClosed(A, 2))
    assert dialogue.tell(t.SubtaskClosed(B, 2)) == [t.SnapshotCoordinator(2)]


def test_a_final_state_is_the_part_in_each_of_them() -> None:  # H47
    dialogue = several(parallelism=1).run(A).cut(1, A).close(2, A)
    assert kinds(dialogue.tell(t.SubtaskFinalState(A, b"final"))) == [
        t.ReopenSubtask,
        t.ReopenSubtask,
        t.StoreCheckpoint,
    ]
    effects = dialogue.tell(t.CoordinatorSnapshotTaken(2, b"2"))
    assert stored(effects).subtask_states == {0: snapshot_of(0, b"final")}


# --- failures and resets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (SubtaskFailed(A, FAILED), SubtaskFailed),
        (SubtaskReset("words", 0), t.SubtaskResetToCheckpoint),
        (OperatorReset("words", "fail_job"), t.OperatorResetToCheckpoint),
        (RunEnded("words", 7, False), RunEnded),
    ],
)
def test_what_concerns_the_attempts_aborts_all_that_is_pending_first(cause: t.TrackerInput, told: type) -> None:
    # H16: both sides know the abort before they learn the rest; no checkpoint fails by it (H45).
    dialogue = several(3).run(A, B).store(1, A, B).close(2, A, B).close(3)
    effects = dialogue.tell(cause)
    assert kinds(effects) == [
        t.NotifyCheckpointAborted,
        t.DiscardCheckpoint,
        t.NotifyCheckpointAborted,
        t.NotifyCheckpointAborted,
        told,
    ]
    assert dialogue.tracker.pending_ids == ()


def test_failures_in_a_row_are_counted_over_all_of_them() -> None:
    # H45: at the limit everything stops until the reset.
    dialogue = several(tolerated_failures=1).run(A).cut(1, A).store(2, A)
    dialogue.tell(t.CheckpointStoreFailed(2, "disk full"), t.CheckpointTriggered(3))
    effects = dialogue.tell(t.AbortRequested(1, "no failure"), t.CheckpointTriggered(4), t.SubtaskClosed(A, 3))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.CloseSubtask, t.SnapshotCoordinator]
    effects = dialogue.tell(t.CoordinatorSnapshotFailed(3, "returned None"))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.NotifyCheckpointAborted, t.RaiseGlobalFailure]
    assert "2 checkpoints in a row failed, the last one, 3: coordinator: returned None" in str(effects[2])
    assert kinds(dialogue.tell(t.CheckpointTriggered(5))) == [t.RefuseCheckpoint]
    assert kinds(dialogue.tell(OperatorReset("words", "x"))) == [t.OperatorResetToCheckpoint]
    assert kinds(dialogue.tell(t.CheckpointTriggered(6))) == [t.SnapshotCoordinator]


def test_a_request_that_waits_is_refused_when_too_many_have_failed() -> None:  # H43, H45
    dialogue = Dialogue(tolerated_failures=0).run(A).cut(1, A)
    assert dialogue.tell(t.CheckpointTriggered(2)) == []
    effects = dialogue.tell(t.SubtaskDeclined(A, 1, "disk full"))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.RaiseGlobalFailure, t.RefuseCheckpoint]
    assert dialogue.tracker.next_deadline() is None


def test_an_acknowledgement_of_another_attempt_settles_none_of_them() -> None:  # H44, G7
    dialogue = several().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), SubtaskReset("words", 0))
    dialogue.run(A2).cut(1, A2, B).cut(2, A2, B)
    dialogue.acknowledge(1, B)
    assert kinds(dialogue.acknowledge(1, A)) == [t.ReportStale]
    assert kinds(dialogue.acknowledge(2, A)) == [t.ReportStale]
    assert stored(dialogue.acknowledge(1, A2)).checkpoint_id == 1


# --- savepoints -------------------------------------------------------------------------------------------


def test_a_savepoint_reopens_everything_and_completes_nothing() -> None:  # H49, G6
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.cut(2, A, B, savepoint=True)
    [store] = dialogue.acknowledge(2, A, B)
    assert isinstance(store, t.StoreCheckpoint)
    assert store.savepoint
    assert store.checkpoint.subtask_states[0] == snapshot_of(0, b"0 at 2", b"held")
    assert dialogue.tell(t.CheckpointStored(2)) == [t.EndSavepoint(2)]
    assert dialogue.tracker.phase is Phase.IDLE
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, 1)]


def test_a_savepoint_that_fails_is_aborted_on_both_sides_but_counts_for_nothing() -> None:
    # H45, H49: the caller that requested it is told, and decides.
    dialogue = Dialogue(tolerated_failures=0).run(A, B).store(1, A, B, savepoint=True)
    assert dialogue.tell(t.CheckpointStoreFailed(1, "disk full")) == [
        t.NotifyCheckpointAborted(1, "storage: disk full"),
        t.DiscardCheckpoint(1, savepoint=True),
    ]


def test_a_savepoint_that_succeeds_does_not_end_a_row_of_failures() -> None:  # H45, H49
    dialogue = Dialogue(tolerated_failures=1).run(A).close(1, A)
    dialogue.tell(t.CoordinatorSnapshotFailed(1, "no"))
    dialogue.store(2, A, savepoint=True)
    dialogue.tell(t.CheckpointStored(2))
    dialogue.close(3, A)
    assert kinds(dialogue.tell(t.CoordinatorSnapshotFailed(3, "no"))) == [
        t.NotifyCheckpointAborted,
        t.RaiseGlobalFailure,
    ]


def test_a_savepoint_neither_subsumes_nor_is_subsumed() -> None:  # H43, H49
    dialogue = several(3).run(A).cut(1, A).store(2, A, savepoint=True).store(3, A)
    assert dialogue.tell(t.CheckpointStored(3)) == [
        t.NotifyCheckpointAborted(1, "subsumed by checkpoint 3"),
        t.NotifyCheckpointComplete(3),
    ]
    assert dialogue.tell(t.CheckpointStored(2)) == [t.EndSavepoint(2)]
    assert dialogue.tracker.restore_id == 3
    dialogue.cut(4, A).store(5, A, savepoint=True)
    assert dialogue.tell(t.CheckpointStored(5)) == [t.EndSavepoint(5)]
    assert dialogue.tracker.pending_ids == (4,)


def test_a_savepoint_waits_like_any_request() -> None:  # H43
    dialogue = Dialogue().run(A).cut(1, A)
    assert dialogue.tell(t.CheckpointTriggered(2, savepoint=True)) == []
    dialogue.acknowledge(1, A)
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1), t.CloseSubtask(A, 2)]
