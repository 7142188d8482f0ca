"""The executor's side of a world without Spark: one attempt's task around a real ``SubtaskMachine``.

Nothing arrives by itself: what was sent on a connection lies there until ``World.settle`` carries it over, and a task
that is deaf leaves it there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from actors import ActorRef
from actors.coordination.messages import AttachConnection, ConnectionClosed, GatewayMessage, MessagesArrived
from protocol.ids import ExecutionAttempt
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.types import (
    BarrierArrived,
    ConnectionAttached,
    ConnectionLost,
    EndAttempt,
    EventSubmitted,
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxItem,
    MailboxStart,
    MessageReceived,
    OperatorFinished,
    OperatorOpened,
    PutInMailbox,
    RequestSubmitted,
    ResolveRequest,
    SendToCoordinator,
    SnapshotRefused,
    SnapshotTaken,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
)
from protocol.wire.codec import decode_event, encode_event, encode_message
from protocol.wire.messages import AttemptEnded, CoordinatorAwaited, Downward, Registered, Resumed, UpMessage


class MemoryConnection:
    """An ``AttemptConnection`` that keeps what is sent on it, in order, if the wire could carry it."""

    def __init__(self, connection_id: int) -> None:
        self._connection_id = connection_id
        self.on_the_way: deque[Downward] = deque()
        self.closed = False

    @property
    def connection_id(self) -> int:
        return self._connection_id

    def send(self, message: Downward, *, at_once: bool = False) -> None:
        if not self.closed:
            encode_message(message)  # as the real one: raises for what is too large
            self.on_the_way.append(message)

    def close(self, *, flush: bool = True) -> None:
        self.closed = True
        if not flush:
            self.on_the_way.clear()


class Task:
    """One attempt in its executor. ``busy``: the operator leaves its mailbox alone; ``deaf``: nothing is read."""

    def __init__(self, attempt: ExecutionAttempt, connection: MemoryConnection, clock: Any) -> None:
        self.attempt = attempt
        self.connection: MemoryConnection | None = connection
        self.gateway_ref: ActorRef[GatewayMessage]
        self.machine: SubtaskMachine
        self.registered: Registered | None = None
        self.mailbox: deque[MailboxItem] = deque()
        self.handled: list[Any] = []  # events and what checkpoints did, in the order of the mailbox
        self.answers: dict[int, Any] = {}
        self.tracebacks: dict[int, bytes] = {}  # of the requests that failed
        self.ended: list[str] = []
        self.notes: list[CoordinatorAwaited] = []
        self.unsaid: list[UpMessage] = []  # kept back while mute
        self.opens_at_once = True
        self.busy = False
        self.deaf = False
        self.mute = False
        self.declines = ""
        self._clock = clock
        self._requests = 0

    @property
    def events(self) -> list[Any]:
        """The events that the operator has handled."""
        return [item for item in self.handled if not isinstance(item, tuple)]

    # --- what the operator does -----------------------------------------------------------------------------------

    def restore(self, registered: Registered) -> None:
        """Before the operator opens."""

    def open(self) -> None:
        self._drive(OperatorOpened())

    def send(self, event: Any) -> None:
        self._drive(EventSubmitted(encode_event(event)))

    def ask(self, request: Any) -> int:
        self._requests += 1
        self._drive(RequestSubmitted(self._requests, encode_event(request)))
        return self._requests

    def finish(self, failure: str = "", state: bytes = b"") -> None:
        self._drive(OperatorFinished(failure, state))

    def work(self) -> None:
        """Handle all that lies in the mailbox; a barrier is answered with the list of the events handled so far."""
        while self.mailbox:
            match self.mailbox.popleft():
                case MailboxEvent(payload):
                    self.handled.append(decode_event(payload))
                case MailboxBarrier(checkpoint_id) if not self.machine.wants_snapshot(checkpoint_id):
                    pass
                case MailboxBarrier(checkpoint_id) if self.declines:
                    self._drive(SnapshotRefused(checkpoint_id, self.declines))
                case MailboxBarrier(checkpoint_id):
                    state = encode_event(self.events)
                    self.handled.append(("snapshot", checkpoint_id))
                    self.acknowledge(checkpoint_id, state)
                case MailboxCompleted(checkpoint_id):
                    self.handled.append(("completed", checkpoint_id))
                case MailboxAborted(checkpoint_id):
                    self.handled.append(("aborted", checkpoint_id))
                case MailboxStart():
                    self.handled.append(("start",))

    def acknowledge(self, checkpoint_id: int, state: bytes) -> None:
        self._drive(SnapshotTaken(checkpoint_id, state))

    def meet_barrier(self, checkpoint_id: int, events_before: int) -> None:
        """A barrier arrives on a way of its own."""
        self._drive(BarrierArrived(checkpoint_id, events_before))

    # --- the connection -------------------------------------------------------------------------------------------

    def lose_connection(self) -> None:
        """What is on the way is lost, and both sides notice."""
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.close(flush=False)
        self.unsaid.clear()
        self._drive(ConnectionLost())
        self.gateway_ref.tell(ConnectionClosed(connection.connection_id, "lost by the test"))

    def reconnect(self, connection: MemoryConnection) -> None:
        self.connection = connection
        self.gateway_ref.tell(AttachConnection(connection, self.machine.resume_seq))

    def speak(self) -> None:
        """Say what was kept back while mute."""
        self.mute = False
        unsaid, self.unsaid = self.unsaid, []
        for message in unsaid:
            self._say(message)

    def read(self) -> bool:
        """Take in what has arrived; True if there was anything."""
        moved = False
        connection = self.connection
        while connection is not None and connection.on_the_way and not self.deaf:
            moved = True
            self._take(connection.on_the_way.popleft())
        if self.mailbox and not self.busy:
            moved = True
            self.work()
        return moved

    def _take(self, message: Downward) -> None:
        match message:
            case CoordinatorAwaited():
                self.notes.append(message)
            case Registered():
                self.registered = message
                limits = SubtaskLimits(message.window_events, message.window_bytes, message.reconnect_timeout_s)
                self.machine = SubtaskMachine(
                    message.task_attempt_id, self.attempt.subtask, limits, message.held, message.events_sent
                )
                self.restore(message)
                self._drive(ConnectionAttached(0))
                if self.opens_at_once:
                    self.open()
            case Resumed(received_seq=received_seq):
                self._drive(ConnectionAttached(received_seq))
            case AttemptEnded(reason=reason) if self.registered is None:
                self.ended.append(reason)
            case _:
                self._drive(MessageReceived(message))

    def _drive(self, fact: SubtaskInput) -> None:
        effects = self.machine.handle(fact, self._clock.now())
        self.machine.check_invariants()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: SubtaskEffect) -> None:
        match effect:
            case SendToCoordinator(message):
                self._say(message)
            case PutInMailbox(item):
                self.mailbox.append(item)
            case ResolveRequest(request_id, error, payload):
                self.answers[request_id] = RuntimeError(error) if error else decode_event(payload)
                if error:
                    self.tracebacks[request_id] = payload
            case EndAttempt(reason):
                self.ended.append(reason)

    def _say(self, message: UpMessage) -> None:
        if self.mute:
            self.unsaid.append(message)
        elif self.connection is not None:
            self.gateway_ref.tell(MessagesArrived(self.connection.connection_id, [message]))
