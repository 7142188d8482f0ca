# SPDX-License-Identifier: Apache-2.0

"""The actor around the coordinators of one operator: those of its parts.

It calls their methods one at a time, in the order of its mailbox (H5). What is meant for one part reaches that one;
what concerns the operator reaches each, in the order of ``Parts.in_order``. It is the only place that drops messages of
attempts that are over, before any handler (H3). When ``checkpoint_coordinator`` returns, the actor announces the cut to
every live gateway before it takes its next message. So every event that the coordinator sends later comes after the
checkpoint (H40, H41). If checkpoints hold no events, the actor records from then on what it takes (H79).

``TakenEvents`` counts how many upward events of each attempt's history each part has taken (H32, H150). The operator's
tracker and this actor share a ``FailureLatch``, so that at most one global failure is reported between two resets (H7,
H8, H15).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import anyio

from actors import Actor, ActorContext, ActorRef, SystemNotRunning
from actors.coordination.engine.gateway import attempt_keys
from actors.coordination.engine.messages import (
    AttemptHint,
    CallHandler,
    CancellationArrived,
    ClientRequest,
    CoordinatorMessage,
    EventArrived,
    Flush,
    GatewayMessage,
    NoteAwaited,
    RequestArrived,
    StartCoordinator,
    SubtaskReadyWithGateway,
    Timed,
    TrackerMessage,
    failing,
)
from actors.coordination.engine.reply import (
    OpenReplies,
    Reply,
    WaitingClient,
    WaitingTask,
    describe_failure,
)
from actors.coordination.host.context import Outcome
from actors.coordination.host.gateway import Announcer, Gateway, GatewayLine, GatewayTable
from actors.coordination.host.incarnation import Sender
from actors.coordination.host.part import Part, Parts
from actors.coordination.host.traces import inside_span
from actors.coordination.statistics import OperatorStatistics
from actors.coordination.store import CoordinatorStore
from actors.coordination.user_calls import Call, CallWatch, call_each, call_user, in_turns, is_fatal, true_cause
from actors.exits import as_exception
from actors.logs import LimitedLog
from protocol.attempts import (
    AttemptCondemned,
    GlobalFailureRaised,
    LedgerInput,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
)
from protocol.barrier_tracker import (
    CollectRecorded,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    RecordedCollected,
    SnapshotCoordinator,
    SubtaskResetToCheckpoint,
)
from protocol.describing import describe, is_a, type_name
from protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from protocol.facts import StageLook
from protocol.gateway.types import AnswerSubmitted, CutReached, ItemTaken, ReadyAnnounced
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.parts import ONE_PART, OWN_PART, PartTable, join_states_in_steps, split_states_in_steps
from protocol.wire.codec import EVENT_STEP_BYTES, WireLimits, decode_event, decode_event_in_steps, encode_argument
from protocol.wire.messages import HeldEvent, Positions, RestoreMode
from protocol.wire.traces import TRACED_FIRST, TRACED_START, split_traceparent

PLACE_CHARS_MAX = 1000


@dataclass(slots=True)
class Recording:
    """What was taken since the cut of one checkpoint, by task attempt id. ``attempts``: those known at the cut."""

    attempts: frozenset[int]
    events: dict[int, list[HeldEvent]] = field(default_factory=dict)


class TakenEvents:
    """The counts of events and requests, by part, which a checkpoint compares with the subtasks' own at the cut.

    An attempt's counts continue from what its restored checkpoint covers. It is kept when the attempt has finished,
    until that success is revoked or everything is reset.

    From ``record`` until ``collect`` or ``drop``, a checkpoint records what is taken. Each event names the last
    checkpoint whose snapshot its subtask had taken when it sent it: it belongs to the recordings of later ones only, so
    a subtask that has its snapshot makes none of them grow. The gateways bound the rest. What a part outside of
    checkpoints takes is counted, and is in no checkpoint (H152). Loop only.
    """

    def __init__(self, table: PartTable = ONE_PART) -> None:
        self._table = table
        self._recordings: dict[int, Recording] = {}  # by checkpoint, ascending
        self._counts: dict[int, list[int]] = {}  # by task attempt id, then by part
        # By subtask: the attempt that last became ready or, for this part, sent something.
        self._latest: list[dict[int, int]] = [{} for _ in table.parts]
        self._handling: tuple[int, int, int] | None = None  # part, sender and position of the current event
        self.is_restored = False
        """Whether that was held in the checkpoint that was restored."""

    def begin(self, attempt: ExecutionAttempt, events_sent: Positions) -> None:
        """The attempt is ready; its history has ``events_sent`` so far."""
        self._counts[attempt.task_attempt_id] = [*events_sent, *(0,) * (self._table.count - len(events_sent))]
        for latest in self._latest:
            latest[attempt.subtask] = attempt.task_attempt_id

    def take(
        self,
        attempt: ExecutionAttempt,
        sender: int | None,
        payload: bytes = b"",
        part: int = OWN_PART,
        *,
        is_request: bool = False,
        after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT,
    ) -> None:
        """The part takes one more event. ``sender``: the subtask that first sent it, if it was restored."""
        task = attempt.task_attempt_id
        counts = self._counts[task]
        counts[part] += 1
        self._latest[part][attempt.subtask] = task
        first_sender = attempt.subtask if sender is None else sender
        self._handling = (part, first_sender, counts[part])
        self.is_restored = sender is not None
        if self._recordings and not self._table.outside[part]:
            for checkpoint_id, recording in self._recordings.items():
                if checkpoint_id > after_snapshot and task in recording.attempts:
                    recording.events.setdefault(task, []).append(HeldEvent(first_sender, payload, is_request, part))

    def record(self, checkpoint_id: int) -> None:
        """The cut of a checkpoint that holds no events: record what is taken from here on (H79)."""
        self._recordings[checkpoint_id] = Recording(frozenset(self._counts))

    def collect(self, checkpoint_id: int) -> dict[int, tuple[HeldEvent, ...]]:
        """End the recording, and return what was taken, in order, by task attempt id."""
        recording = self._recordings.pop(checkpoint_id, None)
        return {} if recording is None else {task: tuple(events) for task, events in recording.events.items()}

    def drop(self, checkpoint_id: int) -> None:
        """The checkpoint is over; ignored if nothing is recorded for it."""
        self._recordings.pop(checkpoint_id, None)

    def taken(self) -> None:
        """The part has handled the event."""
        self._handling, self.is_restored = None, False

    def handles_restored(self, part: int) -> bool:
        """Whether the part handles an event or request that was held in the checkpoint that was restored."""
        return self.is_restored and self._handling is not None and self._handling[0] == part

    def forget(self, attempt: ExecutionAttempt) -> None:
        """The attempt has failed, or its success was revoked."""
        self._counts.pop(attempt.task_attempt_id, None)

    def clear(self) -> None:
        """The whole operator is reset: forget all counts."""
        self._counts.clear()
        for latest in self._latest:
            latest.clear()
        self._recordings.clear()

    def position(self, subtask: int, part: int = OWN_PART) -> int:
        """The position of the part's event of ``subtask`` that is being handled; otherwise of the last one taken."""
        if self._handling is not None and self._handling[:2] == (part, subtask):
            return self._handling[2]
        counts = self._counts.get(self._latest[part].get(subtask, -1))
        return 0 if counts is None else counts[part]

    def at_this_moment(self) -> dict[int, Positions]:
        """The counts by task attempt id, as a checkpoint has them."""
        inside = self._table.inside
        return {task: inside(counts) for task, counts in self._counts.items()}


class FailureLatch:
    """Shared by an operator's tracker and its coordinator: reports the first failure of either, and ignores the rest.

    Resets are counted from 1; 0 is the time before the first. The tracker decides on a reset slightly before the
    coordinator receives it, so each reports a failure with the number of its last reset. A failure from before a reset
    that is already decided is ignored. ``report`` and ``failed`` are as in ``OperatorPorts``. Loop only.
    """

    def __init__(
        self, operator_id: str, report: Callable[[LedgerInput], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._operator_id = operator_id
        self._report = report
        self._failed = failed
        self._latched = False
        self.resets = 0
        """How many resets have been decided."""

    @property
    def latched(self) -> bool:
        """Whether a failure was reported and no reset has followed it yet."""
        return self._latched

    def reset(self) -> None:
        """Record that a reset is decided."""
        self._latched = False
        self.resets += 1

    def raise_failure(self, resets: int, error: BaseException, cause: str) -> bool:
        """Report a global failure after reset ``resets``. False if its reset is already in progress."""
        if self._latched or resets < self.resets:
            return False
        self._latched = True
        self._failed(error)
        self._report(GlobalFailureRaised(self._operator_id, cause))
        return True


class CoordinatorActor(Actor[CoordinatorMessage]):
    """Call the methods of the coordinators of one operator; see the module. It is the ``Host`` of their contexts.

    ``report`` passes inputs to the attempt ledger. ``tracker_ref`` is sent the snapshots.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        operator_id: str,
        parallelism: int,
        mode: RestoreMode,
        snapshot_timeout_s: float,
        store: CoordinatorStore,
        report: Callable[[LedgerInput], None],
        tracker_ref: ActorRef[TrackerMessage],
        statistics: OperatorStatistics,
        failures: FailureLatch,
        look_at_run: Callable[[], Awaitable[StageLook]],
        is_pending: Callable[[int], bool],
        announcer: Announcer[GatewayMessage],
        hold_events: bool,
        watch: CallWatch,
        report_s: float,
        limits: WireLimits,
    ) -> None:
        self.operator_id = operator_id
        self.parallelism = parallelism
        self.mode = mode
        self.store = store
        self._table = parts.table
        self.taken = TakenEvents(parts.table)
        self._announcer = announcer
        self._hold_events = hold_events
        self.look_at_run = look_at_run
        self._is_pending = is_pending
        self.in_doubt: set[int] = set()
        self.input_begins_again = False
        self._parts = parts
        self._own = self._called = parts[0]  # the part that was called last
        self._timers = 0
        self._snapshot_timeout_s = snapshot_timeout_s
        self._report = report
        self._tracker_ref = tracker_ref
        self._statistics = statistics
        self._failures = failures
        self._watch = watch
        self._report_s = report_s
        self._limits = limits
        self._resets = 0  # handled here; ``FailureLatch.resets`` are decided
        self._live: dict[int, GatewayLine[GatewayMessage]] = {}
        self._failure: BaseException | None = None  # the first one since the reset
        self._ended_well = False  # whether the last run succeeded
        self._failed_after = ""  # the first failure after that (H71)
        self._ignores_events = False  # the user's own part has no method that handles events
        self._told_unhandled: set[str] = set()  # one warning for each direction

    async def started(self, context: ActorContext[CoordinatorMessage]) -> None:
        self._context = context
        self.log, self.clock = context.log, context.clock
        self._peer_log = LimitedLog(context.log, context.clock)
        self.gateways = GatewayTable(
            self.parallelism,
            lambda handler: context.self_ref.tell(CallHandler(handler, "when_all_ready")),
            lambda: self._watch.inside,
            self._limits,
            lambda: self.taken.is_restored,
        )
        self._replies = OpenReplies(
            self.operator_id, self._peer_log, self._statistics, self.call_soon_threadsafe, self._limits
        )
        self._watch.attach(context.clock, context.log, self._report_s, self._note_awaited)

    async def receive(self, context: ActorContext[CoordinatorMessage], message: CoordinatorMessage) -> None:
        match message:
            case EventArrived():
                await self._handle_event(message)
            case RequestArrived():
                await self._handle_request(message)
            case CancellationArrived(attempt, request_id):
                self._replies.cancel(attempt, request_id)
            case SnapshotCoordinator(checkpoint_id, target):
                await self._take_snapshot(checkpoint_id, target)
            case CollectRecorded():
                self._collect(message)
            case AttemptHint():
                await self._give_hint(message)
            case CallHandler(handler, caller):
                self._called = self._own  # a handler does not say whose it is
                await self._guarded(caller, call_user(caller, handler))
            case StartCoordinator():
                await self._start(message)
            case ClientRequest():
                await self._handle_client_request(message)
            case Flush(reply_to, settled):
                reply_to.answer(replace(settled, failed=self._failed_after))
            case Timed(fact, callback_us):
                self._statistics.fact_us.record(time.time_ns() / 1000 - callback_us)
                await self._handle_lifecycle(fact)
            case _:
                await self._handle_lifecycle(message)

    def called_for(self, message: object) -> str:
        """The method of the coordinator, with its class, that handles a message."""  # H9
        if isinstance(message, Timed):
            message = message.message
        method = METHODS.get(type(message))
        if isinstance(message, CallHandler):
            method = message.caller
        elif isinstance(message, AttemptHint):
            method = message.method
        return super().called_for(message) if method is None else f"{self._called.kind}.{method}"

    async def stopped(self, context: ActorContext[CoordinatorMessage], cause: BaseException | None) -> None:
        try:
            await call_each("close", [partial(_closed, part) for part in reversed(self._parts.in_order)])
        except Exception:
            context.log.exception("coordinator close failed")
        finally:
            self._replies.close()
            self._watch.close()
            self._peer_log.close()

    def _note_awaited(self, call: Call | None) -> None:
        """Tell the waiting attempts what the coordinator itself waits for, or that this wait is over (H70)."""
        if call is None:
            self._tracker_ref.tell(NoteAwaited("", 0.0, ""))
        else:
            self._tracker_ref.tell(NoteAwaited(call.name, self._watch.age_s(call), call.place[:PLACE_CHARS_MAX]))

    def outlives_cancellation(self, context: ActorContext[CoordinatorMessage]) -> bool:
        """Fail the job if work that a method left behind cancelled the coordinator's task."""
        error = RuntimeError(
            "the coordinator's task was cancelled between two calls, by something that a method left open, such as an "
            "asyncio.timeout in an async generator"
        )
        self.raise_global_failure("after a method", error)
        return True

    def raise_global_failure(
        self,
        method: str,
        error: BaseException,
    ) -> None:
        """Fail the job; until the reset, only the first cause counts (H7, H8)."""
        error = true_cause(error)
        text = describe(error)
        if self._failure is None:
            self._failure = error
            if self._ended_well and self.mode is RestoreMode.STREAMING:
                self._failed_after = f"{method}: {text}"
        if self._failures.raise_failure(self._resets, error, f"{method}: {text}"):
            self.log.error("coordinator failed the job", method=method, error=text, exc_info=error)
        else:
            self.log.warning("global failure already in progress", method=method, error=text, exc_info=error)

    # --- what the contexts of the coordinators use: see ``Host`` -----------------------------------------------------

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        return frozenset(self.in_doubt)

    def handles_restored(self, part: Sender) -> bool:
        return self.taken.handles_restored(part.index)

    def events_taken(self, part: Sender, subtask: int) -> int:
        return self.taken.position(subtask, part.index)

    def fail_job(self, error: BaseException) -> None:
        self.raise_global_failure("fail_job", error)

    def run_in_thread(self, function: Callable[..., Any], *args: Any, handler: Outcome) -> None:
        result, failure = partial(_result, handler), partial(_failure, "call_async", handler)
        self._context.run_in_thread(function, *args, on_result=result, on_error=failure)

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any, handler: Outcome) -> None:
        result, failure = partial(_result, handler), partial(_failure, "run_in_background", handler)
        self._context.run(function, *args, on_result=result, on_error=failure)

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self._timers += 1
        self._context.timers.start(f"call_later-{self._timers}", CallHandler(handler), delay_s=delay_s)

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        with suppress(SystemNotRunning):
            self._context.self_ref.tell_threadsafe(CallHandler(handler))

    # --- calls of all parts -----------------------------------------------------------------------------------------

    async def _start(self, message: StartCoordinator) -> None:
        try:
            self.input_begins_again = message.restored is not None  # as far as is known before the first run
            if message.restored is not None:
                self.log.info("coordinator restored", checkpoint_id=message.restored[0])
                await self._reset(*message.restored)
            await self._of_each(lambda part: part.start(self))
        except Exception as error:
            message.reply_to.fail(error)
            return
        if self._failure is None:
            message.reply_to.answer(None)
        else:  # fail_job within start: there is no job yet to fail, and no reset would follow
            message.reply_to.fail(as_exception("fail_job", self._failure))

    async def _reset(self, checkpoint_id: int, state: bytes | None) -> None:
        """Reset each part to its share of the state."""
        own, states = state, dict[str, bytes]()
        if state is not None:
            own, states = await in_turns(split_states_in_steps(state, [part.name for part in self._parts[1:]]))
        await self._of_each(
            lambda part: part.reset_to_checkpoint(checkpoint_id, states.get(part.name) if part.name else own)
        )

    async def _of_each(self, call: Callable[[Part], Awaitable[object]], unless_default: str = "") -> None:
        """Call something of each part, in their order, until one raises.

        A part that is live and has the method ``unless_default`` from the base class, where it does nothing, is passed
        over. Most parts define few methods, and each subtask that becomes ready, fails, ends or is reset would pay for
        the others (``registration`` and ``failure`` of ``benchmarks.walks``).
        """
        for part in self._parts.in_order:
            if unless_default and part.is_live and not part.overrides(unless_default):
                continue
            self._called = part
            await _explained(part, call(part))

    async def _tell_each(self, method: str, *args: Any) -> bool:
        """Call a method of each part's coordinator, and return whether all succeeded."""
        calls = self._of_each(lambda part: call_user(method, part.method(method), *args), method)
        return await self._guarded(method, calls)

    async def _handle_lifecycle(self, message: CoordinatorMessage) -> None:
        match message:
            case SubtaskReadyWithGateway():
                await self._tell_ready(message)
            case SubtaskFailed(attempt, reason):
                self._live.pop(attempt.task_attempt_id, None)
                self.taken.forget(attempt)
                self.gateways.remove(attempt)
                self._replies.attempt_over(attempt.task_attempt_id)
                kind, by_kind = reason.kind.name.lower(), self._statistics.failures_by_kind
                by_kind[kind] = by_kind.get(kind, 0) + 1
                self.log.info("subtask failed", **attempt_keys(attempt), kind=reason.kind.name, reason=reason.text)
                await self._tell_each("subtask_failed", attempt.subtask, attempt.attempt, reason)
            case SubtaskFinished(attempt):
                self._live.pop(attempt.task_attempt_id, None)
                self.gateways.remove(attempt)
                self._replies.attempt_over(attempt.task_attempt_id)
                self._statistics.finished += 1
                await self._tell_each("subtask_finished", attempt.subtask, attempt.attempt)
            case SubtaskResetToCheckpoint(subtask, checkpoint_id):
                self._statistics.subtask_resets += 1
                self.log.info("subtask reset", subtask=subtask, checkpoint_id=checkpoint_id)
                await self._tell_each("subtask_reset", subtask, checkpoint_id)
            case OperatorResetToCheckpoint(checkpoint_id, state, begins_again):
                self.input_begins_again = begins_again
                self._failure = None
                self._resets += 1
                self._ended_well, self._failed_after = False, ""
                self._live.clear()
                self.gateways.reset()
                self._replies.coordinator_reset()
                self.taken.clear()
                self._statistics.operator_resets += 1
                self.log.info("coordinator reset", checkpoint_id=checkpoint_id)
                await self._guarded("reset_to_checkpoint", self._reset(checkpoint_id, state))
            case RunEnded(_, run_id, succeeded, reason_text):
                self._live.clear()
                self.gateways.clear()
                self._replies.attempts_over()
                self._ended_well = succeeded
                self._statistics.runs += 1
                await self._tell_each("run_ended", run_id, succeeded, reason_text)
                self._tell_ignored_by_operator()
            case NotifyCheckpointComplete(checkpoint_id):
                self._tell_ignored_by_operator()
                await self._tell_each("notify_checkpoint_complete", checkpoint_id)
            case NotifyCheckpointAborted(checkpoint_id, _, in_doubt):
                self.taken.drop(checkpoint_id)
                if in_doubt:
                    self.in_doubt.add(checkpoint_id)
                await self._tell_each("notify_checkpoint_aborted", checkpoint_id)
            case NotifyCheckpointDiscarded(checkpoint_id):
                self.in_doubt.discard(checkpoint_id)
                await self._tell_each("notify_checkpoint_discarded", checkpoint_id)
            case _:
                raise TypeError(f"no message of a coordinator: {message!r}")

    async def _tell_ready(self, message: SubtaskReadyWithGateway) -> None:
        attempt, sends = message.attempt, message.sends
        self._live[attempt.task_attempt_id] = message.gateway_ref
        self.gateways.add(sends)
        self.taken.begin(attempt, message.events_sent)
        self._statistics.ready += 1
        name = "subtask_ready"
        calls = self._of_each(
            lambda part: call_user(name, part.method(name), attempt.subtask, Gateway(sends, part.current)), name
        )
        ready = await self._guarded(name, calls)
        self._ignores_events = not self._own.overrides("handle_event_from_operator")
        if ready:  # otherwise the job fails; the operator must not begin without those events (H66)
            message.gateway_ref.tell_direct(ReadyAnnounced())
            await self._see_if_all_ready()

    async def _give_hint(self, hint: AttemptHint) -> None:
        """Hints of an attempt that is over are dropped: there is more certain news of it (H87)."""
        attempt = hint.attempt
        if attempt.task_attempt_id not in self._live:
            return
        await self._tell_each(hint.method, attempt.subtask, attempt.attempt, *hint.args)

    async def _see_if_all_ready(self) -> None:
        """Call what waits for this, before the next message can say that an attempt is over (H88)."""
        if self.gateways.is_awaited:
            name = "when_all_ready"
            await self._guarded(name, call_user(name, self.gateways.call_handlers))

    # --- calls of one part ------------------------------------------------------------------------------------------

    async def _decoded(self, payload: bytes) -> tuple[Any, str]:
        """The value of an event or a request, and the text of the span that it was sent in, if there is one.

        One event of 4 MiB can cost more than a second, if the keys of its maps were chosen so that each collides with
        those before it. A thread would not help, because msgpack holds the interpreter lock. So a large one is decoded
        in steps, and other work of the loop gets a turn after each.

        Raises ``RemoteProtocolError`` if it is not an event, or exceeds a limit.
        """
        traceparent = ""
        if payload and payload[0] == TRACED_FIRST and payload.startswith(TRACED_START):
            traceparent, payload = split_traceparent(payload)
        if len(payload) <= EVENT_STEP_BYTES:
            return decode_event(payload), traceparent
        return await in_turns(decode_event_in_steps(payload)), traceparent

    async def _handle_event(self, message: EventArrived) -> None:
        attempt = message.attempt
        if not self._is_live(attempt, "event"):
            return
        try:
            event, traceparent = await self._decoded(message.payload)
        except ProtocolError as error:
            self._condemn(attempt, f"an unreadable event from the task: {error}")
            return
        index = message.part
        part = self._called = self._parts[index]
        self._statistics.parts[index].events_received += 1
        if self._ignores_events and part is self._own:
            self._statistics.events_unhandled += 1
            self._tell_unhandled(
                "events from subtasks not handled",
                hint="override handle_event_from_operator in the coordinator, or do not send events to it",
                subtask=attempt.subtask,
            )
        subtask = attempt.subtask
        if message.sender is not None:
            subtask = message.sender
            self._statistics.events_restored += self._table.users[index]
        self.taken.take(attempt, message.sender, message.payload, index, after_snapshot=message.after_snapshot)
        method = part.method("handle_event_from_operator")
        if traceparent:
            method = inside_span(traceparent, method)
        try:
            await call_user("handle_event_from_operator", method, subtask, attempt.attempt, event)
        except RemoteProtocolError as error:  # what a part refuses, because only a forged task sends it
            self._condemn(attempt, f"a forged event from the task: {error}")
        except Exception as error:
            self.raise_global_failure("handle_event_from_operator", part.explain(error))
        self.taken.taken()
        if message.report_taken:
            message.gateway_ref.tell_direct(ItemTaken(message.seq, index))

    def _condemn(self, attempt: ExecutionAttempt, received: str) -> None:
        why = f"the driver received {received}"
        self._report(AttemptCondemned(self.operator_id, attempt.task_attempt_id, why, unusable=True))

    async def _handle_request(self, message: RequestArrived) -> None:
        attempt = message.attempt
        if not self._is_live(attempt, "request"):
            return
        error, payload = "", b""
        part = self._called = self._parts[message.part]
        deferred: Reply | None = None
        subtask = attempt.subtask
        if message.sender is not None:
            subtask = message.sender
            self._statistics.events_restored += self._table.users[part.index]
        self.taken.take(
            attempt, message.sender, message.payload, part.index, is_request=True, after_snapshot=message.after_snapshot
        )
        try:
            request, traceparent = await self._decoded(message.payload)
            method = part.method("handle_request")
            if traceparent:
                method = inside_span(traceparent, method)
            answer = await call_user("handle_request", method, subtask, attempt.attempt, request)
            if is_a(answer, Reply):
                waiting = WaitingTask(self._replies, attempt, message.gateway_ref, message.request_id, part)
                self._replies.take(answer, waiting)
                deferred = answer
            else:
                payload = encode_argument("the answer", answer, self._limits)
        except Exception as failure:  # it fails only the request, as in R97; the coordinator answers for its own state
            error, payload = describe_failure(failure)
            self._peer_log.warning("request failed", **attempt_keys(attempt), error=error, exc_info=failure)
            if is_fatal(failure):
                self.raise_global_failure("handle_request", failure)
        self.taken.taken()
        if message.request_id is not None and deferred is None:
            message.gateway_ref.tell_direct(AnswerSubmitted(message.request_id, error, payload))
        message.gateway_ref.tell_direct(ItemTaken(message.seq, part.index))

    async def _handle_client_request(self, message: ClientRequest) -> None:
        """Answer a client's request; an exception goes to the requester only (R97)."""
        self._statistics.client_requests += 1
        try:
            part = self._called = self._parts.named(message.part)
            if part.name and not part.is_stage and not part.overrides("handle_client_request"):
                raise LocalProtocolError(
                    f"the driver cannot ask the part {part.name!r}: request(..., part=...) names a stage of a chain; "
                    "leave it out to ask the operator's own coordinator"
                )
            method = part.method("handle_client_request")
            if message.traceparent:
                method = inside_span(message.traceparent, method)
            answer = await call_user("handle_client_request", method, message.request)
            if is_a(answer, Reply):
                self._replies.take(answer, WaitingClient(self._replies, message.reply_to))
                return
        except Exception as error:
            self._peer_log.warning("client request failed", error=describe(error), exc_info=error)
            message.reply_to.fail(error)
            if is_fatal(error):
                self.raise_global_failure("handle_client_request", error)
        else:
            message.reply_to.answer(answer)

    async def _take_snapshot(self, checkpoint_id: int, target: str) -> None:
        if not self._is_pending(checkpoint_id):
            return  # it was aborted while this waited in the mailbox, and the abort is there too (H160)
        timeout_s = self._snapshot_timeout_s
        scope = anyio.CancelScope()
        waited_at = ""

        def give_up() -> None:
            nonlocal waited_at
            waited_at = "".join(f", waiting at {call.place}" for call in (self._watch.oldest,) if call is not None)
            scope.cancel()

        deadline = self.clock.call_later(timeout_s, give_up)
        state = b""
        try:
            with scope:
                state = await self._state(checkpoint_id)
            if scope.cancelled_caught:
                reason = f"checkpoint_coordinator took longer than {timeout_s:g} s{waited_at}"
                self._tracker_ref.tell(CoordinatorSnapshotFailed(checkpoint_id, reason))
                return
        except Exception as error:
            reason = f"checkpoint_coordinator: {describe(true_cause(error))}"
            self.raise_global_failure("checkpoint_coordinator", error)
            self._tracker_ref.tell(CoordinatorSnapshotFailed(checkpoint_id, reason))
        else:
            if not self._hold_events:
                self.taken.record(checkpoint_id)
            # A gateway may be closed already, and the news of it wait behind this snapshot.
            open_ones = [line for line in self._live.values() if not line.is_over]
            self._announcer.announce(open_ones, CutReached(checkpoint_id, target))
            self._tracker_ref.tell(CoordinatorSnapshotTaken(checkpoint_id, state, self.taken.at_this_moment()))
        finally:
            deadline.cancel()
            self._parts.cut_reached()

    async def _state(self, checkpoint_id: int) -> bytes:
        """The state of all parts. What each sends from its own snapshot on is held: see ``Sender``."""
        states: dict[str, bytes] = {}
        name = "checkpoint_coordinator"

        async def add(part: Part, checkpoint_id: int) -> None:
            state = await part.method(name)(checkpoint_id)
            if not isinstance(state, bytes | bytearray | memoryview):
                of_part = f" of {part.name!r}" if part.name else ""
                raise TypeError(f"{name}{of_part} returned {type_name(state)}, not bytes; return b'' for no state")
            states[part.name] = bytes(state)
            self._parts.snapshot_taken(part)

        await self._of_each(lambda part: call_user(name, partial(add, part), checkpoint_id))
        stages = [part.name for part in self._parts if part.is_stage]
        return await in_turns(join_states_in_steps(states.pop(""), states, stages))

    def _collect(self, message: CollectRecorded) -> None:
        """Hand over what was recorded. What the subtasks had sent before their snapshots was taken before this."""
        recorded = self.taken.collect(message.checkpoint_id)
        users = self._table.users
        self._statistics.events_in_snapshots += sum(users[held.part] for held in chain.from_iterable(recorded.values()))
        self._tracker_ref.tell(RecordedCollected(message.checkpoint_id, recorded))

    async def _guarded(
        self,
        method: str,
        call: Awaitable[object],
    ) -> bool:
        """Await a call of a method, and return whether it succeeded; an exception is a global failure."""
        try:
            await call
        except Exception as error:
            self.raise_global_failure(method, error)
            return False
        return True

    def _tell_ignored_by_operator(self) -> None:
        operator_class, count = self._statistics.operator_ignores_events, self._statistics.events_confirmed
        if operator_class and count:
            hint = f"override handle_event in {operator_class}, or do not send events to it"
            self._tell_unhandled("events to subtasks not handled", hint=hint, events=count)

    def _tell_unhandled(self, what: str, **keys: Any) -> None:
        if what not in self._told_unhandled:
            self._told_unhandled.add(what)
            self.log.warning(what, **keys)

    def _is_live(self, attempt: ExecutionAttempt, what: str) -> bool:
        if attempt.task_attempt_id in self._live:
            return True
        self._statistics.messages_dropped += 1
        self._peer_log.info("message of ended attempt dropped", what=what, **attempt_keys(attempt))
        return False


METHODS: dict[type, str] = {
    StartCoordinator: "start",
    EventArrived: "handle_event_from_operator",
    RequestArrived: "handle_request",
    ClientRequest: "handle_client_request",
    SnapshotCoordinator: "checkpoint_coordinator",
    SubtaskReadyWithGateway: "subtask_ready",
    SubtaskFailed: "subtask_failed",
    SubtaskFinished: "subtask_finished",
    SubtaskResetToCheckpoint: "subtask_reset",
    OperatorResetToCheckpoint: "reset_to_checkpoint",
    RunEnded: "run_ended",
    NotifyCheckpointComplete: "notify_checkpoint_complete",
    NotifyCheckpointAborted: "notify_checkpoint_aborted",
    NotifyCheckpointDiscarded: "notify_checkpoint_discarded",
}
"""The user's method that a message leads to. An ``AttemptHint`` names it itself."""


async def _explained(part: Part, call: Awaitable[object]) -> None:
    """Await a call of a part. A failure says which part it comes from."""
    try:
        await call
    except Exception as error:
        part.explain(error)
        raise


async def _closed(part: Part) -> None:
    await _explained(part, part.close())


def _result(handler: Outcome, result: Any) -> CallHandler:
    return CallHandler(lambda: handler(result, None))


def _failure(caller: str, handler: Outcome, error: Exception) -> CallHandler:
    """Give an ordinary error to the handler; one that would end the program fails the job."""
    if is_fatal(error):
        return failing(caller, error)
    return CallHandler(lambda: handler(None, error))
