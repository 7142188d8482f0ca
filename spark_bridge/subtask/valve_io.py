"""The shell around ``SubtaskMachine``: one socket, one thread, one lock for each execution attempt.

The task's own thread submits events, takes items out of the mailbox and writes to the socket itself, so an
event leaves without waiting for another thread. The I/O thread reads, puts what came into the mailbox and
confirms it at once, however long the task computes (H23); it also reconnects (H24) and keeps the machine's
deadlines.

Every use of the machine, the outgoing buffer and the mailbox happens under the one lock, so the order of the
bytes on the socket is the order of the machine's effects. Nothing waits while it holds the lock, but on its
own condition.

Whichever way an attempt ends, ``over`` becomes the reason, everybody who waits is woken, and the thread ends.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.codec import encode_message
from protocol.errors import AttemptOver, GatewayFull, ProtocolError, RemoteProtocolError
from protocol.machine import TimePassed
from protocol.messages import Confirm, DownMessage, Finished, Registered, Resume
from protocol.streams import (
    ConnectionAttached,
    ConnectionLost,
    DropConnection,
    RefuseMessage,
    RoomAvailable,
)
from protocol.subtask import SubtaskMachine
from protocol.subtask_types import (
    EndAttempt,
    EventSubmitted,
    MailboxEvent,
    MailboxItem,
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
from spark_bridge.subtask.attached import attach, detach
from spark_bridge.subtask.connection import Connection
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import RequestFailed, TimedOut
from spark_bridge.subtask.io_loop import serve
from spark_bridge.subtask.mailbox import Mailbox
from spark_bridge.subtask.registration import register
from spark_bridge.subtask.waker import Waker

__all__ = ["ValveIo", "ValveStatistics"]

_log = logging.getLogger(__name__)

WRITE_BYTES: Final = 256 * 1024
JOIN_S: Final = 10.0


@dataclass(slots=True)
class ValveStatistics:
    """Counts of one attempt, for logs and tests."""

    events_received: int = 0
    events_submitted: int = 0
    reconnects: int = 0
    messages_refused: int = 0


class ValveIo:
    """One execution attempt's end of the wire.

    Built, opened, used and closed by the task's own thread; ``submit_event`` and ``ask`` may be called by
    other threads of the task too. Every method that waits has a deadline and raises ``AttemptOver`` as soon
    as the attempt is over; after ``close()`` all of them raise it.
    """

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity) -> None:
        self.key = (identity.task_attempt_id, endpoint.operator_id)
        self.owner_thread = threading.get_ident()
        self.over: str | None = None
        self.mailbox = Mailbox(endpoint.mailbox_events_max, endpoint.mailbox_bytes_max)
        self.statistics = ValveStatistics()
        self.at_barrier: Callable[[], None] = self.decline_barriers
        self.endpoint = endpoint
        self._identity = identity
        self._changed = threading.Condition(threading.Lock())
        self.waker = Waker(lambda: self.stopping)
        self.connection: Connection | None = None
        self._outgoing = bytearray()
        self._finished_seq: int | None = None
        self._heard = False
        self._reading_paused = False
        self._closing = False
        self._orphaned = False
        self._next_request_id = 1
        self._answers: dict[int, tuple[str, bytes] | None] = {}
        self._thread: threading.Thread | None = None
        self._machine: SubtaskMachine

    # --- the life of the attempt ---

    def open(self) -> Registered:
        """Connect, register, start the I/O thread. Raises what ``register`` raises; then nothing is left
        behind.
        """
        attach(self, self.endpoint.switch_interval_s)
        try:
            connection, registered, rest = register(self.endpoint, self._identity, self.waker)
            self.connection = connection
            limits = SubtaskLimits(
                window_events=registered.window_events,
                window_bytes=registered.window_bytes,
                reconnect_timeout_s=registered.reconnect_timeout_s,
            )
            self._machine = SubtaskMachine(self._identity.task_attempt_id, limits, held=registered.held)
            with self._changed:
                self._handle(ConnectionAttached(received_seq=0))
                self._take(rest)
            self._thread = threading.Thread(target=serve, args=(self,), name=f"headgate-{self.key[0]}", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return registered

    def close(self) -> None:
        """End the thread and the socket, whatever was still to be said. Safe to call twice, and by any
        thread.

        A garbage collector may run this on the I/O thread itself; then it only asks the thread to end.
        """
        self._closing = True
        if self.over is None:
            self.over = "the task has closed its end"
        self.waker.wake()
        thread = self._thread
        if thread is threading.current_thread():
            self._orphaned = True
            return
        if thread is not None:
            thread.join(JOIN_S)
            if thread.is_alive():
                _log.error("the I/O thread of task %s did not end within %s s", self.key[0], JOIN_S)
                return
        with self._changed:
            self._drop_connection()
            self._changed.notify_all()
        self._release()

    def forget_after_fork(self) -> None:
        """In a forked child: drop the copies of the sockets without a word to the peer, and refuse to be
        used.
        """
        self._changed = threading.Condition(threading.Lock())
        self.over = "this process was forked from the task; only the task itself may talk to its coordinator"
        self._closing = True
        self._thread = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.waker.close()

    def check(self) -> None:
        """Raise ``AttemptOver`` if the attempt is over."""
        if self.over is not None:
            raise AttemptOver(self.over)

    # --- what the task says ---

    def operator_opened(self) -> None:
        """The operator has restored its state (H11)."""
        with self._changed:
            self._submit(OperatorOpened())

    def submit_event(self, payload: bytes) -> None:
        """Send one encoded event; while the window is full, wait up to ``send_timeout_s`` (H27).

        Raises:
            TimedOut: no room came; nothing was sent.
        """
        with self._changed:
            self._submit_with_room(EventSubmitted(payload), self.endpoint.send_timeout_s)
            self.statistics.events_submitted += 1

    def ask(self, payload: bytes, timeout_s: float) -> bytes:
        """Send one encoded request and wait for its answer (H33).

        Raises:
            TimedOut: neither room nor an answer within ``timeout_s``; a late answer is dropped.
            RequestFailed: the coordinator answered with an error.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            request_id = self._next_request_id
            self._next_request_id += 1
            self._answers[request_id] = None
            try:
                self._submit_with_room(RequestSubmitted(request_id, payload), timeout_s)
                while (answer := self._answers[request_id]) is None:
                    self._wait_serving(deadline, f"no answer to request {request_id} within {timeout_s:g} s")
            finally:
                del self._answers[request_id]
            self.check()  # an answer that only says so is the end of the attempt, not an error
        error, answered = answer
        if error:
            raise RequestFailed(error)
        return answered

    def snapshot_taken(self, checkpoint_id: int, state: bytes) -> None:
        """The operator's snapshot, at its barrier; what the valve holds goes with it and then leaves (H31)."""
        with self._changed:
            self._submit(SnapshotTaken(checkpoint_id, state))

    def snapshot_refused(self, checkpoint_id: int, reason: str) -> None:
        """The operator declines ``checkpoint_id``."""
        with self._changed:
            self._submit(SnapshotRefused(checkpoint_id, reason))

    def decline_barriers(self) -> None:
        """Decline every checkpoint whose barrier lies in the mailbox, for the task cannot come to it."""
        with self._changed:
            for barrier in self.mailbox.take_barriers():
                self._submit(
                    SnapshotRefused(
                        barrier.checkpoint_id,
                        "the operator was waiting for its coordinator in the middle of a call, and the "
                        "coordinator for this snapshot: use wait_for_event() instead of request(), send less "
                        "at a time, or set snapshot_anywhere",
                    )
                )

    def try_finish_well(self, state: bytes, deadline: float) -> bool:
        """Say goodbye after a good end, if the mailbox is empty and everything that was sent has left.

        Returns False, and has said nothing, when the mailbox must be handled first. What is confirmed after
        the last look at the mailbox would be lost, so the look and the goodbye are one step.

        Raises:
            TimedOut: a checkpoint held back events until ``deadline``, a reading of ``time.monotonic()``.
        """
        with self._changed:
            while not self.mailbox:
                self.check()
                if self._machine.may_finish:
                    self._handle(OperatorFinished("", state))
                    return True
                self._wait(deadline, "events are held back by a checkpoint that does not end")
            return False

    def finish_badly(self, failure: str) -> None:
        """Say goodbye after a failure; what is still held back is lost with the attempt."""
        with self._changed:
            self._submit(OperatorFinished(failure, b""))

    def wait_until_heard(self, deadline: float) -> None:
        """Wait until the coordinator has taken everything that was sent, the goodbye included.

        Raises:
            TimedOut: it has not until ``deadline``: a task that ended well now would lose events.
        """
        with self._changed:
            while not self._heard:
                self._wait(deadline, "the coordinator has not taken all that this task sent")

    # --- what the task takes ---

    def take(self, *, events_only: bool = False) -> MailboxItem | None:
        """The next mailbox item, or None; with ``events_only``, None too if that item is no event."""
        with self._changed:
            self.check()
            item = self.mailbox.take(events_only=events_only)
            if self._reading_paused and self.mailbox.half_empty:
                self.waker.wake()
            return item

    def wait_for_item(self, timeout_s: float | None) -> bool:
        """Wait until the mailbox holds an item; False after ``timeout_s`` (None: as long as the attempt
        lives).
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self.mailbox:
                self.check()
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    # --- under the lock ---

    def _submit(self, input: SubtaskInput) -> None:
        self.check()
        self._handle(input)

    def _submit_with_room(self, input: SubtaskInput, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._submit(input)
            except GatewayFull as full:
                self._wait_serving(deadline, f"no room to send within {timeout_s:g} s: {full}")

    def _wait_serving(self, deadline: float, failure: str) -> None:
        """Wait for the coordinator in the middle of a call, and look after the barriers that come meanwhile.

        The room, or the answer, may be behind a closed valve which opens at this task's own snapshot. Only
        the task's thread can take it, and it is here: without this both would wait for each other.
        """
        if not self.mailbox.barriers or not self.on_task_thread:
            self._wait(deadline, failure)
            return
        self._changed.release()
        try:
            self.at_barrier()
        finally:
            self._changed.acquire()

    def _wait(self, deadline: float, failure: str) -> None:
        self.check()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimedOut(failure)
        self._changed.wait(left_s)

    def _take(self, messages: Sequence[DownMessage]) -> None:
        if self._finished_seq is not None:
            # The end of the attempt may come in the same read as the confirmation, and the machine forgets
            # then.
            self._heard |= any(
                isinstance(message, Confirm) and message.seq >= self._finished_seq for message in messages
            )
        self._carry_out(self._machine.handle_batch(messages, time.monotonic()))

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
                _log.warning("task %s refused a message: %s", self.key[0], effect.why)
            elif isinstance(effect, EndAttempt):
                self._end(effect.reason)
            elif isinstance(effect, DropConnection):
                broken = effect.why
            else:
                assert isinstance(effect, RoomAvailable)  # whoever waits is woken below
        if frames:
            self._send(b"".join(frames))
        self._changed.notify_all()
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

    def _send(self, data: bytes) -> None:
        """Write at once what the socket takes; the I/O thread writes the rest, and notices what is broken."""
        if self.connection is None:
            return
        if not self._outgoing:
            try:
                sent = self.connection.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.waker.wake()
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._outgoing += data
        self.waker.wake()

    def _end(self, reason: str) -> None:
        if self.over is None:
            self.over = reason
        self._changed.notify_all()
        self.waker.wake()

    def _drop_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._outgoing.clear()

    # --- what the I/O loop uses (each takes the lock itself) ---

    @property
    def on_task_thread(self) -> bool:
        """Whether the caller is the thread that made this valve."""
        return threading.get_ident() == self.owner_thread

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
            events = 0 if self._reading_paused else selectors.EVENT_READ
            return events | selectors.EVENT_WRITE if self._outgoing else events

    def pass_time(self) -> float | None:
        """Tell the machine the time if it wants to know; return the seconds until its next deadline."""
        with self._changed:
            now = time.monotonic()
            deadline = self._machine.next_deadline()
            if deadline is not None and deadline <= now:
                self._carry_out(self._machine.handle(TimePassed(), now))
                deadline = self._machine.next_deadline()
            return None if deadline is None else max(0.0, deadline - now)

    def take_messages(self, messages: Sequence[DownMessage]) -> None:
        """Hand what came to the machine. Raises ``RemoteProtocolError``: the connection is to be dropped."""
        with self._changed:
            self._take(messages)

    def write_outgoing(self) -> None:
        """Write what the socket takes of what is left. Raises ``OSError`` when it is broken."""
        with self._changed:
            if self._outgoing and self.connection is not None:
                sent = self.connection.sock.send(memoryview(self._outgoing)[:WRITE_BYTES])
                del self._outgoing[:sent]

    def lose_connection(self) -> None:
        """The connection broke: from now on the machine keeps what is sent."""
        with self._changed:
            self._drop_connection()
            self._handle(ConnectionLost())

    def attach_connection(self, connection: Connection, received_seq: int, rest: Sequence[DownMessage]) -> None:
        """A new connection stands; the machine sends again what the peer has not received (H24)."""
        with self._changed:
            self.connection = connection
            self.statistics.reconnects += 1
            if self._finished_seq is not None and received_seq >= self._finished_seq:
                self._heard = True
            self._handle(ConnectionAttached(received_seq))
            self._take(rest)

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
            self._drop_connection()
            self._changed.notify_all()
        if self._orphaned:
            self._release()

    def _release(self) -> None:
        self.waker.close()
        detach(self)
