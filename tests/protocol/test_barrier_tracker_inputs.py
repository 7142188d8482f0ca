# SPDX-License-Identifier: Apache-2.0

"""A checkpoint's positions belong to one input: which attempts may use those that they restore (H174)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import FailureKind, FailureReason, OperatorReset, SubtaskFailed, SubtaskReady, SubtaskReset
from protocol.barrier_tracker.rescale import rescaled
from protocol.ids import ExecutionAttempt
from tests.protocol.barrier_tracker_kit import A2, A, B, Dialogue, accepted, attempt_of, snapshot_of

FAILED = FailureReason(FailureKind.FAILED, "by the test")
RESTORED = t.CompletedCheckpoint(4, 2, b"coordinator", {0: snapshot_of(0, b"s0"), 1: snapshot_of(1, b"s1")})


def begins_again(dialogue: Dialogue, attempt: ExecutionAttempt) -> bool:
    [effect] = dialogue.tell(accepted(attempt))
    assert isinstance(effect, t.RestoreAttempt)
    return effect.input_begins_again


def coordinator_begins_again(dialogue: Dialogue) -> bool:
    effect = dialogue.tell(OperatorReset("words", "by the test"))[-1]
    assert isinstance(effect, t.OperatorResetToCheckpoint)
    return effect.input_begins_again


def retried(dialogue: Dialogue, attempt: ExecutionAttempt, next_one: ExecutionAttempt) -> bool:
    dialogue.tell(SubtaskFailed(attempt, FAILED), SubtaskReset("words", attempt.subtask))
    return begins_again(dialogue, next_one)


def test_the_same_input_begins_again_and_another_does_not() -> None:  # H174
    for same in (True, False):
        dialogue = Dialogue(2, restored=RESTORED)
        dialogue.tell(t.InputBegan(same))
        assert coordinator_begins_again(dialogue) is same
        assert begins_again(dialogue, A) is same


def test_nothing_that_is_not_restored_begins_again() -> None:  # H174
    dialogue = Dialogue(2)
    dialogue.tell(t.InputBegan(same=True))
    assert not coordinator_begins_again(dialogue)
    assert not begins_again(dialogue, A)
    dialogue = Dialogue(2, restored=replace(RESTORED, subtask_states={1: snapshot_of(1, b"s1")}))
    dialogue.tell(t.InputBegan(same=True))
    assert not begins_again(dialogue, A), "it was in no checkpoint (H47)"
    assert begins_again(dialogue, B)


def test_a_retry_continues_from_the_first_checkpoint_of_the_same_input_on() -> None:  # H174
    dialogue = Dialogue(2, restored=RESTORED)
    dialogue.tell(t.InputBegan(same=False))
    dialogue.run(A, B)
    assert not retried(dialogue, A, A2), "what it restores is of the previous input"
    dialogue = Dialogue(2, restored=RESTORED)
    dialogue.tell(t.InputBegan(same=False))
    dialogue.run(A, B).complete(5, A, B)
    assert retried(dialogue, A, A2)
    assert coordinator_begins_again(dialogue)


def test_what_a_checkpoint_takes_over_of_a_subtask_at_rest_stays_that_of_the_earlier_input() -> None:  # H174
    dialogue = Dialogue(2, restored=RESTORED)
    dialogue.tell(t.InputBegan(same=False))
    dialogue.run(A).complete(5, A)
    assert retried(dialogue, A, A2)
    assert not begins_again(dialogue, B), "checkpoint 5 holds what it had done of the input before"


def test_and_in_every_later_checkpoint_and_application_until_it_has_run() -> None:  # H174
    dialogue = Dialogue(2, restored=RESTORED)
    dialogue.tell(t.InputBegan(same=False))
    dialogue.run(A).complete(5, A)
    dialogue.store(6, A)
    dialogue.tell(t.CheckpointStored(6))
    completed = dialogue.tracker._completed
    assert completed is not None
    assert [completed.subtask_states[subtask].earlier_input for subtask in (0, 1)] == [False, True]
    later = Dialogue(2, restored=completed)
    later.tell(t.InputBegan(same=True))
    assert begins_again(later, A)
    assert not begins_again(later, B)


def test_a_checkpoint_that_began_before_the_input_says_nothing_about_it_when_it_completes_later() -> None:  # H174
    dialogue = Dialogue(2, restored=RESTORED)
    dialogue.store(5)
    dialogue.tell(t.InputBegan(same=False), t.CheckpointStored(5))
    assert dialogue.tracker.restore_id == 5
    assert not begins_again(dialogue, A)


def test_one_that_was_asked_for_before_and_begins_after_it_belongs_to_it() -> None:  # H174
    dialogue = Dialogue(1, restored=t.CompletedCheckpoint(4, 1, b"c", {0: snapshot_of(0, b"s0")}))
    dialogue.store(5)
    dialogue.tell(t.CheckpointTriggered(6), t.InputBegan(same=False), t.CheckpointStored(5))
    dialogue.run(A)
    dialogue.tell(t.CoordinatorSnapshotTaken(6, b"c"), t.CheckpointStored(6))
    assert dialogue.tracker.restore_id == 6
    assert not retried(dialogue, A, attempt_of(0, 1)), "the subtask did not take part yet"


def partitions_before(dialogue: Dialogue, attempt: ExecutionAttempt, now: int = 2) -> int:
    [effect] = dialogue.tell(replace(accepted(attempt), partitions=now))
    assert isinstance(effect, t.RestoreAttempt)
    return effect.partitions_before


@pytest.mark.parametrize(
    ("restored", "same", "now", "before"),
    [
        (replace(RESTORED, partitions=2), True, 2, 0),
        (replace(RESTORED, partitions=1), True, 2, 1),
        (replace(RESTORED, partitions=2), True, 1, 2),
        (replace(RESTORED, partitions=1), False, 2, 0),
        (replace(RESTORED, partitions=1, subtask_states={}), True, 2, 0),
        (RESTORED, True, 1, 0),  # an earlier release did not note it
        (rescaled(replace(RESTORED, parallelism=3), 2), True, 2, 3),
        (rescaled(replace(RESTORED, parallelism=3, partitions=2), 2), True, 2, 0),
    ],
)
def test_positions_count_the_records_of_so_many_partitions(
    restored: t.CompletedCheckpoint, same: bool, now: int, before: int
) -> None:  # H174
    dialogue = Dialogue(2, restored=restored)
    dialogue.tell(t.InputBegan(same))
    assert partitions_before(dialogue, A, now) == before
    others = replace(restored, subtask_states={1: snapshot_of(1, b"s1")} if restored.subtask_states else {})
    dialogue = Dialogue(2, restored=others)
    dialogue.tell(t.InputBegan(same))
    assert partitions_before(dialogue, A, now) == before, "a subtask without a state must not begin at its first record"


def test_a_checkpoint_keeps_the_number_of_partitions_until_a_subtask_is_ready_in_another() -> None:  # H174
    """An operator that counts records never is. So the right number still continues after the wrong one was refused."""
    restored = replace(RESTORED, partitions=1)
    dialogue = Dialogue(2, restored=restored)
    dialogue.tell(t.InputBegan(True))
    assert partitions_before(dialogue, A) == 1
    dialogue.store(5)
    dialogue.tell(t.CheckpointStored(5))
    assert dialogue.tracker._completed is not None
    assert dialogue.tracker._completed.partitions == 1
    dialogue.tell(SubtaskReady(A))
    dialogue.complete(6, A)
    assert dialogue.tracker._completed.partitions == 2
    assert partitions_before(dialogue, B) == 0


def test_states_of_an_earlier_input_at_rest_do_not_keep_the_next_run_from_beginning() -> None:  # H174
    dialogue = Dialogue(2, restored=replace(RESTORED, partitions=1))
    dialogue.tell(t.InputBegan(False))
    dialogue.store(5)
    dialogue.tell(t.CheckpointStored(5), t.InputBegan(True))
    assert partitions_before(dialogue, A) == 0


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_states_of_two_inputs_that_meet_count_as_those_of_the_later_one(
    first: bool, second: bool, merged: bool
) -> None:  # H174
    """So a part of the restored state may be used for nothing, and an operator refuses what it cannot tell apart."""
    parts = {
        0: replace(snapshot_of(0, b"s0"), earlier_input=first),
        1: replace(snapshot_of(1, b"s1"), earlier_input=second),
    }
    assert rescaled(t.CompletedCheckpoint(4, 2, b"", parts), 1).subtask_states[0].earlier_input is merged


def test_whatever_happens_only_positions_of_the_running_input_are_used() -> None:  # H174
    """Random runs, failures, checkpoints and restarts: a state is used exactly if it was taken during this input."""
    seed = random.randrange(2**32)
    print("seed", seed)
    for world in range(150):
        _one_world(random.Random(seed + world))


def _one_world(chance: random.Random) -> None:
    """Each state is the number of its input, so the machine's answer can be compared with the state itself."""
    dialogue, input_id, next_id, number = Dialogue(2, tolerated_failures=9), 0, 1, 0
    live: dict[int, ExecutionAttempt] = {}
    for _ in range(60):
        step = chance.choice(("begin", "accept", "accept", "fail", "checkpoint", "restart"))
        if step == "begin" and not live:
            same = input_id > 0 and chance.random() < 0.4 and dialogue.tracker._completed is not None
            point = dialogue.tracker._completed
            if same and point is not None:
                input_id = int(point.coordinator_state)
            else:
                input_id = number = number + 1
            dialogue.tell(t.InputBegan(same), OperatorReset("words", "a new run"))
        elif step == "accept" and input_id:
            subtask = chance.randrange(2)
            if subtask in live:
                continue
            next_id += 1
            attempt = ExecutionAttempt("words", subtask, next_id, next_id)
            [effect] = dialogue.tell(accepted(attempt))
            assert isinstance(effect, t.RestoreAttempt)
            taken = [int(state.state) for state in effect.states]
            assert effect.input_begins_again == (taken == [input_id]), (taken, input_id)
            dialogue.tell(SubtaskReady(attempt))
            live[subtask] = attempt
        elif step == "fail" and live:
            subtask = chance.choice(sorted(live))
            dialogue.tell(SubtaskFailed(live.pop(subtask), FAILED), SubtaskReset("words", subtask))
        elif step == "checkpoint" and live:
            next_id += 1
            _checkpoint(dialogue, next_id, input_id, live)
        elif step == "restart":
            live.clear()
            completed = dialogue.tracker._completed
            dialogue = Dialogue(2, tolerated_failures=9, restored=completed)
            input_id = 0


def _checkpoint(dialogue: Dialogue, checkpoint_id: int, input_id: int, live: dict[int, ExecutionAttempt]) -> None:
    state = b"%d" % input_id
    dialogue.close(checkpoint_id, *live.values())
    dialogue.tell(t.CoordinatorSnapshotTaken(checkpoint_id, state))
    dialogue.tell(*(t.SubtaskAcknowledged(attempt, checkpoint_id, state) for attempt in live.values()))
    dialogue.tell(t.CheckpointStored(checkpoint_id))
