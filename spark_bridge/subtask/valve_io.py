"""The shell around ``SubtaskMachine``: one socket, one thread, one lock for each execution attempt.

The task's own thread submits events, takes items out of the mailbox and writes to the socket itself, so an event
leaves without waiting for another thread. Between records it also looks whether something has come. The I/O thread
reads when the task does not, puts what came into the mailbox and confirms it at once, however long the task computes
(H23); it also reconnects (H24) and keeps the machine's deadlines.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from protocol.errors import AttemptOver, GatewayFull, RemoteProtocolError
from protocol.subtask.types import (
    BarrierArrived,
    EventSubmitted,
    MailboxItem,
    OperatorFinished,
    OperatorOpened,
    RequestSubmitted,
    SnapshotRefused,
    SnapshotTaken,
    SubtaskInput,
)
from protocol.wire.messages import Registered
from spark_bridge.subtask.attached import attach
from spark_bridge.subtask.connection import Connection
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import CoordinatorTraceback, RequestFailed, TimedOut
from spark_bridge.subtask.io_loop import serve
from spark_bridge.subtask.registration import register
from spark_bridge.subtask.valve_core import ValveCore

__all__ = ["ValveIo"]

_log = logging.getLogger(__name__)

JOIN_S: Final = 10.0
POLL_S: Final = 0.0001  # between two looks of the task at its socket: a look costs about a microsecond


class ValveIo(ValveCore):
    """One execution attempt's end of the wire, as its task uses it.

    Built, opened, used and closed by the task's own thread; ``submit_event``, ``ask`` and ``barrier_arrived`` may be
    called by other threads of the task too. Every method that waits has a deadline and raises ``AttemptOver`` as soon
    as the attempt is over; after ``close()`` all of them raise it.
    """

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity) -> None:
        super().__init__(endpoint, identity)
        self.at_barrier: Callable[[], None] = self.decline_barriers
        self._next_request_id = 1
        self._polled_at = 0.0
        self._broken: Connection | None = None  # what the task has found broken; the I/O thread is about to drop it
        self._thread: threading.Thread | None = None

    @property
    def on_task_thread(self) -> bool:
        """Whether the caller is the thread that made this valve."""
        return threading.get_ident() == self.owner_thread

    # --- the life of the attempt ---

    def open(self) -> Registered:
        """Connect, register, start the I/O thread. Raises what ``register`` raises; then nothing is left
        behind.
        """
        attach(self, self.endpoint.switch_interval_s)
        try:
            connection, registered, rest = register(self.endpoint, self._identity, self.waker)
            with self._changed:
                self._begin(connection, registered, rest)
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
            self._wire.drop()
            self._tell_waiting()
        self._release()

    def forget_after_fork(self) -> None:
        """In a forked child: drop the copies of the sockets without a word to the peer, and refuse to be
        used.
        """
        self._changed = threading.Condition(threading.Lock())
        self.over = "this process was forked from the task; only the task itself may talk to its coordinator"
        self._closing = True
        self._thread = None
        self._wire.drop()
        self.waker.close()
        self._own_reads.close()

    def check(self) -> None:
        """Raise ``AttemptOver`` if the attempt is over."""
        if self.over is not None:
            raise AttemptOver(self.over)

    # --- what the task says ---

    def operator_opened(self, *, awaits_start: bool) -> None:
        """The operator has restored its state (H11). ``awaits_start``: a ``MailboxStart`` is to come (H66)."""
        with self._changed:
            self._submit(OperatorOpened(awaits_start))

    def submit_event(self, payload: bytes, *, in_snapshot: bool = False) -> None:
        """Send one encoded event; while the window is full, wait up to ``send_timeout_s`` (H27).

        ``in_snapshot``: from inside the snapshot, of which it becomes a part (H31). It waits for no room, which
        might come only behind that snapshot.

        Raises:
            TimedOut: no room came; nothing was sent.
        """
        with self._changed:
            self._submit_with_room(EventSubmitted(payload, in_snapshot), self.endpoint.send_timeout_s)
            self.statistics.events_submitted += 1

    def submit_at_once(self, payload: bytes) -> None:
        """Send one encoded event without waiting. Raises ``GatewayFull`` if there is no room; nothing was sent."""
        with self._changed:
            self._submit(EventSubmitted(payload))
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
            raise RequestFailed(error) from (
                CoordinatorTraceback(answered.decode("utf-8", "replace")) if answered else None
            )
        return answered

    def barrier_arrived(self, checkpoint_id: int, events_before: int) -> None:
        """A barrier came on a way of its own. One that is not wanted is logged and has no effect."""
        with self._changed:
            self._submit(BarrierArrived(checkpoint_id, events_before))

    def wants_snapshot(self, checkpoint_id: int) -> bool:
        """Whether a barrier that was taken out of the mailbox still means something (H44, H49)."""
        with self._changed:
            self.check()
            return self._machine.wants_snapshot(checkpoint_id)

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

    def poll(self) -> None:
        """Read what has come, without waiting, unless that was done a moment ago.

        While the task computes in pure Python the I/O thread gets its turn only after a switch interval; a task that
        passes here between its records is faster than that.
        """
        now = time.monotonic()
        if now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        with self._changed:
            if not (self.stopping or self.mailbox.full):
                self._read_here()

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
                self._wait_for_news(left_s)
            return True

    def timed_out(self, failure: str) -> TimedOut:
        """The error of a wait that took too long, with what the coordinator waits for, if that is known (H70)."""
        with self._changed:
            return TimedOut(self._explained(failure))

    # --- under the lock ---

    def _read_here(self) -> bool:
        """Take what has come, if anything. False when the connection is broken: the I/O thread sees to that."""
        try:
            self._receive()
            return True
        except (OSError, RemoteProtocolError) as error:
            self._broken = self._wire.connection
            if isinstance(error, RemoteProtocolError):
                self._breach = error
            self._wire.break_off()
            return False

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
            raise TimedOut(self._explained(failure))
        self._wait_for_news(left_s)

    def _wait_for_news(self, left_s: float | None) -> None:
        """Wait, with the lock free, until something may have changed, at most so many seconds."""
        own_reads, connection = self._own_reads, self._wire.connection
        if (
            (connection is None or connection is self._broken or self.mailbox.full)
            or not own_reads.are_worthwhile
            or not self.on_task_thread
        ):
            began = time.monotonic()
            told = self._changed.wait(left_s)
            own_reads.was_told(time.monotonic() - began if told else math.inf)
            return
        if not own_reads.active:
            self.waker.wake()  # the I/O thread lets go of the socket
        news = False
        try:
            own_reads.begin(connection.sock)
            self._changed.release()
            try:
                news = own_reads.wait(left_s)
            finally:
                self._changed.acquire()
        finally:
            own_reads.waiting = False
        if not (news and self._read_here()):
            own_reads.active = False
            self.waker.wake()  # it is the I/O thread's again
