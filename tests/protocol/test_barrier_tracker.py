# SPDX-License-Identifier: Apache-2.0

"""The barrier tracker, one test per sentence of the contract: one checkpoint, its parts, its restore, its abort."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import (
    FailureKind,
    FailureReason,
    OperatorReset,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker.pending import Phase
from protocol.errors import LocalProtocolError
from protocol.wire.messages import HeldEvent, RestoreMode, SubtaskState
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, accepted, held_by, kinds, snapshot_of, stored

# --- the order of one checkpoint -------------------------------------------------------------------------


def test_one_checkpoint_takes_its_steps_in_the_order_of_the_contract() -> None:  # H40
    dialogue = Dialogue().run(A, B)
    tell = dialogue.tell
    assert tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(A, 1), t.CloseSubtask(B, 1)]
    assert tell(t.SubtaskClosed(B, 1)) == []
    assert tell(t.SubtaskClosed(A, 1)) == [t.SnapshotCoordinator(1)]
    assert tell(t.CoordinatorSnapshotTaken(1, b"c")) == []
    assert dialogue.tracker.phase.value == "acknowledging"
    assert tell(t.SubtaskAcknowledged(A, 1, b"a", (HeldEvent(0, b"x"), HeldEvent(0, b"y")))) == []
    whole = t.CompletedCheckpoint(
        1, 2, b"c", {0: snapshot_of(0, b"a", b"x", b"y"), 1: snapshot_of(1, b"b")}, partitions=2
    )
    assert tell(t.SubtaskAcknowledged(B, 1, b"b")) == [t.StoreCheckpoint(whole)]
    assert tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
    assert dialogue.tracker.phase is Phase.IDLE
    assert dialogue.tracker.next_deadline() is None


@pytest.mark.parametrize("early", [(A,), (A, B)])
def test_an_acknowledgement_that_is_reported_before_the_coordinators_snapshot_counts(
    early: tuple[Any, ...],
) -> None:
    # H78: the gateways close and send their barriers before the tracker hears of the cut.
    dialogue = Dialogue().run(A, B).close(1, A, B)
    assert dialogue.acknowledge(1, *early) == []
    assert dialogue.tracker.phase is Phase.SNAPSHOTTING
    effects = dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c"))
    effects += dialogue.acknowledge(1, *{A, B}.difference(early))
    assert stored(effects).subtask_states == {
        0: snapshot_of(0, b"0 at 1", b"held"),
        1: snapshot_of(1, b"1 at 1", b"held"),
    }


def test_an_early_acknowledgement_is_compared_with_the_cut_when_that_is_known() -> None:  # H32, H78
    dialogue = Dialogue(1, tolerated_failures=1).run(A).close(1, A)
    assert dialogue.tell(t.SubtaskAcknowledged(A, 1, b"a", (), (3,))) == []
    effects = dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c", {A.task_attempt_id: (2,)}))
    assert kinds(effects) == [t.NotifyCheckpointAborted]


# --- who takes part --------------------------------------------------------------------------------------


def test_a_subtask_that_never_started_takes_part_as_empty() -> None:  # H47
    dialogue = Dialogue().run(B)
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(B, 1)]
    dialogue.tell(t.SubtaskClosed(B, 1), t.CoordinatorSnapshotTaken(1, b"c"))
    assert dialogue.acknowledge(1, B) == [
        t.StoreCheckpoint(t.CompletedCheckpoint(1, 2, b"c", {1: snapshot_of(1, b"1 at 1", b"held")}, partitions=2))
    ]


def test_a_subtask_that_waits_for_its_restart_takes_part_with_what_it_will_restore() -> None:
    # H47: it is neither running nor empty.
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), SubtaskReset("words", 0))
    dialogue.cut(2, B)
    assert stored(dialogue.acknowledge(2, B)).subtask_states == {
        0: snapshot_of(0, b"0 at 1", b"held"),
        1: snapshot_of(1, b"1 at 2", b"held"),
    }


def test_a_finished_subtask_takes_part_with_its_final_state() -> None:  # H47
    dialogue = Dialogue().run(A, B)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(B, 1)]
    dialogue.tell(t.SubtaskClosed(B, 1), t.CoordinatorSnapshotTaken(1, b"c"))
    assert stored(dialogue.acknowledge(1, B)).subtask_states[0] == snapshot_of(0, b"final")


def test_a_final_state_that_comes_instead_of_the_close_settles_that_part() -> None:
    # H47: the operator had ended before it was asked.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(t.CheckpointTriggered(1), t.SubtaskClosed(B, 1))
    assert dialogue.tell(t.SubtaskFinalState(A, b"final")) == [t.ReopenSubtask(A, 1), t.SnapshotCoordinator(1)]
    assert kinds(dialogue.tell(t.SubtaskClosed(A, 1))) == [t.ReportStale]
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c"))
    assert kinds(dialogue.acknowledge(1, B)) == [t.StoreCheckpoint]


def test_a_finished_attempt_is_waited_for_until_its_final_state_has_come() -> None:
    # H47: the engine's report and the subtask's own arrive on different paths.
    dialogue = Dialogue(1).run(A)
    dialogue.tell(SubtaskFinished(A))
    assert dialogue.tell(t.CheckpointTriggered(1)) == []
    assert dialogue.tell(t.SubtaskFinalState(A, b"final")) == [t.ReopenSubtask(A, 1), t.SnapshotCoordinator(1)]


def test_a_success_is_passed_on_and_its_withheld_readiness_forgotten() -> None:  # H86, H11
    dialogue = Dialogue().run(A)
    dialogue.tell(t.CheckpointTriggered(1))
    dialogue.tell(accepted(B))
    assert dialogue.tell(SubtaskReady(B)) == []  # withheld: it has no part in this checkpoint
    assert dialogue.tell(SubtaskFinished(B)) == [SubtaskFinished(B)]
    assert dialogue.tell(t.SubtaskClosed(A, 1)) == [t.SnapshotCoordinator(1)]
    assert kinds(dialogue.tell(SubtaskFinished(B))) == [t.ReportStale]


@pytest.mark.parametrize("state", [b"c", b""])
def test_a_checkpoint_without_any_running_subtask_needs_only_the_coordinator(state: bytes) -> None:
    # H47: no other attempt. H46: empty bytes are a state like any other.
    dialogue = Dialogue()
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.SnapshotCoordinator(1)]
    assert dialogue.tell(t.CoordinatorSnapshotTaken(1, state)) == [
        t.StoreCheckpoint(t.CompletedCheckpoint(1, 2, state, {}))
    ]


def test_a_checkpoint_after_a_good_run_takes_the_final_states() -> None:  # H47, H57
    dialogue = Dialogue(1).run(A)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A), RunEnded("words", 7, True))
    dialogue.tell(t.CheckpointTriggered(1))
    assert dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c")) == [
        t.StoreCheckpoint(t.CompletedCheckpoint(1, 1, b"c", {0: snapshot_of(0, b"final")}, partitions=1))
    ]


def test_an_attempt_that_becomes_ready_after_the_closing_is_announced_immediately() -> None:
    # The coordinator's call order keeps it after the snapshot.
    dialogue = Dialogue().run(A)
    dialogue.tell(accepted(B))
    dialogue.close(1, A)
    assert dialogue.tell(SubtaskReady(B)) == [SubtaskReady(B)]


def test_an_attempt_that_dies_while_it_is_withheld_is_never_announced_ready() -> None:  # H11
    dialogue = Dialogue().run(A)
    dialogue.tell(accepted(B), t.CheckpointTriggered(1), SubtaskReady(B))
    effects = dialogue.tell(SubtaskFailed(B, FAILED))
    assert kinds(effects) == [t.NotifyCheckpointAborted, SubtaskFailed]


def test_a_withheld_attempt_is_announced_when_the_checkpoint_is_aborted() -> None:
    # H48: no wait is unlimited.
    dialogue = Dialogue(tolerated_failures=5).run(A)
    dialogue.tell(accepted(B), t.CheckpointTriggered(1), SubtaskReady(B))
    assert kinds(dialogue.wait(10)) == [t.NotifyCheckpointAborted, SubtaskReady]


# --- restores and resets ---------------------------------------------------------------------------------


def test_in_batch_mode_a_retry_restores_nothing_whatever_has_been_completed() -> None:
    # H18, architecture: batch and streaming
    dialogue = Dialogue(mode=RestoreMode.BATCH).run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, -1)]
    assert dialogue.tell(accepted(A2, RestoreMode.BATCH)) == [t.RestoreAttempt(A2, -1, (), (), ())]


def test_in_streaming_mode_a_retry_restores_the_last_completed_checkpoint() -> None:  # H18, H31
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, 1)]
    assert dialogue.tell(accepted(A2)) == [t.RestoreAttempt(A2, 1, (SubtaskState(0, b"0 at 1"),), held_by(A), (), True)]


def test_a_reset_never_names_a_checkpoint_that_the_coordinator_was_not_told_is_complete() -> None:
    # H18 (FLINK-20290): it is already written, but the failure came first.
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.cut(2, A, B)
    dialogue.acknowledge(2, A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert kinds(dialogue.tell(t.CheckpointStored(2))) == [t.ReportStale]
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, 1)]


def test_a_global_failover_resets_the_coordinator_to_its_state_in_the_last_checkpoint() -> None:  # H15
    dialogue = Dialogue().run(A, B)
    assert dialogue.tell(OperatorReset("words", "x")) == [t.OperatorResetToCheckpoint(-1, None)]
    dialogue.run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), SubtaskFailed(B, FAILED))
    assert dialogue.tell(OperatorReset("words", "x")) == [t.OperatorResetToCheckpoint(1, b"coordinator 1", True)]


def test_a_new_application_restores_what_it_was_given() -> None:  # H52
    restored = t.CompletedCheckpoint(4, 2, b"c", {0: snapshot_of(0, b"zero", b"h", events_sent=(7,))})
    dialogue = Dialogue(restored=restored)
    assert dialogue.tell(accepted(A)) == [
        t.RestoreAttempt(A, 4, (SubtaskState(0, b"zero"),), (HeldEvent(0, b"h"),), (7,), True)
    ]
    assert dialogue.tell(accepted(B)) == [t.RestoreAttempt(B, 4, (), (), ())]


# --- forwarding ------------------------------------------------------------------------------------------


def test_facts_pass_through_in_their_order() -> None:  # H10
    dialogue = Dialogue(1)
    assert dialogue.tell(accepted(A), SubtaskReady(A)) == [
        t.RestoreAttempt(A, -1, (), (), ()),
        SubtaskReady(A),
    ]
    assert dialogue.tell(SubtaskFailed(A, FAILED), SubtaskReset("words", 0)) == [
        SubtaskFailed(A, FAILED),
        t.SubtaskResetToCheckpoint(0, -1),
    ]
    assert dialogue.tell(RunEnded("words", 3, False, "why")) == [RunEnded("words", 3, False, "why")]


def test_an_attempt_that_never_was_accepted_is_reported_failed_all_the_same() -> None:  # H11
    assert Dialogue(1).tell(SubtaskFailed(A, FAILED)) == [SubtaskFailed(A, FAILED)]


def test_what_an_attempt_says_after_its_end_is_stale() -> None:  # H3
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    for late in (SubtaskReady(A), SubtaskFinished(A), t.SubtaskFinalState(A, b"late")):
        assert kinds(dialogue.tell(late)) == [t.ReportStale]


def test_our_own_side_out_of_turn_is_refused_and_changes_nothing() -> None:
    dialogue = Dialogue().run(A, B).close(1, A)
    for wrong in (
        t.CoordinatorSnapshotTaken(1, b"c"),
        t.CheckpointStored(1),
        accepted(A, RestoreMode.BATCH),
    ):
        with pytest.raises(LocalProtocolError):
            dialogue.tell(wrong)
    assert dialogue.tell(t.SubtaskClosed(B, 1)) == [t.SnapshotCoordinator(1)]


# --- aborts and requests ------------------------------------------------------------------------------------


# --- abort -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", ["closing", "snapshotting", "acknowledging", "storing"])
def test_an_attempt_that_fails_aborts_pending_checkpoints_before_it_is_reported(reached: str) -> None:  # H16, H45
    dialogue = Dialogue().run(A, B)
    match reached:
        case "closing":
            dialogue.close(1, B)
        case "snapshotting":
            dialogue.close(1, A, B)
        case "acknowledging":
            dialogue.cut(1, A, B)
        case _:
            dialogue.cut(1, A, B).acknowledge(1, A, B)
    assert dialogue.tracker.phase.value == reached
    effects = dialogue.tell(SubtaskFailed(A, FAILED))
    discard = [t.DiscardCheckpoint] if reached == "storing" else []
    assert kinds(effects) == [t.NotifyCheckpointAborted, *discard, SubtaskFailed]
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, -1)]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_names_who_was_late() -> None:  # H45, H48
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert dialogue.tracker.next_deadline() == 10.0
    assert dialogue.wait(9.9) == []
    [aborted] = dialogue.wait(0.1)
    assert isinstance(aborted, t.NotifyCheckpointAborted)
    assert aborted.checkpoint_id == 1
    assert str(B) in aborted.reason
    assert str(A) not in aborted.reason


@pytest.mark.parametrize(
    ("ended", "who"),
    [
        (t.SubtaskDeclined(A, 1, "no space"), "no space"),
        (t.AbortRequested(1, "the user said so"), "the user said so"),
        (t.CoordinatorSnapshotFailed(1, "returned None"), "returned None"),
    ],
)
def test_a_refusal_a_request_and_the_coordinator_abort(ended: t.TrackerInput, who: str) -> None:  # H45
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    [aborted] = dialogue.tell(ended)
    assert isinstance(aborted, t.NotifyCheckpointAborted)
    assert who in aborted.reason
    assert dialogue.tracker.next_deadline() is None


def test_a_storage_failure_aborts_and_discards_what_was_written() -> None:  # H45, H50
    dialogue = Dialogue(tolerated_failures=1).run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(t.CheckpointStoreFailed(1, "disk full")) == [
        t.NotifyCheckpointAborted(1, "storage: disk full", in_doubt=True),
        t.DiscardCheckpoint(1),
    ]
    assert dialogue.tracker.restore_id == -1


def test_an_acknowledgement_before_the_coordinator_is_asked_aborts() -> None:
    # H40: whatever that snapshot holds, it is not a snapshot of the cut.
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert kinds(dialogue.acknowledge(1, A)) == [t.NotifyCheckpointAborted]


def test_a_repeated_report_changes_nothing() -> None:  # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A)
    for again in (t.SubtaskClosed(A, 1), t.SubtaskAcknowledged(A, 1, b"other")):
        assert kinds(dialogue.tell(again)) == [t.ReportStale]
    assert stored(dialogue.acknowledge(1, B)).subtask_states[0] == snapshot_of(0, b"0 at 1", b"held")


def test_checkpoints_that_fail_in_a_row_become_a_global_failure() -> None:  # H45, G13
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert kinds(dialogue.wait(10)) == [t.NotifyCheckpointAborted]
    dialogue.close(2, A, B)
    effects = dialogue.tell(t.CoordinatorSnapshotFailed(2, "returned None"))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.RaiseGlobalFailure]
    assert "returned None" in str(effects[1])


def test_a_failure_on_which_its_requester_acts_neither_counts_nor_ends_the_row() -> None:
    # H45: a change of the parallelism asks for such a checkpoint
    dialogue = Dialogue(tolerated_failures=1).run(A, B)
    for checkpoint_id in (1, 2, 3):
        effects = dialogue.close(checkpoint_id, A, counts=checkpoint_id != 2).wait(10)
        assert kinds(effects)[1:] == ([t.RaiseGlobalFailure] if checkpoint_id == 3 else [])


def test_one_that_completes_ends_the_row_of_failures() -> None:
    # H45: consecutive
    dialogue = Dialogue(tolerated_failures=1).run(A, B)
    dialogue.close(1, A)
    dialogue.wait(10)
    dialogue.complete(2, A, B)
    dialogue.close(3, A)
    assert kinds(dialogue.wait(10)) == [t.NotifyCheckpointAborted]


def test_the_end_of_a_run_leaves_a_checkpoint_of_finished_subtasks_alone() -> None:  # H47, H57
    dialogue = Dialogue(1, mode=RestoreMode.BATCH).run(A).cut(1, A)
    dialogue.acknowledge(1, A)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert dialogue.tell(RunEnded("words", 7, True)) == [RunEnded("words", 7, True, "")]
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]


# --- one at a time ---------------------------------------------------------------------------------------


def test_a_request_that_waits_can_be_withdrawn() -> None:  # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.tell(t.CheckpointTriggered(2))
    assert dialogue.tell(t.AbortRequested(2, "never mind")) == [t.RefuseCheckpoint(2, "never mind")]
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]


def test_a_request_waits_for_the_reset_that_is_due() -> None:
    # H16: started before it, the checkpoint would only be aborted by it.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(t.CheckpointTriggered(1)) == []
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, -1), t.CloseSubtask(B, 1)]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_request_does_not_wait_for_the_reset_of_the_next_run(succeeded: bool) -> None:  # H43, H48
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), t.CheckpointTriggered(1))
    effects = dialogue.tell(RunEnded("words", 7, succeeded))
    assert [type(effect) for effect in effects] == [RunEnded, t.RefuseCheckpoint]
    assert kinds(dialogue.tell(t.CheckpointTriggered(2))) == [t.RefuseCheckpoint]
    assert dialogue.tracker.next_deadline() is None, "the next run waits for nothing here"
    dialogue.tell(OperatorReset("words", "the next run"))
    dialogue.run(A2)
    assert dialogue.tell(t.CheckpointTriggered(3)) == [t.CloseSubtask(A2, 3)]


def test_a_request_does_not_wait_permanently() -> None:  # H48
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), t.CheckpointTriggered(1))
    assert dialogue.tracker.next_deadline() is not None
    assert kinds(dialogue.wait(10)) == [t.RefuseCheckpoint]
    assert dialogue.tracker.next_deadline() is None


def test_a_copy_that_dies_leaves_no_reset_due() -> None:
    # H13: another attempt of the subtask is still alive.
    dialogue = Dialogue().run(A, B, A2)
    dialogue.tell(SubtaskFailed(A, FailureReason(FailureKind.SUPERSEDED, "")))
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(A2, 1), t.CloseSubtask(B, 1)]


def test_checkpoint_ids_must_increase() -> None:  # H4
    dialogue = Dialogue(restored=t.CompletedCheckpoint(5, 2, b"c", {}))
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(t.CheckpointTriggered(5))
    dialogue.tell(t.CheckpointTriggered(6), t.AbortRequested(6, "enough"))
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(t.CheckpointTriggered(6))
