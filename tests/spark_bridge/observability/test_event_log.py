# SPDX-License-Identifier: Apache-2.0

"""Notes for Spark's event log: what they say, and that they are collected and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from actors.coordination.engine.operator_config import UNBOUNDED
from actors.testing import deterministic_system
from protocol.attempts import (
    AttemptAccepted,
    FailureKind,
    FailureReason,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskReady,
)
from protocol.barrier_tracker import (
    CheckpointTriggered,
    CloseSubtask,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    OperatorResetToCheckpoint,
    RefuseCheckpoint,
    SubtaskResetToCheckpoint,
)
from protocol.describing import type_name
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.event_log import NOTES_MAX, TEXT_MAX, EventLog, EventLogActor, Note, note_of, subscribe
from spark_bridge.observability.history import _sentence
from spark_bridge.observability.journal import Journal

ATTEMPT = ExecutionAttempt("op", 3, 1, 77)


def note(observed: Any, journal: Journal | None = None) -> dict[str, Any] | None:
    return note_of("op", observed, 1000.0004, journal or Journal(0.0))


@pytest.mark.parametrize(
    ("observed", "sentence"),
    [
        (RunStarted("op", 4), "run started, stage 4"),
        (RunEnded("op", 4, True), "run succeeded, stage 4"),
        (RunEnded("op", 4, False, "a task failed"), "run failed, stage 4: a task failed"),
        (
            SubtaskFailed(ATTEMPT, FailureReason(FailureKind.EXECUTOR_LOST, "gone")),
            "subtask 3 attempt 1 failed: executor_lost: gone",
        ),
        (SubtaskResetToCheckpoint(3, 9), "subtask 3 reset to checkpoint 9"),
        (SubtaskResetToCheckpoint(3, -1), "subtask 3 reset to the beginning"),
        (OperatorResetToCheckpoint(9, b""), "operator reset to checkpoint 9"),
        (NotifyCheckpointComplete(9), "checkpoint 9 completed"),
        (NotifyCheckpointAborted(9, "timeout"), "checkpoint 9 aborted: timeout"),
        (RefuseCheckpoint(9, "no run"), "checkpoint 9 refused: no run"),
    ],
)
def test_what_happens_is_noted_and_history_says_it(observed: Any, sentence: str) -> None:
    noted = note(observed)
    assert noted is not None
    assert (noted["at"], noted["operator"]) == (1000.0, "op")
    assert _sentence(noted) == sentence


@pytest.mark.parametrize(
    "observed",
    [
        SubtaskReady(ATTEMPT),
        AttemptAccepted(ATTEMPT, RestoreMode.BATCH, 4, 1),
        CheckpointTriggered(1),
        CloseSubtask(ATTEMPT, 1),
    ],
)
def test_ordinary_steps_are_not_noted(observed: Any) -> None:
    assert note(observed) is None


def test_a_checkpoint_is_noted_with_its_phases_and_a_savepoint_as_such() -> None:
    journal = Journal(0.0)
    for at, step in ((1.0, CheckpointTriggered(9, True)), (1.5, CloseSubtask(ATTEMPT, 9)), (2.0, EndSavepoint(9))):
        journal.observe("op", step, at)
    noted = note(EndSavepoint(9), journal)
    assert noted is not None
    assert _sentence(noted) == "savepoint 9 completed after 1000 ms (waiting 500 ms, closing 500 ms)"


def test_a_long_reason_is_shortened() -> None:
    noted = note(SubtaskFailed(ATTEMPT, FailureReason(FailureKind.FAILED, "x" * 10_000)))
    assert noted is not None
    assert len(noted["why"]) == TEXT_MAX


class Posted(EventLog):
    """Keeps what would go to the JVM; ``problem`` is raised instead, like Py4J would."""

    def __init__(self, problem: Exception | None = None) -> None:
        java_context = SimpleNamespace(isStopped=lambda: isinstance(problem, AttributeError))
        super().__init__(SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: java_context)))
        self.batches: list[list[dict[str, Any]]] = []
        self.problem = problem

    def post(self, notes: list[dict[str, Any]]) -> None:
        self.batches.append(notes)
        if self.problem is not None:
            raise self.problem


async def test_notes_are_posted_together_after_a_second_and_the_rest_at_the_end() -> None:
    posted = Posted()
    async with deterministic_system(seed=1) as kit:
        ref = kit.system.spawn(lambda: EventLogActor(posted))
        ref.tell(Note({"at": 1}))
        ref.tell(Note({"at": 2}))
        await kit.advance(0.9)
        assert posted.batches == []
        await kit.advance(0.2)
        assert posted.batches == [[{"at": 1}, {"at": 2}]]
        await kit.advance(100.0)
        assert len(posted.batches) == 1
        ref.tell(Note({"at": 3}))
        await kit.advance(0.1)
    assert posted.batches[1:] == [[{"at": 3}]]


async def test_a_flood_of_notes_is_bounded_and_says_how_many_are_left_out() -> None:
    posted = Posted()
    async with deterministic_system(seed=1) as kit:
        ref = kit.system.spawn(lambda: EventLogActor(posted), mailbox=UNBOUNDED)
        for number in range(NOTES_MAX + 7):
            ref.tell(Note({"at": number}))
        await kit.advance(1.1)
        ref.tell(Note({"at": 500}))
        await kit.advance(1.1)
    flood, after = posted.batches
    assert len(flood) == NOTES_MAX + 1
    assert flood[-1] == {"at": NOTES_MAX - 1, "operator": "", "what": "notes left out", "count": 7}
    assert after == [{"at": 500}]


@pytest.mark.parametrize(
    ("problem", "failures"),
    [(Py4JError("no"), {"event-log": 1}), (AttributeError("Spark has stopped"), {})],
    ids=type_name,
)
async def test_a_jvm_that_refuses_ends_the_notes_and_nothing_else_and_is_counted_unless_it_ends_itself(
    problem: Exception, failures: dict[str, int]
) -> None:  # H155
    posted, displays = Posted(problem), Displays()
    async with deterministic_system(seed=1) as kit:
        ref = displays.spawn(kit.system, lambda: EventLogActor(posted), "event-log")
        for _ in range(3):
            ref.tell(Note({"at": 1}))
            await kit.advance(2.0)
    assert len(posted.batches) == 1
    assert displays.failures() == failures


async def test_it_hears_of_everything_through_the_journal_until_it_is_ended() -> None:
    posted, journal = Posted(), Journal(1000.0)
    async with deterministic_system(seed=1) as kit:
        end = subscribe(journal, kit.system.spawn(lambda: EventLogActor(posted), mailbox=UNBOUNDED))
        journal.observe("op", RunStarted("op", 4), 2.0)
        journal.observe("op", SubtaskReady(ATTEMPT), 3.0)
        await kit.advance(2.0)
        end()
        journal.observe("op", RunEnded("op", 4, True), 4.0)
    assert posted.batches == [[{"at": 1002.0, "operator": "op", "what": "run started", "stage": 4}]]
