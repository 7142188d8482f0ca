# SPDX-License-Identifier: Apache-2.0

"""The driver's other parts: the real ``BarrierTracker`` and ``AttemptLedger``, with their actors' surroundings."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from actors.coordination.engine.inputs import ActionId, CheckpointLabels, InputPosition
from protocol import barrier_tracker as t
from protocol import file_retention as r
from protocol.attempts import (
    AttemptAccepted,
    CancelJobs,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    OperatorReset,
    RefuseRegistration,
    RegistrationArrived,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.attempts.ledger import AttemptLedger
from protocol.barrier_tracker.pending import files_of
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.facts import JobEnded, JobStarted, StageSubmitted, StatusReported, TaskPlace, TaskState
from protocol.file_retention import FileRetention
from protocol.gateway import types as g
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.parts import positions
from protocol.wire.messages import Register
from protocol.wire.state_handles import StateHandle
from tests.exploration import vocabulary as v
from tests.exploration.coordinator_end import Failed, Ready, Reset, read_counts
from tests.exploration.scopes import Scope
from tests.exploration.subtask_end import REQUEST, RUN, check_files, event_up, is_event_up

NO_INPUT = -1
REFUSED = "the input of the run is refused"
DECISIONS = (
    v.RunStarts,
    AttemptAccepted,
    SubtaskReady,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReset,
    OperatorReset,
    RunEnded,
)
"""What the ledger decides, in the order of which the tracker's actor takes it."""


class LedgerFacts(NamedTuple):
    """The parts of the ledger's state that steps depend on. ``run``, ``input``: of the current job, or the last one."""

    look_due: bool
    run: int
    input: int
    active: bool
    succeeded: bool
    cancelled: bool


class LedgerEnd:
    """The bridge: facts and messages in, decisions about attempts out. The first facts of the first job have come.

    ``cancelled``: Spark was asked to end the job, because its input is refused.
    """

    def __init__(self, scope: Scope) -> None:
        self.mode = scope.mode
        self.subtasks = scope.subtasks
        self.several = scope.runs > 0
        self.run = self.input = 0
        self.succeeded = self.cancelled = False
        self.forged = -1  # the task id of a registration that no look has been about yet
        self.ledger = AttemptLedger()
        self.ledger.handle(OperatorAdded(v.OPERATOR, scope.subtasks), 0.0)
        self._start_job()

    def successor(self, scope: Scope) -> LedgerEnd:
        """The ledger of the next driver: no job has begun."""
        end = LedgerEnd(scope)
        end.run, end.input, end.active = self.run, self.input, False
        end.ledger = AttemptLedger()
        end.ledger.handle(OperatorAdded(v.OPERATOR, scope.subtasks), 0.0)
        return end

    def _start_job(self) -> None:
        run_id = RUN + self.run
        self.active = True
        self.ledger.handle(JobStarted(run_id, (run_id,)), 0.0)
        self.ledger.handle(StageSubmitted(run_id, 0, self.subtasks, partitions=self.subtasks), 0.0)

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        match message:
            case v.Forged(task, number):
                self.forged = task
                register = Register(task, v.OPERATOR, 0, RUN, number, self.mode, 1, "host", "3.11")
                effects = self.ledger.handle(RegistrationArrived(-1, register), 0.0)
            case v.RunBegins(input):
                self.run, self.input, self.succeeded = self.run + 1, input, False
                self._start_job()
                effects = ()
            case v.JobEnds(succeeded):
                self.active, self.succeeded, self.cancelled = False, succeeded, False
                effects = self.ledger.handle(JobEnded(RUN + self.run, succeeded), 0.0)
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
                    v.demand(connection_id == -1 or REFUSED in text, "H11", f"task {task} is refused: {text}")
                    if connection_id != -1:
                        out.append((v.To.ENGINE, task - 1))  # it fails, as the rest of its job
                case CancelJobs(_, reason):
                    v.demand(REFUSED in reason, "H45", f"the job is given up: {reason}")
                    self.cancelled = True
                case AttemptAccepted() | SubtaskReady() | SubtaskFailed() | SubtaskFinished() | SubtaskReset():
                    out.append((v.To.TRACKER, effect))
                case RunStarted() if self.several:
                    action = ActionId(f"{self.run:016x}", 0, f"input {self.input}")
                    out.append((v.To.TRACKER, v.RunStarts(str(action), self.input)))
                case OperatorReset() | RunEnded() if self.several:
                    out.append((v.To.TRACKER, effect))
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

    def facts(self) -> LedgerFacts:
        return LedgerFacts(self.forged >= 0, self.run, self.input, self.active, self.succeeded, self.cancelled)


def folder(checkpoint_id: int) -> str:
    """Where the files of a savepoint are."""
    return f"folder {checkpoint_id}/"


class TrackerEnd:
    """The tracker's actor, with the table of the open gateways and the writes that are under way.

    ``discarding`` are aborted checkpoints that the storage has not discarded yet: a driver that started now might
    restore them, unless a higher one is complete (H64). For the checks: ``over`` are the tasks whose end was reported
    to it, ``asked`` the checkpoints that are not answered.
    """

    def __init__(self, scope: Scope, restored: t.CompletedCheckpoint | None = None) -> None:
        config = t.CheckpointConfig(
            tolerated_failures=100, mode=scope.mode, concurrent_max=scope.concurrent, hold_events=not scope.unheld
        )
        self.tracker = BarrierTracker(v.OPERATOR, scope.subtasks, config, restored, barriers_apart=scope.apart)
        self.labels = CheckpointLabels(restored) if scope.runs else None
        self.parts = scope.parts
        self.files = scope.files
        self.to_copy: dict[int, tuple[StateHandle, ...]] = {}
        self.retention: FileRetention | None = None
        self.disk: frozenset[str] = frozenset()  # the files that are stored
        self.sweeps = False  # the retention waits for a list of them
        if scope.sweeps:
            self.retention = FileRetention(1)
            self._retain(r.RestoreChosen({}), r.RestoreRecorded(), r.FilesListed(()))
            self.sweeps = False
        self.held: deque[Any] = deque()  # decisions that wait for the commit of the previous run's output
        self.run_is_on = self.has_run = self.refused = False
        self.input = self.ended_well = NO_INPUT
        self.begun: dict[int, tuple[int, int]] = {}  # by checkpoint that may be restored: the two above at its start
        self.keeps = scope.restarts > 0
        self.stored = {} if restored is None else {restored.checkpoint_id: restored}
        self.subtasks = scope.subtasks
        self.latest = -1
        self.open: set[int] = set()
        self.over: set[int] = set()
        self.asked: set[int] = set()
        self.writing: set[int] = set()
        self.savepoints: set[int] = set()
        self.discarding: set[int] = set()
        self.complete = -1 if restored is None else restored.checkpoint_id

    def successor(self, scope: Scope, checkpoint_id: int) -> TrackerEnd:
        """The tracker of the next driver, which restores this checkpoint, or none."""
        end = TrackerEnd(scope, self.stored.get(checkpoint_id))
        end.latest = self.latest
        if checkpoint_id >= 0:
            end.input, end.ended_well = end.begun[checkpoint_id] = self.begun[checkpoint_id]
        return end

    # --- inputs ---

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        if self.labels is None or not isinstance(message, DECISIONS):
            self._take(message, out)
        else:
            self.held.append(message)
        while self.held and not self._must_wait(self.held[0]):
            self._decide(self.held.popleft(), out)
        return out

    def _must_wait(self, decision: Any) -> bool:
        """As in the actor: a run begins before the last output of the previous one is committed."""
        begins = isinstance(decision, v.RunStarts | OperatorReset) and not self.run_is_on
        return begins and self.tracker.final_pending and self.tracker.next_deadline() is not None

    def _decide(self, decision: Any, out: list[v.Output]) -> None:
        """As in the actor: begin or end a run for the labels, and give the decision to the machine."""
        assert self.labels is not None
        match decision:
            case v.RunStarts(action, input):
                self.run_is_on = True
                same, why = self.labels.run_begins(action)
                self.refused = bool(why)
                if why:
                    self._check_refused(input, why)
                else:
                    self.input = input
                    out.append((v.To.COORDINATOR, v.InputIs(input)))
                    self._handle(t.InputBegan(same), out)
                    if not (same or self.has_run) and self.tracker.restore_id >= 0:
                        self._handle(OperatorReset(v.OPERATOR, "another input begins"), out)
                self.has_run = True
                return
            case RunEnded(succeeded=succeeded, job_succeeded=job_succeeded):
                self.run_is_on = False
                if succeeded:
                    self.ended_well = self.input
                self.labels.run_ended(succeeded, job_succeeded)
            case AttemptAccepted() if self.refused:
                out.append((v.To.BRIDGE, GlobalFailureRaised(v.OPERATOR, REFUSED)))
                self.refused = False
        self._take(decision, out)

    def _check_refused(self, input: int, why: str) -> None:
        """Check that a run is refused only if its input was given up before, or another one is interrupted (H174)."""
        theirs, done = self.begun.get(self.complete, (NO_INPUT, NO_INPUT))
        rightly = input < theirs or (input > theirs and done < theirs)
        text = f"input {input} is refused after checkpoint {self.complete} of input {theirs}, of which {done} is done"
        v.demand(rightly, "H174", f"{text}: {why}")

    def _retain(self, *inputs: r.RetentionInput) -> None:
        """Tell the retention of files, and do what it says; only a sweep waits for its step."""
        if self.retention is None:
            return
        for input in inputs:
            for effect in self.retention.handle(input):
                match effect:
                    case r.RefuseStore():
                        v.demand(False, "H190", f"{effect}, and every task keeps the rules")
                    case r.ListFiles():
                        self.sweeps = True
                    case r.ConfirmClaim():
                        self._retain(r.ClaimConfirmed(held=True))
                    case r.DeleteFiles(names):
                        self.disk -= set(names)
                        self._retain(r.FilesDeleted())
            self.retention.check_invariants()

    def _trigger(self, savepoint: bool, out: list[v.Output]) -> None:
        self.latest += 1
        self._retain(r.CheckpointBegan(self.latest + 1))
        self.asked.add(self.latest)
        if savepoint:
            self.savepoints.add(self.latest)
        target = folder(self.latest) if savepoint and self.files else ""
        self._handle(t.CheckpointTriggered(self.latest, savepoint, target), out)

    def _take(self, message: Any, out: list[v.Output]) -> None:
        match message:
            case v.Trigger(savepoint):
                self._trigger(savepoint, out)
            case v.WriteEnds(checkpoint_id, stored):
                self.writing.discard(checkpoint_id)
                copied = {files: files._replace(manifest="copy") for files in self.to_copy.pop(checkpoint_id, ())}
                answer = (
                    t.CheckpointStored(checkpoint_id, copied)
                    if stored
                    else t.CheckpointStoreFailed(checkpoint_id, "no space")
                )
                out.append((v.To.TRACKER, answer))
            case v.FileStored(name):
                self.disk |= {name}
            case v.Sweep():
                self.sweeps = False
                self._retain(r.FilesListed(tuple(sorted(self.disk))))
            case v.DiscardEnds(checkpoint_id):
                self.discarding.discard(checkpoint_id)
                out.append((v.To.TRACKER, t.CheckpointDiscarded(checkpoint_id)))
            case SubtaskFailed(attempt):
                self.over.add(attempt.task_attempt_id)
                self._handle(message, out)
            case _:
                self._handle(message, out)

    def _handle(self, message: Any, out: list[v.Output]) -> None:
        effects = self.tracker.handle(message, 0.0)
        self.tracker.check_invariants()
        for effect in effects:
            self._carry_out(effect, out)
        if self.labels is not None:
            self.labels.see(self.tracker.pending_ids)
        if effects and isinstance(effects[-1], t.TriggerCheckpoint):
            self._trigger(False, out)

    def _tell(self, attempt: ExecutionAttempt, message: Any, out: list[v.Output]) -> None:
        if attempt.task_attempt_id in self.open:
            out.append((v.To.GATEWAYS + attempt.task_attempt_id - 1, message))

    def _tell_all(self, message: Any, out: list[v.Output]) -> None:
        out.extend((v.To.GATEWAYS + task - 1, message) for task in sorted(self.open))

    def _close(self, attempt: ExecutionAttempt, reason: str, out: list[v.Output]) -> None:
        self._retain(r.AttemptOver(attempt.task_attempt_id))
        self._tell(attempt, g.AttemptIsOver(reason), out)
        self.open.discard(attempt.task_attempt_id)

    # --- effects of its machine ---

    def _carry_out(self, effect: t.TrackerEffect, out: list[v.Output]) -> None:
        match effect:
            case t.CloseSubtask(attempt, checkpoint_id):
                self._tell(attempt, g.CloseRequested(checkpoint_id), out)
            case t.ReopenSubtask(attempt, checkpoint_id):
                self._tell(attempt, g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.ABORTED), out)
            case t.SnapshotCoordinator(checkpoint_id, target):
                if self.labels is not None:
                    self.begun[checkpoint_id] = self.input, self.ended_well
                out.append((v.To.COORDINATOR, v.Snapshot(checkpoint_id, target)))
            case t.CollectRecorded():
                out.append((v.To.COORDINATOR, effect))
            case t.StoreCheckpoint(checkpoint, savepoint, to_copy):
                self._check(checkpoint)
                if self.files:
                    self._check_copies(checkpoint, savepoint, to_copy)
                    names = self._check_disk(checkpoint)
                    self._retain(r.FilesNamed(checkpoint.checkpoint_id + 1, names))
                    self.to_copy[checkpoint.checkpoint_id] = to_copy
                self.writing.add(checkpoint.checkpoint_id)
                if self.keeps and self.labels is not None:
                    labelled = replace(checkpoint, label=self.labels.of(checkpoint.checkpoint_id))
                    self.stored[checkpoint.checkpoint_id] = labelled
            case t.DiscardCheckpoint(checkpoint_id, savepoint):
                self.writing.discard(checkpoint_id)
                self.to_copy.pop(checkpoint_id, None)
                if not savepoint:
                    self.discarding.add(checkpoint_id)
            case t.NotifyCheckpointDiscarded(checkpoint_id):
                self._retain(r.DoubtEnded(checkpoint_id + 1))
                out.append((v.To.COORDINATOR, v.Discarded(checkpoint_id)))
            case t.NotifyCheckpointComplete() | t.NotifyCheckpointAborted() | t.EndSavepoint() | t.RefuseCheckpoint():
                self._end_checkpoint(effect, out)
            case t.RestoreAttempt(attempt=attempt, states=states):
                missing = {state.files.manifest for state in states if state.files} - self.disk
                v.demand(self.retention is None or not missing, "H190", f"{attempt} is to restore {missing}")
                self.open.add(attempt.task_attempt_id)
                self._tell(attempt, effect, out)
            case t.RaiseGlobalFailure(cause):
                out.append((v.To.BRIDGE, GlobalFailureRaised(v.OPERATOR, cause)))
            case t.ReportStale() | t.TriggerCheckpoint() | t.AwaitUploads():
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
            case t.OperatorResetToCheckpoint(checkpoint_id, _, begins_again):
                out.append((v.To.COORDINATOR, v.ResetAll(checkpoint_id, begins_again)))
            case RunEnded():
                self._tell_all(g.AttemptIsOver("the run has ended"), out)
                self._retain(*map(r.AttemptOver, sorted(self.open)))
                self.open.clear()
                out.append((v.To.COORDINATOR, v.RunIsOver()))
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
                older = tuple(n + 1 for n in range(checkpoint_id))
                self._retain(r.CheckpointDurable(checkpoint_id + 1), r.RecordsRemoved(older))
                self.stored = {n: one for n, one in self.stored.items() if n >= checkpoint_id}
                self.begun = {n: one for n, one in self.begun.items() if n >= checkpoint_id}
                if self.labels is not None:
                    self.labels.complete(checkpoint_id)
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.COMPLETED), out)
                out.append((v.To.COORDINATOR, v.CheckpointEnded(checkpoint_id, True)))
            case t.EndSavepoint():
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.SAVEPOINT), out)
                out.append((v.To.COORDINATOR, v.SavepointEnded(checkpoint_id)))
            case t.NotifyCheckpointAborted(in_doubt=in_doubt):
                self._retain(r.CheckpointGivenUp(checkpoint_id + 1, in_doubt))
                self._tell_all(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.ABORTED), out)
                out.append((v.To.COORDINATOR, v.CheckpointEnded(checkpoint_id, False, in_doubt)))
                if not in_doubt:
                    out.append((v.To.COORDINATOR, v.Discarded(checkpoint_id)))
            case t.RefuseCheckpoint():
                self._retain(r.CheckpointGivenUp(checkpoint_id + 1))

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
                task, sent, received, got, _ = map(int, snapshot.states[0].state.split(b":")[:5])
                own = snapshot.states[0].subtask
                v.demand(own == subtask, "H52", f"{name} holds the state of subtask {own}")
                check_files(snapshot.states[0], self.files)
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
                v.demand(event.part == place % self.parts, "H150", text)
            v.demand(
                snapshot.events_sent == positions([len(range(part, came, self.parts)) for part in range(self.parts)]),
                "H32",
                f"{name}: {snapshot.events_sent} events left, {came} came",
            )

    def _check_disk(self, checkpoint: t.CompletedCheckpoint) -> frozenset[str]:
        """What is written is stored (H190); return the names of its files."""
        names = frozenset(files.manifest for files in files_of(checkpoint))
        missing = names - self.disk
        v.demand(self.retention is None or not missing, "H190", f"{checkpoint.checkpoint_id} needs {missing}")
        return names

    def _check_copies(
        self, checkpoint: t.CompletedCheckpoint, savepoint: bool, to_copy: tuple[StateHandle, ...]
    ) -> None:
        """What is stored needs no file of a savepoint, except its own (H193)."""
        own, name = folder(checkpoint.checkpoint_id), f"checkpoint {checkpoint.checkpoint_id}"
        for files in files_of(checkpoint):
            inside = files.manifest.startswith(own)
            v.demand(inside or not files.manifest.startswith("folder"), "H193", f"{name} has {files}")
            v.demand((files in to_copy) == (savepoint and not inside), "H193", f"{name} has {files}, copies {to_copy}")

    def facts(self) -> TrackerFacts:
        return TrackerFacts(self)


class TrackerFacts:
    """The parts of the tracker's state that steps depend on."""

    __slots__ = ("abortable", "committed", "complete", "discarding", "idle", "open", "restorable", "sweeps", "writing")

    def __init__(self, end: TrackerEnd) -> None:
        self.open = frozenset(end.open)
        self.sweeps = end.sweeps
        self.writing = tuple(sorted(end.writing))
        self.discarding = tuple(sorted(end.discarding))
        self.restorable = frozenset(n for n in end.discarding | end.writing if n > end.complete) - end.savepoints
        self.abortable = tuple(t.AbortRequested(checkpoint_id, "asked for") for checkpoint_id in sorted(end.asked))
        self.complete = end.complete
        self.committed = None if end.labels is None else InputPosition.read(end.labels.completed)
        self.idle = not end.asked and not end.held and not end.tracker.pending_ids and end.tracker.phase.name == "IDLE"
