# SPDX-License-Identifier: Apache-2.0

"""The task's end of its connection to the coordinator: one ``SubtaskMachine``, socket, lock and I/O thread per attempt.

Two threads use it. The task's own thread submits events, takes items out of the mailbox and writes to the socket
itself, so an event leaves without waiting for another thread. Between records, it also reads what has arrived. The I/O
thread (``runner``) reads when the task does not: it fills the mailbox and confirms what came (H23), however long the
task computes. It also writes what the socket did not take, reconnects (H24), and keeps the machine's deadlines.

Every use of the machine, the connection and the mailbox happens under one lock, so the bytes on the socket follow the
order of the machine's effects. Nothing waits while it holds the lock, except on the lock's own condition.

A third thread handles urgent events (``UrgentThread``). If its handler raises, the task's thread raises the same error
when it next uses the channel. A fourth one stores states in files (``UploadThread``), if there are any.

However an attempt ends, ``over`` becomes the reason, every waiting thread is woken, and the I/O thread ends.

Spark reuses workers, so globals, threads and sockets outlive a task (spark-facts 18), and operators may fork. A list of
the attempts of the process holds everything that must be gone before the next task starts. It is keyed by task attempt
and has a lock, because tests run several attempts in one process.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from protocol.describing import describe
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, ProtocolError, RemoteProtocolError
from protocol.file_retention import LAST_STATE
from protocol.machine import TimePassed
from protocol.parts import ONE_PART, OWN_PART, PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.types import (
    BarrierArrived,
    CapacityAvailable,
    EndAttempt,
    EventSubmitted,
    HandleUrgent,
    MailboxEvent,
    MailboxItem,
    OperatorFinished,
    OperatorOpened,
    PutInMailbox,
    RequestAbandoned,
    RequestSubmitted,
    ResolveRequest,
    SendToCoordinator,
    SnapshotRefused,
    SnapshotTaken,
    StartUpload,
    StateUploaded,
    StopUpload,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
    UploadFailed,
    UrgentBegan,
    UrgentHandled,
    snapshot_bytes_max,
)
from protocol.wire.messages import (
    CoordinatorAwaited,
    DownMessage,
    Downward,
    Finished,
    Registered,
    Resume,
    confirmed_by,
    describe_wait,
)
from protocol.wire.state_handles import StateHandle
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.connection import WATCH_S, Connection, CurrentConnection, OwnReads, Waker, register
from spark_bridge.subtask.errors import NO_ANSWER, TimedOut, for_unknown_reasons, request_failure
from spark_bridge.subtask.mailbox import MailboxCall, OperatorMailbox, UrgentThread
from spark_bridge.subtask.uploads import Outcome, UploadThread

if TYPE_CHECKING:
    from spark_bridge.storage.state_files.snapshot import Snapshot
    from spark_bridge.subtask.state_files import TaskFiles

__all__ = ["AwaitedRequest", "ChannelStatistics", "SubtaskChannel", "attached_keys"]

_log = logging.getLogger(__name__)

JOIN_S: Final = 10.0
POLL_S: Final = 0.0001  # between two reads of a computing task: one read of nothing costs about a microsecond
DECLINED_WHILE_WAITING: Final = (
    "the operator was waiting for its coordinator inside a call, and the coordinator for this snapshot: use "
    "wait_for_event() instead of request(), send fewer events at a time, or set snapshot_anywhere"
)


@dataclass(slots=True)
class ChannelStatistics:
    """Counts of one attempt, for logs and tests.

    ``uploaded_bytes``: how much it has written into the storage so far, for its states in files.
    """

    events_received: int = 0
    reconnects: int = 0
    messages_refused: int = 0
    uploaded_bytes: int = 0


@dataclass(slots=True, eq=False)
class AwaitedRequest:
    """A request of a coroutine. ``deliver`` takes the encoded answer, or what the request raises; it must not wait."""

    payload: bytes
    part: int
    deliver: Callable[[bytes | Exception], None]
    request_id: int = 0
    """Its number, once it has left; 0 before."""


class SubtaskChannel:
    """One execution attempt's end of the connection.

    The task's own thread creates, opens, uses and closes it. Other threads of the task may call ``submit_event``,
    ``ask`` and ``barrier_arrived``. Each method that waits has a deadline and raises ``AttemptOver`` as soon as the
    attempt is over. After ``close()`` all of them raise it.
    """

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity) -> None:
        self.key = (identity.task_attempt_id, endpoint.operator_id)
        self.sidecar = (endpoint.host, endpoint.port)
        self.owner_thread = threading.get_ident()
        self.over: str | None = None
        self.mailbox = OperatorMailbox(endpoint.mailbox_events_max, endpoint.mailbox_bytes_max)
        self.statistics = ChannelStatistics()
        self.endpoint = endpoint
        self.waker = Waker(lambda: self.stopping)
        self.at_barrier: Callable[[bool], bool] = self._decline_at_barrier
        """Called when a barrier comes while the task's thread waits: whether it may be declined. True if it was met."""
        self.stepped_loop: Callable[[Any], Any] | None = None
        self.table = ONE_PART
        """The parts of the operator, as the driver has named them."""
        self.failure: BaseException | None = None
        """What the handler of an urgent event has raised, until the task's thread fails with it."""
        self.breaches_in_a_row = 0
        """How often the peer has broken the protocol since its last valid message. Only the I/O thread counts."""
        self._identity = identity
        self._asked_here: set[int] = set()  # requests of the task's own thread that wait
        lock = threading.Lock()
        self._lock = lock  # that of the condition, which takes it with a call in Python
        self._changed = threading.Condition(lock)
        self._waiting_threads = 0
        self._urgent = UrgentThread(lock, f"headgate-urgent-{self.key[0]}", self._report_urgent)
        self._uploads = UploadThread(lock, f"headgate-upload-{self.key[0]}", self._report_upload)
        self._files: TaskFiles | None = None  # made when it is first needed
        self._frozen: dict[int, Snapshot] = {}  # while it is not decided whether the checkpoint wants its files
        self._last: StateHandle | BaseException | None = None  # how the upload of the last state has ended
        self._succeeded = False
        self._wire = CurrentConnection(endpoint.wire_limits)
        self._own_reads = OwnReads(endpoint.spin_s)
        self._machine: SubtaskMachine
        self._token = b""
        self._thread: threading.Thread | None = None
        self._reading_paused = False
        self._broken: Connection | None = None  # found broken by the task's thread; the I/O thread will drop it
        self._breach: RemoteProtocolError | None = None
        self._closing = False
        self._orphaned = False
        self._answers: dict[int, tuple[str, bytes] | None] = {}
        self._awaited_requests: dict[int, AwaitedRequest] = {}  # of coroutines, which have left
        self._waiting_requests: dict[int, deque[AwaitedRequest]] = {}  # by part: those that wait for capacity
        self._failed_requests: list[tuple[AwaitedRequest, ResolveRequest]] = []
        self._at_end: list[Callable[[], None]] = []
        self._parked = False  # the task's thread waits in ``wait_until``
        self._next_request_id = 1
        self._finished_seq: int | None = None  # the number of the completion message
        self._finish_confirmed = False
        self._polled_at = 0.0
        self._awaited: tuple[CoordinatorAwaited, float] | None = None  # the last note, and when it came

    def now(self) -> float:
        """The clock of every deadline that is passed in, in seconds."""
        return time.monotonic()

    @property
    def on_task_thread(self) -> bool:
        """Whether the caller is the thread that created this channel."""
        return threading.get_ident() == self.owner_thread

    # --- the life of the attempt ---

    def open(self, serve: Callable[[SubtaskChannel], None]) -> Registered:
        """Connect, register, and start the I/O thread, whose body is ``serve``.

        Raises what ``register`` raises, after releasing everything.
        """
        _attach(self, self.endpoint.switch_interval_s)
        try:
            connection, registered, rest = register(self.endpoint, self._identity, self.waker)
            with self._lock:
                self._begin(connection, registered, rest)
            self._thread = threading.Thread(target=serve, args=(self,), name=f"headgate-{self.key[0]}", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return registered

    def close(self) -> None:
        """End the thread and the socket, and discard what was not sent. Any thread may call it, also twice.

        A garbage collector may run this on one of the channel's own threads; then it only asks them to end.
        """
        self._closing = True
        if self.over is None:
            self.over = "the task has closed its end"
        if not self._on_own_thread:  # otherwise a garbage collector runs this, perhaps while the thread holds the lock
            with self._lock:
                self._end_awaited()
        self.waker.wake()
        self.stop_urgent(self.endpoint.failure_timeout_s)
        thread = self._thread
        if self._on_own_thread:
            self._orphaned = True
            return
        self._close_files()
        if thread is not None:
            thread.join(JOIN_S)
            if thread.is_alive():
                _log.error("task %s: the I/O thread did not end within %s s", self.key[0], JOIN_S)
                return
        with self._lock:
            self._wire.drop()
            self._wake_waiting()
        self._release()

    def _close_files(self) -> None:
        """End the uploads. What is left of their folders is removed after the last one, which may outlive this."""
        files, self._files = self._files, None
        with self._lock:
            self._uploads.end()
            close = None if files is None else partial(files.close, succeeded=self._succeeded)
            if close is not None and self._uploads.call_after(close):
                close = None
        if close is not None:
            close()
        if not self._uploads.join(self.endpoint.failure_timeout_s):
            _log.warning("task %s: an upload goes on after the end, and will be dropped", self.key[0])

    def forget_after_fork(self) -> None:
        """In a forked child: drop the copies of the sockets without a message to the peer, and refuse any use."""
        lock = threading.Lock()
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._urgent = UrgentThread(lock, "", self._report_urgent)
        self._uploads = UploadThread(lock, "", self._report_upload)
        if self._files is not None:
            self._files.forget_after_fork()
            self._files = None
        self.over = "this process was forked from the task; only the task itself may talk to its coordinator"
        self._closing = True
        self._thread = None
        self._wire.drop()
        self.waker.close()
        self._own_reads.close()

    def check(self) -> None:
        """Raise ``AttemptOver`` if the attempt is over. On the task's thread, raise what ``handle_urgent`` raised."""
        if self.over is not None:
            raise AttemptOver(self.over)
        if self.failure is not None and self.on_task_thread:
            raise self.failure

    @property
    def on_urgent_thread(self) -> bool:
        """Whether the caller is the handler of an urgent event."""
        return self._urgent.on_this_thread

    @property
    def _on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread or self._urgent.on_this_thread or self._uploads.on_this_thread

    @property
    def cancelled(self) -> bool:
        """Whether the operator should end: the attempt is over, or a handler of an urgent event has failed."""
        return self.over is not None or self.failure is not None

    # --- what the task sends ---

    def operator_opened(
        self,
        *,
        awaits_start: bool,
        handle_urgent: Callable[[bytes, int], None] | None = None,
        parts_without_urgent: frozenset[int] = frozenset(),
    ) -> None:
        """The operator has restored its state (H11). ``awaits_start``: it waits for a ``MailboxStart`` (H66).

        ``handle_urgent`` takes the payload of each urgent event, on the thread for these. None: they are ordinary. So
        are those for ``parts_without_urgent``.
        """
        if handle_urgent is not None:
            self._urgent.handle = handle_urgent
        with self._lock:
            self._submit(OperatorOpened(awaits_start, handle_urgent is not None, parts_without_urgent))

    def submit_event(self, payload: bytes, part: int = OWN_PART, *, in_snapshot: bool = False) -> None:
        """Send one encoded event. While the window is full, wait up to ``send_timeout_s`` (H27).

        ``in_snapshot``: sent inside the snapshot, and part of it (H31). It does not wait for capacity, which may
        come only after that snapshot. The same holds in ``handle_urgent`` while a checkpoint closes the valve.

        Raises:
            TimedOut: no capacity became available; nothing was sent.
        """
        with self._lock:
            submitted = EventSubmitted(payload, in_snapshot, self._urgent.on_this_thread, part)
            self._submit_with_capacity(submitted, self.endpoint.send_timeout_s)

    def submit_event_nowait(self, payload: bytes, part: int = OWN_PART) -> None:
        """Send one encoded event without waiting. Raises ``GatewayFull`` if there is no capacity; nothing was sent."""
        with self._lock:
            self._submit(EventSubmitted(payload, part=part))

    def ask(self, payload: bytes, timeout_s: float, part: int = OWN_PART) -> bytes:
        """Send one encoded request and wait for its answer (H33).

        If the part is outside of checkpoints, a barrier that cannot be met meanwhile stays in the mailbox (H152).

        Raises:
            TimedOut: neither capacity nor an answer within ``timeout_s``. The coordinator learns of that (H85); a late
                answer is dropped.
            RequestFailed: the coordinator answered with an error.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            request_id = self._next_request_id
            self._next_request_id += 1
            self._answers[request_id] = None
            if self.on_task_thread:
                self._asked_here.add(request_id)
            try:
                self._submit_with_capacity(RequestSubmitted(request_id, payload, part), timeout_s)
                try:
                    while (answer := self._answers[request_id]) is None:
                        self._wait_serving(deadline, f"{NO_ANSWER} {request_id} within {timeout_s:g} s", part)
                except BaseException:
                    if not self.cancelled:
                        self._handle(RequestAbandoned(request_id))
                    raise
            finally:
                del self._answers[request_id]
                self._asked_here.discard(request_id)
                if self.mailbox.barriers:
                    self._wake_waiting()  # the task's thread may wait with a barrier after this answer
            self.check()  # the end of the attempt resolves requests too, and is not a failed request
        error, answered = answer
        if error:
            raise request_failure(error, answered)
        return answered

    def ask_soon(self, requests: Sequence[AwaitedRequest]) -> None:
        """Send requests of coroutines, in one write, without waiting: those without capacity leave when there is some.

        Any thread may call this. Each request's ``deliver`` is called once, under the lock, unless it is abandoned.

        Raises ``AttemptOver``; then none is delivered.
        """
        with self._lock:
            self.check()
            for request in requests:
                self._waiting_requests.setdefault(request.part, deque()).append(request)
            self._send_requests()

    def abandon(self, request: AwaitedRequest) -> None:
        """Nobody awaits the answer any more (H85). Any thread may call this; never raises."""
        with self._lock:
            if request.request_id:
                if self._awaited_requests.pop(request.request_id, None) is not None and not self.stopping:
                    self._handle(RequestAbandoned(request.request_id))
            else:
                with suppress(KeyError, ValueError):  # it never came here
                    self._waiting_requests[request.part].remove(request)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called as soon as the attempt is over, on any thread, or now if it is. It must not wait."""
        with self._lock:
            if self.over is None:
                self._at_end.append(call)
                return
        call()

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` called on the task's own thread, after what is in the mailbox. For other threads of the task.

        Raises ``LocalProtocolError`` on that thread itself, if it would wait for the call.
        """
        if self.on_task_thread:
            raise LocalProtocolError(
                "a coroutine that runs on the task's own thread waits for what only that thread can do: let "
                "concurrently() run it, which has an event loop on a thread beside it"
            )
        with self._lock:
            if self.over is None:
                self.mailbox.put(MailboxCall(call))
                self._wake_waiting()

    def barrier_arrived(self, checkpoint_id: int, events_before: int) -> None:
        """A barrier came separately from the items. An unexpected one is logged and has no effect."""
        with self._lock:
            self._submit(BarrierArrived(checkpoint_id, events_before))

    def wants_snapshot(self, checkpoint_id: int) -> bool:
        """Whether a barrier that was taken out of the mailbox still counts (H44, H49)."""
        with self._lock:
            self.check()
            return self._machine.wants_snapshot(checkpoint_id)

    def snapshot_taken(self, checkpoint_id: int, state: bytes, files: Snapshot | None = None) -> None:
        """The operator's snapshot, at its barrier. Held events are part of it, and leave after it (H31).

        ``files``: a part of the state, which is stored from now on, while the operator goes on (H192).
        """
        with self._lock:
            if files is not None:
                self._frozen[checkpoint_id] = files
            self._submit(SnapshotTaken(checkpoint_id, state, files is not None))
            unwanted = self._frozen.pop(checkpoint_id, None)
        if unwanted is not None:
            unwanted.remove()

    def snapshot_refused(self, checkpoint_id: int, reason: str) -> None:
        """The operator declines ``checkpoint_id``."""
        with self._lock:
            self._submit(SnapshotRefused(checkpoint_id, reason))

    def files(self) -> TaskFiles:
        """The states in files of this attempt. Raises ``StorageError`` if it cannot have any."""
        if self._files is None:
            from spark_bridge.subtask.state_files import TaskFiles  # few tasks have files, and need what it imports

            self._files = TaskFiles(self.endpoint, self._identity, self._count_uploaded)
        return self._files

    def _count_uploaded(self, size: int) -> None:
        self.statistics.uploaded_bytes = size

    def checkpoint_ended(self, checkpoint_id: int, *, completed: bool) -> None:
        """The task's thread has come to this in its mailbox, before the barrier of any later checkpoint."""
        if self._files is not None:
            (self._files.completed if completed else self._files.aborted)(checkpoint_id)

    def store_last(self, files: Snapshot) -> None:
        """Begin to store the files of the last state: call ``wait_for_uploads``, then ``last_files``."""
        with self._lock:
            self.check()
            self._last = None
            self._uploads.put(self.files().upload(files))

    def wait_for_uploads(self) -> bool:
        """Wait until no upload is going on. False if the mailbox must be handled first."""
        with self._lock:
            while True:
                self.check()
                if self._uploads.idle or self.mailbox:
                    return self._uploads.idle
                self._wait_for_news(None)

    def last_files(self) -> StateHandle:
        """The files of the last state, which are stored. Raises what their upload has raised."""
        last = self._last
        if isinstance(last, BaseException):
            raise last
        assert last is not None
        return last

    def decline_barriers(self) -> None:
        """Decline each checkpoint whose barrier is in the mailbox, because the task cannot handle it now."""
        with self._lock:
            for barrier in self.mailbox.take_barriers():
                self._submit(SnapshotRefused(barrier.checkpoint_id, DECLINED_WHILE_WAITING))

    def wait_until_urgent_are_handled(self, deadline: float) -> int | None:
        """Wait until each urgent event that has come was handled; return how many have come.

        None if the mailbox has a barrier: they may wait for that one, so the mailbox has to be handled first (H79).

        Raises:
            TimedOut: a handler has not returned until ``deadline``.
        """
        with self._lock:
            while not self._machine.urgent_idle:
                if self.mailbox.barriers:
                    return None
                self._wait(deadline, "handle_urgent() has not returned, and the task ends only after that")
            return self._machine.urgent_came

    def try_finish(self, state: bytes, deadline: float, urgent_came: int = 0, files: StateHandle | None = None) -> bool:
        """Report a good end, if the mailbox is empty and everything that was sent has left.

        Returns False, and reports nothing, if the mailbox must be handled first, or if more than ``urgent_came`` urgent
        events have come, so that ``state`` may lack what they changed. An item that is confirmed after the
        last look at the mailbox would be lost, so the look and the report are one step.

        Raises:
            TimedOut: a checkpoint held back events until ``deadline``, a reading of ``time.monotonic()``.
        """
        with self._lock:
            while not self.mailbox:
                self.check()
                if self._machine.urgent_came != urgent_came:
                    return False
                if self._machine.may_finish:
                    self._handle(OperatorFinished("", state, files))
                    self._succeeded = True
                    return True
                self._wait(deadline, "events are held back by a checkpoint that does not end")
            return False

    def finish_with_failure(self, failure: str) -> None:
        """Report a failure. Events that are still held back are lost with the attempt."""
        with self._lock:
            self._submit(OperatorFinished(failure, b""))

    def stop_urgent(self, timeout_s: float) -> None:
        """Begin no more handlers of urgent events, and wait for the one that runs. The operator fails, or has ended."""
        if self._on_own_thread:  # a garbage collector runs this, perhaps while the thread holds the lock
            self._urgent.stopped = True
            return
        with self._lock:
            self._urgent.stop()
            self.failure = None  # the task's thread has it, or fails for another reason
        if not self._urgent.join(timeout_s):
            _log.error("task %s: handle_urgent() did not return within %s s", self.key[0], timeout_s)

    def wait_until_finish_is_confirmed(self, deadline: float) -> None:
        """Wait until the coordinator has taken everything that was sent, including the report of the end.

        Raises:
            TimedOut: it has not until ``deadline``. A task that succeeded now would lose events.
        """
        with self._lock:
            while not self._finish_confirmed:
                self._wait(deadline, "the coordinator has not taken all that this task sent")

    # --- what the task takes ---

    def poll(self) -> None:
        """Read what has arrived, without waiting, unless that was done a moment ago.

        While the task computes in pure Python, the I/O thread gets the interpreter only after a switch interval. A
        task that calls this between its records is faster.
        """
        now = time.monotonic()
        if now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        with self._lock:
            if not (self.stopping or self.mailbox.full):
                self._read_here()

    def take(self, *, events_only: bool = False) -> MailboxItem | MailboxCall | None:
        """The next mailbox item, or None. With ``events_only``, also None if that item is not an event.

        A barrier is not taken before every answer ahead of it has reached its asker, so that the snapshot is not older
        than what another thread of the task does with the answer (H79). None if the asker is this thread.
        """
        with self._lock:
            self.check()
            while not events_only and self.mailbox.starts_with_barrier and (given := self._given_answers()):
                if given & self._asked_here:
                    return None
                self._await_change(None)
                self.check()
            item = self.mailbox.take(events_only=events_only)
            if self._reading_paused and self.mailbox.half_empty:
                self.waker.wake()
            return item

    def _given_answers(self) -> set[int]:
        """The requests whose answer has come, and has not reached its asker."""
        return {request_id for request_id, answer in self._answers.items() if answer is not None}

    def wait_for_item(self, timeout_s: float | None) -> bool:
        """Wait until the mailbox has an item. False after ``timeout_s``; None waits as long as the attempt lives."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while not self.mailbox:
                self.check()
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._wait_for_news(left_s)
            return True

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until the mailbox has an item or ``ready()``, which another thread makes true before it calls ``nudge``.

        Raises ``AttemptOver`` if the attempt ends.
        """
        with self._lock:
            self._parked = True
            try:
                while not self.mailbox and not ready():
                    self.check()
                    if self._own_reads.active:  # what is awaited seldom comes from the socket: do not poll it
                        self._own_reads.active = False
                        self.waker.wake()
                    self._await_change(None)
                self.check()
            finally:
                self._parked = False

    def nudge(self) -> None:
        """Have ``wait_until`` look again. Any thread may call this."""
        if self._parked:  # it looks after it has set this, so what was made true before this line is seen
            with self._lock:
                self._wake_waiting()

    def sleep(self, seconds: float) -> None:
        """Wait, unless the attempt ends. Raises ``AttemptOver`` if it does."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while True:
                self.check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self._await_change(left_s)

    def timed_out(self, failure: str) -> TimedOut:
        """The error of a wait that took too long, with what the coordinator is waiting for, if known (H70)."""
        with self._lock:
            return TimedOut(self._explain_wait(failure))

    # --- what the I/O loop uses ---

    @property
    def connection(self) -> Connection | None:
        """The current connection. Only the I/O thread replaces it."""
        return self._wire.connection

    @property
    def stopping(self) -> bool:
        """Whether the I/O thread should end."""
        return self._closing or self.over is not None

    @property
    def interests(self) -> int:
        """Which events of the socket to wait for. Not reading while the mailbox is full stops the sender (H27)."""
        with self._lock:  # otherwise a task that empties the mailbox now would not know that it must wake us
            self._reading_paused = self.mailbox.full
            if self._own_reads.active and self._own_reads.has_been_away():
                self._own_reads.active = False
            events = 0 if self._reading_paused or self._own_reads.active else selectors.EVENT_READ
            return events | selectors.EVENT_WRITE if self._wire.has_outgoing else events

    def pass_time(self) -> float | None:
        """Tell the machine the time if a deadline has passed; return the seconds until the next one."""
        with self._lock:
            now = time.monotonic()
            deadline = self._machine.next_deadline()
            if deadline is not None and deadline <= now:
                self._carry_out(self._machine.handle(TimePassed(), now))
                deadline = self._machine.next_deadline()
            return None if deadline is None else max(0.0, deadline - now)

    def pass_time_and_watch(self) -> float | None:
        """As ``pass_time``, but at most ``WATCH_S`` while the task reads: its ``interests`` are checked that often."""
        left_s = self.pass_time()
        if not self._own_reads.active:
            return left_s
        return WATCH_S if left_s is None else min(WATCH_S, left_s)

    def read(self) -> None:
        """Take what has arrived, if anything. Raises ``OSError`` or ``RemoteProtocolError``: drop the connection."""
        with self._lock:
            self._receive()

    def take_breach(self) -> RemoteProtocolError | None:
        """How the peer broke the protocol while the task's thread was reading, if that ended the connection."""
        with self._lock:
            breach, self._breach = self._breach, None
            return breach

    def write(self) -> None:
        """Write what the socket did not take before. Raises ``OSError`` if the connection is broken."""
        with self._lock:
            self._wire.flush()

    def lose_connection(self) -> None:
        """The connection broke: from now on the machine keeps what is sent."""
        with self._lock:
            self._wire.drop()
            self._own_reads.active = False
            self._handle(ConnectionLost())

    def attach_connection(self, connection: Connection, received_seq: int, rest: Sequence[Downward]) -> None:
        """A new connection is up; the machine sends again what the peer has not received (H24).

        Raises ``RemoteProtocolError``, after dropping the connection, if the peer resumes at an impossible item.
        """
        with self._lock:
            try:
                self._wire.attach(connection)
                self.statistics.reconnects += 1
                if self._finished_seq is not None and received_seq >= self._finished_seq:
                    self._finish_confirmed = True
                self._handle(ConnectionAttached(received_seq))
                self._take(rest)
            except RemoteProtocolError:
                self._wire.drop()
                self._handle(ConnectionLost())
                raise

    def resume_message(self) -> Resume:
        """The first message on a new connection: what has been received here."""
        with self._lock:
            return Resume(self.key[0], self.key[1], self._machine.resume_seq, self._token)

    def end(self, reason: str) -> None:
        """The attempt is over."""
        with self._lock:
            self._end(reason)

    def loop_ended(self) -> None:
        """The last act of the I/O thread."""
        with self._lock:
            self._urgent.stop()
            self._uploads.end()
            self._wire.drop()
            self._wake_waiting()
        if self._orphaned:
            self._close_files()
            self._release()

    # --- under the lock: requests of coroutines ---

    def _send_requests(self) -> None:
        """Those that have capacity leave, in their order, with one write."""
        effects: list[SubtaskEffect] = []
        now = time.monotonic()
        for waiting in self._waiting_requests.values():
            while waiting:
                request = waiting[0]
                submitted = RequestSubmitted(self._next_request_id, request.payload, request.part)
                try:
                    effects += self._machine.handle(submitted, now)
                except GatewayFull:
                    break
                waiting.popleft()
                request.request_id = self._next_request_id
                self._awaited_requests[request.request_id] = request
                self._next_request_id += 1
        if effects:
            self._carry_out(effects)

    def _follow_up(self) -> None:
        """After effects: the end of the attempt is known, which resolves requests too, and what they say has left."""
        failed, self._failed_requests = self._failed_requests, []
        for request, effect in failed:
            over = None if self.over is None else AttemptOver(self.over)
            request.deliver(over or request_failure(effect.error, effect.payload))
        if self.over is None:
            self._send_requests()

    def _end_awaited(self) -> None:
        """The attempt is over: no request of a coroutine has an answer any more, and who wants to know is told."""
        assert self.over is not None
        awaited = [*self._awaited_requests.values(), *chain.from_iterable(self._waiting_requests.values())]
        self._awaited_requests.clear()
        self._waiting_requests.clear()
        for request in awaited:
            request.deliver(AttemptOver(self.over))
        calls, self._at_end = self._at_end, []
        for call in calls:
            call()

    # --- under the lock: waiting ---

    def _submit(self, input: SubtaskInput) -> None:
        self.check()
        self._handle(input)

    def _submit_with_capacity(self, input: EventSubmitted | RequestSubmitted, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._submit(input)
            except GatewayFull as full:
                self._wait_serving(deadline, f"no capacity to send within {timeout_s:g} s: {full}", input.part)

    def _wait_serving(self, deadline: float, failure: str, part: int) -> None:
        """Wait for the coordinator inside a call, and handle the barriers that arrive meanwhile.

        The capacity or the answer may wait for a closed valve, which opens at this task's own snapshot. Only the task's
        thread can take that, and it is here: without this, both would wait for each other. What a part outside of
        checkpoints waits for is behind no valve, so there the barrier may also wait for this call (H152).
        """
        if self.mailbox.barriers and self.on_task_thread:
            self._lock.release()
            try:
                met = self.at_barrier(not self.table.outside[part])
            finally:
                self._lock.acquire()
            if met:
                return
        self._wait(deadline, failure)

    def _decline_at_barrier(self, may_decline: bool) -> bool:
        if may_decline:
            self.decline_barriers()
        return may_decline

    def _wait(self, deadline: float, failure: str) -> None:
        self.check()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimedOut(self._explain_wait(failure))
        self._wait_for_news(left_s)

    def _wait_for_news(self, left_s: float | None) -> None:
        """Wait, with the lock released, until something may have changed, at most ``left_s`` seconds."""
        own_reads, connection = self._own_reads, self._wire.connection
        if (
            (connection is None or connection is self._broken or self.mailbox.full)
            or not own_reads.are_worthwhile
            or not self.on_task_thread
        ):
            began = time.monotonic()
            told = self._await_change(left_s)
            own_reads.was_told(time.monotonic() - began if told else math.inf)
            return
        if not own_reads.active:
            self.waker.wake()  # the I/O thread stops watching the socket
        news = False
        try:
            own_reads.begin(connection.sock)
            self._lock.release()
            try:
                news = own_reads.wait(left_s)
            finally:
                self._lock.acquire()
        finally:
            own_reads.waiting = False
        if not (news and self._read_here()):
            own_reads.active = False
            self.waker.wake()  # the I/O thread reads again; it may have looked just before, and wait for nothing else

    def _await_change(self, left_s: float | None) -> bool:
        """Wait for ``_wake_waiting``, with the lock released; False if ``left_s`` seconds have passed first."""
        self._waiting_threads += 1
        try:
            return self._changed.wait(left_s)
        finally:
            self._waiting_threads -= 1

    def _wake_waiting(self) -> None:
        if self._waiting_threads:
            self._changed.notify_all()
        if self._own_reads.waiting:
            self._own_reads.wake()

    def _explain_wait(self, failure: str) -> str:
        """The text of a timeout, with what the coordinator last reported that it is waiting for (H70)."""
        if self._awaited is None or not self._awaited[0].call:
            return for_unknown_reasons(failure)
        note, came_at = self._awaited
        awaited_s = note.awaited_s + time.monotonic() - came_at
        return f"{failure}: {describe_wait(note.call, awaited_s, note.place)}"

    # --- under the lock: the machine ---

    def _begin(self, connection: Connection, registered: Registered, rest: Sequence[Downward]) -> None:
        self._token = registered.token
        self.table = PartTable(registered.parts)
        limits = SubtaskLimits(
            window_events=registered.window_events,
            window_bytes=registered.window_bytes,
            reconnect_timeout_s=registered.reconnect_timeout_s,
            heartbeat_interval_s=registered.heartbeat_interval_s,
            snapshot_bytes_max=snapshot_bytes_max(self.endpoint.wire_limits),
        )
        self._machine = SubtaskMachine(
            self.key[0],
            self._identity.subtask,
            limits,
            registered.held,
            registered.events_sent,
            hold_events=registered.hold_events,
            table=self.table,
        )
        self._wire.attach(connection)
        self._handle(ConnectionAttached(received_seq=0))
        self._take(rest)

    def _read_here(self) -> bool:
        """Take what has arrived, if anything. False if the connection is broken: the I/O thread handles that."""
        try:
            self._receive()
            return True
        except (OSError, RemoteProtocolError) as error:
            self._broken = self._wire.connection
            if isinstance(error, RemoteProtocolError):
                self._breach = error
            self._wire.break_off()
            return False

    def _receive(self) -> None:
        messages = self._wire.receive()
        if messages:
            self._take(messages)
            self.breaches_in_a_row = 0

    def _take(self, read: Sequence[Downward]) -> None:
        messages: list[DownMessage] = []
        for message in read:
            if isinstance(message, CoordinatorAwaited):
                self._awaited = (message, time.monotonic())
            else:
                messages.append(message)
        if self._finished_seq is not None:
            # The end of the attempt may come in the same read as the confirmation; the machine forgets then.
            self._finish_confirmed |= any(confirmed_by(message) >= self._finished_seq for message in messages)
        self._carry_out(self._machine.handle_batch(messages, time.monotonic()))

    def _handle(self, input: SubtaskInput) -> None:
        self._carry_out(self._machine.handle(input, time.monotonic()))

    def _carry_out(self, effects: Sequence[SubtaskEffect]) -> None:
        """In the machine's order: an event is in the mailbox before its confirmation leaves (H23)."""
        frames: list[bytes] = []
        broken = ""
        rare = False
        for effect in effects:
            if isinstance(effect, SendToCoordinator):
                frames.append(self._encode(effect))
            elif isinstance(effect, PutInMailbox):
                self.mailbox.put(effect.item)
                self.statistics.events_received += isinstance(effect.item, MailboxEvent)
            elif isinstance(effect, DropConnection):
                broken = effect.why
            else:
                rare = True
                self._carry_out_rare(effect)
        if frames and not self._wire.send(frames[0] if len(frames) == 1 else b"".join(frames)):
            self.waker.wake()
        if self._urgent.events or not self._machine.urgent_idle:
            self._count_urgent()
        self._wake_waiting()
        if rare and (self._failed_requests or self._waiting_requests):
            self._follow_up()
        if broken:
            raise RemoteProtocolError(broken)

    def _carry_out_rare(self, effect: SubtaskEffect) -> None:
        if isinstance(effect, ResolveRequest):
            if effect.request_id in self._answers:
                self._answers[effect.request_id] = (effect.error, effect.payload)
            elif (request := self._awaited_requests.pop(effect.request_id, None)) is not None:
                if effect.error:
                    self._failed_requests.append((request, effect))
                else:
                    request.deliver(effect.payload)
        elif isinstance(effect, HandleUrgent):
            self._urgent.put(effect.payload, effect.part)
            self.statistics.events_received += 1
        elif isinstance(effect, RefuseMessage):
            self.statistics.messages_refused += 1
            # It came too late, such as an event for an operator that has just ended. Its sender is told that.
            _log.info("task %s: message refused: %s", self.key[0], effect.why)
        elif isinstance(effect, StartUpload):
            self._uploads.put(self.files().upload(self._frozen.pop(effect.checkpoint_id), effect.target))
        elif isinstance(effect, StopUpload):
            self._uploads.stop(effect.checkpoint_id)
        elif isinstance(effect, EndAttempt):
            self._end(effect.reason)
        else:
            assert isinstance(effect, CapacityAvailable)  # waiting threads are woken by the caller

    def _report_urgent(self, fact: UrgentBegan | UrgentHandled | None) -> None:
        """A handler of an urgent event has begun or returned; None: it has ended, and no other will begin."""
        if fact is not None and not self.stopping:
            self._handle(fact)
        if self._urgent.failure is not None and not self.stopping:
            self.failure = self._urgent.failure
        self._wake_waiting()

    def _report_upload(self, outcome: Outcome) -> None:
        """An upload has ended."""
        checkpoint_id, result = outcome
        if checkpoint_id == LAST_STATE:
            self._last = result
        elif not self.stopping:
            if isinstance(result, BaseException):
                self._handle(UploadFailed(checkpoint_id, describe(result)))
            else:
                self._handle(StateUploaded(checkpoint_id, result))
        self._wake_waiting()

    def _count_urgent(self) -> None:
        """Urgent events, and what waits for them, count as the mailbox's contents do."""
        items, size = self._machine.waiting
        self.mailbox.count_beside(items + len(self._urgent), size + self._urgent.queued_bytes)
        if self._reading_paused and self.mailbox.half_empty:
            self.waker.wake()

    def _encode(self, effect: SendToCoordinator) -> bytes:
        if isinstance(effect.message, Finished):
            self._finished_seq = effect.message.seq
        try:
            return self._wire.encode(effect.message)
        except ProtocolError as error:
            # The machine already has it in its stream and would try again forever: this attempt cannot continue.
            self._end(str(error))
            raise

    def _end(self, reason: str) -> None:
        if self.over is None:
            self.over = reason
        self._end_awaited()
        self._urgent.stop()
        self._wake_waiting()
        self.waker.wake()

    def _release(self) -> None:
        self.waker.close()
        self._own_reads.close()
        _detach(self)


# --- the attempts of this process ----------------------------------------------------------------------------------


_Whose = tuple[tuple[int, str], tuple[str, int]]
"""An attempt, and the address of its sidecar: two of them may have operators of one name."""


class _Process:
    """The list of one process, and what its attempts share: the interpreter's switch interval.

    It is a class so that a forked child can start with a fresh instance.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attached: dict[_Whose, SubtaskChannel] = {}
        self.usual_interval_s: float | None = None
        self.our_interval_s = 0.0


_process = _Process()


def _attach(attempt: SubtaskChannel, switch_interval_s: float) -> None:
    """List ``attempt``, and close what an earlier task of the same thread has left behind.

    While anything is attached, the switch interval is at most ``switch_interval_s`` seconds; 0 leaves it alone. The
    I/O thread must confirm events while the task computes in pure Python. With CPython's 5 ms it would wait for the
    interpreter lock twice, 10 ms.

    Raises ``RuntimeError`` if the task already runs a subtask of the same operator.
    """
    me = threading.get_ident()
    with _process.lock:
        left_behind = [
            other for other in _process.attached.values() if other.owner_thread == me and other.key[0] != attempt.key[0]
        ]
    for other in left_behind:
        other.close()  # which detaches it
    whose = attempt.key, attempt.sidecar
    with _process.lock:
        if whose in _process.attached:
            raise RuntimeError(
                f"task {attempt.key[0]} already runs a subtask of operator {attempt.key[1]!r}, and an operator has one "
                "in each task: coordinate() another operator for the second function, or put both functions into one "
                "operator with headgate.chain()"
            )
        _process.attached[whose] = attempt
        if switch_interval_s > 0 and _process.usual_interval_s is None:
            usual = sys.getswitchinterval()
            if switch_interval_s < usual:
                _process.usual_interval_s = usual
                sys.setswitchinterval(switch_interval_s)
                _process.our_interval_s = sys.getswitchinterval()


def _detach(attempt: SubtaskChannel) -> None:
    """Remove ``attempt`` from the list. The last one restores the switch interval, unless it was changed meanwhile."""
    with _process.lock:
        whose = attempt.key, attempt.sidecar
        if _process.attached.get(whose) is attempt:
            del _process.attached[whose]
        if not _process.attached and _process.usual_interval_s is not None:
            if sys.getswitchinterval() == _process.our_interval_s:
                sys.setswitchinterval(_process.usual_interval_s)
            _process.usual_interval_s = None


def attached_keys() -> list[tuple[int, str]]:
    """The ``(task_attempt_id, operator_id)`` of each attempt that is attached in this process, sorted."""
    with _process.lock:
        return sorted(key for key, _ in _process.attached)


def _in_the_child() -> None:
    """A forked child has copies of the sockets but none of the threads: it closes the copies silently."""
    global _process
    inherited, _process = _process, _Process()
    for attempt in inherited.attached.values():
        attempt.forget_after_fork()
    if inherited.usual_interval_s is not None:
        sys.setswitchinterval(inherited.usual_interval_s)


os.register_at_fork(after_in_child=_in_the_child)
