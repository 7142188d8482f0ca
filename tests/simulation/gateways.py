"""The driver's end of each attempt: the real ``GatewayMachine`` behind a mailbox, as its actor has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.attempts import AttemptCondemned, ConnectionExpired, OperatorOpened, SubtaskFinished
from protocol.barrier_tracker import (
    GatewayDrained,
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
from protocol.messages import AttemptEnded, Registered, Resumed, UpMessage
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from tests.simulation.checkers import AttemptRecord, demand
from tests.simulation.network import Connection

OPERATOR = "words"


class GatewayWorld(Protocol):
    """What a gateway may touch."""

    now: float

    def record(self, task_attempt_id: int) -> AttemptRecord: ...


class Boxes(Protocol):
    """The mailboxes that a gateway writes to."""

    bridge_box: deque[Any]
    tracker_box: deque[Any]
    coordinator_box: deque[tuple[Any, ...]]
    confirmed: int

    @property
    def world(self) -> GatewayWorld: ...


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


class Gateway:
    """As the gateway's actor: one attempt, one mailbox."""

    def __init__(self, driver: Boxes, attempt: ExecutionAttempt, limits: GatewayLimits, registered: Registered) -> None:
        self.driver = driver
        self.attempt = attempt
        self.machine = GatewayMachine(attempt, limits)
        self.registered = registered
        self.box: deque[Any] = deque()
        self.connection: Connection | None = None
        self.dead = False  # for whoever sends: at once, ahead of the mailbox (H14)
        self.open_events = 0
        self.record = driver.world.record(attempt.task_attempt_id)

    def send(self, payload: str) -> None:
        """The coordinator's ``send_event``."""
        place = len(self.record.down_sent)
        self.record.down_sent.append(payload)
        if self.dead:
            self.record.settle(place, False)
            return
        self.open_events += 1
        self.box.append(EventSubmitted(place, payload.encode()))

    def receive(self) -> None:
        message, now = self.box.popleft(), self.driver.world.now
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
                if self.connection is not None:
                    self.connection.send_down(AttemptEnded(self.attempt.task_attempt_id, reason))
                    self.connection.close_by_server()
                    self.connection = None
            case _:
                self.carry_out(self.machine.handle(message, now))
        self.machine.check_invariants()

    def attach(self, connection: Connection, received_seq: int | None) -> None:
        now = self.driver.world.now
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

    def carry_out(self, effects: Sequence[GatewayEffect]) -> None:
        driver, attempt = self.driver, self.attempt
        tid = attempt.task_attempt_id
        for effect in effects:
            match effect:
                case SendToAttempt(message):
                    if self.connection is not None:
                        self.connection.send_down(message)
                case ConfirmEvent(event_id):
                    self.open_events -= 1
                    self.record.settle(event_id, True)
                    driver.confirmed += 1
                case FailEvent(event_id, error):
                    demand(isinstance(error, AttemptOver), f"H26: event {event_id} of {attempt} failed with {error!r}")
                    self.open_events -= 1
                    self.record.settle(event_id, False)
                case DeliverEvent(seq, payload):
                    driver.coordinator_box.append(("event", self, seq, payload.decode()))
                case FailAttempt(reason):
                    driver.bridge_box.append(AttemptCondemned(OPERATOR, tid, reason))
                case ExpireConnection():
                    driver.bridge_box.append(ConnectionExpired(OPERATOR, tid))
                case DropConnection(why):
                    demand(False, f"H30: the gateway of {attempt} drops its connection: {why}")
                case ReportOpened():
                    driver.bridge_box.append(OperatorOpened(OPERATOR, tid))
                case ReportFinished(failure, state):
                    if not failure:
                        driver.tracker_box.append(SubtaskFinalState(attempt, state))
                    driver.bridge_box.append(SubtaskFinished(OPERATOR, tid, failure))
                case ReportClosed(checkpoint_id):
                    driver.tracker_box.append(SubtaskClosed(attempt, checkpoint_id))
                case ReportDrained(checkpoint_id):
                    driver.tracker_box.append(GatewayDrained(attempt, checkpoint_id))
                case ReportAcknowledged(checkpoint_id, state, held):
                    driver.tracker_box.append(SubtaskAcknowledged(attempt, checkpoint_id, state, held))
                case ReportDeclined(checkpoint_id, reason):
                    driver.tracker_box.append(SubtaskDeclined(attempt, checkpoint_id, reason))
                case _:
                    pass
