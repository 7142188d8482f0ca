"""The actor around one ``GatewayMachine``: one per execution attempt, for ever (H20).

What is handed over but not yet confirmed is bounded at the handle (H27), so the mailbox never grows beyond that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors import Actor, ActorContext, ActorRef
from actors.coordination.confirmation import Confirmation
from actors.coordination.connection import AttemptConnection
from actors.coordination.deadline import DeadlineTimer
from actors.coordination.gateway_handle import SendBudget
from actors.coordination.messages import (
    AttachConnection,
    ConnectionClosed,
    CoordinatorMessage,
    EventArrived,
    GatewayMessage,
    MessagesArrived,
    RequestArrived,
    Retire,
    SendEvent,
    TrackerMessage,
)
from actors.coordination.operator_config import BarrierInjector
from actors.coordination.statistics import OperatorStatistics
from protocol.attempts import AttemptCondemned, ConnectionExpired, LedgerInput, OperatorOpened
from protocol.attempts import SubtaskFinished as LedgerSubtaskFinished
from protocol.barrier_tracker import (
    GatewayDrained,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
)
from protocol.errors import AttemptOver, LocalProtocolError, RemoteProtocolError
from protocol.gateway import GatewayMachine
from protocol.gateway_types import (
    AttemptIsOver,
    ConfirmEvent,
    DeliverEvent,
    DeliverRequest,
    EventSubmitted,
    ExpireConnection,
    FailAttempt,
    FailEvent,
    GatewayEffect,
    GatewayLimits,
    InjectBarrier,
    ReportAcknowledged,
    ReportClosed,
    ReportDeclined,
    ReportDrained,
    ReportFinished,
    ReportOpened,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import AttemptEnded, Registered, Resumed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage, RoomAvailable

_UNBOUNDED = 2**63
TAKEN_EVERY = 64
"""Of events that come together, so many are taken before the task hears of it: its window must not stand still."""


@dataclass(slots=True)
class _Unsettled:
    confirmation: Confirmation
    size: int
    sent_at: float


class GatewayActor(Actor[GatewayMessage]):
    """See the module. ``registered`` is what the attempt is told when its first connection attaches.

    ``inject_barrier``: see ``OperatorConfig``; needed only where barriers are asked for that travel apart.
    """

    def __init__(
        self,
        attempt: ExecutionAttempt,
        limits: GatewayLimits,
        registered: Registered,
        *,
        budget: SendBudget,
        coordinator_ref: ActorRef[CoordinatorMessage],
        tracker_ref: ActorRef[TrackerMessage],
        report: Callable[[LedgerInput], None],
        statistics: OperatorStatistics,
        inject_barrier: BarrierInjector | None = None,
    ) -> None:
        self._attempt = attempt
        # The budget bounds what is sent down, before it comes here. The machine, which would count answers against
        # the same bound, must not refuse what was accepted.
        self._machine = GatewayMachine(attempt, replace(limits, events_max=_UNBOUNDED, bytes_max=_UNBOUNDED))
        self._registered = registered
        self._budget = budget
        self._coordinator_ref = coordinator_ref
        self._tracker_ref = tracker_ref
        self._report = report
        self._statistics = statistics
        self._inject_barrier = inject_barrier
        self._connection: AttemptConnection | None = None
        self._unsettled: dict[int, _Unsettled] = {}
        self._event_count = 0
        self._deadline = DeadlineTimer()
        self._over = False

    async def started(self, context: ActorContext[GatewayMessage]) -> None:
        self._self_ref = context.self_ref
        self._log = context.log

    async def receive(self, context: ActorContext[GatewayMessage], message: GatewayMessage) -> None:
        now = context.clock.now()
        match message:
            case SendEvent():
                self._send_event(message, now)
            case MessagesArrived(connection_id, messages):
                self._take_messages(connection_id, messages, now)
            case AttachConnection(connection, received_seq):
                self._attach(connection, received_seq, now)
            case ConnectionClosed(connection_id, reason):
                if self._connection is not None and self._connection.connection_id == connection_id:
                    context.log.debug("connection closed", reason=reason)
                    self._connection = None
                    self._carry_out(self._machine.handle(ConnectionLost(), now), now)
            case AttemptIsOver(reason):
                self._end(message, reason, now)
                context.self_ref.tell(Retire())  # behind the last events that were handed over: each is settled
            case Retire():
                context.stop()
            case _:
                if isinstance(message, TimePassed):
                    self._deadline.fired()
                self._carry_out(self._machine.handle(message, now), now)
        self._deadline.arm(context, self._machine.next_deadline(), now)

    async def stopped(self, context: ActorContext[GatewayMessage], cause: BaseException | None) -> None:
        if not self._over:
            self._end(AttemptIsOver("the gateway was closed"), "the gateway was closed", context.clock.now())
        for confirmation in self._budget.handed_over:  # they lay in the mailbox, and will never be handled
            self._statistics.events_failed += 1
            confirmation.settle(self._budget.over)
        self._budget.handed_over.clear()

    def _send_event(self, message: SendEvent, now: float) -> None:
        self._budget.handed_over.popleft()
        self._event_count += 1
        event_id = self._event_count
        self._unsettled[event_id] = _Unsettled(message.confirmation, len(message.payload), message.sent_at)
        self._statistics.events_sent += 1
        effects = self._machine.handle(EventSubmitted(event_id, message.payload, message.loss_tolerant), now)
        if not effects:
            self._statistics.events_held += 1
        # The last event that was handed over need not wait for company; the ones before it leave in the same write.
        self._carry_out(effects, now, at_once=not self._budget.handed_over)

    def _take_messages(self, connection_id: int, messages: Sequence[Any], now: float) -> None:
        connection = self._connection
        if connection is None or connection.connection_id != connection_id:
            self._statistics.messages_dropped += len(messages)
            return
        self._carry_out(self._machine.handle_batch(messages, now), now)

    def _attach(self, connection: AttemptConnection, received_seq: int | None, now: float) -> None:
        if self._over:
            connection.send(AttemptEnded(self._attempt.task_attempt_id, "the attempt is over"))
            connection.close()
            return
        try:
            effects = self._machine.handle(ConnectionAttached(received_seq or 0), now)
        except RemoteProtocolError as error:  # only the new connection goes: the one before may be healthy
            self._log.warning("connection dropped", why=str(error))
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
        except LocalProtocolError as error:  # the parts of several subtasks may be too much for one frame (H52)
            self._give_up(f"checkpoint {self._registered.checkpoint_id} cannot be restored: {error}")
            return
        self._carry_out(effects, now)

    def _drop_connection(self, why: str, now: float) -> None:
        """The peer broke the protocol; what can be healed is healed by its resume (H24)."""
        if self._connection is not None:
            self._log.warning("connection dropped", why=why)
            self._connection.close(flush=False)
            self._connection = None
            self._carry_out(self._machine.handle(ConnectionLost(), now), now)

    def _end(self, message: AttemptIsOver, reason: str, now: float) -> None:
        """The attempt is over: what is unsettled fails (H26), and the task is told to be mute (spark-facts 16)."""
        if self._over:
            return
        self._over = True
        self._budget.end(AttemptOver(f"{self._attempt} is over: {reason}"))
        self._carry_out(self._machine.handle(message, now), now)
        self._hang_up(reason)

    def _give_up(self, reason: str) -> None:
        self._report(AttemptCondemned(self._attempt.operator_id, self._attempt.task_attempt_id, reason))
        self._hang_up(reason)

    def _hang_up(self, reason: str) -> None:
        """The machine has given the attempt up and confirms nothing more: tell the task at once, lest it waits."""
        if self._connection is not None:
            self._connection.send(AttemptEnded(self._attempt.task_attempt_id, reason))
            self._connection.close()
            self._connection = None

    def _carry_out(self, effects: Sequence[GatewayEffect], now: float, *, at_once: bool = False) -> None:
        attempt = self._attempt
        last_seq = 0  # of the events that came together: when it is taken, all are
        for effect in effects:
            match effect:
                case SendToAttempt(message):
                    if self._connection is not None:
                        self._connection.send(message, at_once=at_once)
                case ConfirmEvent(event_id):
                    self._settle_confirmed(event_id, now)
                case DeliverEvent(seq, payload, sender):
                    last_seq = last_seq or max(other.seq for other in effects if isinstance(other, DeliverEvent))
                    report_taken = seq == last_seq or seq % TAKEN_EVERY == 0
                    self._coordinator_ref.tell(
                        EventArrived(attempt, seq, payload, self._self_ref, report_taken, sender)
                    )
                case DeliverRequest(seq, request_id, payload):
                    self._coordinator_ref.tell(RequestArrived(attempt, seq, request_id, payload, self._self_ref))
                case FailEvent(event_id, error):
                    unsettled = self._unsettled.pop(event_id)
                    self._statistics.events_failed += 1
                    self._budget.give_back(unsettled.size)
                    unsettled.confirmation.settle(error)
                case FailAttempt(reason):
                    self._give_up(reason)
                case ExpireConnection():
                    self._report(ConnectionExpired(attempt.operator_id, attempt.task_attempt_id))
                case DropConnection(why):
                    self._drop_connection(why, now)
                case RefuseMessage(why):
                    self._statistics.messages_dropped += 1
                    self._log.info("message refused", why=why)
                case RoomAvailable():
                    pass  # the machine never refuses: the budget at the handle does
                case _:
                    self._report_to_tracker(effect)

    def _settle_confirmed(self, event_id: int, now: float) -> None:
        unsettled = self._unsettled.pop(event_id)
        self._statistics.events_confirmed += 1
        self._statistics.confirm_us.record((now - unsettled.sent_at) * 1e6)
        self._budget.give_back(unsettled.size)
        unsettled.confirmation.settle()

    def _report_to_tracker(self, effect: GatewayEffect) -> None:
        attempt = self._attempt
        match effect:
            case ReportOpened():
                self._report(OperatorOpened(attempt.operator_id, attempt.task_attempt_id))
            case ReportFinished(failure, state, events_sent):
                if not failure:
                    self._tracker_ref.tell(SubtaskFinalState(attempt, state, events_sent))
                self._report(LedgerSubtaskFinished(attempt.operator_id, attempt.task_attempt_id, failure))
            case ReportClosed(checkpoint_id):
                self._tracker_ref.tell(SubtaskClosed(attempt, checkpoint_id))
            case ReportDrained(checkpoint_id):
                self._tracker_ref.tell(GatewayDrained(attempt, checkpoint_id))
            case ReportAcknowledged(checkpoint_id, state, held, events_sent):
                self._statistics.events_in_snapshots += len(held)
                self._tracker_ref.tell(SubtaskAcknowledged(attempt, checkpoint_id, state, held, events_sent))
            case ReportDeclined(checkpoint_id, reason):
                self._tracker_ref.tell(SubtaskDeclined(attempt, checkpoint_id, reason))
            case InjectBarrier(checkpoint_id, events_before):
                self._inject(checkpoint_id, events_before)
            case _:
                raise TypeError(f"no effect of a gateway: {effect!r}")

    def _inject(self, checkpoint_id: int, events_before: int) -> None:
        """The barrier leaves on its own way. Where it cannot, the checkpoint need not wait for its timeout."""
        assert self._inject_barrier is not None
        try:
            self._inject_barrier(self._attempt, checkpoint_id, events_before)
        except Exception as error:
            self._log.warning("a barrier could not be sent", checkpoint_id=checkpoint_id, error=repr(error))
            reason = f"its barrier could not be sent: {type(error).__name__}: {error}"
            self._tracker_ref.tell(SubtaskDeclined(self._attempt, checkpoint_id, reason))


__all__ = ["GatewayActor"]
