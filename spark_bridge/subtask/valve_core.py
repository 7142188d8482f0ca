"""The half of the valve that both threads share: the machine, the lock, and how effects are carried out.

Every use of the machine, the wire and the mailbox happens under the one lock, so the order of the bytes on the
socket is the order of the machine's effects. Nothing waits while it holds the lock, but on its own condition.

Whichever way an attempt ends, ``over`` becomes the reason, everybody who waits is woken, and the I/O thread ends.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.types import (
    EndAttempt,
    MailboxEvent,
    PutInMailbox,
    ResolveRequest,
    RoomAvailable,
    SendToCoordinator,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
)
from protocol.wire.codec import encode_message
from protocol.wire.messages import (
    Confirm,
    CoordinatorAwaited,
    DownMessage,
    Downward,
    Finished,
    Registered,
    Resume,
    describe_wait,
)
from spark_bridge.subtask.attached import detach
from spark_bridge.subtask.connection import Connection
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.mailbox import Mailbox
from spark_bridge.subtask.own_reads import WATCH_S, OwnReads
from spark_bridge.subtask.waker import Waker
from spark_bridge.subtask.wire import Wire

__all__ = ["ValveCore", "ValveStatistics"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ValveStatistics:
    """Counts of one attempt, for logs and tests."""

    events_received: int = 0
    events_submitted: int = 0
    reconnects: int = 0
    messages_refused: int = 0


class ValveCore:
    """See the module. The methods without an underscore are the I/O thread's; each takes the lock itself."""

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity) -> None:
        self.key = (identity.task_attempt_id, endpoint.operator_id)
        self.owner_thread = threading.get_ident()
        self.over: str | None = None
        self.mailbox = Mailbox(endpoint.mailbox_events_max, endpoint.mailbox_bytes_max)
        self.statistics = ValveStatistics()
        self.endpoint = endpoint
        self.waker = Waker(lambda: self.stopping)
        self._identity = identity
        self._changed = threading.Condition(threading.Lock())
        self._wire = Wire()
        self._own_reads = OwnReads(endpoint.spin_s)
        self._finished_seq: int | None = None
        self._heard = False
        self._reading_paused = False
        self._breach: RemoteProtocolError | None = None
        self.breaches_in_a_row = 0
        """How often the peer has broken the protocol since it last said something sound; the I/O thread counts."""
        self._closing = False
        self._orphaned = False
        self._answers: dict[int, tuple[str, bytes] | None] = {}
        self._machine: SubtaskMachine
        self._awaited: tuple[CoordinatorAwaited, float] | None = None  # the last note, and when it came

    # --- under the lock ---

    def _begin(self, connection: Connection, registered: Registered, rest: Sequence[Downward]) -> None:
        limits = SubtaskLimits(
            window_events=registered.window_events,
            window_bytes=registered.window_bytes,
            reconnect_timeout_s=registered.reconnect_timeout_s,
        )
        self._machine = SubtaskMachine(
            self.key[0], self._identity.subtask, limits, registered.held, registered.events_sent
        )
        self._wire.attach(connection)
        self._handle(ConnectionAttached(received_seq=0))
        self._take(rest)

    def _take(self, read: Sequence[Downward]) -> None:
        messages: list[DownMessage] = []
        for message in read:
            if isinstance(message, CoordinatorAwaited):
                self._awaited = (message, time.monotonic())
            else:
                messages.append(message)
        if self._finished_seq is not None:
            # The end of the attempt may come in the same read as the confirmation; the machine forgets then.
            self._heard |= any(
                isinstance(message, Confirm) and message.seq >= self._finished_seq for message in messages
            )
        self._carry_out(self._machine.handle_batch(messages, time.monotonic()))

    def _receive(self) -> None:
        messages = self._wire.receive()
        if messages:
            self._take(messages)
            self.breaches_in_a_row = 0

    def _handle(self, input: SubtaskInput) -> None:
        self._carry_out(self._machine.handle(input, time.monotonic()))

    def _carry_out(self, effects: Sequence[SubtaskEffect]) -> None:
        """In the machine's order: the mailbox has an event before its confirmation leaves (H23)."""
        frames: list[bytes] = []
        broken = ""
        for effect in effects:
            if isinstance(effect, SendToCoordinator):
                frames.append(self._encoded(effect))
            elif isinstance(effect, PutInMailbox):
                self.mailbox.put(effect.item)
                self.statistics.events_received += isinstance(effect.item, MailboxEvent)
            elif isinstance(effect, ResolveRequest):
                if effect.request_id in self._answers:
                    self._answers[effect.request_id] = (effect.error, effect.payload)
            elif isinstance(effect, RefuseMessage):
                self.statistics.messages_refused += 1
                # It comes too late, such as an event for an operator that has just ended. Its sender is told that.
                _log.info("task %s refused a message: %s", self.key[0], effect.why)
            elif isinstance(effect, EndAttempt):
                self._end(effect.reason)
            elif isinstance(effect, DropConnection):
                broken = effect.why
            else:
                assert isinstance(effect, RoomAvailable)  # whoever waits is woken below
        if frames and not self._wire.send(b"".join(frames)):
            self.waker.wake()
        self._tell_waiting()
        if broken:
            raise RemoteProtocolError(broken)

    def _encoded(self, effect: SendToCoordinator) -> bytes:
        if isinstance(effect.message, Finished):
            self._finished_seq = effect.message.seq
        try:
            return encode_message(effect.message)
        except ProtocolError as error:
            # The machine has it in its stream already and would try for ever: this attempt cannot go on.
            self._end(str(error))
            raise

    def _end(self, reason: str) -> None:
        if self.over is None:
            self.over = reason
        self._tell_waiting()
        self.waker.wake()

    def _tell_waiting(self) -> None:
        self._changed.notify_all()
        if self._own_reads.waiting:
            self._own_reads.wake()

    def _release(self) -> None:
        self.waker.close()
        self._own_reads.close()
        detach(self.key, self)

    def _explained(self, failure: str) -> str:
        """The text of a timeout, with what the coordinator said last that it is waiting for (H70)."""
        if self._awaited is None or not self._awaited[0].call:
            return failure
        note, came_at = self._awaited
        awaited_s = note.awaited_s + time.monotonic() - came_at
        return f"{failure}: {describe_wait(note.call, awaited_s, note.place)}"

    # --- what the I/O loop uses ---

    @property
    def connection(self) -> Connection | None:
        """The present connection. Only the I/O thread replaces it."""
        return self._wire.connection

    @property
    def stopping(self) -> bool:
        """Whether the I/O thread should end."""
        return self._closing or self.over is not None

    @property
    def interests(self) -> int:
        """What to wait for on the socket: not reading while the mailbox is full is what stops the sender
        (H27).
        """
        with self._changed:  # or a task that empties the mailbox meanwhile would not know that it must wake us
            self._reading_paused = self.mailbox.full
            if self._own_reads.active and self._own_reads.has_been_away():
                self._own_reads.active = False
            events = 0 if self._reading_paused or self._own_reads.active else selectors.EVENT_READ
            return events | selectors.EVENT_WRITE if self._wire.has_outgoing else events

    def pass_time(self) -> float | None:
        """Tell the machine the time if it wants to know; return the seconds until its next deadline."""
        with self._changed:
            now = time.monotonic()
            deadline = self._machine.next_deadline()
            if deadline is not None and deadline <= now:
                self._carry_out(self._machine.handle(TimePassed(), now))
                deadline = self._machine.next_deadline()
            return None if deadline is None else max(0.0, deadline - now)

    def time_to_look(self) -> float | None:
        """As ``pass_time``, but a task that reads itself is looked at (``interests``) every ``WATCH_S``."""
        left_s = self.pass_time()
        if not self._own_reads.active:
            return left_s
        return WATCH_S if left_s is None else min(WATCH_S, left_s)

    def read(self) -> None:
        """Take what has come, if anything. Raises ``OSError`` or ``RemoteProtocolError``: drop the connection."""
        with self._changed:
            self._receive()

    def take_breach(self) -> RemoteProtocolError | None:
        """How the peer has broken the protocol when the task's own thread read, if that is why the connection ends."""
        with self._changed:
            breach, self._breach = self._breach, None
            return breach

    def write(self) -> None:
        """Write what is left over. Raises ``OSError`` when the connection is broken."""
        with self._changed:
            self._wire.flush()

    def lose_connection(self) -> None:
        """The connection broke: from now on the machine keeps what is sent."""
        with self._changed:
            self._wire.drop()
            self._own_reads.active = False
            self._handle(ConnectionLost())

    def attach_connection(self, connection: Connection, received_seq: int, rest: Sequence[Downward]) -> None:
        """A new connection stands; the machine sends again what the peer has not received (H24).

        Raises ``RemoteProtocolError``, and has dropped it again, if the peer resumes where nobody was.
        """
        with self._changed:
            try:
                self._wire.attach(connection)
                self.statistics.reconnects += 1
                if self._finished_seq is not None and received_seq >= self._finished_seq:
                    self._heard = True
                self._handle(ConnectionAttached(received_seq))
                self._take(rest)
            except RemoteProtocolError:
                self._wire.drop()
                self._handle(ConnectionLost())
                raise

    def resume_message(self) -> Resume:
        """The first word on a new connection: what has arrived here."""
        with self._changed:
            return Resume(self.key[0], self.key[1], self._machine.resume_seq)

    def end(self, reason: str) -> None:
        """The attempt is over."""
        with self._changed:
            self._end(reason)

    def loop_ended(self) -> None:
        """The last act of the I/O thread."""
        with self._changed:
            self._wire.drop()
            self._tell_waiting()
        if self._orphaned:
            self._release()
