# SPDX-License-Identifier: Apache-2.0

"""The context of an operator: it talks to the coordinator, waits for it, and identifies the attempt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Generic, Protocol, SupportsFloat, SupportsIndex

from protocol.arguments import NOT_NEGATIVE, REAL, WAIT_MAX_S, check_wait, checked
from protocol.describing import type_name
from protocol.errors import GatewayFull, LocalProtocolError
from protocol.event_types import Sent
from protocol.subtask.types import (
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxItem,
    MailboxStart,
)
from protocol.wire.codec import decode_event, encode_argument, encode_event
from protocol.wire.messages import Registered
from spark_bridge.subtask.channel import ChannelStatistics, SubtaskChannel
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator, TimedOut
from spark_bridge.subtask.operator import SubtaskOperator

__all__ = ["SubtaskContext"]


class Counters(Protocol):
    """What ``count`` and ``observe`` add to."""

    def count(self, name: str, by: SupportsIndex | SupportsFloat) -> None: ...

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None: ...


class SubtaskContext(Generic[Sent]):
    """An operator's access to its coordinator. The framework creates it and passes it to ``SubtaskOperator.open``.

    ``send_event``, ``request`` and ``barrier_arrived`` may be called from any thread of the task, except that
    ``handle_urgent`` may not call ``request``; ``wait_for_event`` and ``handle_pending`` only from the task's own
    thread, on which the operator runs. Everything raises
    ``AttemptOver`` once the attempt is over: killed, superseded, or without a connection for too long. Let that
    exception pass; Spark ends the task. Do not use the context in or after ``SubtaskOperator.close``: sending there
    raises ``LocalProtocolError`` or ``AttemptOver``.

    Attributes:
        operator_id: the operator's name, as given to ``coordinate``.
        parallelism: how many subtasks the operator has.
        mode: who owns the operator's output: Spark (batch), or the operator with its checkpoints (streaming).
        subtask: the index of this subtask, from 0. It is the partition's number.
        task_attempt_id: Spark's id of this task attempt, unique in the application.
        attempt: the number of this attempt among the subtask's accepted ones, from 0, as the coordinator sees it.
    """

    def __init__(
        self,
        channel: SubtaskChannel,
        operator: SubtaskOperator,
        endpoint: TaskEndpoint,
        identity: TaskIdentity,
        registered: Registered,
    ) -> None:
        self._channel = channel
        self._operator = operator
        self._task_thread = threading.get_ident()
        self._inside: str | None = None
        self._awaits_start = False
        self.counters: Counters | None = None
        self._endpoint = endpoint
        self._limits = endpoint.wire_limits
        channel.at_barrier = self._at_barrier
        self.local_files = endpoint.local_files
        """Whether tasks may write to the executor's local directory: not if Spark encrypts what it writes there."""
        self.operator_id = endpoint.operator_id
        self.parallelism = endpoint.parallelism
        self.mode = endpoint.mode
        self.subtask = identity.subtask
        self.task_attempt_id = identity.task_attempt_id
        self.attempt = registered.attempt
        self.checkpoint_id = registered.checkpoint_id
        """The checkpoint that ``state`` in ``open`` comes from; -1 if there is none."""
        self.restored_requests: tuple[Any, ...] = tuple(
            decode_event(held.payload) for held in registered.held if held.is_request
        )
        """The unanswered requests in the restored checkpoint, in the order in which they were sent.

        The coordinator receives them again, before anything new, and their answers are dropped. An operator whose
        state says that it was about to ask learns here that it need not ask again."""
        self.input_begins_again = registered.input_begins_again
        """Whether ``process`` gets the records before the restored checkpoint once more.

        True: the run has the input that the restored state belongs to, from its first record on. An operator that must
        not process a record twice skips those that its state counts. False: nothing of what comes has been processed,
        so it must skip nothing. That is so if nothing was restored; if the run has another input than the one before,
        such as the job of the next day or the next micro-batch; and in a stage of a ``chain`` after a source, which
        continues where the checkpoint left it."""

    @property
    def cancelled(self) -> bool:
        """Whether the attempt is over, or ``handle_urgent`` has raised. A long computation may check this and return.

        Never waits, never raises."""
        return self._channel.cancelled

    @property
    def statistics(self) -> ChannelStatistics:
        """Counts of what was sent and received so far."""
        return self._channel.statistics

    def send_event(self, event: Sent) -> None:
        """Send ``event`` to the coordinator. It can have the types that the reference lists, and your own classes.

        The event is encoded before this returns, so changing it later has no effect. Events arrive in the order in
        which they were sent, each exactly once. While a checkpoint is in progress they are held back and become part
        of the snapshot, unless checkpoints hold no events (``CheckpointConfig.hold_events``). An event sent inside
        ``snapshot_state`` is part of that snapshot, and does not wait for capacity. Returns when the event is in the
        outgoing stream, which may be before it arrives; a task succeeds only after the coordinator has taken all of
        them. Events sent inside ``open`` reach the coordinator after its
        ``subtask_ready``.

        Raises:
            EventEncodeError: a value in ``event`` is of a type that events cannot have, or it is too large. Nothing was
                sent.
            TimedOut: the coordinator took too few events for ``send_timeout_s`` seconds. Nothing was sent.
            LocalProtocolError: inside ``open``, there was no capacity, and none can come there. Nothing was sent.
            AttemptOver: the attempt is over.
        """
        if self._runs_inside("open"):
            self._send_inside_open(encode_event(event, self._limits))
        else:
            self._channel.submit_event(
                encode_event(event, self._limits), in_snapshot=self._runs_inside("snapshot_state")
            )

    def send_event_nowait(self, event: Sent) -> None:
        """Send an event as ``send_event`` does, but raise ``GatewayFull`` instead of waiting for capacity."""
        payload = encode_event(event, self._limits)
        if self._runs_inside("snapshot_state"):
            self._channel.submit_event(payload, in_snapshot=True)
        else:
            self._channel.submit_event_nowait(payload)

    def count(self, name: str, by: SupportsIndex | SupportsFloat = 1) -> None:
        """Add ``by`` to the operator's counter ``name``; ``handle.counters()`` has the sums of all tasks.

        They are exact, whatever is lost or copied meanwhile: an attempt that is lost takes its counts back. In
        streaming mode they are part of the checkpoints, and continue after a restore. The driver hears of a count
        within half a second while the task counts, and of all counts when the task ends. Any thread of the task may
        call this. It costs about a microsecond.

        ``by`` is any integer of at most 4096 bits, which stays exact, or any other real number, which becomes a float:
        also one of NumPy, a ``Decimal`` or a ``Fraction``. A sum that no float can hold is infinite.

        Raises:
            ValueError: ``by`` is NaN, infinite, or an integer of more bits. ``name`` is empty, has more than 200
                characters or a lone surrogate, or is used by ``observe``; or the task uses more than 1000 names.
            TypeError: ``by`` is not a number.
            AttemptOver: the attempt is over.
        """
        self._counters().count(name, by)

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None:
        """Add ``value`` to the operator's distribution ``name``, as ``count`` does to a counter.

        ``handle.counters()[name]`` is a ``Distribution``, with the count, the sum, the extremes and quantiles.
        ``value`` becomes a float. Raises as ``count`` does.
        """
        self._counters().observe(name, value)

    def request(self, payload: Any, timeout_s: float = 30.0) -> Any:
        """Send ``payload`` to the coordinator's ``handle_request`` and return its answer.

        ``payload`` and answer have the types that events can have. ``timeout_s`` is in seconds. Requests and
        events arrive in the order in which they were sent. No event is handled during the wait, and a checkpoint that
        starts during it is declined, unless the operator sets ``snapshot_anywhere``.

        Raises:
            RequestFailed: the coordinator answered with an error.
            TimedOut: no answer within ``timeout_s``. A later answer is dropped.
            EventEncodeError: a value in ``payload`` is of a type that events cannot have, or it is too large.
            LocalProtocolError: inside ``snapshot_state`` or ``open``, which must return before the coordinator
                receives the request, and inside ``handle_urgent``, which a checkpoint may wait for.
            AttemptOver: the attempt is over.
        """
        if type(timeout_s) not in REAL or not 0 <= timeout_s <= WAIT_MAX_S:
            check_wait("timeout_s", timeout_s)
        if self._runs_inside("snapshot_state"):
            raise LocalProtocolError(
                "request() cannot be used inside snapshot_state(): the coordinator answers only after it has returned. "
                "Send an event instead, or ask in process()"
            )
        self._refuse_to_wait_inside_urgent("request")
        self._refuse_to_wait_inside_open("request", "Ask in process()")
        return decode_event(self._channel.ask(encode_argument("payload", payload, self._limits), timeout_s))

    @checked()
    def barrier_arrived(self, checkpoint_id: int, events_before: int = 0) -> None:
        """Report that the barrier of ``checkpoint_id`` came with the data, if barriers travel separately from events.

        ``events_before`` is the number that ``inject_barrier`` passed along with the barrier. The task takes its
        snapshot when it next handles its mailbox (before its next record, in ``wait_for_event`` or
        ``handle_pending``), provided that every event up to that number has arrived. An operator whose data must not
        continue before the snapshot has to wait for it. Without ``events_before``, only loss-tolerant events may
        arrive too late for the snapshot. A second report, or one for a checkpoint that is over or unknown, has no
        effect. Never waits; any thread of the task may call it.

        Raises:
            AttemptOver: the attempt is over.
        """
        self._channel.barrier_arrived(checkpoint_id, events_before)

    @checked(seconds=NOT_NEGATIVE)
    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds without handling anything. Any thread of the task may call this.

        Unlike ``time.sleep`` it ends when the attempt does, and in ``headgate.testing`` the time is virtual.

        Raises:
            AttemptOver: the attempt is over.
        """
        self._channel.sleep(seconds)

    def now(self) -> float:
        """The clock of all timeouts, in seconds; virtual in ``headgate.testing``."""
        return self._channel.now()

    def wait_for_event(self, timeout_s: float | None = None) -> int:
        """Wait until something is in the mailbox, then handle everything in it, in order of arrival.

        Returns the number of items handled: 0 if none came within ``timeout_s`` seconds. None waits as long as the
        attempt lives. An item may be an event, a checkpoint or a notification; and the event that you need may have
        been handled before this call, because events that ``subtask_ready`` sends are handled before ``process``
        begins. So wait in a loop that checks what you need: ``while not self.rules: context.wait_for_event()``.

        Raises:
            LocalProtocolError: inside ``open``, inside another method that handles an item, or on another thread than
                the task's own.
            AttemptOver: the attempt is over.
        """
        if timeout_s is not None and (type(timeout_s) not in REAL or not 0 <= timeout_s <= WAIT_MAX_S):
            check_wait("timeout_s", timeout_s)
        self._enter("wait_for_event")
        if not self._channel.wait_for_item(timeout_s):
            return 0
        return self._handle_items(events_only=False)

    def handle_pending(self) -> int:
        """Handle everything in the mailbox, in order of arrival, without waiting; return the number of items.

        Raises:
            LocalProtocolError: inside ``open``, inside another method that handles an item, or on another thread than
                the task's own.
            AttemptOver: the attempt is over.
        """
        self._enter("handle_pending")
        self._channel.poll()
        return self._handle_items(events_only=False)

    # --- used by the runner, the chain of operators and ready-made parts ---

    @property
    def endpoint(self) -> TaskEndpoint:
        """The sidecar's address and the operator's settings."""
        return self._endpoint

    @property
    def checkpoint_waits(self) -> bool:
        """Whether a checkpoint waits for this task to handle its mailbox. A request would decline it."""
        return self._channel.mailbox.barriers > 0

    @checked()
    def timed_out(self, failure: str) -> TimedOut:
        """The error of a wait that took too long, with what the coordinator is waiting for, if known."""
        return self._channel.timed_out(failure)

    def _counters(self) -> Counters:
        if self.counters is None:
            raise LocalProtocolError(
                "count() and observe() cannot be used before open() is called, or after close(): count in one of "
                "these, or between them"
            )
        return self.counters

    def open_operator(self, state: bytes | None) -> None:
        """Have the operator restore ``state``, and tell the coordinator that it is open."""
        # H11
        self._inside = "open"
        try:
            self._operator.open(self, state)
        finally:
            self._inside = None
        self._awaits_start = self._operator.waits_for_subtask_ready
        self._channel.operator_opened(
            awaits_start=self._awaits_start,
            handle_urgent=self._handle_urgent if handles_urgent(self._operator) else None,
            parts_without_urgent=getattr(self._operator, "parts_without_urgent", frozenset()),
        )

    def wait_until_ready(self) -> None:
        """Handle what the coordinator sends inside ``subtask_ready``, until that method has returned.

        Raises:
            TimedOut: it did not return within ``ready_timeout_s``.
        """
        # H66
        deadline = self._channel.now() + self._endpoint.ready_timeout_s
        while self._awaits_start:
            if not self._channel.wait_for_item(max(0.0, deadline - self._channel.now())):
                raise self._channel.timed_out(
                    f"the coordinator's subtask_ready() for subtask {self.subtask} of {self.operator_id!r} has not "
                    f"returned within {self._endpoint.ready_timeout_s:g} s after open(): it waits, or the coordinator "
                    "is busy with earlier calls. Make these quicker, raise ready_timeout_s, or set "
                    "waits_for_subtask_ready = False on an operator that needs no initial values"
                )
            if (item := self._channel.take()) is not None:
                self._handle(item)

    def records(self, records: Iterator[Any]) -> Iterator[Any]:
        """Yield ``records``, handling the mailbox before each of them."""
        channel = self._channel
        while True:
            channel.poll()
            if channel.mailbox or channel.over is not None or channel.failure is not None:
                self._handle_items(events_only=False)
            try:
                record = next(records)
            except StopIteration:
                return
            yield record

    def between_outputs(self) -> None:
        """After an output: handle events, and snapshots if the operator allows them here."""
        self._channel.poll()
        channel = self._channel
        if channel.mailbox or channel.over is not None or channel.failure is not None:
            self._handle_items(events_only=not self._operator.snapshot_anywhere)

    def _runs_inside(self, method: str) -> bool:
        """Whether the caller is this method of the operator. Other threads of the task may call at the same time."""
        return self._inside == method and threading.get_ident() == self._task_thread

    def _refuse_to_wait_inside_open(self, what: str, instead: str) -> None:
        """Before ``open`` has returned, the coordinator takes nothing from this task and sends it nothing (H11)."""
        if self._runs_inside("open"):
            raise LocalProtocolError(
                f"{what}() cannot be used inside open(): the coordinator learns of this task only after open() has "
                f"returned. {instead}, or let the coordinator send initial values in subtask_ready(): handle_event() "
                "gets them before process() begins"
            )

    def _refuse_to_wait_inside_urgent(self, what: str) -> None:
        """A checkpoint waits for the handler, and holds back what it would wait for."""
        if self._channel.on_urgent_thread:
            raise LocalProtocolError(
                f"{what}() cannot be used inside handle_urgent(), which must not wait for the coordinator: a "
                "checkpoint may hold back the answer until handle_urgent() has returned. Send an event instead, or let "
                "process() do it"
            )

    def _handle_urgent(self, payload: bytes) -> None:
        """On the thread for urgent events."""
        self._operator.handle_urgent(decode_event(payload))

    def _send_inside_open(self, payload: bytes) -> None:
        try:
            self._channel.submit_event_nowait(payload)
        except GatewayFull as full:
            raise LocalProtocolError(
                f"send_event() found no capacity inside open(), and the coordinator frees some only after open() has "
                f"returned. Send the rest in process(): {full}"
            ) from full

    def _at_barrier(self) -> None:
        """A barrier came while ``send_event`` or ``request`` waits.

        This handles one item only. What the caller waits for may have arrived meanwhile, before the next barrier, and
        then belongs in that barrier's snapshot.
        """
        if self._operator.snapshot_anywhere and self._inside is None:
            if (item := self._channel.take()) is not None:
                self._handle(item)
        else:
            self._channel.decline_barriers()

    def _enter(self, what: str) -> None:
        self._refuse_to_wait_inside_urgent(what)
        if threading.get_ident() != self._task_thread:
            raise LocalProtocolError(
                f"{what}() was called from another thread: call it on the task's own thread, for example in process()"
            )
        self._refuse_to_wait_inside_open(what, "Wait in process()")
        if self._inside is not None:
            raise LocalProtocolError(f"{what}() cannot be called inside {self._inside}(): return from it first")

    def _handle_items(self, *, events_only: bool) -> int:
        count = 0
        while (item := self._channel.take(events_only=events_only)) is not None:
            self._handle(item)
            count += 1
        return count

    def _handle(self, item: MailboxItem) -> None:
        operator = self._operator
        try:
            match item:
                case MailboxEvent(payload=payload):
                    self._inside = "handle_event"
                    operator.handle_event(decode_event(payload))
                case MailboxBarrier(checkpoint_id=checkpoint_id):
                    self._inside = "snapshot_state"
                    self._snapshot(checkpoint_id)
                case MailboxCompleted(checkpoint_id=checkpoint_id):
                    self._inside = "notify_checkpoint_complete"
                    operator.notify_checkpoint_complete(checkpoint_id)
                case MailboxAborted(checkpoint_id=checkpoint_id):
                    self._inside = "notify_checkpoint_aborted"
                    operator.notify_checkpoint_aborted(checkpoint_id)
                case MailboxStart():
                    self._awaits_start = False
        finally:
            self._inside = None

    def _snapshot(self, checkpoint_id: int) -> None:
        if not self._channel.wants_snapshot(checkpoint_id):
            return  # the checkpoint ended while its barrier was in the mailbox
        try:
            state = self._operator.snapshot_state(checkpoint_id)
        except CheckpointDeclinedByOperator as declined:
            self._channel.snapshot_refused(checkpoint_id, str(declined))
            return
        self._channel.snapshot_taken(checkpoint_id, checked_state(self._operator, "snapshot_state", state))


def handles_urgent(operator: SubtaskOperator) -> bool:
    """Whether the operator, or a part of it, defines ``handle_urgent``. Otherwise urgent events are ordinary ones."""
    chained: bool | None = getattr(operator, "handles_urgent", None)  # an ``OperatorChain`` knows it of its parts
    if chained is not None:
        return chained
    return getattr(operator.handle_urgent, "__func__", None) is not SubtaskOperator.handle_urgent


def checked_state(operator: SubtaskOperator, method: str, state: object) -> bytes:
    """Return ``state`` if it is bytes, even if empty. Raise ``TypeError`` for anything else, such as None (H46)."""
    if not isinstance(state, bytes):
        raise TypeError(
            f"{type_name(operator)}.{method} must return bytes, not {type_name(state)}: "
            'return b"" if there is no state to keep'
        )
    return state
