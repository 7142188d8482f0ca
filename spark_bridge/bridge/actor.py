# SPDX-License-Identifier: Apache-2.0

"""The bridge: facts from Spark and messages from tasks in, decisions about execution attempts out.

``BridgeActor`` owns the application's one ``AttemptLedger``. It feeds the ledger, hands each decision to the operator
that it concerns, and carries out what the ledger asks of Spark: kill a task, cancel a job, query Spark's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors import ActorCancelled, ActorContext, ActorRef, DirectActor, Signal, Terminated
from actors.coordination.engine.connection import AttemptConnection
from actors.coordination.engine.deadline import DeadlineTimer
from actors.coordination.engine.messages import LedgerDecided, TrackerMessage
from actors.repeated_lines import LimitedLog
from protocol.attempts import (
    AttemptAccepted,
    AttemptLedger,
    CancelJobs,
    ConnectionExpired,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    OperatorRemoved,
    OperatorReset,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.describing import is_a
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import EngineFact, FactsDropped, JobStarted
from protocol.machine import TimePassed
from protocol.wire.messages import RefusalCode, Refused, Register
from spark_bridge.bridge.messages import (
    AddOperator,
    AwaitRunsOver,
    BridgeMessage,
    FailRuns,
    InheritRuns,
    RegistrationAbandoned,
    RegistrationReceived,
    RemoveOperator,
    StopActions,
    UnknownAttemptResumed,
    ViewAttempts,
    ViewRun,
)
from spark_bridge.bridge.relay import Relay, RelayedFact
from spark_bridge.bridge.runs import InheritedRuns, JobsOfAction, RunningJobs
from spark_bridge.bridge.spark_commands import CancelCommand, CommandFailed, KillCommand, SparkCommands, WatchCommand
from spark_bridge.common.errors import OperatorBroken


class BridgeActor(DirectActor[BridgeMessage]):
    """See the module. It keeps ``running`` up to date."""

    def __init__(
        self,
        config: LedgerConfig,
        relay: Callable[[], Relay],
        *,
        running: RunningJobs | None = None,
    ) -> None:
        self._ledger = AttemptLedger(config)
        self._relay = relay
        self._trackers: dict[str, ActorRef[TrackerMessage]] = {}
        self._watched: dict[ActorRef[TrackerMessage], AddOperator] = {}
        self._broken: dict[str, str] = {}  # by operator: why it has ended, until it is removed
        self._registering: dict[int, tuple[AttemptConnection, Register]] = {}
        self._running = running or RunningJobs()
        self._awaiting_end: list[AwaitRunsOver] = []
        self._jobs: dict[str, JobsOfAction] = {}
        self._warned_of_several: set[str] = set()
        self._deadline = DeadlineTimer()
        self._inherited = InheritedRuns()

    async def started(self, context: ActorContext[BridgeMessage]) -> None:
        self._peer_log = LimitedLog(context.log, context.clock)
        self._commands = SparkCommands(self._relay, context, self._peer_log)

    async def signal(self, context: ActorContext[BridgeMessage], signal: Signal) -> None:
        """An operator's actors have ended: with an error that no user code raised, unless they were stopped (H165)."""
        if not isinstance(signal, Terminated):
            return
        added = self._watched.pop(signal.ref)
        cause = signal.cause
        if cause is None or is_a(cause, ActorCancelled) or self._trackers.get(added.operator_id) != signal.ref:
            return
        error = OperatorBroken.because(added.operator_id, cause)
        context.log.error("operator broken", operator_id=added.operator_id, error=str(error), exc_info=cause)
        self._trackers.pop(added.operator_id)
        self._broken[added.operator_id] = str(error)
        added.broken(error)
        now = context.clock.now()
        self._carry_out(context, self._ledger.handle(GlobalFailureRaised(added.operator_id, str(error)), now), None)
        self._deadline.arm(context, self._ledger.next_deadline(), now)

    async def stopped(self, context: ActorContext[BridgeMessage], cause: BaseException | None) -> None:
        self._peer_log.close()

    def handle(self, context: ActorContext[BridgeMessage], message: BridgeMessage) -> None:
        now = context.clock.now()
        match message:
            case RelayedFact(fact, callback_us):
                self._hear(context, fact)
                self._carry_out(context, self._ledger.handle(fact, now), callback_us)
            case RegistrationReceived():
                self._register(context, message, now)
            case RegistrationAbandoned(connection_id):
                self._abandon_registration(context, connection_id, now)
            case AddOperator() | RemoveOperator() | AwaitRunsOver() | FailRuns() | StopActions() | InheritRuns():
                self._handle_driver(context, message, now)
            case ViewRun(operator_id, reply_to):
                reply_to.answer(self._ledger.view_run(operator_id))
                return
            case ViewAttempts(operator_id, first, count, known, view_to):
                view_to.answer(self._ledger.view_attempts(operator_id, first, count, known))
                return
            case UnknownAttemptResumed(task_attempt_id):
                kill = KillTask(task_attempt_id, "the sidecar was started again: the attempt's coordinator is gone")
                self._commands.ask(kill)
            case CommandFailed() | KillCommand() | CancelCommand() | WatchCommand():
                self._commands.handle(message)
            case _:
                if isinstance(message, TimePassed):
                    self._deadline.fired()
                self._carry_out(context, self._ledger.handle(message, now), None)
        self._deadline.arm(context, self._ledger.next_deadline(), now)
        if self._awaiting_end:
            self._answer_those_who_await_the_end()

    def _hear(self, context: ActorContext[BridgeMessage], fact: EngineFact) -> None:
        self._running.hear(fact)
        match fact:
            case JobStarted(job_id=job_id, action=action):
                if why := self._running.why_stopped(action):
                    self._commands.ask(CancelJobs((job_id,), why))
            case FactsDropped(count):
                self._peer_log.warning("Spark facts dropped", count=count)

    def _handle_driver(
        self,
        context: ActorContext[BridgeMessage],
        message: AddOperator | RemoveOperator | AwaitRunsOver | FailRuns | StopActions | InheritRuns,
        now: float,
    ) -> None:
        """Handle what the driver's half of the sidecar asks for."""
        match message:
            case AddOperator():
                self._add_operator(context, message, now)
            case RemoveOperator(operator_id, reply_to):
                self._carry_out(context, self._ledger.handle(OperatorRemoved(operator_id), now), None)
                self._trackers.pop(operator_id, None)  # only now: it is told that its run has ended
                self._broken.pop(operator_id, None)
                reply_to.answer(None)
            case AwaitRunsOver():
                self._awaiting_end.append(message)
            case FailRuns(cause, operator_ids):
                for operator_id in self._running.operator_ids:
                    if operator_ids is None or operator_id in operator_ids:
                        failure = GlobalFailureRaised(operator_id, cause)
                        self._carry_out(context, self._ledger.handle(failure, now), None)
            case StopActions(cause, action_ids):
                self._commands.ask(CancelJobs(self._running.stop_actions(action_ids, cause), cause))
            case InheritRuns(runs):
                self._inherited = runs
                for job_id, stage_ids in runs.job_stages().items():
                    started = JobStarted(job_id, stage_ids)
                    self._running.hear(started)
                    self._carry_out(context, self._ledger.handle(started, now), None)

    def _answer_those_who_await_the_end(self) -> None:
        waiting, self._awaiting_end = self._awaiting_end, []
        running, stopped_jobs = self._running.operator_ids, self._running.stopped_jobs
        for request in waiting:
            if request.operator_ids is None:
                goes_on = bool(running or stopped_jobs)
            else:
                jobs = self._running.jobs_of(request.action_ids)
                goes_on = bool(jobs) or not request.operator_ids.isdisjoint(running)
            if goes_on:
                self._awaiting_end.append(request)
            elif request.reply_to.open:
                request.reply_to.answer(None)

    def _add_operator(self, context: ActorContext[BridgeMessage], message: AddOperator, now: float) -> None:
        added = OperatorAdded(message.operator_id, message.parallelism, message.allow_fewer)
        try:
            effects = self._ledger.handle(added, now)
        except LocalProtocolError as error:
            message.reply_to.fail(error)
            return
        self._trackers[message.operator_id] = message.tracker_ref
        self._watched[message.tracker_ref] = message
        context.watch(message.tracker_ref)
        self._carry_out(context, effects, None)
        message.reply_to.answer(None)

    def _register(self, context: ActorContext[BridgeMessage], message: RegistrationReceived, now: float) -> None:
        connection_id = message.connection.connection_id
        self._registering[connection_id] = (message.connection, message.message)
        if why := self._why_refused(message.message):
            task_attempt_id = message.message.task_attempt_id
            self._refuse(
                context, RefuseRegistration(connection_id, task_attempt_id, RefusalCode.COORDINATOR_FAILED, why)
            )
            return
        try:
            effects = self._ledger.handle(RegistrationArrived(connection_id, message.message), now)
        except RemoteProtocolError as error:
            self._peer_log.warning("invalid registration refused", error=str(error))
            del self._registering[connection_id]
            message.connection.close(flush=False)
        else:
            if self._ledger.waits_for_facts_of(message.message):
                self._commands.watch(message.message.run_id, message.message.task_attempt_id)
            self._carry_out(context, effects, None)

    def _why_refused(self, register: Register) -> str:
        """Why a task is not to run, whatever the ledger knows of it; empty if it may."""
        if why := self._running.why_stopped(register.action):
            return why  # its job is being cancelled
        self._running.registered(register.run_id, register.action)
        if register.operator_id in self._broken:
            return self._broken[register.operator_id]
        why, job_ids = self._inherited.why_not_resumable(register.run_id)
        if why and self._running.mark_failed(register.run_id, register.operator_id):
            self._commands.ask(CancelJobs(job_ids, why))
        return why

    def _abandon_registration(self, context: ActorContext[BridgeMessage], connection_id: int, now: float) -> None:
        abandoned = self._registering.pop(connection_id, None)
        if abandoned is not None:
            register = abandoned[1]
            expired = ConnectionExpired(register.operator_id, register.task_attempt_id)
            self._carry_out(context, self._ledger.handle(expired, now), None)

    def _carry_out(
        self,
        context: ActorContext[BridgeMessage],
        effects: Sequence[LedgerEffect],
        callback_us: int | None,
    ) -> None:
        for effect in effects:
            match effect:
                case AttemptAccepted(connection_id=connection_id, attempt=attempt):
                    connection, _ = self._registering.pop(connection_id)
                    self._see_several_jobs(context, attempt.operator_id, effect)
                    self._tell_operator(attempt.operator_id, LedgerDecided(effect, callback_us, connection))
                case SubtaskReady(attempt) | SubtaskFailed(attempt) | SubtaskFinished(attempt):
                    self._tell_operator(attempt.operator_id, LedgerDecided(effect, callback_us))
                case SubtaskReset() | OperatorReset() | RunStarted() | RunEnded():
                    self._running.note(effect)
                    action = ""
                    if isinstance(effect, RunStarted):
                        action = self._running.action_of(effect.operator_id)
                    if isinstance(effect, RunStarted | RunEnded):
                        self._see_several_jobs(context, effect.operator_id, effect)
                    if isinstance(effect, RunEnded):
                        self._see_missing(context, effect)
                    self._tell_operator(effect.operator_id, LedgerDecided(effect, callback_us, action=action))
                case RefuseRegistration():
                    self._refuse(context, effect)
                case ReportStale(what, operator_id, task_attempt_id):
                    context.log.debug(
                        "stale input ignored", what=what, operator_id=operator_id, task_attempt_id=task_attempt_id
                    )
                case KillTask() | CancelJobs() | QueryStatus():
                    self._commands.ask(effect)
                case _:
                    raise TypeError(f"unknown effect of the ledger: {effect!r}")

    def _see_several_jobs(
        self,
        context: ActorContext[BridgeMessage],
        operator_id: str,
        effect: AttemptAccepted | RunStarted | RunEnded,
    ) -> None:
        """Warn once if an action runs job after job, each over other partitions, as ``take`` does (H55)."""
        jobs = self._jobs.setdefault(operator_id, JobsOfAction())
        jobs.note(effect)
        if jobs.count < 2 or operator_id in self._warned_of_several:
            return
        self._warned_of_several.add(operator_id)
        context.log.warning(
            "action ran several jobs over operator",
            operator_id=operator_id,
            hint="take(), first(), show(), isEmpty() and limit() run job after job, each over some of the partitions. "
            "Each job is a run: a coordinator that is built for each run has seen only the last one. Use an action "
            "over all partitions, such as collect(), or cache() the output and count() it first",
        )

    def _see_missing(self, context: ActorContext[BridgeMessage], ended: RunEnded) -> None:
        """Warn if some tasks of a stage had nothing of the operator, as those of the other side of a union (H58)."""
        if ended.missing:
            context.log.warning(
                "run ended without some of its subtasks",
                operator_id=ended.operator_id,
                missing=ended.missing,
                hint="some tasks of its stage succeeded without the operator. If union() has put another RDD into the "
                "stage, coordinate the operator with the number of partitions of the RDD that has it, and call "
                "repartition() with this number after its subtasks and before the union(). It is not a mistake if "
                "Spark had kept a part of a cached output, or if what follows the operator did not read its outputs",
            )

    def _refuse(self, context: ActorContext[BridgeMessage], effect: RefuseRegistration) -> None:
        self._peer_log.warning(
            "registration refused",
            task_attempt_id=effect.task_attempt_id,
            code=effect.code.name,
            reason=effect.message,
        )
        entry = self._registering.pop(effect.connection_id, None)
        if entry is not None:
            connection = entry[0]
            connection.send(Refused(effect.task_attempt_id, effect.code, effect.message))
            connection.close()

    def _tell_operator(self, operator_id: str, message: LedgerDecided) -> None:
        tracker_ref = self._trackers.get(operator_id)
        if tracker_ref is not None:
            tracker_ref.tell_direct(message)
