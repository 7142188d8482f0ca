# SPDX-License-Identifier: Apache-2.0

"""Spans from a journal: which there are, how long they last, what they belong to and what they link to."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protocol.attempts import (
    AttemptAccepted,
    FailureKind,
    FailureReason,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
)
from protocol.barrier_tracker import (
    CheckpointTriggered,
    CloseSubtask,
    CompletedCheckpoint,
    CoordinatorSnapshotTaken,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    OperatorResetToCheckpoint,
    RefuseCheckpoint,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskResetToCheckpoint,
)
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.spans import CHECKPOINTS_LINKED, Spans

EPOCH = 1000.0
FIRST, SECOND = ExecutionAttempt("op", 3, 0, 77), ExecutionAttempt("op", 3, 1, 78)


class Recorded:
    """A journal with spans. Each observation is one second after the one before, beginning at second 1."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.journal = Journal(EPOCH)
        self.spans = Spans(self.journal, provider)
        self.second = 0

    def observe(self, *several: Any) -> None:
        for observed in several:
            self.second += 1
            self.journal.observe("op", observed, float(self.second))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == f"headgate.{name}"]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - EPOCH, span.end_time / 1e9 - EPOCH


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def accepted(attempt: ExecutionAttempt) -> AttemptAccepted:
    return AttemptAccepted(attempt, RestoreMode.STREAMING, 4, 1)


def failed(attempt: ExecutionAttempt, kind: FailureKind = FailureKind.KILLED) -> SubtaskFailed:
    return SubtaskFailed(attempt, FailureReason(kind, "by a test"))


def checkpoint(checkpoint_id: int, end: Any) -> list[Any]:
    return [
        CheckpointTriggered(checkpoint_id, isinstance(end, EndSavepoint)),
        CloseSubtask(FIRST, checkpoint_id),
        SnapshotCoordinator(checkpoint_id),
        CoordinatorSnapshotTaken(checkpoint_id, b""),
        StoreCheckpoint(CompletedCheckpoint(checkpoint_id, 1, b"", {})),
        end,
    ]


def test_attempts_are_below_their_run_and_have_its_end() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), accepted(FIRST), SubtaskReady(FIRST), SubtaskFinished(FIRST))
    recorded.observe(accepted(SECOND), RunEnded("op", 4, True))
    run = recorded.one("run")
    assert (seconds(run), run.parent, run.status.is_ok, run.links) == ((1, 6), None, True, ())
    assert dict(run.attributes or {}) == {"headgate.operator": "op", "headgate.stage_id": 4}
    first, second = recorded.named("attempt")
    assert (seconds(first), seconds(second)) == ((2, 4), (5, 6))
    assert first.parent is not None
    assert first.parent.span_id == id_of(run)
    assert [(event.name, event.timestamp / 1e9 - EPOCH) for event in first.events] == [("ready", 3)]
    assert dict(first.attributes or {}) == {
        "headgate.operator": "op",
        "headgate.subtask": 3,
        "headgate.attempt": 0,
        "headgate.task_attempt_id": 77,
    }


def test_a_failed_attempt_has_its_reason_and_its_restore_links_to_it_and_to_the_checkpoint() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), accepted(FIRST), *checkpoint(9, NotifyCheckpointComplete(9)))
    recorded.observe(failed(FIRST), SubtaskResetToCheckpoint(3, 9), accepted(SECOND), SubtaskReady(SECOND))
    attempt, restore = recorded.one("attempt"), recorded.one("restore")
    assert attempt.status.description == "killed: by a test"
    assert not attempt.status.is_ok
    assert (attempt.attributes or {})["headgate.failure"] == "killed"
    assert seconds(restore) == (10, 12)
    assert linked(restore) == [id_of(attempt), id_of(recorded.one("checkpoint"))]
    assert (restore.attributes or {})["headgate.checkpoint_id"] == 9
    recorded.spans.close()
    assert restore.parent is not None
    assert restore.parent.span_id == id_of(recorded.one("run"))


def test_a_checkpoint_is_a_trace_with_its_phases_and_links_to_its_run() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), *checkpoint(9, NotifyCheckpointComplete(9)), RunEnded("op", 4, True))
    whole = recorded.one("checkpoint")
    assert (seconds(whole), whole.parent, whole.status.is_ok) == ((2, 7), None, True)
    assert linked(whole) == [id_of(recorded.one("run"))]
    phases = ["waiting", "closing", "snapshotting", "acknowledging", "storing"]
    for second, phase in enumerate(phases, start=2):
        span = recorded.one(phase)
        assert span.parent is not None
        assert (seconds(span), span.parent.span_id) == ((second, second + 1), id_of(whole))
    assert len(recorded.exporter.get_finished_spans()) == 1 + 1 + len(phases)  # none for each subtask or event


@pytest.mark.parametrize(
    ("end", "name", "problem"),
    [
        (EndSavepoint(9), "savepoint", None),
        (NotifyCheckpointAborted(9, "too late"), "checkpoint", "too late"),
        (RefuseCheckpoint(9, "no run"), "checkpoint", "no run"),
    ],
)
def test_a_savepoint_is_named_so_and_one_that_fails_says_why(end: Any, name: str, problem: str | None) -> None:
    recorded = Recorded()
    recorded.observe(*checkpoint(9, end))
    assert recorded.one(name).status.description == problem
    assert recorded.one(name).status.is_ok == (problem is None)


def test_a_run_that_begins_while_another_is_open_ends_that_one_and_its_attempts_without_an_error() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), accepted(FIRST), RunStarted("op", 5), accepted(SECOND))
    first, attempt = recorded.one("run"), recorded.one("attempt")
    assert (seconds(first), seconds(attempt)) == ((1, 3), (2, 3))
    assert first.status.is_ok or first.status.description is None
    recorded.observe(RunEnded("op", 5, True))
    _, second = recorded.named("run")
    assert (seconds(second), linked(second)) == ((3, 5), [])
    assert (second.attributes or {})["headgate.stage_id"] == 5
    assert recorded.named("restart") == []


def test_an_attempt_that_ended_with_its_run_is_not_ended_again_with_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = Recorded()
    for run, attempt in ((4, FIRST), (5, SECOND)):
        recorded.observe(RunStarted("op", run), accepted(attempt), RunEnded("op", run, True))
    assert [seconds(span) for span in recorded.named("attempt")] == [(2, 3), (5, 6)]
    assert caplog.messages == [], "OpenTelemetry warns about a span that is ended twice"


def test_a_restart_links_the_run_that_failed_with_the_next_one() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), accepted(FIRST), RunEnded("op", 4, False, "it broke"))
    recorded.observe(OperatorResetToCheckpoint(-1, None), RunStarted("op", 5), accepted(SECOND), SubtaskReady(SECOND))
    recorded.observe(RunEnded("op", 5, True), RunStarted("op", 6), RunEnded("op", 6, True))
    broken, again, later = recorded.named("run")
    restart, restore = recorded.one("restart"), recorded.one("restore")
    assert broken.status.description == "it broke"
    assert (seconds(restart), linked(restart), linked(again)) == ((3, 5), [id_of(broken)], [id_of(restart)])
    assert (seconds(restore), linked(restore)) == ((4, 7), [id_of(broken)])
    assert linked(later) == []


def test_closing_ends_what_is_open_and_hears_nothing_more() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), accepted(FIRST), SubtaskResetToCheckpoint(5, -1), CheckpointTriggered(9))
    recorded.spans.close()
    recorded.spans.close()
    names = sorted(span.name for span in recorded.exporter.get_finished_spans())
    assert names == [f"headgate.{name}" for name in ("attempt", "checkpoint", "restore", "run", "waiting")]
    recorded.observe(RunStarted("op", 5))
    assert len(recorded.exporter.get_finished_spans()) == 5


def test_an_attempt_that_failed_before_it_was_accepted_is_seen_too() -> None:
    recorded = Recorded()
    recorded.observe(RunStarted("op", 4), failed(FIRST))
    assert seconds(recorded.one("attempt")) == (2, 2)


def test_old_checkpoints_are_forgotten() -> None:
    recorded = Recorded()
    for number in range(CHECKPOINTS_LINKED + 1):
        recorded.observe(CheckpointTriggered(number), NotifyCheckpointComplete(number))
    recorded.observe(SubtaskResetToCheckpoint(1, 0), SubtaskResetToCheckpoint(2, 1), SubtaskReady(SECOND))
    recorded.spans.close()
    assert [len(span.links) for span in recorded.named("restore")] == [0, 1]


def test_without_the_package_the_setting_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SidecarError, match=r"pip install 'headgate\[opentelemetry\]'"):
        Spans(Journal(EPOCH))
