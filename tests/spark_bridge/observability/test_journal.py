# SPDX-License-Identifier: Apache-2.0

"""The journal: phases of checkpoints, failures, subscribers, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from protocol.attempts import (
    AttemptAccepted,
    Decision,
    FailureKind,
    FailureReason,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import (
    CheckpointTriggered,
    CloseSubtask,
    CompletedCheckpoint,
    CoordinatorSnapshotTaken,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    RefuseCheckpoint,
    SnapshotCoordinator,
    StoreCheckpoint,
)
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.observability.displays import FAILURES_MAX, PAUSE_S, Displays
from spark_bridge.observability.journal import CHECKPOINTS_KEPT, FAILURES_KEPT, Journal

EPOCH = 1000.0
ATTEMPT = ExecutionAttempt("op", 3, 1, 77)


def steps(checkpoint_id: int, end: Any, *, savepoint: bool = False) -> list[Any]:
    return [
        CheckpointTriggered(checkpoint_id, savepoint),
        CloseSubtask(ATTEMPT, checkpoint_id),
        SnapshotCoordinator(checkpoint_id),
        CoordinatorSnapshotTaken(checkpoint_id, b""),
        StoreCheckpoint(CompletedCheckpoint(checkpoint_id, 1, b"", {}), savepoint),
        end,
    ]


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        (NotifyCheckpointComplete(5), "completed", ""),
        (EndSavepoint(5), "completed", ""),
        (NotifyCheckpointAborted(5, "why"), "aborted", "why"),
        (RefuseCheckpoint(5, "why"), "refused", "why"),
    ],
)
def test_a_checkpoint_is_recorded_with_the_length_of_each_phase(end: Any, outcome: str, reason: str) -> None:
    journal = Journal(EPOCH)
    for second, step in enumerate(steps(5, end, savepoint=isinstance(end, EndSavepoint)), start=10):
        journal.observe("op", step, float(second * second))
    (record,) = journal.of("op").checkpoints
    assert (record.checkpoint_id, record.outcome, record.reason) == (5, outcome, reason)
    assert (record.triggered_at, record.duration_s) == (EPOCH + 100, 225 - 100)
    assert record.phases_s == {
        "waiting": 21,
        "closing": 23,
        "snapshotting": 25,
        "acknowledging": 27,
        "storing": 29,
    }
    assert record.savepoint is isinstance(end, EndSavepoint)
    assert journal.of("op").under_way == {}


def test_a_checkpoint_in_progress_shows_its_phase_and_since_when() -> None:
    journal = Journal(EPOCH)
    for second, step in enumerate(steps(5, None)[:3]):
        journal.observe("op", step, float(second))
    under_way = journal.of("op").under_way[5]
    assert (under_way.phase, under_way.phase_began, under_way.triggered) == ("snapshotting", 2.0, 0.0)


def test_a_failure_is_recorded_with_its_attempt_and_one_of_the_job_without() -> None:
    journal = Journal(EPOCH)
    journal.observe("op", SubtaskFailed(ATTEMPT, FailureReason(FailureKind.KILLED, "text")), 1.0)
    journal.job_failed("op", ValueError("boom"), 2.0)
    assert list(journal.of("op").failures) == [
        (EPOCH + 1, 3, 1, "killed", "text"),
        (EPOCH + 2, None, None, "global_failure", "ValueError: boom"),
    ]


def test_a_run_has_its_beginning_until_it_ends() -> None:
    journal = Journal(EPOCH)
    journal.observe("op", RunStarted("op", 4), 3.0)
    assert journal.of("op").run_began == 3.0
    journal.observe("op", RunEnded("op", 4, True, ""), 5.0)
    assert journal.of("op").run_began is None


@pytest.mark.parametrize(
    ("decision", "step"),
    [
        (RunStarted("op", 4), ("run started", None, None, "stage 4")),
        (AttemptAccepted(ATTEMPT, RestoreMode.BATCH, 4, 9), ("accepted", 3, 1, "")),
        (SubtaskReady(ATTEMPT), ("ready", 3, 1, "")),
        (SubtaskFailed(ATTEMPT, FailureReason(FailureKind.KILLED, "why")), ("failed", 3, 1, "killed")),
        (SubtaskFinished(ATTEMPT), ("finished", 3, 1, "")),
        (SubtaskReset("op", 3), ("subtask reset", 3, None, "")),
        (OperatorReset("op", "why"), ("operator reset", None, None, "why")),
        (RunEnded("op", 4, True, "why"), ("run ended", None, None, "")),
        (RunEnded("op", 4, False, "why"), ("run ended", None, None, "why")),
        (RunEnded("op", 4, False), ("run ended", None, None, "failed")),
    ],
)
def test_each_decision_is_a_step_of_the_timeline(decision: Decision, step: tuple[object, ...]) -> None:
    journal = Journal(EPOCH)
    journal.observe("op", decision, 3.0)
    assert list(journal.of("op").timeline) == [(EPOCH + 3, *step)]


def test_memory_is_bounded_and_a_released_operator_is_forgotten() -> None:
    journal = Journal(EPOCH)
    for number in range(max(CHECKPOINTS_KEPT, FAILURES_KEPT) + 7):
        journal.observe("op", CheckpointTriggered(number), 0.0)
        journal.observe("op", NotifyCheckpointComplete(number), 0.0)
        journal.job_failed("op", ValueError(str(number)), 0.0)
    assert len(journal.of("op").checkpoints) == CHECKPOINTS_KEPT
    assert len(journal.of("op").failures) == FAILURES_KEPT
    assert journal.of("op").checkpoints[-1].checkpoint_id == max(CHECKPOINTS_KEPT, FAILURES_KEPT) + 6
    journal.forget("op")
    assert not journal.of("op").checkpoints


def test_subscribers_see_everything_and_one_that_fails_pauses_and_harms_nobody() -> None:  # H155
    now = 0.0
    displays = Displays(lambda: now)
    journal = Journal(EPOCH, displays)
    seen: list[Any] = []
    tries: list[Any] = []

    def failing(operator_id: str, observed: Any, now: float) -> None:
        tries.append(observed)
        raise RuntimeError("as it was told")

    journal.subscribe("trace", failing)
    end = journal.subscribe("spans", lambda operator_id, observed, now: seen.append((operator_id, observed, now)))
    with structlog.testing.capture_logs() as lines:
        for stage in range(2 * FAILURES_MAX):
            journal.observe("op", RunStarted("op", stage), 3.0)
    assert [line["event"] for line in lines] == ["display failed, jobs not affected", "display paused"]
    assert len(tries) == FAILURES_MAX
    assert displays.failures()["trace"] == FAILURES_MAX
    now = PAUSE_S
    journal.observe("op", RunStarted("op", 4), 3.0)
    journal.observe("op", RunStarted("op", 5), 4.0)
    assert len(tries) == FAILURES_MAX + 1, "one attempt shows whether it works again"
    end()
    end()
    journal.observe("op", RunStarted("op", 6), 5.0)
    assert len(seen) == 2 * FAILURES_MAX + 2
    assert seen[-1] == ("op", RunStarted("op", 5), 4.0)
