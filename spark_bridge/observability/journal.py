# SPDX-License-Identifier: Apache-2.0

"""What has become of each operator lately: its checkpoints with their phases, and its failures. Bounded in memory.

It is shown the values of the machines, unchanged (``OperatorPorts.observe``), and passes them on to its subscribers:
a trace, spans, notes in Spark's event log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.coordination.engine.operator_config import Observed
from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import (
    AwaitUploads,
    CheckpointTriggered,
    CloseSubtask,
    CollectRecorded,
    CoordinatorSnapshotTaken,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    RefuseCheckpoint,
    SnapshotCoordinator,
    StoreCheckpoint,
)
from protocol.describing import describe
from spark_bridge.bridge.runs import JobsOfAction
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.status import CheckpointRecord, FailureRecord, TimelineRecord

CHECKPOINTS_KEPT = 100
"""How many ended checkpoints of an operator are kept."""
FAILURES_KEPT = 100
"""How many failures of an operator are kept."""
TIMELINE_KEPT = 500
"""How many steps of an operator and its attempts are kept."""

Subscriber = Callable[[str, Observed, float], None]
"""Takes the operator's name, what was observed, and a reading of the journal's clock. Called on the event loop."""

_PHASES: dict[type, str] = {
    CheckpointTriggered: "waiting",
    CloseSubtask: "closing",
    SnapshotCoordinator: "snapshotting",
    CoordinatorSnapshotTaken: "acknowledging",
    CollectRecorded: "collecting",
    AwaitUploads: "uploading",
    StoreCheckpoint: "storing",
}
"""The phase that begins with each of these."""


def phase_of(observed: Observed) -> tuple[str, int] | None:
    """The phase that begins with what was observed, and the checkpoint's id; None if none does."""
    phase = _PHASES.get(type(observed))
    if phase is None:
        return None
    of: Any = observed.checkpoint if isinstance(observed, StoreCheckpoint) else observed
    return phase, of.checkpoint_id


def end_of(observed: Observed) -> tuple[int, str, str] | None:
    """The checkpoint that ends with what was observed, its outcome, and why it has that; None if none does."""
    match observed:
        case NotifyCheckpointComplete(checkpoint_id) | EndSavepoint(checkpoint_id):
            return checkpoint_id, "completed", ""
        case NotifyCheckpointAborted(checkpoint_id=checkpoint_id, reason=reason):
            return checkpoint_id, "aborted", reason
        case RefuseCheckpoint(checkpoint_id=checkpoint_id, reason=reason):
            return checkpoint_id, "refused", reason
    return None


_LIFE: dict[type, str] = {AttemptAccepted: "accepted", SubtaskReady: "ready", SubtaskFinished: "finished"}
"""The steps of an attempt that ends well."""


@dataclass(slots=True)
class CheckpointUnderWay:
    """A checkpoint that has not ended. Times are readings of the journal's clock."""

    checkpoint_id: int
    savepoint: bool
    triggered: float
    phase: str = "waiting"
    phase_began: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: str, now: float) -> None:
        """Begin the next phase."""
        self.phases_s[self.phase] = self.phases_s.get(self.phase, 0.0) + now - self.phase_began
        self.phase, self.phase_began = phase, now


class OperatorJournal:
    """What has become of one operator. Loop only."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self.under_way: dict[int, CheckpointUnderWay] = {}
        self.checkpoints: deque[CheckpointRecord] = deque(maxlen=CHECKPOINTS_KEPT)
        self.failures: deque[FailureRecord] = deque(maxlen=FAILURES_KEPT)
        self.timeline: deque[TimelineRecord] = deque(maxlen=TIMELINE_KEPT)
        self.run_began: float | None = None
        self.jobs = JobsOfAction()
        self.steps = 0
        """How often anything has happened, for those who look whether anything has."""

    def observe(self, observed: Observed, now: float) -> None:
        self.steps += 1
        begun = phase_of(observed)
        if begun is not None:
            self._enter(observed, *begun, now)
            return
        if (ended := end_of(observed)) is not None:
            self._end(*ended, now)
            return
        if isinstance(observed, RunStarted | AttemptAccepted | RunEnded):
            self.jobs.note(observed)
        match observed:
            case RunStarted(run_id=run_id):
                self.run_began = now
                self._step(now, "run started", text=f"stage {run_id}")
            case RunEnded(succeeded=succeeded, reason=reason):
                self.run_began = None
                self._step(now, "run ended", text="" if succeeded else reason or "failed")
            case OperatorReset(cause=cause):
                self._step(now, "operator reset", text=cause)
            case SubtaskReset(subtask=subtask):
                self._step(now, "subtask reset", subtask)
            case AttemptAccepted(attempt=attempt) | SubtaskReady(attempt) | SubtaskFinished(attempt):
                self._step(now, _LIFE[type(observed)], attempt.subtask, attempt.attempt)
            case SubtaskFailed(attempt, reason_of_failure):
                kind, text = reason_of_failure.kind.name.lower(), reason_of_failure.text
                self.failures.append(FailureRecord(self._epoch + now, attempt.subtask, attempt.attempt, kind, text))
                self._step(now, "failed", attempt.subtask, attempt.attempt, text=kind)

    def _step(
        self, now: float, what: str, subtask: int | None = None, attempt: int | None = None, text: str = ""
    ) -> None:
        self.timeline.append(TimelineRecord(self._epoch + now, what, subtask, attempt, text))

    def job_failed(self, error: BaseException, now: float) -> None:
        """The coordinator, or one of its checkpoints, has failed the job."""
        self.steps += 1
        text = describe(error)
        self.failures.append(FailureRecord(self._epoch + now, None, None, "global_failure", text))

    def _enter(self, observed: Observed, phase: str, checkpoint_id: int, now: float) -> None:
        if isinstance(observed, CheckpointTriggered):
            triggered = CheckpointUnderWay(checkpoint_id, observed.savepoint, now, phase, now)
            self.under_way[checkpoint_id] = triggered
        elif checkpoint_id in self.under_way:
            self.under_way[checkpoint_id].enter(phase, now)

    def _end(self, checkpoint_id: int, outcome: str, reason: str, now: float) -> None:
        ended = self.under_way.pop(checkpoint_id, None)
        if ended is not None:
            ended.enter("", now)
            self.checkpoints.append(
                CheckpointRecord(
                    checkpoint_id,
                    ended.savepoint,
                    self._epoch + ended.triggered,
                    now - ended.triggered,
                    ended.phases_s,
                    outcome,
                    reason,
                )
            )


class Journal:
    """The names and journals of all operators. Loop only.

    ``epoch``: what to add to a reading of the system's clock to get seconds since the epoch.
    """

    def __init__(self, epoch: float, displays: Displays | None = None) -> None:
        self.epoch = epoch
        self.displays = displays or Displays()
        """Decides what happens when a subscriber fails."""
        self._operators: dict[str, OperatorJournal] = {}
        self._subscribers: list[tuple[str, Subscriber]] = []

    def of(self, operator_id: str) -> OperatorJournal:
        """The journal of one operator, which begins with the first call."""
        journal = self._operators.get(operator_id)
        if journal is None:
            journal = self._operators[operator_id] = OperatorJournal(self.epoch)
        return journal

    def forget(self, operator_id: str) -> None:
        """The operator was released."""
        self._operators.pop(operator_id, None)

    def job_failed(self, operator_id: str, error: BaseException, now: float) -> None:
        """The coordinator, or one of its checkpoints, has failed the operator's job."""
        self.displays.run("journal", self.of(operator_id).job_failed, error, now)

    def observe(self, operator_id: str, observed: Observed, now: float) -> None:
        """See ``OperatorPorts.observe``. Never raises: what a subscriber raises is a failure of its display."""
        run = self.displays.run
        run("journal", self.of(operator_id).observe, observed, now)
        for display, subscriber in tuple(self._subscribers):
            run(display, subscriber, operator_id, observed, now)

    def subscribe(self, display: str, subscriber: Subscriber) -> Callable[[], None]:
        """Pass everything observed from now on to ``subscriber``. The result ends that; it may be called twice."""
        entry = (display, subscriber)
        self._subscribers.append(entry)

        def end() -> None:
            if entry in self._subscribers:
                self._subscribers.remove(entry)

        return end
