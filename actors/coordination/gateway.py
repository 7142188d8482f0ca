"""The actor around one ``GatewayMachine``, and the handle that coordinators hold.

One actor per execution attempt, for ever (H20). What is handed over but not yet confirmed is bounded at the handle
(H27), so the actor's own mailbox never grows beyond that bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors import Actor, ActorContext, ActorRef
from actors.coordination.confirmation import Confirmation
from actors.coordination.connection import AttemptConnection
from actors.coordination.deadline import DeadlineTimer
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
from protocol.codec import encode_event
from protocol.errors import AttemptOver, GatewayFull, RemoteProtocolError
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


class SendBudget:
    """How many events and bytes one gateway may have handed over and not yet settled (H27). Waiters go in order."""

    __slots__ = ("_bytes_max", "_events_max", "_waiters", "bytes", "events", "handed_over", "over")

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.events = 0
        self.bytes = 0
        self.handed_over: deque[Confirmation] = deque()  # not yet seen by the gateway, in the order of its mailbox
        self.over: AttemptOver | None = None  # set the moment the attempt is over: whoever sends knows at once (H14)

    def end(self, error: AttemptOver) -> None:
        """The attempt is over: nobody waits for room any more."""
        if self.over is None:
            self.over = error
            self._wake()

    def has_room(self, size: int) -> bool:
        """A single event larger than the whole bound passes when nothing else is under way, rather than never."""
        if self.over is not None:
            return True
        return self.events == 0 or (self.events < self._events_max and self.bytes + size <= self._bytes_max)

    def try_take(self, size: int) -> bool:
        """Whoever waits comes first; but once the attempt is over there is nothing left to wait for."""
        if self.over is None and (self._waiters or not self.has_room(size)):
            return False
        self._take(size)
        return True

    async def take(self, size: int) -> None:
        if self.try_take(size):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            while True:
                await waiter
                if self.has_room(size):
                    break
                waiter = asyncio.get_running_loop().create_future()
                self._waiters[0] = waiter
        except BaseException:
            self._waiters.remove(waiter)
            self._wake()
            raise
        self._waiters.popleft()
        self._take(size)
        self._wake()

    def give_back(self, size: int) -> None:
        self.events -= 1
        self.bytes -= size
        self._wake()

    def _take(self, size: int) -> None:
        self.events += 1
        self.bytes += size

    def _wake(self) -> None:
        if self._waiters and not self._waiters[0].done():
            self._waiters[0].set_result(None)


class GatewayHandle:
    """``SubtaskGateway`` as coordinators hold it; see there for what its methods promise."""

    __slots__ = ("_attempt", "_budget", "_clock", "_ref")

    def __init__(
        self,
        attempt: ExecutionAttempt,
        ref: ActorRef[GatewayMessage],
        budget: SendBudget,
        clock: Callable[[], float],
    ) -> None:
        self._attempt = attempt
        self._ref = ref
        self._budget = budget
        self._clock = clock

    def __repr__(self) -> str:
        return f"<SubtaskGateway {self._attempt}>"

    @property
    def attempt(self) -> ExecutionAttempt:
        return self._attempt

    @property
    def events_pending(self) -> int:
        return self._budget.events

    @property
    def bytes_pending(self) -> int:
        return self._budget.bytes

    async def send_event(self, event: Any, *, loss_tolerant: bool = False) -> Confirmation:
        payload = encode_event(event)
        await self._budget.take(len(payload))
        return self._hand_over(payload, loss_tolerant)

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False) -> Confirmation:
        payload = encode_event(event)
        if not self._budget.try_take(len(payload)):
            raise GatewayFull(
                f"{self._attempt}: {self._budget.events} events ({self._budget.bytes} bytes) are unconfirmed; "
                "await send_event() to wait for room, or raise the gateway's bound"
            )
        return self._hand_over(payload, loss_tolerant)

    def _hand_over(self, payload: bytes, loss_tolerant: bool) -> Confirmation:
        confirmation = Confirmation()
        if self._budget.over is not None:
            self._budget.give_back(len(payload))
            confirmation.settle(self._budget.over)
            return confirmation
        self._budget.handed_over.append(confirmation)
        self._ref.tell(SendEvent(payload, loss_tolerant, confirmation, self._clock()))
        return confirmation


@dataclass(slots=True)
class _Unsettled:
    confirmation: Confirmation
    size: int
    sent_at: float


class GatewayActor(Actor[GatewayMessage]):
    """See the module. ``registered`` is what the attempt is told when its first connection attaches."""

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
        if received_seq is None:
            connection.send(self._registered)
        else:
            connection.send(Resumed(self._attempt.task_attempt_id, self._machine.resume_seq))
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
                case DeliverEvent(seq, payload):
                    last_seq = last_seq or max(other.seq for other in effects if isinstance(other, DeliverEvent))
                    report_taken = seq == last_seq or seq % TAKEN_EVERY == 0
                    self._coordinator_ref.tell(EventArrived(attempt, seq, payload, self._self_ref, report_taken))
                case DeliverRequest(seq, request_id, payload):
                    self._coordinator_ref.tell(RequestArrived(attempt, seq, request_id, payload, self._self_ref))
                case FailEvent(event_id, error):
                    unsettled = self._unsettled.pop(event_id)
                    self._statistics.events_failed += 1
                    self._budget.give_back(unsettled.size)
                    unsettled.confirmation.settle(error)
                case FailAttempt(reason):
                    self._report(AttemptCondemned(attempt.operator_id, attempt.task_attempt_id, reason))
                    self._hang_up(reason)
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
            case ReportFinished(failure, state):
                if not failure:
                    self._tracker_ref.tell(SubtaskFinalState(attempt, state))
                self._report(LedgerSubtaskFinished(attempt.operator_id, attempt.task_attempt_id, failure))
            case ReportClosed(checkpoint_id):
                self._tracker_ref.tell(SubtaskClosed(attempt, checkpoint_id))
            case ReportDrained(checkpoint_id):
                self._tracker_ref.tell(GatewayDrained(attempt, checkpoint_id))
            case ReportAcknowledged(checkpoint_id, state, held):
                self._tracker_ref.tell(SubtaskAcknowledged(attempt, checkpoint_id, state, held))
            case ReportDeclined(checkpoint_id, reason):
                self._tracker_ref.tell(SubtaskDeclined(attempt, checkpoint_id, reason))
            case _:
                raise TypeError(f"no effect of a gateway: {effect!r}")


__all__ = ["GatewayActor", "GatewayHandle", "SendBudget"]
