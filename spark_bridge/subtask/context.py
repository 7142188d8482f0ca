# SPDX-License-Identifier: Apache-2.0

"""The context of an operator: it talks to the coordinator, waits for it, and identifies the attempt.

The framework calls one method of one part at a time, on the task's own thread. What that method may do through its
context depends on which one it is: nothing waits for the coordinator inside ``open``, of which the coordinator learns
only afterwards, and no item is handled while another one is. ``Calls`` knows which call is in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from sys import modules
from typing import TYPE_CHECKING, Any, Generic, Protocol, SupportsFloat, SupportsIndex, overload, runtime_checkable

from protocol.arguments import ID, NOT_NEGATIVE, REAL, WAIT_MAX_S, check_wait, checked
from protocol.describing import type_name
from protocol.errors import GatewayFull, InputRefused, LocalProtocolError
from protocol.event_types import Answer, Request, Sent_contra
from protocol.subtask.types import MailboxItem
from protocol.wire.codec import decode_event, encode_argument, encode_event
from protocol.wire.messages import Registered
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import ChannelStatistics
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.items import Items
from spark_bridge.subtask.mailbox import MailboxCall
from spark_bridge.subtask.task_channel import TaskChannel
from spark_bridge.subtask.traces import OPENTELEMETRY, with_current_span

if TYPE_CHECKING:
    from pathlib import Path

    from protocol.key_groups import KeyGroups

__all__ = [
    "QUESTIONS",
    "Calls",
    "Counters",
    "SubtaskContext",
    "inner_context",
    "refuse_on_loop",
    "runs_on_loop",
    "to_one_that_asks",
]


QUESTIONS = "headgate.questions"
"""The part outside of checkpoints that asks another part's coordinator what a coroutine asks."""


@runtime_checkable
class Counters(Protocol):
    """What ``count`` and ``observe`` add to."""

    def count(self, name: str, by: SupportsIndex | SupportsFloat) -> None: ...

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None: ...


class Calls:
    """Which call into the operator is in progress, and what it allows: one for each attempt, with all its parts.

    ``inside``: the method that is in progress; None for ``process`` and ``final_state``, which may handle items.
    ``handle`` calls the part that an item is for, and sets ``inside`` meanwhile.
    """

    def __init__(
        self,
        channel: TaskChannel,
        endpoint: TaskEndpoint,
        identity: TaskIdentity,
        handle: Callable[[MailboxItem | MailboxCall], None],
    ) -> None:
        self.channel = channel
        self.endpoint = endpoint
        self.identity = identity
        self.limits = endpoint.wire_limits
        self.counters: Counters | None = None
        self.inside: str | None = None
        self.each_failure_counts = False
        self.can_cut: Callable[[], bool] = lambda: True
        """Whether a snapshot can be taken where the stage that runs waits."""
        self._handle = handle
        self._task_thread = threading.get_ident()
        self._requests: dict[Any, Any] = {}  # of coroutines, by their loop

    # --- for ready-made parts: see ``TaskAccess`` -----------------------------------------------------------------

    def post(self, call: Callable[[], object]) -> None:
        self.channel.post(call)

    def timed_out(self, failure: str) -> TimedOut:
        return self.channel.timed_out(failure)

    # --- for coroutines -------------------------------------------------------------------------------------------

    async def ask_on_loop(self, payload: bytes, timeout_s: float, part: int) -> bytes:
        """Send an encoded request from the loop that runs here, and await its answer."""
        from spark_bridge.subtask.coroutines.requests import (
            of_this_loop,  # it needs asyncio, which few tasks have imported
        )

        return await of_this_loop(self.channel, self._requests).ask(payload, timeout_s, part)

    # --- the mailbox ----------------------------------------------------------------------------------------------

    def handle_items(self, *, events_only: bool = False) -> int:
        """Handle what is in the mailbox, in order; up to the first other item with ``events_only``. Return how many."""
        count = 0
        while (item := self.channel.take(events_only=events_only)) is not None:
            self._handle(item)
            count += 1
        return count

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready()`` or something is in the mailbox, and handle that.

        False if a barrier is next that cannot be met here: what has to be cut first is upstream.
        """
        channel = self.channel
        channel.wait_until(ready)
        while channel.mailbox:
            if channel.mailbox.starts_with_barrier and not self.can_cut():
                return False
            if (item := channel.take()) is not None:
                self._handle(item)
        return True

    def handle_pending(self) -> int:
        """See ``SubtaskContext``."""
        self.check_may_wait("handle_pending")
        self.channel.poll()
        return self.handle_items()

    # --- what is allowed now --------------------------------------------------------------------------------------

    def runs_inside(self, method: str) -> bool:
        """Whether the caller is this method. Other threads of the task may call at the same time."""
        return self.inside == method and threading.get_ident() == self._task_thread

    def check_may_ask(self) -> None:
        """Raise ``LocalProtocolError`` if the answer to a request cannot come before the caller has returned."""
        if self.inside is None and threading.get_ident() == self._task_thread:
            return  # ``process``, the usual case, without a look at the thread for urgent events
        if self.runs_inside("snapshot_state"):
            raise LocalProtocolError(
                "request() cannot be used inside snapshot_state(): the coordinator answers only after it has returned. "
                "Send an event instead, or ask in process()"
            )
        self._refuse_inside_urgent("request")
        self._refuse_inside_open("request", "Ask in process()")

    def check_may_wait(self, what: str) -> None:
        """Raise ``LocalProtocolError`` if the caller must not handle items."""
        if self.inside is None and threading.get_ident() == self._task_thread:
            return
        self._refuse_inside_urgent(what)
        if threading.get_ident() != self._task_thread:
            raise LocalProtocolError(
                f"{what}() was called from another thread: call it on the task's own thread, for example in process()"
            )
        self._refuse_inside_open(what, "Wait in process()")
        raise LocalProtocolError(f"{what}() cannot be called inside {self.inside}(): return from it first")

    def _refuse_inside_open(self, what: str, instead: str) -> None:
        """Before ``open`` has returned, the coordinator takes nothing from this task and sends it nothing (H11)."""
        if self.runs_inside("open"):
            raise LocalProtocolError(
                f"{what}() cannot be used inside open(): the coordinator learns of this task only after open() has "
                f"returned. {instead}, or let the coordinator send initial values in subtask_ready(): handle_event() "
                "gets them before process() begins"
            )

    def _refuse_inside_urgent(self, what: str) -> None:
        """A checkpoint waits for the handler, and holds back what it would wait for."""
        if self.channel.on_urgent_thread:
            raise LocalProtocolError(
                f"{what}() cannot be used inside handle_urgent(), which must not wait for the coordinator: a "
                "checkpoint may hold back the answer until handle_urgent() has returned. Send an event instead, or let "
                "process() do it"
            )


class SubtaskContext(Generic[Sent_contra]):
    """An operator's access to its coordinator. The framework creates it and passes it to ``SubtaskOperator.open``.

    ``send_event``, ``request`` and ``barrier_arrived`` may be called from any thread of the task, except that
    ``handle_urgent`` may not call ``request``; ``wait_for_event`` and ``handle_pending`` only from the task's own
    thread, on which the operator runs. Everything raises
    ``AttemptOver`` once the attempt is over: killed, superseded, or without a connection for too long. Let that
    exception pass; Spark ends the task. Do not use the context in or after ``SubtaskOperator.close``: sending there
    raises ``LocalProtocolError`` or ``AttemptOver``. What is sent inside a span of OpenTelemetry is handled by the
    coordinator with that span as the current one.

    Attributes:
        operator_id: the operator's name, as given to ``coordinate``.
        parallelism: how many subtasks the operator has.
        mode: who owns the operator's output: Spark (batch), or the operator with its checkpoints (streaming).
        subtask: the index of this subtask, from 0. It is the partition's number.
        task_attempt_id: Spark's id of this task attempt, unique in the application.
        attempt: the number of this attempt among the subtask's accepted ones, from 0, as the coordinator sees it.
    """

    _fed_has_results: Callable[[], bool] | None = None  # of the next stage, if it takes ``PAUSE``
    _items: Items | None = None  # those that the stage is fed with, if they have to hear what becomes of them
    _way: tuple[int, ...] = ()  # to a reader inside of others: its index in each of them, the innermost first

    def __init__(
        self,
        calls: Calls,
        registered: Registered,
        part: str = "",
        restored_requests: tuple[Any, ...] = (),
        input_begins_again: bool = False,
    ) -> None:
        self._calls = calls
        self._channel = calls.channel
        self._limits = calls.limits
        self._counters = calls.counters
        self._part = index_of(calls.channel, part)
        self.operator_id = calls.endpoint.operator_id
        self.parallelism = calls.endpoint.parallelism
        self.mode = calls.endpoint.mode
        self.subtask = calls.identity.subtask
        self.task_attempt_id = calls.identity.task_attempt_id
        self.attempt = registered.attempt
        self.checkpoint_id = registered.checkpoint_id
        """The checkpoint that ``state`` in ``open`` comes from; -1 if there is none."""
        self.restored_requests = restored_requests
        """The unanswered requests in the restored checkpoint, in the order in which they were sent.

        The coordinator receives them again, before anything new, and their answers are dropped. An operator whose
        state says that it was about to ask learns here that it need not ask again."""
        self._input_begins_again = input_begins_again
        self._has_asked = False  # for ``input_begins_again``

    @property
    def input_begins_again(self) -> bool:
        """Whether ``process`` gets the records before the restored checkpoint once more.

        True: the run has the input that the restored state belongs to, from its first record on. An operator that must
        not process a record twice skips those that its state counts. False: nothing of what comes has been processed,
        so it must skip nothing. That is so if nothing was restored; if the run has another input than the one before,
        such as the job of the next day or the next micro-batch; and in a stage of a ``chain`` after a source, which
        continues where the checkpoint left it.

        A task fails with ``InputRefused``, before it takes a record, if its ``open`` got the state of another input,
        ``counts_records`` is True, and nothing in it asks this.
        """
        self._has_asked = True
        return self._input_begins_again

    @property
    def cancelled(self) -> bool:
        """Whether the attempt is over, or ``handle_urgent`` has raised. A long computation may check this and return.

        Never waits, never raises."""
        return self._channel.cancelled

    @property
    def statistics(self) -> ChannelStatistics:
        """Counts of what was sent and received so far."""
        return self._channel.statistics

    def send_event(self, event: Sent_contra) -> None:
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
        payload = self._encoded(event)
        if self._calls.inside is None:  # the usual case, without a look at the thread
            self._channel.submit_event(payload, self._part)
        elif self._calls.runs_inside("open"):
            self._send_inside_open(payload)
        else:
            self._channel.submit_event(payload, self._part, in_snapshot=self._calls.runs_inside("snapshot_state"))

    def send_event_nowait(self, event: Sent_contra) -> None:
        """Send an event as ``send_event`` does, but raise ``GatewayFull`` instead of waiting for capacity."""
        payload = self._encoded(event)
        if self._calls.runs_inside("snapshot_state"):
            self._channel.submit_event(payload, self._part, in_snapshot=True)
        else:
            self._channel.submit_event_nowait(payload, self._part)

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
        self._counting().count(name, by)

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None:
        """Add ``value`` to the operator's distribution ``name``, as ``count`` does to a counter.

        ``handle.counters()[name]`` is a ``Distribution``, with the count, the sum, the extremes and quantiles.
        ``value`` becomes a float. Raises as ``count`` does.
        """
        self._counting().observe(name, value)

    @overload
    def request(self, payload: Request[Answer], timeout_s: float = 30.0) -> Answer: ...

    @overload
    def request(self, payload: Any, timeout_s: float = 30.0) -> Any: ...

    def request(self, payload: Any, timeout_s: float = 30.0) -> Any:
        """Send ``payload`` to the coordinator's ``handle_request`` and return its answer.

        ``payload`` and answer have the types that events can have. If the class of ``payload`` is a
        ``Request[Answer]``, a type checker knows the answer. ``timeout_s`` is in seconds. Requests and events arrive in
        the order in which they were sent. No event is handled during the wait, and a checkpoint that starts during it
        is declined, unless the operator sets ``snapshot_anywhere``.

        Raises:
            RequestFailed: the coordinator answered with an error.
            TimedOut: no answer within ``timeout_s``. A later answer is dropped.
            EventEncodeError: a value in ``payload`` is of a type that events cannot have, or it is too large.
            LocalProtocolError: inside ``snapshot_state`` or ``open``, which must return before the coordinator
                receives the request; inside ``handle_urgent``, which a checkpoint may wait for; and in a coroutine,
                which awaits ``request_async`` instead.
            AttemptOver: the attempt is over.
        """
        refuse_on_loop("request", "request_async")
        if type(timeout_s) not in REAL or not 0 <= timeout_s <= WAIT_MAX_S:
            check_wait("timeout_s", timeout_s)
        self._calls.check_may_ask()
        encoded = encode_argument("payload", payload, self._limits)
        if OPENTELEMETRY in modules:
            encoded = with_current_span(encoded, self._limits)
        return decode_event(self._channel.ask(encoded, timeout_s, self._part))

    @overload
    async def request_async(self, payload: Request[Answer], timeout_s: float = 30.0) -> Answer: ...

    @overload
    async def request_async(self, payload: Any, timeout_s: float = 30.0) -> Any: ...

    async def request_async(self, payload: Any, timeout_s: float = 30.0) -> Any:
        """As ``request``, for a coroutine on any asyncio loop in the task: thousands may wait at the same time.

        It is a question about the present: checkpoints neither hold it nor wait for it, and no restore repeats it. A
        coroutine whose record is processed again asks again. What the coordinator must count exactly is an event, not
        a question. Requests of several coroutines may arrive in any order. One that is cancelled, or times out,
        gives its place back.

        Raises as ``request`` does; ``LocalProtocolError`` only inside ``open``.
        """
        if type(timeout_s) not in REAL or not 0 <= timeout_s <= WAIT_MAX_S:
            check_wait("timeout_s", timeout_s)
        if self._calls.runs_inside("open"):
            self._calls.check_may_ask()
        table, part = self._channel.table, self._part
        if not table.outside[part] and (questions := table.index(QUESTIONS)) is not None:
            payload, part = [part, payload], questions
        encoded = encode_argument("payload", payload, self._limits)
        if OPENTELEMETRY in modules:
            encoded = with_current_span(encoded, self._limits)
        return decode_event(await self._calls.ask_on_loop(encoded, timeout_s, part))

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

    @property
    def state_folder(self) -> Path:
        """A folder of this attempt alone, on the executor's local disk, for a store whose files are the state.

        It is empty, unless ``open`` is given ``RestoredFiles``, which are in it. In a chain each stage has its own. It
        is deleted when the attempt ends, or by the next attempt on the host. So only what ``snapshot_state`` returns as
        ``StateFiles`` is kept. Headgate encrypts nothing in it. Call it on the task's own thread.

        Raises:
            StorageError: the sidecar has no storage that can have states in files, or no folder can be made.
        """
        return self._channel.files().state_folder(self._part)

    @checked(checkpoint_id=ID)
    def snapshot_folder(self, checkpoint_id: int) -> Path:
        """A new and empty folder, on the same filesystem as ``state_folder``, for ``snapshot_state`` and
        ``final_state``.

        Let your store write its own checkpoint into it, or into a folder below it, and return that as ``StateFiles``:
        it is not copied, is the framework's from then on, and is deleted after the upload. What is not returned is
        deleted too. ``checkpoint_id`` is what ``snapshot_state`` was given. Call it on the task's own thread.

        Raises:
            StorageError: as ``state_folder``.
        """
        return self._channel.files().snapshot_folder(checkpoint_id)

    def _check_key_groups(self, groups: KeyGroups) -> None:
        """Raise ``ValueError`` if the state that was restored has another number of them."""
        self._channel.files().check_key_groups(groups)

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
        self._calls.check_may_wait("wait_for_event")
        if not self._channel.wait_for_item(timeout_s):
            return 0
        return self._calls.handle_items()

    def handle_pending(self) -> int:
        """Handle everything in the mailbox, in order of arrival, without waiting; return the number of items.

        Raises:
            LocalProtocolError: inside ``open``, inside another method that handles an item, or on another thread than
                the task's own.
            AttemptOver: the attempt is over.
        """
        return self._calls.handle_pending()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _encoded(self, event: Any) -> bytes:
        for index in self._way:
            event = [index, event]
        payload = encode_event(event, self._limits)
        return with_current_span(payload, self._limits) if OPENTELEMETRY in modules else payload

    def _send_inside_open(self, payload: bytes) -> None:
        try:
            self._channel.submit_event_nowait(payload, self._part)
        except GatewayFull as full:
            raise LocalProtocolError(
                f"send_event() found no capacity inside open(), and the coordinator frees some only after open() has "
                f"returned. Send the rest in process(): {full}"
            ) from full

    def _counting(self) -> Counters:
        if self._counters is None:
            raise LocalProtocolError(
                "count() and observe() cannot be used before open() is called, or after close(): count in one of "
                "these, or between them"
            )
        return self._counters


def runs_on_loop() -> bool:
    """Whether an asyncio loop runs in this thread."""
    return "asyncio" in modules and modules["asyncio"]._get_running_loop() is not None


def refuse_on_loop(blocking: str, awaitable: str) -> None:
    """Raise ``LocalProtocolError`` if an asyncio loop runs in this thread, which ``blocking`` would stop.

    Both are the names of methods, or what is written in a program: ``with permits`` and ``async with permits``.
    """
    if runs_on_loop():
        called, use = blocking, awaitable
        if blocking.isidentifier():
            called, use = f"{blocking}()", f"await {awaitable}(...)"
        raise LocalProtocolError(
            f"{called} would stop the event loop that runs here, with all of its coroutines: use `{use}`"
        )


def index_of(channel: TaskChannel, part: str) -> int:
    """The index of a part in the operator. Raises ``LocalProtocolError`` if the driver does not know it."""
    index = channel.table.index(part)
    if index is None:
        raise LocalProtocolError(
            f"this task has the part {part!r}, which its operator does not have: pass it to coordinate(..., "
            "uses=[...]), or the same chain to coordinate() and to subtask() if it is a stage"
        )
    return index


def inner_context(context: SubtaskContext[Any], index: int) -> SubtaskContext[Any]:
    """Return the context of a reader inside of another one, to whose enumerator its events say its index."""
    inner = copy(context)
    inner._way = (index, *context._way)
    return inner


def to_one_that_asks(context: SubtaskContext[Any], operator: Any, records: Iterator[Any]) -> Iterator[Any]:
    """Yield ``records``. Raise ``InputRefused`` before the first one if ``input_begins_again`` was not read by then.

    For an operator that has restored the state of another input, and may skip as many records as that counts.
    """
    for record in records:
        if not context._has_asked:
            name = type_name(operator)
            raise InputRefused(
                f"operator {context.operator_id!r}: {name}.open() got the state of another input, from checkpoint "
                f"{context.checkpoint_id}, and {name} does not look at context.input_begins_again: if it skips as many "
                "records as that state counts, it loses records that nobody has processed. Write in open(), with your "
                "own way to read a state: done = int(state) if state and context.input_begins_again else 0. "
                f"If the state does not say which records to skip, set counts_records = False in {name}"
            )
        yield record
