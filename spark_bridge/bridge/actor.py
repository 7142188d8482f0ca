# SPDX-License-Identifier: Apache-2.0

"""The bridge: facts from Spark and messages from tasks in, decisions about execution attempts out.

``BridgeActor`` owns the application's one ``AttemptLedger``. It feeds the ledger, hands each decision to the operator
that it concerns, and carries out what the ledger asks of Spark: kill a task, cancel a job, query Spark's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actors import ActorCancelled, ActorContext, ActorRef, DirectActor, Signal, Terminated
from actors.actor import DeadlineTimer
from actors.coordination.engine.messages import AttemptConnection, LedgerDecided, TrackerMessage
from actors.logs import LimitedLog
from protocol.attempts import (
    AttemptAccepted,
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
from protocol.attempts.ledger import AttemptLedger
from protocol.describing import is_a
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import EngineFact, FactsDropped, JobStarted
from protocol.machine import TimePassed
from protocol.wire.messages import RefusalCode, Refused, Register
from spark_bridge.bridge.messages import (
    AddOperator,
    AwaitRunsOver,
    BridgeMessage,
    CancelCommand,
    CommandFailed,
    CommandMessage,
    FailRuns,
    InheritRuns,
    KillCommand,
    RegistrationAbandoned,
    RegistrationReceived,
    RemoveOperator,
    StopActions,
    UnknownAttemptResumed,
    ViewAttempts,
    ViewRun,
    WatchCommand,
)
from spark_bridge.bridge.relay import Relay, RelayedFact, RelayStopped
from spark_bridge.bridge.runs import InheritedRuns, JobsOfAction, RunningJobs, why_worker_died
from spark_bridge.common.errors import OperatorBroken

FIRST_REPEAT_S = 0.5
REPEAT_MAX_S = 10.0
"""The pause before a command is repeated doubles each time, up to this."""


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
                        if why := why_worker_died(effect.reason):
                            context.log.warning("worker process died", operator_id=effect.operator_id, why=why)
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


class SparkCommands:
    """Sends the ledger's commands to Spark, and repeats them until Spark has accepted them. Loop only.

    If a kill or a cancellation were lost, an attempt that has been given up would stay alive and block its job, and no
    fact would ever report it (H19, H25). So a failed command is repeated at growing intervals. A query of Spark's state
    is not repeated here, because the ledger itself asks again as long as it needs the answer.

    The calls end with the actor whose ``context`` is given. A lost host can cause a line for each of its tasks, so
    ``log`` counts lines that repeat.
    """

    def __init__(self, relay: Callable[[], Relay], context: ActorContext[Any], log: LimitedLog) -> None:
        self._relay = relay
        self._context = context
        self._log = log

    def ask(self, effect: KillTask | CancelJobs | QueryStatus) -> None:
        """Send a command to Spark. The answer to a query reaches the actor as a fact."""
        match effect:
            case KillTask():
                _log_kill(self._log, effect)
                self._send(KillCommand(effect.task_attempt_id, effect.reason, effect.place))
            case CancelJobs(job_ids, reason):
                for job_id in job_ids:
                    self._log.info("job cancellation requested", job_id=job_id, reason=reason)
                    self._send(CancelCommand(job_id, reason))
            case QueryStatus(task_attempt_ids, job_ids):
                self._context.run(
                    self._relay().query_status,
                    task_attempt_ids,
                    job_ids,
                    on_result=lambda status: status,
                    on_error=lambda error: CommandFailed(effect, error),
                )

    def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Have the relay deliver the facts of a stage that runs an operator, and of a task that says it is in it."""
        self._send(WatchCommand(stage_id, task_attempt_id))

    def handle(self, message: CommandMessage) -> None:
        """Handle what ``ask`` has sent to the actor: a command that has failed, or one that is due again."""
        if isinstance(message, CommandFailed):
            self._repeat_later(message)
        else:
            self._send(message)

    def _send(self, command: KillCommand | CancelCommand | WatchCommand) -> None:
        def failed(error: Exception) -> CommandFailed:
            return CommandFailed(command, error)

        relay = self._relay()
        match command:
            case KillCommand(task_attempt_id, reason, place):
                self._context.run(relay.kill_task, task_attempt_id, reason, place, on_error=failed)
            case CancelCommand(job_id, reason):
                self._context.run(relay.cancel_job, job_id, reason, on_error=failed)
            case WatchCommand(stage_id, task_attempt_id):
                self._context.run(relay.watch, stage_id, task_attempt_id, on_error=failed)

    def _repeat_later(self, message: CommandFailed) -> None:
        command, error = message.command, message.error
        if isinstance(command, QueryStatus) or isinstance(error, RelayStopped):
            self._log.warning("Spark command failed", command=str(command), error=repr(error))
            return
        delay_s = min(FIRST_REPEAT_S * 2**command.failures, REPEAT_MAX_S)
        self._log.warning(
            "Spark command failed, retry scheduled", command=str(command), delay_s=delay_s, error=repr(error)
        )
        again = replace(command, failures=min(command.failures + 1, 32))
        self._context.timers.start(replace(again, failures=0), again, delay_s=delay_s)


def _log_kill(log: LimitedLog, kill: KillTask) -> None:
    """Log a kill, as a warning if it counts towards the limit at which the job fails (H69)."""
    who = {
        "operator_id": kill.operator_id,
        "subtask": kill.subtask,
        "attempt": kill.attempt,
        "task_attempt_id": kill.task_attempt_id,
        "reason": kill.reason,
    }
    if kill.count:
        log.warning("task kill requested", **who, kills=kill.count, kills_max=kill.limit)
    else:
        log.info("task kill requested", **who)
