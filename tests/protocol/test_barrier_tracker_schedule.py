# SPDX-License-Identifier: Apache-2.0

"""Scheduled checkpoints: by the interval, and after a run that succeeded."""

from __future__ import annotations

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import OperatorReset, RunEnded, SubtaskFailed, SubtaskFinished, SubtaskReady, SubtaskReset
from protocol.wire.messages import RestoreMode
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, accepted, kinds

DUE = [t.TriggerCheckpoint()]


# --- by the interval --------------------------------------------------------------------------------------


def test_one_is_due_every_interval_from_the_first_attempt_that_is_ready() -> None:
    # Issue 3; H4: the machine asks for an id, it does not generate one.
    dialogue = Dialogue(interval_s=3.0)
    assert dialogue.wait(50.0) == []
    dialogue.tell(accepted(A))
    assert dialogue.tracker.next_deadline() is None
    dialogue.tell(SubtaskReady(A))
    assert dialogue.tracker.next_deadline() == 53.0
    assert dialogue.wait(2.9) == []
    assert dialogue.wait(0.1) == DUE
    dialogue.complete(1, A)
    assert dialogue.tracker.next_deadline() == 56.0
    assert dialogue.wait(3.0) == DUE


def test_without_an_interval_none_is_due() -> None:
    dialogue = Dialogue().run(A)
    assert dialogue.tracker.next_deadline() is None
    assert dialogue.wait(100.0) == []


def test_one_that_is_due_is_asked_for_once() -> None:
    # H43: while its id is requested, and while it is pending or waits.
    dialogue = Dialogue(interval_s=3.0).run(A)
    assert dialogue.wait(3.0) == DUE
    assert dialogue.wait(3.0) == []
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.CloseSubtask(A, 1)]
    assert dialogue.wait(3.0) == []


def test_one_for_which_no_id_came_is_asked_for_again() -> None:  # H48
    dialogue = Dialogue(interval_s=3.0).run(A)
    assert dialogue.wait(3.0) == DUE
    assert dialogue.tracker.next_deadline() == 13.0
    assert dialogue.wait(10.0) == DUE


def test_one_that_is_late_is_asked_for_as_soon_as_it_can_start_and_only_once() -> None:  # H43
    dialogue = Dialogue(interval_s=3.0).run(A).store(1, A)
    assert dialogue.wait(8.0) == []
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1), t.TriggerCheckpoint()]
    dialogue.complete(2, A)
    assert dialogue.tracker.next_deadline() == 11.0


def test_a_request_that_waits_goes_first() -> None:  # H43
    dialogue = Dialogue(interval_s=3.0).run(A).store(1, A)
    dialogue.wait(8.0)
    dialogue.tell(t.CheckpointTriggered(2))
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1), t.CloseSubtask(A, 2)]


def test_several_may_be_due_at_the_same_time_up_to_the_limit() -> None:  # H43
    dialogue = Dialogue(interval_s=3.0, concurrent_max=2).run(A).cut(1, A)
    assert dialogue.wait(3.0) == DUE
    dialogue.cut(2, A)
    assert dialogue.wait(3.0) == []


def test_the_deadline_of_one_that_is_pending_may_come_before_the_next_is_due() -> None:  # H43, H48
    dialogue = Dialogue(interval_s=30.0, concurrent_max=2).run(A).cut(1, A)
    assert dialogue.tracker.next_deadline() == 10.0
    assert kinds(dialogue.wait(10.0)) == [t.NotifyCheckpointAborted, t.RaiseGlobalFailure]


def test_nothing_is_due_within_the_pause_after_one_has_ended() -> None:
    dialogue = Dialogue(interval_s=3.0, min_pause_s=2.0, tolerated_failures=1).run(A)
    dialogue.wait(2.0)
    dialogue.complete(1, A)
    assert dialogue.tracker.next_deadline() == 4.0
    assert dialogue.wait(1.9) == []
    assert dialogue.wait(0.1) == DUE
    dialogue.close(2, A)
    dialogue.wait(1.5)
    dialogue.tell(t.CoordinatorSnapshotFailed(2, "an abort is an end, too"))
    assert dialogue.tracker.next_deadline() == 7.5


def test_none_is_due_while_no_attempt_runs() -> None:
    # Issue 3: failed, finished, and before the next one is ready.
    dialogue = Dialogue(1, interval_s=3.0).run(A)
    dialogue.tell(SubtaskFailed(A, FAILED), SubtaskReset("words", 0))
    assert dialogue.tracker.next_deadline() is None
    dialogue.tell(accepted(A2))
    assert dialogue.wait(9.0) == []
    dialogue.tell(SubtaskReady(A2))
    assert dialogue.tracker.next_deadline() == 12.0
    dialogue.tell(t.SubtaskFinalState(A2, b""), SubtaskFinished(A2))
    assert dialogue.tracker.next_deadline() is None


def test_none_is_due_while_a_reset_is_due_or_a_subtask_has_copies() -> None:
    # H13, H16: it would be refused, or wait.
    dialogue = Dialogue(interval_s=3.0).run(A, B)
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.wait(3.0) == []
    assert dialogue.tell(SubtaskReset("words", 0))[1:] == DUE
    dialogue = Dialogue(interval_s=3.0).run(A, A2)
    assert dialogue.wait(3.0) == []
    assert dialogue.tell(SubtaskFailed(A2, FAILED))[1:] == DUE


def test_a_reset_of_the_operator_forgets_what_was_due() -> None:  # H15
    dialogue = Dialogue(interval_s=3.0).run(A, B)
    dialogue.tell(OperatorReset("words", "x"))
    assert dialogue.tracker.next_deadline() is None
    assert dialogue.wait(5.0) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0.0},
        {"interval_s": 0.0},
        {"min_pause_s": -1.0},
        {"tolerated_failures": -1},
        {"concurrent_max": 0},
    ],
)
def test_a_meaningless_config_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        t.CheckpointConfig(**wrong)  # type: ignore[arg-type]


# --- after a run that succeeded --------------------------------------------------------------------------


def a_finished_run(**how: int) -> Dialogue:
    dialogue = Dialogue(1, **how).run(A)  # type: ignore[arg-type]
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    return dialogue


def test_a_run_that_ended_well_is_followed_by_one_final_checkpoint() -> None:
    # Issue 3: its last output is committed with it. H47: the final states are its parts.
    dialogue = a_finished_run()
    assert dialogue.tell(RunEnded("words", 7, True)) == [RunEnded("words", 7, True, ""), t.TriggerCheckpoint()]
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.SnapshotCoordinator(1)]
    dialogue.tell(t.CoordinatorSnapshotTaken(1, b"c"))
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
    assert not dialogue.tracker.final_pending
    assert dialogue.tracker.next_deadline() is None


def test_while_the_final_one_is_pending_no_other_is_asked_for() -> None:  # H43
    dialogue = a_finished_run(concurrent_max=2)
    assert kinds(dialogue.tell(RunEnded("words", 7, True))) == [RunEnded, t.TriggerCheckpoint]
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.SnapshotCoordinator(1)]
    assert dialogue.wait(5.0) == []
    assert dialogue.tracker.next_deadline() == 10.0


@pytest.mark.parametrize(("mode", "succeeded"), [(RestoreMode.BATCH, True), (RestoreMode.STREAMING, False)])
def test_in_batch_mode_and_after_a_failed_run_there_is_no_final_checkpoint(mode: RestoreMode, succeeded: bool) -> None:
    dialogue = Dialogue(1, mode=mode).run(A)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert kinds(dialogue.tell(RunEnded("words", 7, succeeded))) == [RunEnded]
    assert not dialogue.tracker.final_pending


def test_what_is_pending_is_aborted_and_the_final_one_follows() -> None:  # H57, H16
    dialogue = Dialogue(2).run(A, B).close(1, A)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert kinds(dialogue.tell(RunEnded("words", 7, True))) == [
        t.NotifyCheckpointAborted,
        RunEnded,
        t.TriggerCheckpoint,
    ]


def test_the_final_one_waits_for_a_settled_one_which_does_not_replace_it() -> None:
    # H43, H57: the checkpoint that is being stored began before the last output.
    dialogue = Dialogue(1).run(A).store(1, A)
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert kinds(dialogue.tell(RunEnded("words", 7, True))) == [RunEnded]
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1), t.TriggerCheckpoint()]
    assert dialogue.tracker.final_pending


def test_a_request_that_waited_for_the_runs_end_serves_as_the_final_one() -> None:
    dialogue = Dialogue(1).run(A).store(1, A)
    dialogue.tell(
        t.SubtaskFinalState(A, b"final"), SubtaskFinished(A), t.CheckpointTriggered(2), RunEnded("words", 7, True)
    )
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1), t.SnapshotCoordinator(2)]
    dialogue.tell(t.CoordinatorSnapshotTaken(2, b"c"))
    assert dialogue.tell(t.CheckpointStored(2)) == [t.NotifyCheckpointComplete(2)]
    assert not dialogue.tracker.final_pending


def test_a_savepoint_is_not_a_final_checkpoint() -> None:
    # H49: it commits nothing.
    dialogue = Dialogue(1).run(A).store(1, A)
    dialogue.tell(
        t.SubtaskFinalState(A, b""), SubtaskFinished(A), t.CheckpointTriggered(2, True), RunEnded("words", 7, True)
    )
    dialogue.tell(t.CheckpointStored(1), t.CoordinatorSnapshotTaken(2, b"c"))
    assert dialogue.tell(t.CheckpointStored(2)) == [t.EndSavepoint(2), t.TriggerCheckpoint()]


def test_a_final_one_that_fails_is_tried_again_after_the_pause() -> None:
    # H45: while failures are tolerated.
    dialogue = a_finished_run(tolerated_failures=1, min_pause_s=2)
    dialogue.tell(RunEnded("words", 7, True), t.CheckpointTriggered(1), t.CoordinatorSnapshotTaken(1, b"c"))
    assert kinds(dialogue.tell(t.CheckpointStoreFailed(1, "disk full")))[0] is t.NotifyCheckpointAborted
    assert dialogue.tracker.next_deadline() == 2.0
    assert dialogue.wait(2.0) == DUE
    dialogue.tell(t.CheckpointTriggered(2))
    effects = dialogue.tell(t.CoordinatorSnapshotFailed(2, "no"))
    assert kinds(effects) == [t.NotifyCheckpointAborted, t.RaiseGlobalFailure]
    assert kinds(dialogue.tell(OperatorReset("words", "x"))) == [t.OperatorResetToCheckpoint]
    assert not dialogue.tracker.final_pending


def test_a_global_failure_too_late_for_its_run_does_not_keep_its_output_uncommitted() -> None:
    """H45. Found by the simulation: the run's last checkpoint exceeded the failure limit after Spark had ended the job
    well. No final checkpoint began, and no caller was told that the last output is not committed."""
    dialogue = Dialogue(1, tolerated_failures=0).run(A).store(1, A)
    assert kinds(dialogue.tell(t.CheckpointStoreFailed(1, "disk full")))[-1] is t.RaiseGlobalFailure
    dialogue.tell(t.SubtaskFinalState(A, b"final"), SubtaskFinished(A))
    assert kinds(dialogue.tell(RunEnded("words", 7, True))) == [RunEnded, t.TriggerCheckpoint]
    dialogue.tell(t.CheckpointTriggered(2), t.CoordinatorSnapshotTaken(2, b"c"))
    assert dialogue.tell(t.CheckpointStored(2)) == [t.NotifyCheckpointComplete(2), t.NotifyCheckpointDiscarded(1)]
    assert not dialogue.tracker.final_pending


def test_a_final_one_for_which_no_id_comes_is_asked_for_as_often_as_failures_are_tolerated() -> None:
    # H48: callers that wait for the end of the run stop waiting.
    dialogue = a_finished_run(tolerated_failures=1)
    dialogue.tell(RunEnded("words", 7, True))
    assert dialogue.wait(10.0) == DUE
    assert dialogue.tracker.next_deadline() == 20.0
    assert dialogue.wait(10.0) == []
    assert dialogue.tracker.next_deadline() is None
    assert not dialogue.tracker.final_pending
