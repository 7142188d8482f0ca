# SPDX-License-Identifier: Apache-2.0

"""One attempt of a subtask in memory: the real ``SubtaskMachine``, with the test in place of the operator."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from actors import ActorRef
from actors.clock import Clock
from actors.coordination.engine.messages import GatewayMessage, MessagesArrived
from headgate.testing._answer import Answer
from protocol.arguments import ANY, check_attributes, check_fields, checked
from protocol.ids import ExecutionAttempt
from protocol.parts import ONE_PART, OWN_PART, PartTable
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.types import (
    ConnectionAttached,
    ConnectionLost,
    EndAttempt,
    EventSubmitted,
    HandleUrgent,
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
    TimePassed,
    UrgentBegan,
    UrgentHandled,
)
from protocol.values import value
from protocol.wire.codec import decode_event, encode_argument, encode_event, encode_message
from protocol.wire.framing import CODEC_LIMITS
from protocol.wire.messages import (
    AttemptEnded,
    Confirm,
    CoordinatorAwaited,
    Downward,
    Refused,
    Registered,
    Resumed,
    UpMessage,
)
from protocol.wire.traces import split_traceparent
from spark_bridge.subtask.errors import CoordinatorTraceback, RequestFailed
from spark_bridge.subtask.traces import with_current_span


class MemoryConnection:
    """An ``AttemptConnection`` that keeps the messages sent on it, in order, if the wire could carry them."""

    def __init__(self, connection_id: int) -> None:
        self._connection_id = connection_id
        self.on_the_way: deque[Downward] = deque()
        self.closed = False
        self.came = False
        """Whether the task has written something since ``heard`` was called last."""

    @property
    def connection_id(self) -> int:
        return self._connection_id

    def heard(self) -> bool:
        came, self.came = self.came, False
        return came

    def progressed(self) -> bool:
        return False

    def send(self, message: Downward, *, immediately: bool = False) -> None:
        if not self.closed:
            encode_message(message)  # as a real connection does: raises if the message is too large
            self.on_the_way.append(message)

    def close(self, *, flush: bool = True) -> None:
        self.closed = True
        if not flush:
            self.on_the_way.clear()


@value
class PartEvent:
    """An event or request of a named part of the operator, as a ``Task`` sends it and gets it."""

    name: str
    event: Any

    def __post_init__(self) -> None:
        check_fields(self)


@check_attributes(declines=ANY)
class Task:
    """One attempt of a subtask, whose operator the test plays. ``World.launch`` makes it.

    A subclass may override ``work``, ``snapshot_state`` and ``restore``: pass it as ``launch(..., task_class=...)``.

    Messages travel when the world moves next (``settle``, ``advance``, ``launch``, ...). Events arrive in the order in
    which they were sent, each once. The task answers checkpoints automatically, with ``state``.

    After the attempt is over (``outcome``), further messages from it are dropped.
    """

    busy: bool
    unresponsive: bool
    silent: bool
    late_confirmations: bool
    declines: str
    state: bytes
    handles_urgent: bool
    awaits_start: bool

    def __init__(self, attempt: ExecutionAttempt, connection: MemoryConnection, clock: Clock) -> None:
        self.attempt = attempt
        """Which attempt this is. Its number counts the subtask's attempts that the coordinator knows, from 0."""
        self.busy = False
        """Whether the operator does not handle its mailbox. Events are confirmed meanwhile, but not handled."""
        self.unresponsive = False
        """Whether the whole process is frozen: it reads and confirms nothing."""
        self.silent = False
        """Whether nothing that it sends arrives, although it reads and works. When it is False again, all arrives."""
        self.late_confirmations = False
        """Whether only its confirmations of events do not arrive. When it is False again, they do."""
        self.declines = ""
        """Why the operator declines checkpoints; empty if it takes part."""
        self.state = b""
        """The task's state in the next checkpoint."""
        self.restored_state: bytes | None = None
        """The state that this attempt restores, or None. Of a state in files, the ``data``."""
        self.restored_checkpoint_id = -1
        """The checkpoint that it comes from; -1 for none."""
        self.input_begins_again = False
        """Whether that state belongs to the input of this run: see ``SubtaskContext.input_begins_again``."""
        self.handled: list[Any] = []
        """What the operator has handled, in order: events, urgent ones among them, and tuples for everything else.

        The tuples are ``("start",)``, with ``awaits_start``, and for checkpoints ``("snapshot", id)``,
        ``("completed", id)`` and ``("aborted", id)``.
        """
        self.awaits_start = False
        """Whether it is told when ``subtask_ready`` has returned, as a real operator is that begins with its records
        only then. Set it before the operator opens, for example after ``launch(..., opens=False)``."""
        self.urgent_events: list[Any] = []
        """The urgent events among them, in order. A busy operator handles them too."""
        self.handles_urgent = True
        """Whether the operator defines ``handle_urgent``. Otherwise urgent events are ordinary ones. Set it before the
        operator opens."""
        self.ended: list[str] = []
        """The driver's reason for ending the attempt."""
        self.outcome = ""
        """How Spark counts the attempt: empty while it runs, then ``"success"``, ``"failed"`` or ``"killed"``."""
        self.connection: MemoryConnection | None = connection
        self.gateway_ref: ActorRef[GatewayMessage]
        self.machine: SubtaskMachine
        self.table = ONE_PART
        self.registered: Registered | None = None
        self.mailbox: deque[MailboxItem] = deque()
        self.opens_immediately = True
        """Whether it opens as soon as it is registered. Otherwise call ``open``: see ``World.launch``."""
        self.attempt_number = attempt.attempt  # Spark's own count
        self._clock = clock
        self._requests: list[Answer[Any]] = []
        self._goodbye: str | None = None
        self._urgent_failed = False
        self._refusal = ""
        self._unsaid: list[UpMessage] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.attempt} {self.outcome or 'running'}>"

    @property
    def events(self) -> list[Any]:
        """The events that the operator has handled, in order."""
        return [item for item in self.handled if not isinstance(item, tuple)]

    # --- what the operator does -----------------------------------------------------------------------------------

    def send(self, event: Any) -> None:
        """Send an event to the coordinator.

        Raises:
            EventEncodeError: a value in it is of a type that events cannot have, or it is too large.
            GatewayFull: the window is full. A real task would wait.
        """
        event, part = self._addressed(event)
        self._drive(EventSubmitted(with_current_span(encode_event(event), CODEC_LIMITS), part=part))

    def request(self, payload: Any) -> Answer[Any]:
        """Send a request to the coordinator. The error of a failed one is ``RequestFailed``. Raises as ``send``."""
        payload, part = self._addressed(payload)
        answer: Answer[Any] = Answer()
        self._requests.append(answer)
        encoded = with_current_span(encode_argument("payload", payload), CODEC_LIMITS)
        self._drive(RequestSubmitted(len(self._requests), encoded, part))
        return answer

    @checked(failure=ANY)
    def finish(self, failure: str = "", state: bytes | None = None) -> None:
        """End the operator: successfully, or with the text of a failure.

        Spark counts the attempt when everything that it sent has arrived. ``state`` is the subtask's part of later
        checkpoints; by default it is ``self.state``.
        """
        final = b"" if failure else self.snapshot_state() if state is None else state
        self._drive(OperatorFinished(failure, final))
        self._goodbye = failure

    def snapshot_state(self) -> bytes:
        """Return the task's state for a checkpoint: ``state``, unless overridden."""
        return self.state

    def restore(self, registered: Registered) -> None:
        """Called before the operator opens."""

    def open(self) -> None:
        """Report that the operator is open. The task calls this itself, unless ``opens_immediately`` is False."""
        self._drive(OperatorOpened(self.awaits_start, self.handles_urgent))

    def work(self) -> None:
        """Handle everything in the mailbox."""
        while self.mailbox:
            match self.mailbox.popleft():
                case MailboxEvent(payload, part):
                    self.handled.append(self._received(payload, part))
                case MailboxBarrier(checkpoint_id) if not self.machine.wants_snapshot(checkpoint_id):
                    pass
                case MailboxBarrier(checkpoint_id) if self.declines:
                    self._drive(SnapshotRefused(checkpoint_id, self.declines))
                case MailboxBarrier(checkpoint_id):
                    state = self.snapshot_state()
                    self.handled.append(("snapshot", checkpoint_id))
                    self.acknowledge(checkpoint_id, state)
                case MailboxCompleted(checkpoint_id):
                    self.handled.append(("completed", checkpoint_id))
                case MailboxAborted(checkpoint_id):
                    self.handled.append(("aborted", checkpoint_id))
                case MailboxStart():
                    self.handled.append(("start",))

    @checked()
    def acknowledge(self, checkpoint_id: int, state: bytes) -> None:
        """Answer a checkpoint. ``work`` does that."""
        self._drive(SnapshotTaken(checkpoint_id, state))

    # --- for the world --------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read what has arrived; True if there was anything. The world calls this whenever it moves."""
        moved = self._say_what_was_held_back()
        connection = self.connection
        while connection is not None and connection.on_the_way and not self.unresponsive:
            moved = True
            self._take(connection.on_the_way.popleft())
        self._give_sign_of_life()
        return self._handle_mailbox() or moved

    def lose_connection(self) -> None:
        """Lose the connection and everything on it. The world calls this."""
        self._close_connection()
        self._drive(ConnectionLost())

    def _give_sign_of_life(self) -> None:
        """Send a heartbeat if one is due, as the I/O thread of a real task does whatever the operator does."""
        if self.registered is None or self.connection is None or self.unresponsive:
            return
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline <= self._clock.now():
            self._drive(TimePassed())

    def stop(self) -> None:
        """End the process, as a kill does."""
        self._close_connection()

    def _close_connection(self) -> None:
        self._unsaid.clear()  # what is not confirmed is sent again
        if self.connection is not None:
            self.connection.close(flush=False)
        self.connection = None

    def exit_status(self) -> tuple[bool, str] | None:
        """Whether the process has succeeded, and the failure if not. None while it runs, or if it was killed."""
        if self._refusal:
            return False, self._refusal
        if self._goodbye is None:
            return None
        if self._goodbye:
            return False, self._goodbye
        return (True, "") if self.machine.all_confirmed else None

    def _handle_mailbox(self) -> bool:
        if not self.mailbox or self.busy or self.unresponsive:
            return False
        self.work()
        return True

    def _take(self, message: Downward) -> None:
        match message:
            case CoordinatorAwaited():
                self._take_note(message)
            case Registered():
                self.registered = message
                self.table = PartTable(message.parts)
                self.attempt = replace(self.attempt, attempt=message.attempt)
                self.restored_checkpoint_id = message.checkpoint_id
                self.input_begins_again = message.input_begins_again
                self.restored_state = min(message.states).state if message.states else None
                limits = SubtaskLimits(
                    message.window_events,
                    message.window_bytes,
                    message.reconnect_timeout_s,
                    heartbeat_interval_s=message.heartbeat_interval_s,
                )
                self.machine = SubtaskMachine(
                    message.task_attempt_id,
                    self.attempt.subtask,
                    limits,
                    message.held,
                    message.events_sent,
                    hold_events=message.hold_events,
                    table=self.table,
                )
                self.restore(message)
                self._drive(ConnectionAttached(0))
                if self.opens_immediately:
                    self.open()
            case Resumed(received_seq=received_seq):
                self._drive(ConnectionAttached(received_seq))
            case Refused(message=text):
                self._refusal = f"registration refused: {text}"
            case AttemptEnded(reason=reason) if self.registered is None:
                self.ended.append(reason)
            case _:
                self._drive(MessageReceived(message))

    def _take_note(self, note: CoordinatorAwaited) -> None:
        """Take the coordinator's note about the method that it waits in, which only texts of timeouts contain."""

    def _drive(self, fact: SubtaskInput) -> None:
        if self.registered is None:
            raise AssertionError(f"{self!r} is not registered yet: await world.settle() first")
        effects = self.machine.handle(fact, self._clock.now())
        self.machine.check_invariants()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: SubtaskEffect) -> None:
        match effect:
            case SendToCoordinator(message):
                self._say(message)
            case PutInMailbox(item):
                self._put(item)
            case HandleUrgent(payload, part):
                if not self._urgent_failed:
                    self._drive(UrgentBegan())
                    self._urgent_failed = not self._handle_urgent(payload, part)
                if not self._urgent_failed:
                    self._drive(UrgentHandled())
            case ResolveRequest(request_id, error, payload):
                self._resolve(request_id, error, payload)
            case EndAttempt(reason):
                self.ended.append(reason)

    def _handle_urgent(self, payload: bytes, part: int) -> bool:
        """Handle an urgent event. False if that failed: then no other one is handled."""
        event = self._received(payload, part)
        self.urgent_events.append(event)
        self.handled.append(event)
        return True

    def _addressed(self, event: Any) -> tuple[Any, int]:
        """The event, and the index of its part."""
        if type(event) is not PartEvent:
            return event, OWN_PART
        index = self.table.index(event.name)
        assert index is not None, f"there is no part {event.name!r}"
        return event.event, index

    def _received(self, payload: bytes, part: int) -> Any:
        event = decode_event(split_traceparent(payload)[1])
        return PartEvent(self.table.names[part], event) if part else event

    def _put(self, item: MailboxItem) -> None:
        self.mailbox.append(item)

    def _resolve(self, request_id: int, error: str, payload: bytes) -> None:
        answer = self._requests[request_id - 1]
        if not error:
            answer.answer(decode_event(payload))
            return
        failure = RequestFailed(error)
        failure.__cause__ = CoordinatorTraceback(payload.decode("utf-8", "replace")) if payload else None
        answer.fail(failure)

    def _say(self, message: UpMessage) -> None:
        is_confirmation = isinstance(message, Confirm)
        # Each kind keeps its order.
        is_behind = any(isinstance(one, Confirm) is is_confirmation for one in self._unsaid)
        if self.silent or is_behind or (self.late_confirmations and is_confirmation):
            self._unsaid.append(message)
        elif self.connection is not None:
            self.connection.came = True
            self.gateway_ref.tell(MessagesArrived(self.connection.connection_id, [message]))

    def _say_what_was_held_back(self) -> bool:
        """Say, in order, what may arrive by now; returns whether there was anything."""
        unsaid, self._unsaid = self._unsaid, []
        for message in unsaid:
            self._say(message)
        return len(self._unsaid) < len(unsaid)
