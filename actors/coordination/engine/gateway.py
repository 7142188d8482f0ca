# SPDX-License-Identifier: Apache-2.0

"""The actor around a ``GatewayMachine``, and those of an operator that are open.

Each execution attempt has its own (H20), from its acceptance until it is over. The coordinator's handle bounds the
events that are accepted and not yet settled (H27), so the mailbox is bounded too.

What somebody sees who looks at a gateway comes from its ``GatewaySight``, without asking its actor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from actors import ActorContext, ActorRef, DirectActor
from actors.actor import DeadlineTimer
from actors.coordination.engine.messages import (
    AttachConnection,
    AttemptConnection,
    AttemptHint,
    CancellationArrived,
    ConnectionClosed,
    CoordinatorMessage,
    EventArrived,
    GatewayMessage,
    GatewayView,
    MessagesArrived,
    NoteAwaited,
    RequestArrived,
    RequestDeferred,
    Retire,
    SubtaskReadyWithGateway,
    TrackerMessage,
    failing,
)
from actors.coordination.engine.operator_config import UNBOUNDED, BarrierInjector, OperatorConfig, OperatorPorts
from actors.coordination.host.gateway import Announcer, AttemptSends, Confirmation, GatewayLine, SendEvent
from actors.coordination.statistics import OperatorStatistics
from actors.coordination.user_calls import is_fatal
from actors.exits import as_exception
from actors.logs import LimitedLog
from protocol.attempts import AttemptCondemned, ConnectionExpired, LedgerInput, OperatorEnded, OperatorOpened
from protocol.barrier_tracker import (
    RestoreAttempt,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskStateFailed,
    SubtaskStateStored,
)
from protocol.describing import describe
from protocol.errors import AttemptOver, LocalProtocolError, RemoteProtocolError
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.gateway.types import (
    AnswerSubmitted,
    AttemptIsOver,
    CheckpointOver,
    CloseRequested,
    ConfirmEvent,
    CutReached,
    DeliverCancellation,
    DeliverEvent,
    DeliverRequest,
    EventSubmitted,
    ExpireConnection,
    ExpireEvent,
    FailAttempt,
    FailEvent,
    GatewayEffect,
    InjectBarrier,
    PeerHeard,
    ReadyAnnounced,
    ReportAcknowledged,
    ReportClosed,
    ReportDeclined,
    ReportFinished,
    ReportOpened,
    ReportResponsive,
    ReportStateFailed,
    ReportStateStored,
    ReportSuspected,
    SendProgressed,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.parts import ONE_PART, PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.wire.messages import AttemptEnded, CoordinatorAwaited, Positions, Registered, Resumed

TAKEN_EVERY = 64
"""How many events of one batch are taken before the task is told, so that its window keeps moving."""


class GatewaySight:
    """The machine of a gateway's actor, which alone changes it, and since when each request has had no answer.

    The actor sets ``view`` to None with each message. So looking often at many gateways that are idle makes no garbage.
    Loop only.
    """

    __slots__ = ("deferred_at", "machine", "requested_at", "view")

    def __init__(self, machine: GatewayMachine) -> None:
        self.machine = machine
        self.requested_at: dict[int, float] = {}
        """When each request came that has no answer yet, by its id, oldest first; without the deferred ones."""
        self.deferred_at: dict[int, float] = {}
        """The same of those whose answer the coordinator has deferred, in the order in which it took them."""
        self.view: GatewayView | None = None

    def look(self) -> GatewayView:
        """The gateway at this moment."""
        if self.view is None:
            machine, figures = self.machine, self.machine.statistics()
            self.view = GatewayView(
                machine.state is GatewayState.ATTACHED,
                machine.ready,
                machine.heard_at,
                figures.held_events,
                figures.unconfirmed_events,
                figures.untaken_events,
                figures.held_bytes + figures.unconfirmed_bytes + figures.untaken_bytes,
                machine.unconfirmed_since,
                next(iter(self.requested_at.values()), None),
                next(iter(self.deferred_at.values()), None),
                figures.closed_for,
            )
        return self.view


class GatewayActor(DirectActor[GatewayMessage]):
    """Run one ``GatewayMachine`` and carry out its effects; see the module.

    ``registered`` is sent to the attempt when its first connection attaches. ``sight`` has the machine, and is kept up
    to date. ``line``: the way to this actor for everything whose order matters.

    ``inject_barrier``: see ``OperatorConfig``; needed only for barriers that travel apart.
    """

    def __init__(
        self,
        sight: GatewaySight,
        registered: Registered,
        *,
        sends: AttemptSends,
        coordinator_ref: ActorRef[CoordinatorMessage],
        tracker_ref: ActorRef[TrackerMessage],
        report: Callable[[LedgerInput], None],
        statistics: OperatorStatistics,
        line: GatewayLine[GatewayMessage],
        table: PartTable = ONE_PART,
        inject_barrier: BarrierInjector | None = None,
    ) -> None:
        self._outside, self._users = table.outside, table.users
        self._sight = sight
        self._machine = sight.machine
        self._attempt = self._machine.attempt
        self._requested_at = sight.requested_at
        self._deferred_at = sight.deferred_at
        self._registered = registered
        self._sends = sends
        self._coordinator_ref = coordinator_ref
        self._tracker_ref = tracker_ref
        self._report = report
        self._statistics = statistics
        self._line = line
        self._inject_barrier = inject_barrier
        self._connection: AttemptConnection | None = None
        self._unsettled: dict[int, Confirmation] = {}
        self._event_count = 0
        self._deadline = DeadlineTimer()
        self._over = False

    async def started(self, context: ActorContext[GatewayMessage]) -> None:
        self._context = context
        self._now = context.clock.now
        self._self_ref = context.self_ref
        self._log = context.log
        self._peer_log = LimitedLog(context.log, context.clock)

    def handle(self, context: ActorContext[GatewayMessage], message: GatewayMessage) -> None:
        now = self._now()
        self._sight.view = None
        act = _ACTS.get(type(message))
        if act is not None:
            act(self, message, now)
        else:
            machine_input: Any = message
            self._carry_out(self._machine.handle(machine_input, now), now)
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._deadline.arm(context, deadline, now)

    async def stopped(self, context: ActorContext[GatewayMessage], cause: BaseException | None) -> None:
        if not self._over:
            self._end(AttemptIsOver("the gateway was closed"), context.clock.now())
        self._peer_log.close()
        for confirmation in self._sends.handed_over:  # still in the mailbox, and will never be handled
            self._statistics.events_failed += self._users[confirmation.part]
            confirmation.settle(self._sends.over)
        self._sends.handed_over.clear()

    def _send_event(self, message: SendEvent, now: float) -> None:
        self._sends.handed_over.pop(0)
        self._event_count += 1
        event_id = self._event_count
        self._unsettled[event_id] = message.confirmation
        submitted = EventSubmitted(event_id, message.payload, message.loss_tolerant, message.urgent, message.part)
        effects = self._machine.handle(submitted, now)
        self._statistics.parts[message.part].events_sent += 1
        if not effects:
            self._statistics.events_held += self._users[message.part]
        # A single event leaves immediately. If others are unsettled, it waits for more of the same turn of the loop.
        self._carry_out(effects, now, immediately=len(self._unsettled) == 1 or message.urgent)

    def _take_messages(self, message: MessagesArrived, now: float) -> None:
        connection = self._connection
        if connection is None or connection.connection_id != message.connection_id:
            self._statistics.messages_dropped += len(message.messages)
            return
        self._carry_out(self._machine.handle_batch(message.messages, now), now)

    def _attach(self, message: AttachConnection, now: float) -> None:
        connection, received_seq = message.connection, message.received_seq
        if self._over:
            connection.send(AttemptEnded(self._attempt.task_attempt_id, "the attempt is over"))
            connection.close()
            return
        try:
            effects = self._machine.handle(ConnectionAttached(received_seq or 0), now)
        except RemoteProtocolError as error:  # drop only the new connection: the previous one may be fine
            self._peer_log.warning("connection dropped", why=str(error))
            connection.close(flush=False)
            return
        if self._connection is not None:
            self._connection.close(flush=False)
        self._connection = connection
        try:
            if received_seq is None:
                connection.send(self._registered)
            else:
                connection.send(Resumed(self._attempt.task_attempt_id, self._machine.resume_seq))
        except LocalProtocolError as error:  # the states of several subtasks may exceed one frame (H52)
            self._give_up(f"checkpoint {self._registered.checkpoint_id} cannot be restored: {error}", unusable=True)
            return
        self._carry_out(effects, now)

    def _lose_connection(self, message: ConnectionClosed, now: float) -> None:
        if self._connection is not None and self._connection.connection_id == message.connection_id:
            self._log.debug("connection closed", reason=message.reason)
            self._connection = None
            self._carry_out(self._machine.handle(ConnectionLost(), now), now)

    def _drop_connection(self, why: str, now: float) -> None:
        """The peer broke the protocol. A resume repairs what can be repaired (H24)."""
        if self._connection is not None:
            self._peer_log.warning("connection dropped", why=why)
            self._connection.close(flush=False)
            self._connection = None
            self._carry_out(self._machine.handle(ConnectionLost(), now), now)

    def _submit_answer(self, message: AnswerSubmitted, now: float) -> None:
        requested_at = self._requested_at.pop(message.request_id, None)
        if requested_at is not None:
            self._statistics.request_us.record((now - requested_at) * 1e6)
        else:
            self._deferred_at.pop(message.request_id, None)
        self._carry_out(self._machine.handle(message, now), now)

    def _defer_request(self, message: RequestDeferred, now: float) -> None:
        """Only for people who look, and for ``request_us``: how long a deferred answer takes is the user's decision."""
        requested_at = self._requested_at.pop(message.request_id, None)
        if requested_at is not None:
            self._deferred_at[message.request_id] = requested_at

    def _write_immediately(
        self, message: ReadyAnnounced | CloseRequested | CutReached | CheckpointOver, now: float
    ) -> None:
        """The task waits until it is ready; and it takes its step of a checkpoint while the others are being told."""
        self._carry_out(self._machine.handle(message, now), now, immediately=True)

    def _take_time(self, message: TimePassed, now: float) -> None:
        self._deadline.fired()
        if self._machine.wants_heartbeats and self._connection is not None and self._connection.heard():
            self._carry_out(self._machine.handle(PeerHeard(), now), now)
        if self._connection is not None and self._connection.progressed():
            self._carry_out(self._machine.handle(SendProgressed(), now), now)
        self._carry_out(self._machine.handle(message, now), now)

    def _on_attempt_over(self, message: AttemptIsOver, now: float) -> None:
        self._end(message, now)
        self._self_ref.tell(Retire())  # after the last accepted events, so that each is settled

    def _send_note(self, message: NoteAwaited, now: float) -> None:
        """Outside the stream: without a connection the note is dropped, and a later one follows if needed."""
        if self._connection is not None:
            task_attempt_id = self._attempt.task_attempt_id
            self._connection.send(CoordinatorAwaited(task_attempt_id, message.call, message.awaited_s, message.place))

    def _retire(self, message: Retire, now: float) -> None:
        self._context.stop()

    def _end(self, message: AttemptIsOver, now: float) -> None:
        """The attempt is over: unsettled events fail (H26), and the task is told to stop sending (spark-facts 16)."""
        if self._over:
            return
        reason = message.reason
        self._over = True
        self._sends.end(AttemptOver(f"{self._attempt} is over: {reason}"))
        self._carry_out(self._machine.handle(message, now), now)
        self._hang_up(reason)

    def _give_up(self, reason: str, *, silent: bool = False, unusable: bool = False) -> None:
        attempt = self._attempt
        self._report(AttemptCondemned(attempt.operator_id, attempt.task_attempt_id, reason, silent, unusable))
        self._hang_up(reason)

    def _hang_up(self, reason: str) -> None:
        """The machine has given the attempt up and confirms nothing more: notify the task so that it stops waiting."""
        if self._connection is not None:
            self._connection.send(AttemptEnded(self._attempt.task_attempt_id, reason))
            self._connection.close()
            self._connection = None

    def _carry_out(self, effects: Sequence[GatewayEffect], now: float, *, immediately: bool = False) -> None:
        last_seq = -1  # the batch's last event: when it is taken, all are; not looked for yet
        effect: Any
        for effect in effects:
            kind = type(effect)
            if kind is SendToAttempt:
                if self._connection is not None:
                    self._connection.send(effect.message, immediately=immediately and effect is effects[-1])
            elif kind is DeliverEvent:
                if last_seq < 0:
                    last_seq = self._last_inside(effects)
                self._deliver_event(effect, last_seq)
            else:
                _EFFECTS[kind](self, effect, now)

    def _last_inside(self, effects: Sequence[GatewayEffect]) -> int:
        outside = self._outside
        for effect in reversed(effects):
            if type(effect) is DeliverEvent and not outside[effect.part]:
                return effect.seq
        return 0

    def _deliver_event(self, effect: DeliverEvent, last_seq: int) -> None:
        seq, part = effect.seq, effect.part
        # What is outside of checkpoints is taken for itself, so each is reported.
        report_taken = seq == last_seq or seq % TAKEN_EVERY == 0 or self._outside[part]
        self._coordinator_ref.tell(
            EventArrived(
                self._attempt, seq, effect.payload, self._line, report_taken, effect.sender, effect.after_snapshot, part
            )
        )

    def _deliver_request(self, effect: DeliverRequest, now: float) -> None:
        if effect.request_id is not None:
            self._statistics.parts[effect.part].requests_received += 1
            if self._users[effect.part]:
                self._requested_at[effect.request_id] = now
        self._coordinator_ref.tell(
            RequestArrived(
                self._attempt,
                effect.seq,
                effect.request_id,
                effect.payload,
                self._line,
                effect.sender,
                effect.after_snapshot,
                effect.part,
            )
        )

    def _deliver_cancellation(self, effect: DeliverCancellation, now: float) -> None:
        self._coordinator_ref.tell(CancellationArrived(self._attempt, effect.request_id))

    def _confirm_event(self, effect: ConfirmEvent, now: float) -> None:
        confirmation = self._unsettled.pop(effect.event_id)
        self._statistics.parts[confirmation.part].events_confirmed += 1
        if self._users[confirmation.part]:
            self._statistics.confirm_us.record((now - confirmation.sent_at) * 1e6, self._attempt)
        self._sends.give_back(confirmation)
        confirmation.settle()

    def _fail_event(self, effect: FailEvent, now: float) -> None:
        confirmation = self._unsettled.pop(effect.event_id)
        self._statistics.events_failed += self._users[confirmation.part]
        self._sends.give_back(confirmation)
        confirmation.settle(effect.error)

    def _expire_event(self, effect: ExpireEvent, now: float) -> None:
        """Only the wait ends. The event takes up capacity until it is confirmed or fails (H27), and is counted then."""
        self._unsettled[effect.event_id].settle(effect.error)

    def _expire_connection(self, effect: ExpireConnection, now: float) -> None:
        self._report(ConnectionExpired(self._attempt.operator_id, self._attempt.task_attempt_id))

    def _refuse_message(self, effect: RefuseMessage, now: float) -> None:
        self._statistics.messages_dropped += 1
        self._peer_log.info("message refused", why=effect.why)

    def _report_opened(self, effect: ReportOpened, now: float) -> None:
        self._report(OperatorOpened(self._attempt.operator_id, self._attempt.task_attempt_id))

    def _report_suspected(self, effect: ReportSuspected, now: float) -> None:
        self._statistics.suspicions += 1
        self._log.info("subtask suspected", reason=effect.reason)
        self._coordinator_ref.tell(AttemptHint(self._attempt, "subtask_suspected", (effect.reason,)))

    def _report_responsive(self, effect: ReportResponsive, now: float) -> None:
        self._log.info("subtask responsive again")
        self._coordinator_ref.tell(AttemptHint(self._attempt, "subtask_responsive"))

    def _report_finished(self, effect: ReportFinished, now: float) -> None:
        attempt = self._attempt
        if not effect.failure:
            self._tracker_ref.tell_direct(SubtaskFinalState(attempt, effect.state, effect.events_sent, effect.files))
        self._report(OperatorEnded(attempt.operator_id, attempt.task_attempt_id, effect.failure))

    def _report_closed(self, effect: ReportClosed, now: float) -> None:
        self._tracker_ref.tell_direct(SubtaskClosed(self._attempt, effect.checkpoint_id))

    def _report_acknowledged(self, effect: ReportAcknowledged, now: float) -> None:
        if effect.held:
            self._statistics.events_in_snapshots += sum(self._users[held.part] for held in effect.held)
        self._tracker_ref.tell_direct(
            SubtaskAcknowledged(
                self._attempt,
                effect.checkpoint_id,
                effect.state,
                effect.held,
                effect.events_sent,
                effect.state_follows,
            )
        )

    def _report_state_stored(self, effect: ReportStateStored, now: float) -> None:
        self._tracker_ref.tell_direct(SubtaskStateStored(self._attempt, effect.checkpoint_id, effect.handle))

    def _report_state_failed(self, effect: ReportStateFailed, now: float) -> None:
        self._tracker_ref.tell_direct(SubtaskStateFailed(self._attempt, effect.checkpoint_id, effect.reason))

    def _report_declined(self, effect: ReportDeclined, now: float) -> None:
        self._tracker_ref.tell_direct(SubtaskDeclined(self._attempt, effect.checkpoint_id, effect.reason))

    def _inject(self, effect: InjectBarrier, now: float) -> None:
        """Send the barrier separately. If that fails, decline the checkpoint instead of waiting for its timeout."""
        assert self._inject_barrier is not None
        checkpoint_id, events_before = effect.checkpoint_id, effect.events_before
        try:
            self._inject_barrier(self._attempt, checkpoint_id, events_before)
        except BaseException as error:
            text = describe(error)
            self._log.warning("barrier not sent", checkpoint_id=checkpoint_id, error=text)
            reason = f"its barrier could not be sent: {text}"
            self._tracker_ref.tell_direct(SubtaskDeclined(self._attempt, checkpoint_id, reason))
            failure = as_exception("inject_barrier", error)
            if is_fatal(failure):
                self._coordinator_ref.tell(failing("inject_barrier", failure))


_ACTS: dict[type, Callable[[GatewayActor, Any, float], None]] = {
    SendEvent: GatewayActor._send_event,
    AnswerSubmitted: GatewayActor._submit_answer,
    RequestDeferred: GatewayActor._defer_request,
    MessagesArrived: GatewayActor._take_messages,
    AttachConnection: GatewayActor._attach,
    ConnectionClosed: GatewayActor._lose_connection,
    AttemptIsOver: GatewayActor._on_attempt_over,
    NoteAwaited: GatewayActor._send_note,
    Retire: GatewayActor._retire,
    TimePassed: GatewayActor._take_time,
    ReadyAnnounced: GatewayActor._write_immediately,
    CloseRequested: GatewayActor._write_immediately,
    CutReached: GatewayActor._write_immediately,
    CheckpointOver: GatewayActor._write_immediately,
}
"""How each message is handled; all others go to the machine unchanged."""

_EFFECTS: dict[type, Callable[[GatewayActor, Any, float], None]] = {
    ConfirmEvent: GatewayActor._confirm_event,
    DeliverRequest: GatewayActor._deliver_request,
    DeliverCancellation: GatewayActor._deliver_cancellation,
    FailEvent: GatewayActor._fail_event,
    FailAttempt: lambda gateway, effect, now: gateway._give_up(effect.reason, silent=effect.silent),
    ExpireConnection: GatewayActor._expire_connection,
    ExpireEvent: GatewayActor._expire_event,
    DropConnection: lambda gateway, effect, now: gateway._drop_connection(effect.why, now),
    RefuseMessage: GatewayActor._refuse_message,
    ReportOpened: GatewayActor._report_opened,
    ReportSuspected: GatewayActor._report_suspected,
    ReportResponsive: GatewayActor._report_responsive,
    ReportFinished: GatewayActor._report_finished,
    ReportClosed: GatewayActor._report_closed,
    ReportAcknowledged: GatewayActor._report_acknowledged,
    ReportStateStored: GatewayActor._report_state_stored,
    ReportStateFailed: GatewayActor._report_state_failed,
    ReportDeclined: GatewayActor._report_declined,
    InjectBarrier: GatewayActor._inject,
}
"""How each effect is carried out, except the two that are frequent."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    ref: ActorRef[GatewayMessage]
    line: GatewayLine[GatewayMessage]
    sends: AttemptSends
    events_sent: Positions  # in the attempt's restored history


_VIEW = attrgetter("view")
_CLOSED: Any = SimpleNamespace(view=None)


class OpenGateways:
    """Children of the tracker's actor, one per attempt. Used on the event loop only."""

    def __init__(
        self,
        context: ActorContext[TrackerMessage],
        config: OperatorConfig,
        ports: OperatorPorts,
        statistics: OperatorStatistics,
        coordinator_ref: ActorRef[CoordinatorMessage],
        announcer: Announcer[GatewayMessage],
        table: PartTable,
    ) -> None:
        self._announcer = announcer
        self._table = table
        self._context = context
        self._config = config
        self._ports = ports
        self._statistics = statistics
        self._coordinator_ref = coordinator_ref
        self._open: dict[int, _Gateway] = {}
        self._sights: dict[int, GatewaySight] = {}

    def open(self, effect: RestoreAttempt, connection: AttemptConnection, positions_refused: str = "") -> None:
        """The attempt is accepted: tell it on its connection what to restore."""
        context, attempt, limits = self._context, effect.attempt, self._config.gateway
        registered = Registered(
            attempt.task_attempt_id,
            attempt.attempt,
            effect.checkpoint_id,
            effect.states,
            effect.held,
            limits.reconnect_timeout_s,
            limits.upward_events_max,
            limits.upward_bytes_max,
            effect.events_sent,
            self._ports.attempt_token(attempt),
            limits.heartbeat_interval_s or 0.0,
            self._config.checkpoint.hold_events,
            effect.input_begins_again,
            positions_refused,
            self._table.parts,
            self._config.files_from if effect.elsewhere else "",
        )
        sight = GatewaySight(
            GatewayMachine(
                attempt,
                limits,
                barriers_apart=self._config.inject_barrier is not None,
                hold_events=self._config.checkpoint.hold_events,
                senders={held.sender for held in effect.held} or (),
                table=self._table,
            )
        )
        line: GatewayLine[GatewayMessage] = GatewayLine()
        bounds = limits.events_max, limits.bytes_max
        sends = AttemptSends(attempt, line.tell_direct, bounds, context.clock.now, self._config.wire_limits)
        line.ref = ref = context.spawn(
            lambda: GatewayActor(
                sight,
                registered,
                sends=sends,
                coordinator_ref=self._coordinator_ref,
                tracker_ref=context.self_ref,
                report=self._ports.report,
                statistics=self._statistics,
                line=line,
                table=self._table,
                inject_barrier=self._config.inject_barrier,
            ),
            name=f"gateway-{attempt.subtask}-{attempt.attempt}",
            mailbox=UNBOUNDED,
            log_context=attempt_keys(attempt),
        )
        self._open[attempt.task_attempt_id] = _Gateway(ref, line, sends, effect.events_sent)
        self._sights[attempt.task_attempt_id] = sight
        self._statistics.attempts += 1
        ref.tell(AttachConnection(connection, None))
        self._ports.gateway_opened(attempt, ref, connection)

    def readiness(self, attempt: ExecutionAttempt) -> SubtaskReadyWithGateway | None:
        """The message to the coordinator about a ready attempt; None if its gateway is already closed (H11)."""
        gateway = self._open.get(attempt.task_attempt_id)
        if gateway is None:
            return None
        return SubtaskReadyWithGateway(attempt, gateway.sends, gateway.line, gateway.events_sent)

    def tell(self, attempts: Sequence[ExecutionAttempt], message: GatewayMessage) -> None:
        """Announce a message to the gateways of these attempts, as far as they are open."""
        found = [self._open.get(attempt.task_attempt_id) for attempt in attempts]
        self._announcer.announce([gateway.line for gateway in found if gateway is not None], message)

    def tell_all(self, message: GatewayMessage) -> None:
        self._announcer.announce([gateway.line for gateway in self._open.values()], message)

    def reject_sends(self, attempt: ExecutionAttempt, reason: str) -> None:
        """From now on the coordinator's sends to the attempt fail, even before it is told why (H14)."""
        gateway = self._open.get(attempt.task_attempt_id)
        if gateway is not None:
            gateway.sends.end(AttemptOver(f"{attempt} is over: {reason}"))

    def close(self, attempt: ExecutionAttempt, reason: str) -> None:
        """Reject further sends, and fail the events that the gateway had accepted (H26)."""
        self.reject_sends(attempt, reason)
        gateway = self._open.pop(attempt.task_attempt_id, None)
        if gateway is not None:
            del self._sights[attempt.task_attempt_id]
            gateway.line.end()
            gateway.ref.tell(AttemptIsOver(reason))
            self._ports.gateway_closed(attempt)

    def close_all(self, reason: str) -> None:
        for gateway in list(self._open.values()):
            self.close(gateway.sends.attempt, reason)

    def __len__(self) -> int:
        return len(self._open)

    def view(self, task_attempt_ids: Sequence[int]) -> list[GatewayView | None]:
        """The gateways of these attempts at this moment; None for one that is closed."""
        # In C, because somebody may look at 10,000 idle ones ten times a second.
        views: list[GatewayView | None] = list(map(_VIEW, map(self._sights.get, task_attempt_ids, repeat(_CLOSED))))
        if None in views:
            sights = map(self._sights.get, task_attempt_ids)
            views = [None if sight is None else sight.look() for sight in sights]
        return views


def attempt_keys(attempt: ExecutionAttempt) -> dict[str, int]:
    """What names the attempt in the log."""
    return {
        "subtask": attempt.subtask,
        "attempt": attempt.attempt,
        "task_attempt_id": attempt.task_attempt_id,
    }
