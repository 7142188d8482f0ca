"""The driver's end of each attempt: the real ``GatewayMachine`` behind a mailbox, as its actor has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.attempts import AttemptCondemned, ConnectionExpired, OperatorOpened, SubtaskFinished
from protocol.barrier_tracker import (
    GatewayDrained,
    RestoreAttempt,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
)
from protocol.errors import AttemptOver, RemoteProtocolError
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
from protocol.messages import AttemptEnded, Registered, Resumed, UpMessage
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import demand
from tests.simulation.network import Connection
from tests.simulation.shared import Boxes

EVENTS_MAX = 8
"""How many events of one gateway may be unsettled; its handle counts them, as the actors' one does."""
LIMITS = GatewayLimits(3.0, 2.0, 2**63, 2**63, 4, 10_000)


@dataclass(frozen=True)
class Attach:
    connection: Connection
    received_seq: int | None


@dataclass(frozen=True)
class Arrived:
    connection_id: int
    messages: Sequence[UpMessage]


@dataclass(frozen=True)
class Lost:
    connection_id: int


@dataclass(frozen=True)
class Retire:
    """Behind all that was sent to it: what comes later, nobody reads."""


class Gateway:
    """As the gateway's actor: one attempt, one mailbox."""

    def __init__(self, boxes: Boxes, table: GatewayTable, effect: RestoreAttempt, target: int) -> None:
        self.boxes = boxes
        self.table = table
        self.attempt = attempt = effect.attempt
        self.target = target  # so many events each key has to get in this run
        self.events_restored = effect.events_sent
        self.machine = GatewayMachine(attempt, LIMITS)
        self.registered = Registered(
            attempt.task_attempt_id,
            attempt.attempt,
            effect.checkpoint_id,
            effect.states,
            effect.held,
            LIMITS.reconnect_timeout_s,
            LIMITS.upward_events_max,
            LIMITS.upward_bytes_max,
            effect.events_sent,
        )
        self.box: deque[Any] = deque()
        self.connection: Connection | None = None
        self.dead = False  # for whoever sends: at once, ahead of the mailbox (H14)
        self.open_events = 0
        self.record = boxes.world.record(attempt.task_attempt_id)

    def send(self, payload: str, *, loose: bool = False) -> None:
        """The coordinator's ``send_event``."""
        place = len(self.record.down_sent)
        self.record.down_sent.append(payload)
        if loose:
            self.record.loose.add(place)
        if self.dead:
            self.record.settle(place, False)
            return
        self.open_events += 1
        self.box.append(EventSubmitted(place, payload.encode(), loose))

    def receive(self) -> None:
        message, now = self.box.popleft(), self.boxes.world.now
        match message:
            case Arrived(connection_id, messages):
                if self.connection is not None and self.connection.connection_id == connection_id:
                    self.carry_out(self.machine.handle_batch(messages, now))
            case Attach(connection, received_seq):
                self.attach(connection, received_seq)
            case Lost(connection_id):
                if self.connection is not None and self.connection.connection_id == connection_id:
                    self.connection = None
                    self.carry_out(self.machine.handle(ConnectionLost(), now))
            case AttemptIsOver(reason):
                self.carry_out(self.machine.handle(message, now))
                self.hang_up(reason)
                self.box.append(Retire())
            case Retire():
                self.table.all.remove(self)
                self.box.clear()
            case _:
                self.carry_out(self.machine.handle(message, now))
        self.machine.check_invariants()

    def attach(self, connection: Connection, received_seq: int | None) -> None:
        now = self.boxes.world.now
        if self.dead:
            connection.send_down(AttemptEnded(self.attempt.task_attempt_id, "the attempt is over"))
            connection.close_by_server()
            return
        resume_seq = self.machine.resume_seq
        try:
            effects = self.machine.handle(ConnectionAttached(received_seq or 0), now)
        except RemoteProtocolError:  # a resume that was overtaken by the one of a later connection
            connection.close_by_server()
            return
        if self.connection is not None:
            self.connection.close_by_server()
        self.connection = connection
        if received_seq is None:
            connection.send_down(self.registered)
        else:
            connection.send_down(Resumed(self.attempt.task_attempt_id, resume_seq))
        self.carry_out(effects)

    def hang_up(self, reason: str) -> None:
        if self.connection is not None:
            self.connection.send_down(AttemptEnded(self.attempt.task_attempt_id, reason))
            self.connection.close_by_server()
            self.connection = None

    def settle(self, event_id: int, confirmed: bool) -> None:
        self.open_events -= 1
        self.record.settle(event_id, confirmed)

    def carry_out(self, effects: Sequence[GatewayEffect]) -> None:
        boxes, attempt = self.boxes, self.attempt
        tid = attempt.task_attempt_id
        for effect in effects:
            match effect:
                case SendToAttempt(message):
                    if self.connection is not None:
                        self.connection.send_down(message)
                case ConfirmEvent(event_id):
                    self.settle(event_id, True)
                    boxes.world.figures.events_down += 1
                case FailEvent(event_id, error):
                    demand(isinstance(error, AttemptOver), f"H26: event {event_id} of {attempt} failed with {error!r}")
                    self.settle(event_id, False)
                case DeliverEvent(seq, payload, sender):
                    boxes.coordinator.append(("event", self, seq, payload.decode(), sender))
                case DeliverRequest(seq, request_id, payload):
                    boxes.coordinator.append(("request", self, seq, payload.decode(), request_id))
                case FailAttempt(reason):
                    self.record.check_late()
                    boxes.bridge.append(AttemptCondemned(OPERATOR, tid, reason))
                    self.hang_up(reason)
                case ExpireConnection():
                    boxes.bridge.append(ConnectionExpired(OPERATOR, tid))
                case DropConnection(why):
                    demand(False, f"H30: the gateway of {attempt} drops its connection: {why}")
                case InjectBarrier(checkpoint_id, events_before):
                    boxes.world.send_barrier_apart(tid, checkpoint_id, events_before)
                case _:
                    self.report(effect)

    def report(self, effect: GatewayEffect) -> None:
        boxes, attempt = self.boxes, self.attempt
        tid = attempt.task_attempt_id
        match effect:
            case ReportOpened():
                boxes.bridge.append(OperatorOpened(OPERATOR, tid))
            case ReportFinished(failure, state, events_sent):
                if not failure:
                    boxes.tracker.append(SubtaskFinalState(attempt, state, events_sent))
                boxes.bridge.append(SubtaskFinished(OPERATOR, tid, failure))
            case ReportClosed(checkpoint_id):
                boxes.tracker.append(SubtaskClosed(attempt, checkpoint_id))
            case ReportDrained(checkpoint_id):
                self.record.check_drained(checkpoint_id)
                boxes.tracker.append(GatewayDrained(attempt, checkpoint_id))
            case ReportAcknowledged(checkpoint_id, state, held, events_sent):
                boxes.tracker.append(SubtaskAcknowledged(attempt, checkpoint_id, state, held, events_sent))
            case ReportDeclined(checkpoint_id, reason):
                boxes.tracker.append(SubtaskDeclined(attempt, checkpoint_id, reason))
            case _:
                pass


@dataclass
class GatewayTable:
    """The gateways of one driver, and the connections that have none yet. ``open`` are those not over, by task."""

    registering: dict[int, Connection] = field(default_factory=dict)  # by connection, until the ledger has decided
    accepting: dict[int, tuple[Connection, int]] = field(default_factory=dict)  # by task, with its run
    open: dict[int, Gateway] = field(default_factory=dict)
    all: list[Gateway] = field(default_factory=list)
    by_connection: dict[int, Gateway] = field(default_factory=dict)

    def open_one(self, boxes: Boxes, effect: RestoreAttempt) -> None:
        tid = effect.attempt.task_attempt_id
        connection, run_id = self.accepting.pop(tid)
        gateway = Gateway(boxes, self, effect, boxes.world.target(run_id))
        self.open[tid] = gateway
        self.all.append(gateway)
        self.by_connection[connection.connection_id] = gateway
        gateway.box.append(Attach(connection, None))
        if connection.server_knows:
            gateway.box.append(Lost(connection.connection_id))

    def close(self, attempt: ExecutionAttempt, reason: str) -> None:
        gateway = self.open.pop(attempt.task_attempt_id, None)
        if gateway is not None:
            gateway.dead = True
            gateway.box.append(AttemptIsOver(reason))

    def close_all(self, reason: str) -> None:
        for gateway in list(self.open.values()):
            self.close(gateway.attempt, reason)

    def tell(self, attempt: ExecutionAttempt, message: Any) -> None:
        gateway = self.open.get(attempt.task_attempt_id)
        if gateway is not None:
            gateway.box.append(message)

    def tell_all(self, message: Any) -> None:
        for gateway in self.open.values():
            gateway.box.append(message)

    def beside(self, attempt: ExecutionAttempt) -> set[int]:
        """The other attempts of its subtask that are alive now, ready or not."""
        same = (g.attempt for g in self.open.values() if g.attempt.subtask == attempt.subtask)
        return {other.attempt for other in same if other != attempt}
