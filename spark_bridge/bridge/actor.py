"""The bridge: Spark's facts and the tasks' own words in, decisions about execution attempts out.

``ConnectionRouter`` stands between the server and the actors: it knows which connection belongs to which gateway.
``BridgeActor`` owns the application's one ``AttemptLedger``. It feeds the ledger, hands each decision to the operator
that it concerns, and carries out what the ledger wants of Spark: kill a task, cancel a job, look at Spark's books.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from actors import ActorContext, ActorRef, DirectActor
from actors.coordination.connection import AttemptConnection
from actors.coordination.deadline import DeadlineTimer
from actors.coordination.messages import (
    AttachConnection,
    ConnectionClosed,
    GatewayMessage,
    LedgerDecided,
    MessagesArrived,
    TrackerMessage,
)
from protocol.attempts import (
    AcceptAttempt,
    AnnounceFailed,
    AnnounceReady,
    AttemptLedger,
    CancelJobs,
    ConnectionExpired,
    EndRun,
    FinishAttempt,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    OperatorRemoved,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    ResetOperator,
    ResetSubtask,
    StartRun,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import FactsDropped, JobStarted
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import RefusalCode, Refused, Register, Resume
from spark_bridge.bridge.commands import CancelCommand, CommandFailed, KillCommand, SparkCommands
from spark_bridge.bridge.messages import (
    AddOperator,
    AwaitRunsOver,
    BridgeMessage,
    FailRuns,
    InheritRuns,
    RegistrationAbandoned,
    RegistrationReceived,
    RemoveOperator,
    StrangerResumed,
)
from spark_bridge.bridge.relay import Relay, RelayedFact
from spark_bridge.bridge.takeover import InheritedRuns
from spark_bridge.driver.runs import RunningJobs
from spark_bridge.server.server import Connection

log = structlog.get_logger("headgate.bridge")


class ConnectionRouter:
    """Which gateway serves which connection. The server's handler; loop only.

    ``takes_over``: tasks of an earlier sidecar may come. Until ``attach`` they wait, and an attempt that this sidecar
    has never accepted, or that is over, is killed through Spark rather than left to fail.
    """

    def __init__(self, *, takes_over: bool = False) -> None:
        self._takes_over = takes_over
        self._early: list[tuple[Connection, Register | Resume]] = []
        self._bridge_ref: ActorRef[BridgeMessage] | None = None
        self._why_refused = "the sidecar is not running"
        self._open: dict[int, Connection] = {}
        self._by_connection: dict[int, ActorRef[GatewayMessage]] = {}
        self._by_attempt: dict[tuple[str, int], ActorRef[GatewayMessage]] = {}
        self._connection_of: dict[tuple[str, int], int] = {}  # the newest of each attempt
        self._over: set[int] = set()  # open connections whose attempt is over
        self.messages_dropped = 0

    def attach(self, bridge_ref: ActorRef[BridgeMessage]) -> None:
        """From here on registrations go to the bridge; before, they are refused, or wait where one takes over."""
        self._bridge_ref = bridge_ref
        early, self._early = self._early, []
        for connection, message in early:
            if connection.connection_id not in self._open:
                continue
            if isinstance(message, Register):
                self._register(connection, message)
            else:
                self._resume(connection, message)

    def refuse_tasks(self, why: str) -> None:
        """From here on registrations are refused, with this reason; attempts that were accepted go on."""
        self._bridge_ref, self._why_refused = None, why

    # --- the server's side ----------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self._open[connection.connection_id] = connection

    def messages_received(self, connection: Connection, messages: Sequence[Any]) -> None:
        gateway = self._by_connection.get(connection.connection_id)
        if gateway is not None:
            gateway.tell_direct(MessagesArrived(connection.connection_id, messages))
            return
        if connection.connection_id in self._over:  # a killed task may talk on for seconds (H3)
            self.messages_dropped += len(messages)
            log.debug("dropped: the attempt is over", peer=connection.peer, messages=len(messages))
            return
        first, rest = messages[0], messages[1:]
        match first:
            case Register() | Resume() if self._takes_over and self._bridge_ref is None:
                connection.identified()
                self._early.append((connection, first))  # whatever else it says is of an attempt that will be over
            case Register() if not rest and not connection.is_identified:
                connection.identified()
                self._register(connection, first)
            case Resume():
                connection.identified()
                self._resume(connection, first)
                if rest and connection.connection_id in self._by_connection:  # a refused one has no more to say
                    self.messages_received(connection, rest)
            case _:
                log.warning("connection closed: it spoke before it was registered", peer=connection.peer)
                connection.close(flush=False)

    def disconnected(self, connection: Connection, reason: str) -> None:
        self._open.pop(connection.connection_id, None)
        gateway = self._by_connection.pop(connection.connection_id, None)
        if gateway is not None:
            gateway.tell_direct(ConnectionClosed(connection.connection_id, reason))
        elif connection.connection_id in self._over:
            self._over.remove(connection.connection_id)
        elif self._bridge_ref is not None:
            self._bridge_ref.tell_direct(RegistrationAbandoned(connection.connection_id))

    # --- the operators' side --------------------------------------------------------------------------------------

    def gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self._by_attempt[attempt.operator_id, attempt.task_attempt_id] = ref
        if connection.connection_id in self._open:
            self._serve(connection.connection_id, (attempt.operator_id, attempt.task_attempt_id), ref)
        else:
            ref.tell(ConnectionClosed(connection.connection_id, "closed before the attempt was accepted"))

    def gateway_closed(self, attempt: ExecutionAttempt) -> None:
        key = (attempt.operator_id, attempt.task_attempt_id)
        self._by_attempt.pop(key, None)
        connection_id = self._connection_of.pop(key, None)
        if connection_id is not None and self._by_connection.pop(connection_id, None) is not None:
            self._over.add(connection_id)

    @property
    def gateway_count(self) -> int:
        """Execution attempts that have a gateway now."""
        return len(self._by_attempt)

    def _serve(self, connection_id: int, key: tuple[str, int], gateway: ActorRef[GatewayMessage]) -> None:
        self._by_connection[connection_id] = gateway
        self._connection_of[key] = connection_id

    def _register(self, connection: Connection, message: Register) -> None:
        if self._bridge_ref is None:
            connection.send(Refused(message.task_attempt_id, RefusalCode.SHUTTING_DOWN, self._why_refused))
            connection.close()
        else:
            self._bridge_ref.tell_direct(RegistrationReceived(connection, message))

    def _resume(self, connection: Connection, message: Resume) -> None:
        gateway = self._by_attempt.get((message.operator_id, message.task_attempt_id))
        if gateway is None and self._takes_over and self._bridge_ref is not None:
            self._over.add(connection.connection_id)  # it is not answered: the kill comes before its patience ends
            self._bridge_ref.tell_direct(StrangerResumed(message.task_attempt_id))
        elif gateway is None:
            text = f"task {message.task_attempt_id} of operator {message.operator_id!r} is over"
            connection.send(Refused(message.task_attempt_id, RefusalCode.ATTEMPT_OVER, text))
            connection.close()
        else:
            self._serve(connection.connection_id, (message.operator_id, message.task_attempt_id), gateway)
            gateway.tell_direct(AttachConnection(connection, message.received_seq))


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
        self._commands = SparkCommands(relay)
        self._trackers: dict[str, ActorRef[TrackerMessage]] = {}
        self._registering: dict[int, tuple[AttemptConnection, Register]] = {}
        self._running = running or RunningJobs()
        self._awaiting_end: list[AwaitRunsOver] = []
        self._deadline = DeadlineTimer()
        self._inherited = InheritedRuns()

    def handle(self, context: ActorContext[BridgeMessage], message: BridgeMessage) -> None:
        now = context.clock.now()
        match message:
            case RelayedFact(fact, callback_us):
                self._running.hear(fact)
                if isinstance(fact, FactsDropped):
                    context.log.warning("facts dropped; the ledger will heal", count=fact.count)
                self._carry_out(context, self._ledger.handle(fact, now), callback_us)
            case RegistrationReceived():
                self._register(context, message, now)
            case RegistrationAbandoned(connection_id):
                abandoned = self._registering.pop(connection_id, None)
                if abandoned is not None:
                    register = abandoned[1]
                    expired = ConnectionExpired(register.operator_id, register.task_attempt_id)
                    self._carry_out(context, self._ledger.handle(expired, now), None)
            case AddOperator():
                self._add_operator(context, message, now)
            case RemoveOperator(operator_id, reply_to):
                self._carry_out(context, self._ledger.handle(OperatorRemoved(operator_id), now), None)
                self._trackers.pop(operator_id, None)  # only now: it is told that its run has ended
                reply_to.answer(None)
            case AwaitRunsOver():
                self._awaiting_end.append(message)
            case FailRuns(cause, operator_ids):
                for operator_id in self._running.operator_ids:
                    if operator_ids is not None and operator_id not in operator_ids:
                        continue
                    self._carry_out(context, self._ledger.handle(GlobalFailureRaised(operator_id, cause), now), None)
            case InheritRuns(runs):
                self._inherited = runs
                for job_id, stage_ids in runs.job_stages().items():
                    started = JobStarted(job_id, stage_ids)
                    self._running.hear(started)
                    self._carry_out(context, self._ledger.handle(started, now), None)
            case StrangerResumed(task_attempt_id):
                kill = KillTask(task_attempt_id, "the sidecar was started again: this attempt's coordinator is gone")
                self._commands.ask(context, kill)
            case CommandFailed():
                self._commands.failed(context, message)
            case KillCommand() | CancelCommand():
                self._commands.send(context, message)
            case _:
                if isinstance(message, TimePassed):
                    self._deadline.fired()
                self._carry_out(context, self._ledger.handle(message, now), None)
        self._deadline.arm(context, self._ledger.next_deadline(), now)
        if self._awaiting_end:
            self._answer_those_who_await_the_end()

    def _answer_those_who_await_the_end(self) -> None:
        waiting, self._awaiting_end = self._awaiting_end, []
        running = self._running.operator_ids
        for request in waiting:
            if running if request.operator_ids is None else not request.operator_ids.isdisjoint(running):
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
        self._carry_out(context, effects, None)
        message.reply_to.answer(None)

    def _register(self, context: ActorContext[BridgeMessage], message: RegistrationReceived, now: float) -> None:
        connection_id = message.connection.connection_id
        self._registering[connection_id] = (message.connection, message.message)
        self._running.registered(message.message.run_id, message.message.action)
        cause, job_ids = self._inherited.doom(message.message.run_id)
        if cause:
            task_attempt_id = message.message.task_attempt_id
            self._refuse(
                context, RefuseRegistration(connection_id, task_attempt_id, RefusalCode.COORDINATOR_FAILED, cause)
            )
            if self._running.doom(message.message.run_id, message.message.operator_id):
                self._commands.ask(context, CancelJobs(job_ids, cause))
            return
        try:
            effects = self._ledger.handle(RegistrationArrived(connection_id, message.message), now)
        except RemoteProtocolError as error:
            context.log.warning("connection closed: a registration that makes no sense", error=str(error))
            del self._registering[connection_id]
            message.connection.close(flush=False)
        else:
            self._carry_out(context, effects, None)

    def _carry_out(
        self,
        context: ActorContext[BridgeMessage],
        effects: Sequence[LedgerEffect],
        callback_us: int | None,
    ) -> None:
        for effect in effects:
            match effect:
                case AcceptAttempt(connection_id=connection_id, attempt=attempt):
                    connection, _ = self._registering.pop(connection_id)
                    self._tell_operator(attempt.operator_id, LedgerDecided(effect, callback_us, connection))
                case AnnounceReady(attempt) | AnnounceFailed(attempt) | FinishAttempt(attempt):
                    self._tell_operator(attempt.operator_id, LedgerDecided(effect, callback_us))
                case ResetSubtask() | ResetOperator() | StartRun() | EndRun():
                    self._running.note(effect)
                    self._tell_operator(effect.operator_id, LedgerDecided(effect, callback_us))
                case RefuseRegistration():
                    self._refuse(context, effect)
                case ReportStale(what, operator_id, task_attempt_id):
                    context.log.debug(
                        "stale, ignored", what=what, operator_id=operator_id, task_attempt_id=task_attempt_id
                    )
                case KillTask() | CancelJobs() | QueryStatus():
                    self._commands.ask(context, effect)
                case _:
                    raise TypeError(f"no effect of a ledger: {effect!r}")

    def _refuse(self, context: ActorContext[BridgeMessage], effect: RefuseRegistration) -> None:
        context.log.warning(
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
