# SPDX-License-Identifier: Apache-2.0

"""The driver's other parts: the real ``BarrierTracker`` and ``AttemptLedger``, with their actors' surroundings."""

from __future__ import annotations

from typing import Any

from protocol import barrier_tracker as t
from protocol.attempts import (
    AttemptAccepted,
    AttemptLedger,
    CancelJobs,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    RefuseRegistration,
    RegistrationArrived,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.facts import JobStarted, StageSubmitted, StatusReported, TaskPlace, TaskState
from protocol.gateway import types as g
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import Register
from tests.exploration import vocabulary as v
from tests.exploration.coordinator_end import Failed, Ready, Reset, read_counts
from tests.exploration.scopes import Scope
from tests.exploration.subtask_end import REQUEST, RUN, event_up, is_event_up


class LedgerEnd:
    """The bridge: facts and messages in, decisions about attempts out. The job's first facts have come."""

    def __init__(self, scope: Scope) -> None:
        self.mode = scope.mode
        self.forged = -1  # the task id of a registration that no look has been about yet
        self.ledger = AttemptLedger()
        self.ledger.handle(OperatorAdded(v.OPERATOR, scope.subtasks), 0.0)
        self.ledger.handle(JobStarted(RUN, (RUN,)), 0.0)
        self.ledger.handle(StageSubmitted(RUN, 0, scope.subtasks, partitions=scope.subtasks), 0.0)

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        match message:
            case v.Forged(task, number):
                self.forged = task
                register = Register(task, v.OPERATOR, 0, RUN, number, self.mode, 1, "host", "3.11")
                effects = self.ledger.handle(RegistrationArrived(-1, register), 0.0)
            case v.Looked(running):
                effects = self._look([slot + 1 for slot in running])
            case _:
                effects = self.ledger.handle(message, 0.0)
        self.ledger.check_invariants()
        self._forget_order()
        for effect in effects:
            match effect:
                case KillTask(task):
                    out.append((v.To.ENGINE, task - 1))
                case AttemptAccepted(connection_id=-1, attempt=attempt):
                    v.demand(False, "H75", f"{attempt} is accepted, and Spark does not know it")
                case RefuseRegistration(task_attempt_id=task, connection_id=connection_id, message=text):
                    v.demand(connection_id == -1, "H11", f"task {task} is refused: {text}")
                case CancelJobs(_, reason):
                    v.demand(False, "H45", f"the job is given up: {reason}")
                case AttemptAccepted() | SubtaskReady() | SubtaskFailed() | SubtaskFinished() | SubtaskReset():
                    out.append((v.To.TRACKER, effect))
                case RunStarted():
                    pass  # it is the only one
                case _:
                    pass  # a stale message, or a look at Spark's status store, which would report nothing new
        return out

    def _forget_order(self) -> None:
        """Forget the order between partitions: facts are numbered on arrival, but compared only within a partition."""
        engine = self.ledger._engine
        for stage in engine.stages.values():
            for partition in {task.partition for task in stage.tasks.values()}:
                tasks = [task for task in stage.tasks.values() if task.partition == partition]
                places = {task.start_order for task in tasks} | {task.end_order for task in tasks}
                rank = {place: at for at, place in enumerate(sorted(place for place in places if place is not None))}
                for task in tasks:
                    task.start_order = None if task.start_order is None else rank[task.start_order]
                    task.end_order = None if task.end_order is None else rank[task.end_order]
        engine._order = 100

    def _look(self, running: list[int]) -> tuple[LedgerEffect, ...]:
        """Answer the look that follows a registration which waits. It is the only step that takes time."""
        effects = self.ledger.handle(TimePassed(), LedgerConfig().heal_after_s)
        states = {**dict.fromkeys(running, TaskState.RUNNING), self.forged: TaskState.UNKNOWN}
        places = {task: TaskPlace(RUN, 0) for task in running}
        self.forged = -1
        return effects + self.ledger.handle(StatusReported({RUN: True}, states, places), LedgerConfig().heal_after_s)

    def facts(self) -> bool:
        """Whether a look is due."""
        return self.forged >= 0


class TrackerEnd:
    """The tracker's actor, with the table of the open gateways and the writes that are under way.

    ``discarding`` are aborted checkpoints that the storage has not discarded yet: a driver that started now might
    restore them, unless a higher one is complete (H64). For the checks: ``over`` are the tasks whose end was reported
    to it, ``asked`` the checkpoints that are not answered.
    """

    def __init__(self, scope: Scope) -> None:
        config = t.CheckpointConfig(
            tolerated_failures=100, mode=scope.mode, concurrent_max=scope.concurrent, hold_events=not scope.unheld
        )
        self.tracker = t.BarrierTracker(v.OPERATOR, scope.subtasks, config, barriers_apart=scope.apart)
        self.subtasks = scope.subtasks
        self.latest = -1
        self.open: set[int] = set()
        self.over: set[int] = set()
        self.asked: set[int] = set()
        self.writing: set[int] = set()
        self.savepoints: set[int] = set()
        self.discarding: set[int] = set()
        self.complete = -1

    # --- inputs ---

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        match message:
            case v.Trigger(savepoint):
                self.latest += 1
                self.asked.add(self.latest)
                if savepoint:
                    self.savepoints.add(self.latest)
                self._handle(t.CheckpointTriggered(self.latest, savepoint), out)
            case v.WriteEnds(checkpoint_id, stored):
                self.writing.discard(checkpoint_id)
                answer = (
                    t.CheckpointStored(checkpoint_id) if stored else t.CheckpointStoreFailed(checkpoint_id, "no space")
                )
                out.append((v.To.TRACKER, answer))
            case v.DiscardEnds(checkpoint_id):
                self.discarding.discard(checkpoint_id)
                out.append((v.To.TRACKER, t.CheckpointDiscarded(checkpoint_id)))
            case SubtaskFailed(attempt):
                self.over.add(attempt.task_attempt_id)
                self._handle(message, out)
            case _:
                self._handle(message, out)
        return out

    def _handle(self, message: Any, out: list[v.Output]) -> None:
        effects = self.tracker.handle(message, 0.0)
        self.tracker.check_invariants()
        for effect in effects:
            self._carry_out(effect, out)

    def _tell(self, attempt: ExecutionAttempt, message: Any, out: list[v.Output]) -> None:
        if attempt.task_attempt_id in self.open:
            out.append((v.To.GATEWAYS + attempt.task_attempt_id - 1, message))

    def _tell_all(self, message: Any, out: list[v.Output]) -> None:
        out.extend((v.To.GATEWAYS + task - 1, message) for task in sorted(self.open))

    def _close(self, attempt: ExecutionAttempt, reason: str, out: list[v.Output]) -> None:
        self._tell(attempt, g.AttemptIsOver(reason), out)
        self.open.discard(attempt.task_attempt_id)

    # --- effects of its machine ---

    def _carry_out(self, effect: t.TrackerEffect, out: list[v.Output]) -> None:
        match effect:
            case t.CloseSubtask(attempt, checkpoint_id):
                self._tell(attempt, g.CloseRequested(checkpoint_id), out)
            case t.ReopenSubtask(attempt, checkpoint_id):
                self._tell(attempt, g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.ABORTED), out)
            case t.SnapshotCoordinator(checkpoint_id):
                out.append((v.To.COORDINATOR, v.Snapshot(checkpoint_id)))
            case t.CollectRecorded():
                out.append((v.To.COORDINATOR, effect))
            case t.StoreCheckpoint(checkpoint):
                self._check(checkpoint)
                self.writing.add(checkpoint.checkpoint_id)
            case t.DiscardCheckpoint(checkpoint_id, savepoint):
                self.writing.discard(checkpoint_id)
                if not savepoint:
                    self.discarding.add(checkpoint_id)
            case t.NotifyCheckpointDiscarded(checkpoint_id):
                out.append((v.To.COORDINATOR, v.Discarded(checkpoint_id)))
            case t.NotifyCheckpointComplete() | t.NotifyCheckpointAborted() | t.EndSavepoint() | t.RefuseCheckpoint():
                self._end_checkpoint(effect, out)
            case t.RestoreAttempt(attempt=attempt):
                self.open.add(attempt.task_attempt_id)
                self._tell(attempt, effect, out)
            case t.RaiseGlobalFailure(cause):
                out.append((v.To.BRIDGE, GlobalFailureRaised(v.OPERATOR, cause)))
            case t.ReportStale():
                pass
            case _:
                self._tell_coordinator(effect, out)

    def _tell_coordinator(self, effect: t.TrackerEffect, out: list[v.Output]) -> None:
        match effect:
            case SubtaskReady(attempt):
                if attempt.task_attempt_id in self.open:
                    events_sent = self.tracker._attempts.by_task[attempt.task_attempt_id].events_restored
                    out.append((v.To.COORDINATOR, Ready(attempt, events_sent)))
            case SubtaskFinished(attempt):
                self._close(attempt, "it has finished", out)
                out.append((v.To.COORDINATOR, v.AttemptFinished(v.Slot(attempt.task_attempt_id - 1))))
            case SubtaskFailed(attempt, reason):
                self._close(attempt, str(reason), out)
                out.append((v.To.COORDINATOR, Failed(attempt)))
            case t.SubtaskResetToCheckpoint(subtask, checkpoint_id):
                out.append((v.To.COORDINATOR, Reset(subtask, checkpoint_id)))
            case _:
                raise AssertionError(f"beyond what is explored: {effect}")

    def _end_checkpoint(
        self,
        effect: t.NotifyCheckpointComplete | t.NotifyCheckpointAborted | t.EndSavepoint | t.RefuseCheckpoint,
        out: list[v.Output],
    ) -> None:
        checkpoint_id = effect.checkpoint_id
        v.demand(checkpoint_id in self.asked, "H44", f"checkpoint {checkpoint_id} is answered twice, or unasked")
        self.asked.discard(checkpoint_id)
        match effect:
            case t.NotifyCheckpointComplete():
                v.demand(checkpoint_id not in self.savepoints, "H49", f"savepoint {checkpoint_id} is completed")
                self.complete = checkpoint_id
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.COMPLETED), out)
                out.append((v.To.COORDINATOR, v.CheckpointEnded(checkpoint_id, True)))
            case t.EndSavepoint():
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.SAVEPOINT), out)
                out.append((v.To.COORDINATOR, v.SavepointEnded(checkpoint_id)))
            case t.NotifyCheckpointAborted(in_doubt=in_doubt):
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.ABORTED), out)
                out.append((v.To.COORDINATOR, v.CheckpointEnded(checkpoint_id, False, in_doubt)))
                if not in_doubt:
                    out.append((v.To.COORDINATOR, v.Discarded(checkpoint_id)))
            case t.RefuseCheckpoint():
                pass

    # --- the invariant of the contract ---

    def _check(self, checkpoint: t.CompletedCheckpoint) -> None:
        """Restore the checkpoint, and compare both ends of every channel."""
        theirs = read_counts(checkpoint.coordinator_state)
        for subtask in range(self.subtasks):
            came, went, answered = theirs.get(subtask, (0, 0, 0))
            snapshot = checkpoint.subtask_states.get(subtask, t.SubtaskSnapshot())
            name = f"checkpoint {checkpoint.checkpoint_id}, subtask {subtask}"
            sent = received = got = 0
            if snapshot.states:
                task, sent, received, got = map(int, snapshot.states[0].state.split(b":"))
                own = snapshot.states[0].subtask
                v.demand(own == subtask, "H52", f"{name} holds the state of subtask {own}")
                known = self.tracker._restore_point()
                same = known is not None and known.subtask_states.get(subtask) == snapshot
                late = task in self.over and not same
                v.demand(not late, "H44", f"{name} holds the state of task {task}, which was over")
            v.demand(went == received, "invariant", f"{name}, down: {went} events sent, {received} received")
            v.demand(answered == got, "invariant", f"{name}, down: {answered} answers given, {got} received")
            held = len(snapshot.held)
            text = f"{name}, up: {sent} events sent, {came} received and {held} stored"
            v.demand(sent == came + held, "invariant", text)
            for place, event in enumerate(snapshot.held, came):
                text = f"{name} stores {event.payload!r} as event {place}"
                v.demand(is_event_up(event.payload, event_up(subtask, place)), "H31", text)
                v.demand(event.is_request == event.payload.startswith(REQUEST), "H73", text)
            v.demand(snapshot.events_sent == came, "H32", f"{name}: {snapshot.events_sent} events left, {came} came")

    def facts(self) -> TrackerFacts:
        return TrackerFacts(self)


class TrackerFacts:
    """The parts of the tracker's state that steps depend on."""

    __slots__ = ("abortable", "discarding", "idle", "open", "restorable", "writing")

    def __init__(self, end: TrackerEnd) -> None:
        self.open = frozenset(end.open)
        self.writing = tuple(sorted(end.writing))
        self.discarding = tuple(sorted(end.discarding))
        self.restorable = frozenset(n for n in end.discarding | end.writing if n > end.complete) - end.savepoints
        self.abortable = tuple(t.AbortRequested(checkpoint_id, "asked for") for checkpoint_id in sorted(end.asked))
        self.idle = not end.asked and not end.tracker.pending_ids and end.tracker.phase.name == "IDLE"
