"""The actor around one ``BarrierTracker``: the root of one operator's actors.

Every decision of the attempt ledger about this operator passes through here on its way to the coordinator, so that
one mailbox fixes the order of checkpoints against failures and resets (H16, H18). It is the parent of the
coordinator and of every gateway; they end with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from actors import Actor, ActorContext, ActorRef, Background, MailboxConfig, Reply
from actors.coordination.connection import AttemptConnection
from actors.coordination.coordinator import CoordinatorActor
from actors.coordination.deadline import DeadlineTimer
from actors.coordination.gateway import GatewayActor, GatewayHandle, SendBudget
from actors.coordination.interface import OperatorCoordinator
from actors.coordination.messages import (
    AttachConnection,
    CoordinatorMessage,
    GatewayMessage,
    LedgerDecided,
    NotifyAborted,
    NotifyCompleted,
    RequestCheckpoint,
    ResetToCheckpoint,
    RunHasEnded,
    StartCoordinator,
    StartOperator,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
    TakeSnapshot,
    TrackerMessage,
)
from actors.coordination.statistics import OperatorStatistics
from protocol.attempts import (
    AcceptAttempt,
    AnnounceFailed,
    AnnounceReady,
    EndRun,
    FinishAttempt,
    GlobalFailureRaised,
    LedgerEffect,
    LedgerInput,
    ResetOperator,
    ResetSubtask,
    StartRun,
)
from protocol.barrier_tracker import (
    AbortCheckpoint,
    AttemptAccepted,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    BarrierTracker,
    CheckpointConfig,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompleteCheckpoint,
    CompletedCheckpoint,
    DiscardCheckpoint,
    OperatorResetRequired,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    RunEnded,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskResetRequired,
    TellFailed,
    TellReady,
    TellReset,
    TellResetToCheckpoint,
    TellRunEnded,
    TrackerEffect,
    TrackerInput,
)
from protocol.errors import AttemptOver
from protocol.gateway_types import (
    AttemptIsOver,
    BarrierRequested,
    CheckpointOver,
    CloseRequested,
    GatewayLimits,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import Registered, RestoreMode

UNBOUNDED = MailboxConfig(capacity=None)
"""What the protocol itself bounds (H27) needs no second bound in the mailbox."""


class CheckpointFailed(Exception):
    """A checkpoint was aborted; the message says why."""


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """How one operator is coordinated. Times in seconds."""

    operator_id: str
    parallelism: int
    mode: RestoreMode = RestoreMode.BATCH
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class OperatorPorts:
    """The operator's doors to the engine's side. All are called on the event loop.

    ``report`` takes what the attempt ledger must hear. ``gateway_opened`` and ``gateway_closed`` tell whoever routes
    connections which actor serves an attempt, and until when. ``store`` makes a checkpoint durable or raises;
    ``discard`` removes one that is not wanted any more, whole or in part; what it raises is logged. ``failed`` hears
    the first cause of each global failure.
    """

    report: Callable[[LedgerInput], None]
    gateway_opened: Callable[[ExecutionAttempt, ActorRef[GatewayMessage], AttemptConnection], None]
    gateway_closed: Callable[[ExecutionAttempt], None]
    store: Callable[[CompletedCheckpoint], Awaitable[None]]
    discard: Callable[[int], Awaitable[None]]
    failed: Callable[[BaseException], None]


@dataclass(slots=True)
class _Gateway:
    ref: ActorRef[GatewayMessage]
    budget: SendBudget
    handle: GatewayHandle


class BarrierTrackerActor(Actor[TrackerMessage]):
    """See the module."""

    def __init__(
        self,
        coordinator: OperatorCoordinator,
        config: OperatorConfig,
        ports: OperatorPorts,
        statistics: OperatorStatistics,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._ports = ports
        self._statistics = statistics
        self._machine = BarrierTracker(config.operator_id, config.parallelism, config.checkpoint)
        self._gateways: dict[int, _Gateway] = {}
        self._accepting: dict[int, AttemptConnection] = {}
        self._requests: dict[int, Reply[int]] = {}
        self._storing: Background | None = None
        self._last_checkpoint_id = 0
        self._failed = False  # a global failure is under way: its first cause was told
        self._deadline = DeadlineTimer()
        self._coordinator_ref: ActorRef[CoordinatorMessage]

    async def started(self, context: ActorContext[TrackerMessage]) -> None:
        self._coordinator_ref = context.spawn(
            lambda: CoordinatorActor(
                self._coordinator,
                operator_id=self._config.operator_id,
                parallelism=self._config.parallelism,
                mode=self._config.mode,
                snapshot_timeout_s=self._config.snapshot_timeout_s,
                report=self._ports.report,
                tracker_ref=context.self_ref,
                statistics=self._statistics,
                on_failure=self._hear_failure,
            ),
            name="coordinator",
            mailbox=UNBOUNDED,
        )

    async def receive(self, context: ActorContext[TrackerMessage], message: TrackerMessage) -> None:
        callback_us: int | None = None
        match message:
            case StartOperator(reply_to):
                self._coordinator_ref.tell(StartCoordinator(reply_to))
                return
            case RequestCheckpoint(reply_to):
                self._last_checkpoint_id += 1
                self._requests[self._last_checkpoint_id] = reply_to
                machine_input: TrackerInput = CheckpointTriggered(self._last_checkpoint_id)
            case LedgerDecided(effect, callback_us, connection):
                translated = self._translate(effect, connection)
                if translated is None:
                    return
                machine_input = translated
            case _:
                if isinstance(message, TimePassed):
                    self._deadline.fired()
                machine_input = message
        now = context.clock.now()
        self._carry_out(context, self._machine.handle(machine_input, now), callback_us)
        self._deadline.arm(context, self._machine.next_deadline(), now)

    def _translate(self, effect: LedgerEffect, connection: AttemptConnection | None) -> TrackerInput | None:
        """A decision of the ledger as a fact for the tracker."""
        match effect:
            case AcceptAttempt(attempt=attempt, mode=mode):
                assert connection is not None
                self._accepting[attempt.task_attempt_id] = connection
                return AttemptAccepted(attempt, mode)
            case AnnounceReady(attempt):
                return AttemptReady(attempt)
            case AnnounceFailed(attempt, reason):
                return AttemptFailed(attempt, reason)
            case FinishAttempt(attempt):
                self._close_gateway(attempt, "it has finished")
                self._coordinator_ref.tell(SubtaskFinished(attempt))
                return AttemptFinished(attempt)
            case ResetSubtask(subtask=subtask):
                return SubtaskResetRequired(subtask)
            case ResetOperator(cause=cause):
                return OperatorResetRequired(cause)
            case EndRun(run_id=run_id, succeeded=succeeded, reason=reason_text):
                return RunEnded(run_id, succeeded, reason_text)
            case StartRun():
                return None
            case _:
                raise TypeError(f"no decision about an operator: {effect!r}")

    def _carry_out(
        self,
        context: ActorContext[TrackerMessage],
        effects: Sequence[TrackerEffect],
        callback_us: int | None,
    ) -> None:
        for effect in effects:
            match effect:
                case CloseSubtask(attempt, checkpoint_id):
                    self._tell_gateway(attempt, CloseRequested(checkpoint_id))
                case SendBarrier(attempt, checkpoint_id):
                    self._tell_gateway(attempt, BarrierRequested(checkpoint_id))
                case ReopenSubtask(attempt, checkpoint_id):
                    self._tell_gateway(attempt, CheckpointOver(checkpoint_id, False))
                case SnapshotCoordinator(checkpoint_id):
                    self._coordinator_ref.tell(TakeSnapshot(checkpoint_id))
                case StoreCheckpoint(checkpoint):
                    self._store(context, checkpoint)
                case CompleteCheckpoint(checkpoint_id):
                    self._end_checkpoint(checkpoint_id, None)
                case AbortCheckpoint(checkpoint_id, reason):
                    context.log.info("checkpoint aborted", checkpoint_id=checkpoint_id, reason=reason)
                    self._end_checkpoint(checkpoint_id, reason)
                case RefuseCheckpoint(checkpoint_id, reason):
                    self._answer_request(checkpoint_id, reason)
                case DiscardCheckpoint(checkpoint_id):
                    self._discard(context, checkpoint_id)
                case ReportStale(what):
                    context.log.debug("stale, ignored", what=what)
                case RaiseGlobalFailure(cause):
                    context.log.error("too many checkpoints failed", cause=cause)
                    self._hear_failure(CheckpointFailed(cause))
                    self._ports.report(GlobalFailureRaised(self._config.operator_id, cause))
                case RestoreAttempt():
                    self._open_gateway(context, effect)
                case _:
                    self._tell_coordinator(effect, callback_us)

    def _tell_coordinator(self, effect: TrackerEffect, callback_us: int | None) -> None:
        match effect:
            case TellReady(attempt):
                gateway = self._gateways.get(attempt.task_attempt_id)
                if gateway is not None:  # else it finished while its readiness was withheld, and is not alive (H11)
                    self._coordinator_ref.tell(SubtaskReady(attempt, gateway.handle, gateway.ref))
            case TellFailed(attempt, reason):
                self._close_gateway(attempt, f"{reason.kind.name.lower()}: {reason.text}")
                self._coordinator_ref.tell(SubtaskFailed(attempt, reason, callback_us))
            case TellReset(subtask, checkpoint_id):
                self._coordinator_ref.tell(SubtaskReset(subtask, checkpoint_id, callback_us))
            case TellResetToCheckpoint(checkpoint_id, state):
                self._failed = False
                self._coordinator_ref.tell(ResetToCheckpoint(checkpoint_id, state))
            case TellRunEnded(run_id, succeeded, reason_text):
                for gateway in list(self._gateways.values()):
                    self._close_gateway(gateway.handle.attempt, "the run has ended")
                self._coordinator_ref.tell(RunHasEnded(run_id, succeeded, reason_text, callback_us))
            case _:
                raise TypeError(f"no effect of a tracker: {effect!r}")

    def _open_gateway(self, context: ActorContext[TrackerMessage], effect: RestoreAttempt) -> None:
        attempt = effect.attempt
        connection = self._accepting.pop(attempt.task_attempt_id)
        limits = self._config.gateway
        registered = Registered(
            attempt.task_attempt_id,
            attempt.attempt,
            effect.checkpoint_id,
            effect.state,
            effect.held,
            limits.reconnect_timeout_s,
            limits.upward_events_max,
            limits.upward_bytes_max,
        )
        budget = SendBudget(limits.events_max, limits.bytes_max)
        ref = context.spawn(
            lambda: GatewayActor(
                attempt,
                limits,
                registered,
                budget=budget,
                coordinator_ref=self._coordinator_ref,
                tracker_ref=context.self_ref,
                report=self._ports.report,
                statistics=self._statistics,
            ),
            name=f"gateway-{attempt.subtask}-{attempt.attempt}",
            mailbox=UNBOUNDED,
            log_context={
                "subtask": attempt.subtask,
                "attempt": attempt.attempt,
                "task_attempt_id": attempt.task_attempt_id,
            },
        )
        handle = GatewayHandle(attempt, ref, budget, context.clock.now)
        self._gateways[attempt.task_attempt_id] = _Gateway(ref, budget, handle)
        self._statistics.attempts += 1
        ref.tell(AttachConnection(connection, None))
        self._ports.gateway_opened(attempt, ref, connection)

    def _close_gateway(self, attempt: ExecutionAttempt, reason: str) -> None:
        """From here on the coordinator's sends to the attempt fail at once, before it hears why (H14, H26)."""
        gateway = self._gateways.pop(attempt.task_attempt_id, None)
        if gateway is not None:
            gateway.budget.end(AttemptOver(f"{attempt} is over: {reason}"))
            gateway.ref.tell(AttemptIsOver(reason))
            self._ports.gateway_closed(attempt)

    def _tell_gateway(self, attempt: ExecutionAttempt, message: GatewayMessage) -> None:
        gateway = self._gateways.get(attempt.task_attempt_id)
        if gateway is not None:
            gateway.ref.tell(message)

    def _end_checkpoint(self, checkpoint_id: int, abort_reason: str | None) -> None:
        for gateway in self._gateways.values():
            gateway.ref.tell(CheckpointOver(checkpoint_id, abort_reason is None))
        notify = NotifyCompleted if abort_reason is None else NotifyAborted
        self._coordinator_ref.tell(notify(checkpoint_id))
        self._answer_request(checkpoint_id, abort_reason)

    def _answer_request(self, checkpoint_id: int, failure: str | None) -> None:
        request = self._requests.pop(checkpoint_id, None)
        if request is None:
            return
        if failure is None:
            request.answer(checkpoint_id)
        else:
            request.fail(CheckpointFailed(f"checkpoint {checkpoint_id}: {failure}"))

    def _store(self, context: ActorContext[TrackerMessage], checkpoint: CompletedCheckpoint) -> None:
        checkpoint_id = checkpoint.checkpoint_id
        self._storing = context.run(
            self._ports.store,
            checkpoint,
            on_result=lambda _: CheckpointStored(checkpoint_id),
            on_error=lambda error: CheckpointStoreFailed(checkpoint_id, f"{type(error).__name__}: {error}"),
        )

    def _discard(self, context: ActorContext[TrackerMessage], checkpoint_id: int) -> None:
        if self._storing is not None:
            self._storing.cancel()
            self._storing = None

        async def discard() -> None:
            try:
                await self._ports.discard(checkpoint_id)
            except Exception:  # what is left over is refused or overwritten by the storage; nobody fails for it (H48)
                context.log.exception("discarding a checkpoint failed", checkpoint_id=checkpoint_id)

        context.run(discard)

    def _hear_failure(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._ports.failed(error)


__all__ = [
    "BarrierTrackerActor",
    "CheckpointFailed",
    "OperatorConfig",
    "OperatorPorts",
]
