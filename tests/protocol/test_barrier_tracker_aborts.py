# SPDX-License-Identifier: Apache-2.0

"""How a checkpoint is aborted, and how one waits for another (H16, H43 to H45)."""

from __future__ import annotations

import pytest

from protocol.attempts import RunEnded, SubtaskFailed, SubtaskFinished, SubtaskReset
from protocol.attempts.types import FailureKind, FailureReason
from protocol.barrier_tracker import (
    AbortRequested,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    DiscardCheckpoint,
    GatewayDrained,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReportStale,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetToCheckpoint,
    TrackerInput,
)
from protocol.errors import LocalProtocolError
from protocol.wire.messages import RestoreMode
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, kinds, snapshot_of, stored

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
    discard = [DiscardCheckpoint] if reached == "storing" else []
    assert kinds(effects) == [NotifyCheckpointAborted, *discard, SubtaskFailed]
    assert dialogue.tell(SubtaskReset("words", 0)) == [SubtaskResetToCheckpoint(0, -1)]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_names_who_was_late() -> None:  # H45, H48
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert dialogue.tracker.next_deadline() == 10.0
    assert dialogue.wait(9.9) == []
    [aborted] = dialogue.wait(0.1)
    assert isinstance(aborted, NotifyCheckpointAborted)
    assert aborted.checkpoint_id == 1
    assert str(B) in aborted.reason
    assert str(A) not in aborted.reason


@pytest.mark.parametrize(
    ("ended", "who"),
    [
        (SubtaskDeclined(A, 1, "no room"), "no room"),
        (AbortRequested(1, "the user said so"), "the user said so"),
        (CoordinatorSnapshotFailed(1, "returned None"), "returned None"),
    ],
)
def test_a_refusal_a_request_and_the_coordinator_abort(ended: TrackerInput, who: str) -> None:  # H45
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    [aborted] = dialogue.tell(ended)
    assert isinstance(aborted, NotifyCheckpointAborted)
    assert who in aborted.reason
    assert dialogue.tracker.next_deadline() is None


def test_a_storage_failure_aborts_and_discards_what_was_written() -> None:  # H45, H50
    dialogue = Dialogue(tolerated_failures=1).run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(CheckpointStoreFailed(1, "disk full")) == [
        NotifyCheckpointAborted(1, "storage: disk full", in_doubt=True),
        DiscardCheckpoint(1),
    ]
    assert dialogue.tracker.restore_id == -1


def test_an_acknowledgement_before_its_barrier_aborts() -> None:
    # H40: whatever that snapshot holds, it is not a snapshot of the cut.
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    assert kinds(dialogue.acknowledge(1, A)) == [NotifyCheckpointAborted]


def test_a_repeated_report_changes_nothing() -> None:  # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A)
    for again in (SubtaskClosed(A, 1), GatewayDrained(A, 1), SubtaskAcknowledged(A, 1, b"other")):
        assert kinds(dialogue.tell(again)) == [ReportStale]
    assert stored(dialogue.acknowledge(1, B)).subtask_states[0] == snapshot_of(0, b"0 at 1", b"held")


def test_checkpoints_that_fail_in_a_row_become_a_global_failure() -> None:  # H45, G13
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert kinds(dialogue.wait(10)) == [NotifyCheckpointAborted]
    dialogue.close(2, A, B)
    effects = dialogue.tell(CoordinatorSnapshotFailed(2, "returned None"))
    assert kinds(effects) == [NotifyCheckpointAborted, RaiseGlobalFailure]
    assert "returned None" in str(effects[1])


def test_one_that_completes_ends_the_row_of_failures() -> None:
    # H45: consecutive
    dialogue = Dialogue(tolerated_failures=1).run(A, B)
    dialogue.close(1, A)
    dialogue.wait(10)
    dialogue.complete(2, A, B)
    dialogue.close(3, A)
    assert kinds(dialogue.wait(10)) == [NotifyCheckpointAborted]


def test_the_end_of_a_run_leaves_a_checkpoint_of_finished_subtasks_alone() -> None:  # H47, H57
    dialogue = Dialogue(1, mode=RestoreMode.BATCH).run(A).cut(1, A)
    dialogue.acknowledge(1, A)
    dialogue.tell(SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert dialogue.tell(RunEnded("words", 7, True)) == [RunEnded("words", 7, True, "")]
    assert dialogue.tell(CheckpointStored(1)) == [NotifyCheckpointComplete(1)]


# --- one at a time ---------------------------------------------------------------------------------------


def test_a_request_that_waits_can_be_withdrawn() -> None:  # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.tell(CheckpointTriggered(2))
    assert dialogue.tell(AbortRequested(2, "never mind")) == [RefuseCheckpoint(2, "never mind")]
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(CheckpointStored(1)) == [NotifyCheckpointComplete(1)]


def test_a_request_waits_for_the_reset_that_is_due() -> None:
    # H16: started before it, the checkpoint would only be aborted by it.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(CheckpointTriggered(1)) == []
    assert dialogue.tell(SubtaskReset("words", 0)) == [SubtaskResetToCheckpoint(0, -1), CloseSubtask(B, 1)]


def test_a_request_does_not_wait_permanently() -> None:  # H48
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED), CheckpointTriggered(1))
    assert kinds(dialogue.wait(10)) == [RefuseCheckpoint]
    assert dialogue.tracker.next_deadline() is None


def test_a_copy_that_dies_leaves_no_reset_due() -> None:
    # H13: another attempt of the subtask is still alive.
    dialogue = Dialogue().run(A, B, A2)
    dialogue.tell(SubtaskFailed(A, FailureReason(FailureKind.SUPERSEDED, "")))
    assert dialogue.tell(CheckpointTriggered(1)) == [CloseSubtask(A2, 1), CloseSubtask(B, 1)]


def test_checkpoint_ids_must_increase() -> None:  # H4
    dialogue = Dialogue(restored=CompletedCheckpoint(5, 2, b"c", {}))
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(CheckpointTriggered(5))
    dialogue.tell(CheckpointTriggered(6), AbortRequested(6, "enough"))
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(CheckpointTriggered(6))
