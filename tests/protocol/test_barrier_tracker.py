"""The barrier tracker, one sentence of the contract a test. A test reads as a dialogue: what it is told,
what it says.
"""

from __future__ import annotations

import pytest

from protocol.attempts.types import FailureKind, FailureReason
from protocol.barrier_tracker import (
    AbortCheckpoint,
    AbortRequested,
    AttemptAccepted,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    BarrierTracker,
    CheckpointConfig,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompleteCheckpoint,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    GatewayDrained,
    OperatorResetRequired,
    Phase,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    RunEnded,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetRequired,
    SubtaskSnapshot,
    TellFailed,
    TellReady,
    TellReset,
    TellResetToCheckpoint,
    TellRunEnded,
    TimePassed,
    TrackerEffect,
    TrackerInput,
)
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.messages import RestoreMode

FAILED = FailureReason(FailureKind.FAILED, "it broke")


def attempt_of(subtask: int, number: int = 0) -> ExecutionAttempt:
    return ExecutionAttempt("words", subtask, number, 100 * (number + 1) + subtask)


A, B = attempt_of(0), attempt_of(1)
A2 = attempt_of(0, 1)


class Dialogue:
    """A tracker that checks its invariants after every input, and a clock that stands until it is moved."""

    def __init__(
        self,
        parallelism: int = 2,
        *,
        tolerated_failures: int = 0,
        mode: RestoreMode = RestoreMode.STREAMING,
        restored: CompletedCheckpoint | None = None,
    ) -> None:
        config = CheckpointConfig(timeout_s=10.0, tolerated_failures=tolerated_failures, mode=mode)
        self.mode = mode
        self.now = 0.0
        self.tracker = BarrierTracker("words", parallelism, config, restored)

    def tell(self, *inputs: TrackerInput) -> list[TrackerEffect]:
        out: list[TrackerEffect] = []
        for input in inputs:
            out.extend(self.tracker.handle(input, self.now))
            self.tracker.check_invariants()
        return out

    def run(self, *attempts: ExecutionAttempt) -> Dialogue:
        for attempt in attempts:
            self.tell(AttemptAccepted(attempt, self.mode), AttemptReady(attempt))
        return self

    def close(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> Dialogue:
        self.tell(CheckpointTriggered(checkpoint_id))
        self.tell(*(SubtaskClosed(attempt, checkpoint_id) for attempt in attempts))
        return self

    def cut(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> Dialogue:
        """Up to the barriers."""
        self.close(checkpoint_id, *attempts)
        self.tell(CoordinatorSnapshotTaken(checkpoint_id, b"coordinator %d" % checkpoint_id))
        self.tell(*(GatewayDrained(attempt, checkpoint_id) for attempt in attempts))
        return self

    def acknowledge(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> list[TrackerEffect]:
        return self.tell(
            *(
                SubtaskAcknowledged(attempt, checkpoint_id, b"%d at %d" % (attempt.subtask, checkpoint_id), (b"held",))
                for attempt in attempts
            )
        )

    def complete(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> list[TrackerEffect]:
        self.cut(checkpoint_id, *attempts)
        self.acknowledge(checkpoint_id, *attempts)
        return self.tell(CheckpointStored(checkpoint_id))

    def wait(self, seconds: float) -> list[TrackerEffect]:
        self.now += seconds
        return self.tell(TimePassed())


def kinds(effects: list[TrackerEffect]) -> list[type]:
    return [type(effect) for effect in effects]


# --- the order of one checkpoint -------------------------------------------------------------------------


def test_one_checkpoint_takes_its_steps_in_the_order_of_the_contract() -> None:
    # H40
    dialogue = Dialogue().run(A, B)
    tell = dialogue.tell
    assert tell(CheckpointTriggered(1)) == [CloseSubtask(A, 1), CloseSubtask(B, 1)]
    assert tell(SubtaskClosed(B, 1)) == []
    assert tell(SubtaskClosed(A, 1)) == [SnapshotCoordinator(1)]
    assert tell(CoordinatorSnapshotTaken(1, b"c")) == []
    assert tell(GatewayDrained(A, 1)) == []
    assert tell(GatewayDrained(B, 1)) == [SendBarrier(A, 1), SendBarrier(B, 1)]
    assert tell(SubtaskAcknowledged(A, 1, b"a", (b"x", b"y"))) == []
    whole = CompletedCheckpoint(1, b"c", {0: SubtaskSnapshot(b"a", (b"x", b"y")), 1: SubtaskSnapshot(b"b")})
    assert tell(SubtaskAcknowledged(B, 1, b"b")) == [StoreCheckpoint(whole)]
    assert tell(CheckpointStored(1)) == [CompleteCheckpoint(1)]
    assert dialogue.tracker.phase is Phase.IDLE
    assert dialogue.tracker.next_deadline() is None


def test_a_drain_that_is_reported_before_the_coordinators_snapshot_counts() -> None:
    # H42: the gateways close inside the coordinator's own order; their word may come first.
    dialogue = Dialogue().run(A, B).close(1, A, B)
    assert dialogue.tell(GatewayDrained(A, 1), GatewayDrained(B, 1)) == []
    assert dialogue.tell(CoordinatorSnapshotTaken(1, b"c")) == [SendBarrier(A, 1), SendBarrier(B, 1)]


def test_no_barrier_leaves_before_every_gateway_has_drained() -> None:
    # H40, H42
    dialogue = Dialogue().run(A, B).close(1, A, B)
    assert dialogue.tell(GatewayDrained(A, 1), CoordinatorSnapshotTaken(1, b"c")) == []
    assert dialogue.tracker.phase is Phase.DRAINING


def test_empty_bytes_are_a_state_like_any_other() -> None:
    # H46
    dialogue = Dialogue(1)
    assert dialogue.tell(CheckpointTriggered(1)) == [SnapshotCoordinator(1)]
    assert dialogue.tell(CoordinatorSnapshotTaken(1, b"")) == [StoreCheckpoint(CompletedCheckpoint(1, b"", {}))]


# --- who takes part --------------------------------------------------------------------------------------


def test_a_subtask_that_never_started_takes_part_as_empty() -> None:
    # H47
    dialogue = Dialogue().run(B)
    assert dialogue.tell(CheckpointTriggered(1)) == [CloseSubtask(B, 1)]
    dialogue.tell(SubtaskClosed(B, 1), CoordinatorSnapshotTaken(1, b"c"), GatewayDrained(B, 1))
    assert dialogue.acknowledge(1, B) == [
        StoreCheckpoint(CompletedCheckpoint(1, b"c", {1: SubtaskSnapshot(b"1 at 1", (b"held",))}))
    ]


def test_a_subtask_that_waits_for_its_restart_takes_part_with_what_it_will_restore() -> None:
    # H47: it is neither running nor empty.
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(AttemptFailed(A, FAILED), SubtaskResetRequired(0))
    dialogue.cut(2, B)
    [store] = dialogue.acknowledge(2, B)
    assert isinstance(store, StoreCheckpoint)
    assert store.checkpoint.subtask_states == {
        0: SubtaskSnapshot(b"0 at 1", (b"held",)),
        1: SubtaskSnapshot(b"1 at 2", (b"held",)),
    }


def test_a_finished_subtask_takes_part_with_its_final_state() -> None:
    # H47
    dialogue = Dialogue().run(A, B)
    dialogue.tell(SubtaskFinalState(A, b"final"), AttemptFinished(A))
    assert dialogue.tell(CheckpointTriggered(1)) == [CloseSubtask(B, 1)]
    dialogue.tell(SubtaskClosed(B, 1), CoordinatorSnapshotTaken(1, b"c"), GatewayDrained(B, 1))
    [store] = dialogue.acknowledge(1, B)
    assert isinstance(store, StoreCheckpoint)
    assert store.checkpoint.subtask_states[0] == SubtaskSnapshot(b"final")


def test_a_final_state_that_comes_instead_of_the_close_settles_that_part() -> None:
    # H47: the operator had ended before it was asked.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(CheckpointTriggered(1), SubtaskClosed(B, 1))
    assert dialogue.tell(SubtaskFinalState(A, b"final")) == [ReopenSubtask(A, 1), SnapshotCoordinator(1)]
    assert kinds(dialogue.tell(SubtaskClosed(A, 1))) == [ReportStale]
    dialogue.tell(CoordinatorSnapshotTaken(1, b"c"))
    assert dialogue.tell(GatewayDrained(B, 1)) == [SendBarrier(B, 1)]


@pytest.mark.parametrize("reached", ["closed", "cut", "barrier"])
def test_an_operator_that_ends_during_a_checkpoint_takes_part_with_its_final_state(reached: str) -> None:
    # H47: it ends only when its valve holds nothing, so its final state is its whole part (H31).
    dialogue = Dialogue(1).run(A).close(1, A)
    if reached != "closed":
        dialogue.tell(CoordinatorSnapshotTaken(1, b"c"))
    if reached == "barrier":
        dialogue.tell(GatewayDrained(A, 1))
    effects = dialogue.tell(SubtaskFinalState(A, b"final"))
    if reached == "closed":
        effects += dialogue.tell(CoordinatorSnapshotTaken(1, b"c"))
    whole = CompletedCheckpoint(1, b"c", {0: SubtaskSnapshot(b"final")})
    assert effects == [ReopenSubtask(A, 1), StoreCheckpoint(whole)]


def test_a_finished_attempt_is_waited_for_until_its_final_state_has_come() -> None:
    # H47: the engine's word and the subtask's own come on different ways.
    dialogue = Dialogue(1).run(A)
    dialogue.tell(AttemptFinished(A))
    assert dialogue.tell(CheckpointTriggered(1)) == []
    assert dialogue.tell(SubtaskFinalState(A, b"final")) == [ReopenSubtask(A, 1), SnapshotCoordinator(1)]


def test_a_checkpoint_without_any_running_subtask_needs_only_the_coordinator() -> None:
    # H47: nobody else.
    dialogue = Dialogue()
    assert dialogue.tell(CheckpointTriggered(1)) == [SnapshotCoordinator(1)]
    assert dialogue.tell(CoordinatorSnapshotTaken(1, b"c")) == [StoreCheckpoint(CompletedCheckpoint(1, b"c", {}))]


def test_a_checkpoint_after_a_good_run_takes_the_final_states() -> None:
    # H47, H57
    dialogue = Dialogue(1).run(A)
    dialogue.tell(SubtaskFinalState(A, b"final"), AttemptFinished(A), RunEnded(7, True))
    dialogue.tell(CheckpointTriggered(1))
    assert dialogue.tell(CoordinatorSnapshotTaken(1, b"c")) == [
        StoreCheckpoint(CompletedCheckpoint(1, b"c", {0: SubtaskSnapshot(b"final")}))
    ]


def test_an_attempt_that_becomes_ready_during_the_closing_is_announced_behind_the_snapshot() -> None:
    # The invariant: before the cut, an event between it and the coordinator would be in one half only.
    dialogue = Dialogue().run(A)
    dialogue.tell(AttemptAccepted(B, RestoreMode.STREAMING), CheckpointTriggered(1))
    assert dialogue.tell(AttemptReady(B)) == []
    assert dialogue.tell(SubtaskClosed(A, 1)) == [SnapshotCoordinator(1), TellReady(B)]


def test_an_attempt_that_becomes_ready_after_the_closing_is_announced_at_once() -> None:
    # The coordinator's own order keeps it behind the snapshot.
    dialogue = Dialogue().run(A)
    dialogue.tell(AttemptAccepted(B, RestoreMode.STREAMING))
    dialogue.close(1, A)
    assert dialogue.tell(AttemptReady(B)) == [TellReady(B)]


def test_an_attempt_that_dies_while_it_is_withheld_is_never_announced_ready() -> None:
    # H11
    dialogue = Dialogue().run(A)
    dialogue.tell(AttemptAccepted(B, RestoreMode.STREAMING), CheckpointTriggered(1), AttemptReady(B))
    effects = dialogue.tell(AttemptFailed(B, FAILED))
    assert kinds(effects) == [AbortCheckpoint, TellFailed]


def test_a_withheld_attempt_is_announced_when_the_checkpoint_is_aborted() -> None:
    # H48: nothing waits for ever.
    dialogue = Dialogue(tolerated_failures=5).run(A)
    dialogue.tell(AttemptAccepted(B, RestoreMode.STREAMING), CheckpointTriggered(1), AttemptReady(B))
    assert kinds(dialogue.wait(10)) == [AbortCheckpoint, TellReady]


def test_two_attempts_of_one_subtask_have_no_single_state() -> None:
    # H13
    dialogue = Dialogue().run(A, B, A2)
    [refused] = dialogue.tell(CheckpointTriggered(1))
    assert refused == RefuseCheckpoint(1, "subtask 0 has 2 attempts at once")


# --- abort -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", ["closing", "snapshotting", "acknowledging", "storing"])
def test_an_attempt_that_fails_aborts_what_is_pending_before_it_is_told(reached: str) -> None:
    # H16, H45
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
    effects = dialogue.tell(AttemptFailed(A, FAILED))
    discard = [DiscardCheckpoint] if reached == "storing" else []
    assert kinds(effects) == [AbortCheckpoint, *discard, TellFailed]
    assert dialogue.tell(SubtaskResetRequired(0)) == [TellReset(0, -1)]


def test_a_reset_aborts_what_is_pending_first() -> None:
    # H16
    dialogue = Dialogue().run(A, B).close(1, A)
    assert kinds(dialogue.tell(SubtaskResetRequired(1))) == [AbortCheckpoint, TellReset]
    dialogue.close(2, A)
    assert kinds(dialogue.tell(OperatorResetRequired("fail_job"))) == [AbortCheckpoint, TellResetToCheckpoint]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_names_who_was_late() -> None:
    # H45, H48
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert dialogue.tracker.next_deadline() == 10.0
    assert dialogue.wait(9.9) == []
    [aborted] = dialogue.wait(0.1)
    assert isinstance(aborted, AbortCheckpoint)
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
def test_a_refusal_a_request_and_the_coordinator_abort(ended: TrackerInput, who: str) -> None:
    # H45
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    [aborted] = dialogue.tell(ended)
    assert isinstance(aborted, AbortCheckpoint)
    assert who in aborted.reason
    assert dialogue.tracker.next_deadline() is None


def test_storage_that_fails_aborts_and_takes_back_what_it_wrote() -> None:
    # H45, H50
    dialogue = Dialogue(tolerated_failures=1).run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(CheckpointStoreFailed(1, "disk full")) == [
        AbortCheckpoint(1, "storage: disk full"),
        DiscardCheckpoint(1),
    ]
    assert dialogue.tracker.restore_id == -1


def test_a_late_completion_of_an_aborted_checkpoint_changes_nothing() -> None:
    # H44
    dialogue = Dialogue(tolerated_failures=9).run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A, B)
    dialogue.tell(AbortRequested(1, "enough"))
    late: list[TrackerInput] = [
        CheckpointStored(1),
        CheckpointStoreFailed(1, "?"),
        CoordinatorSnapshotTaken(1, b"late"),
        CoordinatorSnapshotFailed(1, "late"),
        SubtaskClosed(A, 1),
        GatewayDrained(A, 1),
        SubtaskAcknowledged(A, 1, b"late"),
        SubtaskDeclined(A, 1, "late"),
        AbortRequested(1, "again"),
    ]
    for input in late:
        assert kinds(dialogue.tell(input)) == [ReportStale]
    assert dialogue.tracker.restore_id == -1


def test_abort_is_by_id() -> None:
    # H44, G4
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.close(2, A)
    assert kinds(dialogue.tell(AbortRequested(1, "an old one"))) == [ReportStale]
    assert dialogue.tracker.pending_id == 2


def test_an_acknowledgement_of_another_attempt_is_ignored() -> None:
    # H44, G7
    dialogue = Dialogue().run(A, B)
    dialogue.tell(AttemptFailed(A, FAILED), SubtaskResetRequired(0))
    dialogue.run(A2).cut(1, A2, B)
    assert kinds(dialogue.acknowledge(1, A)) == [ReportStale]
    assert kinds(dialogue.acknowledge(1, A2, B)) == [StoreCheckpoint]


def test_an_acknowledgement_before_its_barrier_aborts() -> None:
    # H40: whatever that snapshot holds, it is not what the cut asks for.
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A, B)
    assert kinds(dialogue.acknowledge(1, A)) == [AbortCheckpoint]


def test_a_repeated_word_changes_nothing() -> None:
    # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.acknowledge(1, A)
    for again in (SubtaskClosed(A, 1), GatewayDrained(A, 1), SubtaskAcknowledged(A, 1, b"other")):
        assert kinds(dialogue.tell(again)) == [ReportStale]
    [store] = dialogue.acknowledge(1, B)
    assert isinstance(store, StoreCheckpoint)
    assert store.checkpoint.subtask_states[0].state == b"0 at 1"


def test_checkpoints_that_fail_in_a_row_become_a_global_failure() -> None:
    # H45, G13
    dialogue = Dialogue(tolerated_failures=1).run(A, B).close(1, A)
    assert kinds(dialogue.wait(10)) == [AbortCheckpoint]
    dialogue.close(2, A, B)
    effects = dialogue.tell(CoordinatorSnapshotFailed(2, "returned None"))
    assert kinds(effects) == [AbortCheckpoint, RaiseGlobalFailure]
    assert "returned None" in str(effects[1])


def test_one_that_completes_ends_the_row_of_failures() -> None:
    # H45: consecutive
    dialogue = Dialogue(tolerated_failures=1).run(A, B)
    dialogue.close(1, A)
    dialogue.wait(10)
    dialogue.complete(2, A, B)
    dialogue.close(3, A)
    assert kinds(dialogue.wait(10)) == [AbortCheckpoint]


def test_an_attempt_that_fails_is_no_failure_of_the_checkpoint() -> None:
    # H45: it has its own failover; it must not fail the job for it.
    dialogue = Dialogue(tolerated_failures=0).run(A, B).close(1, A)
    assert kinds(dialogue.tell(AttemptFailed(A, FAILED))) == [AbortCheckpoint, TellFailed]


def test_the_end_of_a_run_aborts_what_its_subtasks_still_owe() -> None:
    # H57
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    assert kinds(dialogue.tell(RunEnded(7, True))) == [AbortCheckpoint, TellRunEnded]


def test_the_end_of_a_run_leaves_a_checkpoint_of_finished_subtasks_alone() -> None:
    # H47, H57
    dialogue = Dialogue(1).run(A).cut(1, A)
    dialogue.acknowledge(1, A)
    dialogue.tell(SubtaskFinalState(A, b"final"), AttemptFinished(A))
    assert dialogue.tell(RunEnded(7, True)) == [TellRunEnded(7, True, "")]
    assert dialogue.tell(CheckpointStored(1)) == [CompleteCheckpoint(1)]


# --- one at a time ---------------------------------------------------------------------------------------


def test_a_request_meanwhile_waits_and_a_second_one_is_refused() -> None:
    # H43
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    assert dialogue.tell(CheckpointTriggered(2)) == []
    assert kinds(dialogue.tell(CheckpointTriggered(3))) == [RefuseCheckpoint]
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(CheckpointStored(1)) == [
        CompleteCheckpoint(1),
        CloseSubtask(A, 2),
        CloseSubtask(B, 2),
    ]


def test_a_request_that_waits_can_be_withdrawn() -> None:
    # H44
    dialogue = Dialogue().run(A, B).cut(1, A, B)
    dialogue.tell(CheckpointTriggered(2))
    assert dialogue.tell(AbortRequested(2, "never mind")) == [RefuseCheckpoint(2, "never mind")]
    dialogue.acknowledge(1, A, B)
    assert dialogue.tell(CheckpointStored(1)) == [CompleteCheckpoint(1)]


def test_a_request_waits_for_the_reset_that_is_owed() -> None:
    # H16: started before it, the checkpoint would only be aborted by it.
    dialogue = Dialogue().run(A, B)
    dialogue.tell(AttemptFailed(A, FAILED))
    assert dialogue.tell(CheckpointTriggered(1)) == []
    assert dialogue.tell(SubtaskResetRequired(0)) == [TellReset(0, -1), CloseSubtask(B, 1)]


def test_a_request_does_not_wait_for_ever() -> None:
    # H48
    dialogue = Dialogue().run(A, B)
    dialogue.tell(AttemptFailed(A, FAILED), CheckpointTriggered(1))
    assert kinds(dialogue.wait(10)) == [RefuseCheckpoint]
    assert dialogue.tracker.next_deadline() is None


def test_a_sibling_that_dies_leaves_no_reset_owed() -> None:
    # H13: another attempt of the subtask lives on.
    dialogue = Dialogue().run(A, B, A2)
    dialogue.tell(AttemptFailed(A, FailureReason(FailureKind.SUPERSEDED, "")))
    assert dialogue.tell(CheckpointTriggered(1)) == [CloseSubtask(A2, 1), CloseSubtask(B, 1)]


def test_checkpoint_ids_rise() -> None:
    # H4
    dialogue = Dialogue(restored=CompletedCheckpoint(5, b"c", {}))
    with pytest.raises(LocalProtocolError, match="rise"):
        dialogue.tell(CheckpointTriggered(5))
    dialogue.tell(CheckpointTriggered(6), AbortRequested(6, "enough"))
    with pytest.raises(LocalProtocolError, match="rise"):
        dialogue.tell(CheckpointTriggered(6))


# --- restores and resets ---------------------------------------------------------------------------------


def test_in_batch_mode_a_retry_restores_nothing_whatever_has_been_completed() -> None:
    # H18, architecture: batch and streaming
    dialogue = Dialogue(mode=RestoreMode.BATCH).run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(AttemptFailed(A, FAILED))
    assert dialogue.tell(SubtaskResetRequired(0)) == [TellReset(0, -1)]
    assert dialogue.tell(AttemptAccepted(A2, RestoreMode.BATCH)) == [RestoreAttempt(A2, -1, None, ())]


def test_in_streaming_mode_a_retry_restores_the_last_completed_checkpoint() -> None:
    # H18, H31
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(AttemptFailed(A, FAILED))
    assert dialogue.tell(SubtaskResetRequired(0)) == [TellReset(0, 1)]
    assert dialogue.tell(AttemptAccepted(A2, RestoreMode.STREAMING)) == [RestoreAttempt(A2, 1, b"0 at 1", (b"held",))]


def test_a_reset_never_names_a_checkpoint_that_the_coordinator_was_not_told_is_complete() -> None:
    # H18 (FLINK-20290): it is written already, but the failure came first.
    dialogue = Dialogue().run(A, B)
    dialogue.complete(1, A, B)
    dialogue.cut(2, A, B)
    dialogue.acknowledge(2, A, B)
    dialogue.tell(AttemptFailed(A, FAILED))
    assert kinds(dialogue.tell(CheckpointStored(2))) == [ReportStale]
    assert dialogue.tell(SubtaskResetRequired(0)) == [TellReset(0, 1)]


def test_a_global_failover_resets_the_coordinator_to_its_state_in_the_last_checkpoint() -> None:
    # H15
    dialogue = Dialogue().run(A, B)
    assert dialogue.tell(OperatorResetRequired("x")) == [TellResetToCheckpoint(-1, None)]
    dialogue.run(A, B)
    dialogue.complete(1, A, B)
    dialogue.tell(AttemptFailed(A, FAILED), AttemptFailed(B, FAILED))
    assert dialogue.tell(OperatorResetRequired("x")) == [TellResetToCheckpoint(1, b"coordinator 1")]


def test_a_new_application_restores_what_it_was_given() -> None:
    # H52
    restored = CompletedCheckpoint(4, b"c", {0: SubtaskSnapshot(b"zero", (b"h",))})
    dialogue = Dialogue(restored=restored)
    assert dialogue.tell(AttemptAccepted(A, RestoreMode.STREAMING)) == [RestoreAttempt(A, 4, b"zero", (b"h",))]
    assert dialogue.tell(AttemptAccepted(B, RestoreMode.STREAMING)) == [RestoreAttempt(B, 4, None, ())]


def test_a_restored_subtask_without_a_place_is_refused() -> None:
    # H52
    with pytest.raises(LocalProtocolError, match="parallelism is 2"):
        Dialogue(restored=CompletedCheckpoint(4, b"c", {2: SubtaskSnapshot(b"two")}))


# --- what is passed on -----------------------------------------------------------------------------------


def test_facts_pass_through_in_their_order() -> None:
    # H10
    dialogue = Dialogue(1)
    assert dialogue.tell(AttemptAccepted(A, RestoreMode.STREAMING), AttemptReady(A)) == [
        RestoreAttempt(A, -1, None, ()),
        TellReady(A),
    ]
    assert dialogue.tell(AttemptFailed(A, FAILED), SubtaskResetRequired(0)) == [
        TellFailed(A, FAILED),
        TellReset(0, -1),
    ]
    assert dialogue.tell(RunEnded(3, False, "why")) == [TellRunEnded(3, False, "why")]


def test_an_attempt_that_never_was_accepted_is_reported_failed_all_the_same() -> None:
    # H11
    assert Dialogue(1).tell(AttemptFailed(A, FAILED)) == [TellFailed(A, FAILED)]


def test_what_an_attempt_says_after_its_end_is_stale() -> None:
    # H3
    dialogue = Dialogue().run(A, B)
    dialogue.tell(AttemptFailed(A, FAILED))
    for late in (AttemptReady(A), AttemptFinished(A), SubtaskFinalState(A, b"late")):
        assert kinds(dialogue.tell(late)) == [ReportStale]


def test_our_own_side_out_of_turn_is_refused_and_changes_nothing() -> None:
    dialogue = Dialogue().run(A, B).close(1, A)
    for wrong in (
        CoordinatorSnapshotTaken(1, b"c"),
        CheckpointStored(1),
        AttemptAccepted(A, RestoreMode.BATCH),
    ):
        with pytest.raises(LocalProtocolError):
            dialogue.tell(wrong)
    assert dialogue.tell(SubtaskClosed(B, 1)) == [SnapshotCoordinator(1)]
