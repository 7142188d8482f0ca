"""The barrier tracker under inputs that nobody planned: whatever comes, and in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.attempts.types import FailureKind, FailureReason
from protocol.barrier_tracker import (
    AbortRequested,
    BarrierTracker,
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    EndSavepoint,
    GatewayDrained,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    OperatorResetToCheckpoint,
    RefuseCheckpoint,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetToCheckpoint,
    TimePassed,
    TrackerEffect,
    TrackerInput,
)
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode

ATTEMPTS = [
    ExecutionAttempt("words", subtask, number, 10 * number + subtask) for number in range(3) for subtask in (0, 1)
]
REASON = FailureReason(FailureKind.KILLED, "")

attempts = st.sampled_from(ATTEMPTS)
checkpoint_ids = st.integers(min_value=1, max_value=5)
concurrent_maxes = st.integers(min_value=1, max_value=3)
positions = st.sampled_from([0, 0, 0, 1])
inputs: st.SearchStrategy[TrackerInput] = st.one_of(
    st.builds(CheckpointTriggered, checkpoint_ids, st.booleans()),
    st.builds(AbortRequested, checkpoint_ids, st.just("enough")),
    st.builds(AttemptAccepted, attempts, st.sampled_from(RestoreMode)),
    st.builds(SubtaskReady, attempts),
    st.builds(SubtaskFailed, attempts, st.just(REASON)),
    st.builds(SubtaskFinished, attempts),
    st.builds(SubtaskReset, st.sampled_from([0, 1])),
    st.builds(OperatorReset, st.just("x")),
    st.builds(RunEnded, st.just(1), st.booleans()),
    st.builds(SubtaskClosed, attempts, checkpoint_ids),
    st.builds(CoordinatorSnapshotTaken, checkpoint_ids, st.just(b"c"), st.just({1: 1})),
    st.builds(CoordinatorSnapshotFailed, checkpoint_ids, st.just("x")),
    st.builds(GatewayDrained, attempts, checkpoint_ids),
    st.builds(SubtaskAcknowledged, attempts, checkpoint_ids, st.just(b"a"), st.just(()), positions),
    st.builds(SubtaskDeclined, attempts, checkpoint_ids, st.just("x")),
    st.builds(SubtaskFinalState, attempts, st.just(b"f"), positions),
    st.builds(CheckpointStored, checkpoint_ids),
    st.builds(CheckpointStoreFailed, checkpoint_ids, st.just("x")),
    st.builds(CheckpointDiscarded, checkpoint_ids),
    st.just(TimePassed()),
)


def state_of(tracker: BarrierTracker) -> dict[str, object]:
    return copy.deepcopy(vars(tracker))


def check_order(effects: Sequence[TrackerEffect]) -> None:
    """H16, H18: within one answer and over a whole history."""
    pending_told: set[int] = set()
    completed = -1
    for effect in effects:
        match effect:
            case NotifyCheckpointComplete(checkpoint_id):
                assert checkpoint_id > completed
                assert checkpoint_id not in pending_told
                completed = checkpoint_id
            case NotifyCheckpointAborted(checkpoint_id):
                pending_told.add(checkpoint_id)
            case SubtaskResetToCheckpoint(_, checkpoint_id) | OperatorResetToCheckpoint(checkpoint_id, _):
                assert checkpoint_id in (-1, completed)
            case _:
                pass


def a_tracker(tolerated_failures: int, concurrent_max: int) -> BarrierTracker:
    config = CheckpointConfig(10.0, tolerated_failures, interval_s=4.0, concurrent_max=concurrent_max)
    return BarrierTracker("words", 2, config)


@settings(max_examples=300)
@given(st.lists(st.tuples(inputs, st.sampled_from([0.0, 1.0, 6.0])), max_size=60), concurrent_maxes)
def test_any_history_is_answered_or_refused_and_a_refused_input_changes_nothing(
    history: list[tuple[TrackerInput, float]], concurrent_max: int
) -> None:
    # H43, H44, H48: each request is answered once, and nothing is pending behind the last deadline.
    tracker = a_tracker(1, concurrent_max)
    now, told = 0.0, list[TrackerEffect]()
    asked: list[int] = []
    for input, passed_s in history:
        now += passed_s
        before = state_of(tracker)
        try:
            told += tracker.handle(input, now)
        except LocalProtocolError:
            assert state_of(tracker) == before
            continue
        if isinstance(input, CheckpointTriggered):
            asked.append(input.checkpoint_id)
        tracker.check_invariants()
    for _ in range(4):  # what waits may start when what is pending ends, and then has its own time
        now += 10.0
        told += tracker.handle(TimePassed(), now)
        tracker.check_invariants()
    assert tracker.pending_ids == ()
    ends = (NotifyCheckpointComplete, EndSavepoint, NotifyCheckpointAborted, RefuseCheckpoint)
    assert sorted(effect.checkpoint_id for effect in told if isinstance(effect, ends)) == sorted(asked)
    check_order(told)


@pytest.mark.parametrize("attempt", ATTEMPTS[:2], ids=str)
@settings(max_examples=200)
@given(data=st.data())
def test_no_attempt_is_announced_ready_after_its_failure(attempt: ExecutionAttempt, data: st.DataObject) -> None:
    # H10, H11
    concurrent_max = data.draw(concurrent_maxes)
    tracker = a_tracker(9, concurrent_max)
    over = False
    for input in data.draw(st.lists(inputs, max_size=60)):
        if over and isinstance(input, AttemptAccepted):
            continue  # a task attempt id never comes back (H1)
        try:
            effects = tracker.handle(input, 0.0)
        except LocalProtocolError:
            continue
        for effect in effects:
            if isinstance(effect, SubtaskFailed) and effect.attempt == attempt:
                over = True
            assert not (over and isinstance(effect, SubtaskReady) and effect.attempt == attempt)


@settings(max_examples=200)
@given(st.lists(inputs, max_size=60), concurrent_maxes)
def test_every_abort_stands_before_the_failure_or_reset_of_the_same_answer(
    history: list[TrackerInput], concurrent_max: int
) -> None:
    # H16
    tracker = a_tracker(9, concurrent_max)
    tells = (SubtaskFailed, SubtaskResetToCheckpoint, OperatorResetToCheckpoint, RunEnded)
    for input in history:
        were_pending = tracker.pending_ids
        try:
            effects = tracker.handle(input, 0.0)
        except LocalProtocolError:
            continue
        place = next((i for i, effect in enumerate(effects) if isinstance(effect, tells)), None)
        if place is None:
            continue
        aborted = [effect.checkpoint_id for effect in effects if isinstance(effect, NotifyCheckpointAborted)]
        before = [effect.checkpoint_id for effect in effects[:place] if isinstance(effect, NotifyCheckpointAborted)]
        assert before == aborted
        if not isinstance(input, RunEnded):
            assert aborted == list(were_pending)
