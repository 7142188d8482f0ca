# SPDX-License-Identifier: Apache-2.0

"""A user's coordinator, as simple as possible while showing every lost, duplicated or misplaced event.

Like users' coordinators, it is sometimes slow, raises, or sends from inside a method.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.coordination import Confirmation, CoordinatorContext, OperatorCoordinator, Reply, SubtaskGateway
from protocol.attempts import FailureKind, FailureReason, SubtaskFailed, SubtaskFinished
from protocol.errors import AttemptOver, ConfirmationTimeout
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from tests.simulation.application import CONFIRM_S, EVENTS_MAX, STAGES, TEAM, Application, own_state, part_text
from tests.simulation.checkers import AttemptRecord, CallbackOrder, check_whole, demand, judged
from tests.simulation.inputs import NOTHING
from tests.simulation.invariant import REQUEST, Log, read_coordinator, split_wire_form
from tests.simulation.invariant_monitor import InvariantMonitor
from tests.simulation.output import PreparedRows

if TYPE_CHECKING:
    from tests.simulation.stages import Turns
    from tests.simulation.world import World

RAISES = 0.004
"""How likely a method fails, while the world is unkind."""
HANGS = 0.02
"""How likely a snapshot never ends."""
DEFERS = 0.5
"""How likely a request is answered later (H84)."""
FOR_ALL = {
    "subtask_ready",
    "subtask_suspected",
    "subtask_responsive",
    "subtask_failed",
    "subtask_finished",
    "subtask_reset",
    "checkpoint_coordinator",
    "notify_checkpoint_complete",
    "notify_checkpoint_aborted",
    "notify_checkpoint_discarded",
    "reset_to_checkpoint",
    "run_ended",
}
"""The methods that are called for all parts of a chain (H80)."""


@dataclass
class Handle:
    """A ready attempt, as the coordinator stores it."""

    gateway: SubtaskGateway
    target: int  # how many events each key has to get in this run
    record: AttemptRecord

    @property
    def attempt(self) -> ExecutionAttempt:
        return self.gateway.attempt


@dataclass
class Deferred:
    """A request whose answer comes later."""

    reply: Reply
    attempt: ExecutionAttempt
    key: int
    request_id: int
    answer: str
    due: float  # on the world's clock
    books: Books  # those of the coordinator that was asked
    part: str  # which it is; empty for the main one


@dataclass
class Books:
    """The coordinator's knowledge: a log for each attempt and key. A reset passes only the coordinator's own bytes."""

    application: Application
    rows: PreparedRows | None = None
    base: dict[int, Log] = field(default_factory=dict)  # by key: what an attempt would start from
    logs: dict[int, dict[int, dict[int, Log]]] = field(default_factory=dict)  # by subtask and attempt, then by key
    handles: dict[int, dict[int, Handle]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    loose_sent: dict[int, int] = field(default_factory=dict)  # by task
    snapshots: dict[int, bytes] = field(default_factory=dict)
    truth: tuple[int, bool] | None = None  # if the jobs have inputs: that of the last run, and whether it is done
    begun_before: set[int] = field(default_factory=set)  # checkpoints that were in progress when their run ended

    def base_of(self, key: int) -> Log:
        return self.base.setdefault(key, Log())

    def logs_of(self, attempt: ExecutionAttempt) -> dict[int, Log]:
        return self.logs[attempt.subtask][attempt.attempt]

    def ready(self, handle: Handle) -> None:
        subtask, number = handle.attempt.subtask, handle.attempt.attempt
        keys = self.application.keys_of(subtask)
        self.logs.setdefault(subtask, {})[number] = {key: self.base_of(key).copy() for key in keys}
        self.handles.setdefault(subtask, {})[number] = handle

    def over(self, attempt: ExecutionAttempt) -> None:
        self.handles.get(attempt.subtask, {}).pop(attempt.attempt, None)

    def finish(self, attempt: ExecutionAttempt) -> None:
        """Record that the gateway is dead from now on; its exchanges stay part of every snapshot until a reset."""
        self.over(attempt)
        self.finished.add(attempt.subtask)
        logs = self.logs.get(attempt.subtask, {}).get(attempt.attempt, {})
        self.base.update({key: log.copy() for key, log in logs.items()})

    def snapshot(self, checkpoint_id: int) -> bytes:
        logs: dict[int, list[list[str]]] = {}
        for key in range(self.application.settings.keys):
            subtask = self.application.owner(key)
            handles = self.handles.get(subtask)
            if handles and subtask not in self.finished:
                logs[key] = self.logs[subtask][next(iter(handles))][key].plain()
            else:
                logs[key] = self.base_of(key).plain()
        whole: dict[str, Any] = {"logs": logs, "loose": self.loose_sent}
        if self.truth is not None:
            input, done = self.truth
            whole["input"] = input, done and checkpoint_id not in self.begun_before
        if self.rows is not None:
            received = {key: len(Log(*log).received) for key, log in logs.items()}
            whole["output"] = self.rows.snapshot(checkpoint_id, received)
        state = self.snapshots[checkpoint_id] = json.dumps(whole).encode()
        return state

    def output_of(self, checkpoint_id: int) -> dict[str, Any] | None:
        """Return what a snapshot records about the output; None for the empty checkpoint."""
        state: dict[str, Any] | None = None
        if checkpoint_id >= 0:
            state = json.loads(self.snapshots[checkpoint_id])["output"]
        return state

    def restore(self, checkpoint_id: int, state: bytes) -> None:
        self.snapshots[checkpoint_id] = state
        self.base = read_coordinator(state)[0]
        self._restore_truth(state)
        if self.rows is not None:
            self.rows.restored(checkpoint_id, self.output_of(checkpoint_id))

    def reset(self, subtask: int, checkpoint_id: int) -> None:
        logs = read_coordinator(self.snapshots[checkpoint_id])[0] if checkpoint_id >= 0 else {}
        self._forget(subtask, logs, checkpoint_id)

    def reset_all(self, checkpoint_id: int, state: bytes | None) -> None:
        logs = {} if state is None else read_coordinator(state)[0]
        self._restore_truth(state)
        for subtask in range(self.application.parallelism):
            self._forget(subtask, logs, checkpoint_id)

    def _restore_truth(self, state: bytes | None) -> None:
        if self.truth is not None:
            input, done = (NOTHING, True) if state is None else json.loads(own_state(state))["input"]
            self.truth = input, done

    def begin(self, input: int) -> None:
        """A run with this input has begun. What is done stays done."""
        if self.truth is not None:
            self.truth = input, self.truth == (input, True)

    def _forget(self, subtask: int, logs: dict[int, Log], checkpoint_id: int) -> None:
        self.logs.pop(subtask, None)
        self.handles.pop(subtask, None)
        self.finished.discard(subtask)
        for key in self.application.keys_of(subtask):
            self.base[key] = logs.get(key, Log())
            if self.rows is not None:
                self.rows.go_back(key, self.output_of(checkpoint_id))


class Coordinator(OperatorCoordinator):
    """See the module. ``order`` judges the calls that it receives."""

    def __init__(self, world: World, application: Application, monitor: InvariantMonitor) -> None:
        settings = application.settings
        streaming = settings.mode is RestoreMode.STREAMING  # in batch mode Spark owns the output
        self.context: CoordinatorContext
        self.books = Books(application, PreparedRows(world.output, settings.by_notice) if streaming else None)
        if world.inputs is not None:
            self.books.truth, self.books.begun_before = (NOTHING, True), monitor.begun_before
        self.stalled: asyncio.Future[None] | None = None
        self.hangs = False  # only a deadline ends the stall
        self.started = self.closed = False
        self.order = CallbackOrder(
            application.parallelism,
            settings.mode is RestoreMode.BATCH,
            (settings.copies and settings.mode is RestoreMode.BATCH) or settings.barrier_stage,
            settings.checkpoints.concurrent_max,
        )
        self.orders = [self.order]  # those of the stages too
        self.turns: Turns | None = None  # if there are stages
        self._world = world
        self._application = application
        self._monitor = monitor
        self._inside = ""  # the method that runs
        self._waits_for_capacity: Handle | None = None
        self._deferred: list[Deferred] = []
        self._ahead: set[str] = set()  # parts whose states are taken, before the cut of the chain
        self._behind_the_cut: list[Callable[[], None]] = []  # notes of what those parts have sent meanwhile

    # --- behavior of user code ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _call(self, method: str, told: str = "") -> AsyncIterator[None]:
        """A method of this coordinator, which is the last one of a chain."""
        async with self.call(method, told, len(STAGES) if method in FOR_ALL else None):
            yield

    @asynccontextmanager
    async def call(self, method: str, told: str, turn: int | None) -> AsyncIterator[None]:
        """Check that each method ends before the next (H5) and none follows close (H6). It may be slow or raise.

        ``turn``: the place in a chain, if the method is called for all of its parts. Only the last one raises then: the
        parts behind one that raises do not get the call, and the order of their calls is judged.
        """
        try:
            async with self._one_call(method, told, turn):
                yield
        except BaseException:
            if self.turns is not None:
                self.turns.stopped()
            raise

    @asynccontextmanager
    async def _one_call(self, method: str, told: str, turn: int | None) -> AsyncIterator[None]:
        world = self._world
        world.tell(f"coordinator: {method}({told})")
        with judged(world):
            demand(not self._inside, f"H5: {method} is called inside {self._inside}")
            demand(not self.closed, f"H6: {method} is called after close")
            if self.turns is not None and turn is not None:
                self.turns.take(turn, method)
        self._inside = method
        began = world.now
        try:
            if self._chance(self._application.settings.stalls):
                await self._stall()
            with judged(world):
                yield
            with judged(world):
                self._monitor.check_reported(method, world.now - began)
        finally:
            self._inside = ""
        may_raise = self.started and turn in (None, len(STAGES))
        if may_raise and world.engine.faults.spend(world.random, RAISES):
            world.befall("the coordinator raises", f"coordinator: {method} raises")
            if method != "handle_request":  # fails only the requesting task (H33)
                self._monitor.raised = method
            raise RuntimeError(f"no luck in {method}")

    def _chance(self, probability: float) -> bool:
        return self._world.random.random() < probability

    async def _stall(self) -> None:
        self.stalled = asyncio.get_running_loop().create_future()
        try:
            await self.stalled
        finally:
            self.stalled, self.hangs = None, False

    @property
    def busy(self) -> bool:
        """Whether one of its methods is running."""
        return bool(self._inside)

    def end_stall(self) -> None:
        if self.stalled is not None and not self.stalled.done():
            self.stalled.set_result(None)

    # --- sending --------------------------------------------------------------------------------------------------

    def _senders(self) -> list[Handle]:
        """Return the attempts that may take another event and need one."""
        return [
            handle
            for handles in self.books.handles.values()
            for handle in handles.values()
            if handle is not self._waits_for_capacity
            and handle.gateway.events_pending < EVENTS_MAX
            and self._wanting(handle)
        ]

    def _wanting(self, handle: Handle) -> list[int]:
        return [key for key, log in self.books.logs_of(handle.attempt).items() if len(log.sent) < handle.target]

    def can_send(self) -> bool:
        return bool(self._senders())

    def send_something(self) -> None:
        """Send from the loop, outside of any method, as user code can."""
        handle = self._world.random.choice(self._senders())
        key, event, loose, urgent = self._next_event(handle)
        confirmation = handle.gateway.send_event_nowait(event, loss_tolerant=loose, urgent=urgent)
        self._sent(handle, key, event, urgent, confirmation)

    async def _send_inside(self) -> None:
        """Send from inside a method, and wait for capacity if there is none (H27)."""
        handles = [h for handles in self.books.handles.values() for h in handles.values() if self._wanting(h)]
        if not handles or not self._chance(self._application.settings.inside):
            return
        self._waits_for_capacity = handle = self._world.random.choice(handles)
        key, event, loose, urgent = self._next_event(handle)
        try:
            confirmation = await handle.gateway.send_event(event, loss_tolerant=loose, urgent=urgent)
        finally:
            self._waits_for_capacity = None
        self._sent(handle, key, event, urgent, confirmation)

    def _next_event(self, handle: Handle) -> tuple[int | None, str, bool, bool]:
        """Return its key, the payload, whether it may be lost, and whether it is urgent.

        A loss-tolerant event has no key. All events of a key have the same urgency, so a key's log keeps its order.
        """
        tid, settings = handle.attempt.task_attempt_id, self._application.settings
        if self._chance(settings.loose):
            number = self.books.loose_sent.get(tid, 0) + 1
            return None, f"{tid}|~{number}", True, settings.urgent and number % 2 == 0
        key = self._world.random.choice(self._wanting(handle))
        event = f"{tid}|{key}:d{len(self.books.logs_of(handle.attempt)[key].sent)}"
        return key, event, False, settings.urgent and key % 2 == 0

    def _sent(self, handle: Handle, key: int | None, event: str, urgent: bool, confirmation: Confirmation) -> None:
        """Record an event as handed over now; its fate is open unless the attempt is over."""
        record, tid = handle.record, handle.attempt.task_attempt_id
        place = self._note_sent(record, event, confirmation)
        if urgent:
            record.urgent.append(place)
        if key is None:
            record.loose.add(place)
            self.books.loose_sent[tid] = self.books.loose_sent.get(tid, 0) + 1
        else:
            self.books.logs_of(handle.attempt)[key].sent.append(event.rpartition(":")[2])

    def _note_sent(self, record: AttemptRecord, event: str, confirmation: Confirmation) -> int:
        place = len(record.down_sent)
        record.down_sent.append(event)
        record.sent_at.append(record.connected_for(self._world.now))
        self._world.tell(f"coordinator sends {event}")
        confirmation.add_done_callback(partial(self._settled, record, place))
        return place

    def _settled(self, record: AttemptRecord, place: int, confirmation: Confirmation) -> None:
        error = confirmation.error()
        with judged(self._world):
            demand(error is None or isinstance(error, AttemptOver), f"H26: event {place} failed with {error!r}")
            if isinstance(error, ConfirmationTimeout) and place in record.loose:
                self._world.figures.happen("a loss-tolerant event expires")
                record.check_expired(place, self._world.now, CONFIRM_S)
            record.settle(place, confirmation.confirmed())
        self._world.figures.events_down += confirmation.confirmed()

    # --- for the parts of a chain ---------------------------------------------------------------------------------

    @contextmanager
    def waiting_for_capacity(self, attempt: ExecutionAttempt) -> Iterator[None]:
        """A part may wait for capacity there, so nothing else is sent, which would confuse the record of the order."""
        self._waits_for_capacity = self.books.handles.get(attempt.subtask, {}).get(attempt.attempt)
        try:
            yield
        finally:
            self._waits_for_capacity = None

    def waits_for_capacity_at(self, attempt: ExecutionAttempt) -> bool:
        """Whether this coordinator or a part waits for capacity there."""
        return self._waits_for_capacity is not None and self._waits_for_capacity.attempt == attempt

    def sent_by_part(
        self, attempt: ExecutionAttempt, name: str, event: Any, urgent: bool, confirmation: Confirmation
    ) -> None:
        def note() -> None:
            record = self._world.record(attempt.task_attempt_id)
            if name == TEAM:
                record.outside_sent.append(part_text(name, event))
                return
            place = self._note_sent(record, part_text(name, event), confirmation)
            if urgent:
                record.urgent.append(place)

        self._at_the_cut(name, note)

    def _at_the_cut(self, part: str, note: Callable[[], None]) -> None:
        """Note what a part has sent: now, or behind the cut if that part's snapshot is taken before it (H80)."""
        if part in self._ahead:
            self._world.figures.happen("a stage sends between its snapshot and the cut")
            self._behind_the_cut.append(note)
        else:
            note()

    def snapshot_of_part(self, part: str) -> None:
        """The state of a part is taken, and the cut of the chain comes later."""
        self._ahead.add(part)

    def cut_reached(self) -> None:
        """Everything that was held leaves now, in its order."""
        self._ahead.clear()
        for note in self._behind_the_cut:
            note()
        self._behind_the_cut.clear()

    def take_of_part(self, subtask: int, number: int, payload: str, position: int) -> None:
        """Check an event for a part, as those for this coordinator."""
        attempt: ExecutionAttempt = self._monitor.handling.attempt
        self.order.event(attempt.subtask, attempt.attempt)
        demand(number == attempt.attempt, f"H3: {payload} of {attempt} comes as of attempt {number}")
        self._world.record(attempt.task_attempt_id).came_up(payload, position)
        self._world.tell(f"{payload} of {attempt} comes")

    # --- callbacks ------------------------------------------------------------------------------------------------

    async def start(self, context: CoordinatorContext) -> None:
        async with self._call("start"):
            self.context = context
            if self.books.rows is not None and self._application.restored is None:
                self.books.rows.restored(-1, None)
        self.started = True

    async def close(self) -> None:
        with judged(self._world):
            demand(not self.closed, "H6: close is called twice")
        self.closed = True

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: str) -> None:
        async with self._call("handle_event_from_operator", f"{subtask}#{attempt}: {event}"):
            demand(not event.startswith(REQUEST), f"H73: the request {event} comes as an event")
            self._take(subtask, attempt, event)
            await self._send_inside()

    async def handle_request(self, subtask: int, attempt: int, request: str) -> str | Reply:
        async with self._call("handle_request", f"{subtask}#{attempt}: {request}"):
            demand(request.startswith(REQUEST), f"H73: the event {request} comes as a request")
            log = self._take(subtask, attempt, request)
        answer = f"a{split_wire_form(request)[2]}"
        message = self._monitor.handling
        figures = self._world.figures
        figures.requests += 1
        if message.request_id is None:  # from a checkpoint: nothing waits for the answer (H73)
            figures.requests_restored += 1
            return answer
        if self._chance(DEFERS):
            figures.happen("an answer is deferred")
            return self.defer(split_wire_form(request)[1], answer, self.books, "")
        log.answers.append(answer)
        self._world.record(message.attempt.task_attempt_id).answered[message.request_id] = answer
        return answer

    def defer(self, key: int, answer: str, books: Books, part: str) -> Reply:
        """Answer the request that is being handled later."""
        message = self._monitor.handling
        due = self._world.now + self._world.random.choice([0.0, 0.1, 2.0])
        self._deferred.append(Deferred(Reply(), message.attempt, key, message.request_id, answer, due, books, part))
        return self._deferred[-1].reply

    def may_settle(self) -> bool:
        """Whether the time of a reply has come. One that is over may be settled too, without effect."""
        return any(deferred.due <= self._world.now for deferred in self._deferred)

    def settles_at(self) -> float | None:
        return min((deferred.due for deferred in self._deferred), default=None)

    def settle_something(self) -> None:
        """Settle a reply from the loop, outside of any method, as user code can."""
        random = self._world.random
        deferred = random.choice([one for one in self._deferred if one.due <= self._world.now])
        self._deferred.remove(deferred)
        reply, attempt = deferred.reply, deferred.attempt
        self._world.tell(f"coordinator settles {deferred.request_id} of {attempt}: {deferred.answer}, {reply}")
        if reply.over:
            self._world.figures.happen("a deferred answer is over")
            reply.answer(deferred.answer)
            return
        with judged(self._world):
            known = attempt.attempt in deferred.books.handles.get(attempt.subtask, {})
            demand(known, f"H85: the reply to {attempt} is open, and the attempt over")
        if random.random() < 0.1:
            self._world.record(attempt.task_attempt_id).unrecorded_answers = True
            reply.fail("no luck")
            return
        deferred.books.logs_of(attempt)[deferred.key].answers.append(deferred.answer)
        answered = self._world.record(attempt.task_attempt_id).answered
        self._at_the_cut(deferred.part, partial(answered.__setitem__, deferred.request_id, deferred.answer))
        reply.answer(deferred.answer)

    def _take(self, subtask: int, number: int, payload: str) -> Log:
        """Take an event of an attempt that is alive (H3)."""
        message = self._monitor.handling
        attempt: ExecutionAttempt = message.attempt
        self.order.event(attempt.subtask, attempt.attempt)
        demand(number == attempt.attempt, f"H3: {payload} of {attempt} comes as of attempt {number}")
        sender, key, event = split_wire_form(payload)
        demand(sender == subtask, f"H52: {payload} comes in the name of subtask {subtask}")
        self._world.record(attempt.task_attempt_id).came_up(payload, self.context.events_taken(subtask))
        log = self.books.logs_of(attempt)[key]
        log.received.append(event)
        figures = self._world.figures
        figures.events_up += 1
        figures.events_restored += getattr(message, "sender", None) is not None
        return log

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        async with self._call("subtask_ready", f"{gateway.attempt}"):
            attempt, world = gateway.attempt, self._world
            demand(attempt.subtask == subtask, f"H20: {attempt} is announced as of subtask {subtask}")
            self.order.ready(subtask, attempt.attempt, self._monitor.beside_ready(attempt))
            target = world.target_of(attempt.task_attempt_id)
            if (records := world.processes[attempt.task_attempt_id].records) is not None:
                self.books.begin(records.input)
            self.books.ready(Handle(gateway, target, world.record(attempt.task_attempt_id)))
            self._check_gateways()
            await self._send_inside()
            if self._chance(self._application.settings.inside):
                self.context.call_later(world.random.uniform(0.0, 0.1), self._send_later)
        record = world.record(attempt.task_attempt_id)
        record.greeted = len(record.down_sent)

    async def _send_later(self) -> None:
        async with self._call("call_later"):
            await self._send_inside()

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        async with self._call("subtask_suspected", f"{subtask}#{attempt}: {reason}"):
            self.order.suspected(subtask, attempt)
            self._world.figures.happen("a subtask is suspected")

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        async with self._call("subtask_responsive", f"{subtask}#{attempt}"):
            self.order.responsive(subtask, attempt)
            self._world.figures.happen("a suspected subtask lives")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        message = self._monitor.handling
        assert isinstance(message, SubtaskFailed)
        async with self._call("subtask_failed", f"{message.attempt}: {reason}"):
            self.order.failed_attempt(subtask, attempt, *self._monitor.beside_failed(message.attempt))
            if reason.kind is FailureKind.SUPERSEDED and reason.text.endswith("has succeeded"):
                text = f"H86: {subtask}#{attempt} is superseded by a success that was not reported"
                demand(subtask in self.books.finished, text)
            self._world.figures.count_failure(reason.kind.value)
            handle = self.books.handles.get(subtask, {}).get(attempt)
            self.books.over(message.attempt)
            self._check_gateways()
            if handle is not None:
                self._try_dead_gateway(handle)

    def _try_dead_gateway(self, handle: Handle) -> None:
        """Check that a closed gateway refuses to send (H14); the event fails immediately (H26)."""
        confirmation = handle.gateway.send_event_nowait("to nobody")
        demand(confirmation.error() is not None, f"H14: {handle.attempt} has failed, and its gateway takes events")

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        message = self._monitor.handling
        assert isinstance(message, SubtaskFinished)
        self._monitor.finished.add(message.attempt)
        async with self._call("subtask_finished", f"{message.attempt}"):
            self.order.finish(subtask, attempt)
            self._world.figures.happen("a subtask finishes")
            record = self._world.record(message.attempt.task_attempt_id)
            record.check_all_came_up()
            counts = subtask in self._world.engine.succeeded
            demand(counts, f"H86: {message.attempt} finishes, and Spark counts no success")
            handle = self.books.handles.get(subtask, {}).get(attempt)
            self.books.finish(message.attempt)
            self._check_gateways()
            if handle is not None:
                self._try_dead_gateway(handle)

    def _check_gateways(self) -> None:
        """Check that the context has the same gateways as the books, which note them by hand (H88)."""
        mine = {handle.attempt for handles in self.books.handles.values() for handle in handles.values()}
        kept = {gateway.attempt for gateway in self.context.gateways}
        demand(mine == kept, f"H88: the context has the gateways of {kept}, and alive are {mine}")

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        async with self._call("subtask_reset", f"{subtask} to checkpoint {checkpoint_id}"):
            self._world.figures.resets += 1
            self.order.reset(subtask, checkpoint_id)
            self.books.reset(subtask, checkpoint_id)
            self._clean_up()

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        """Take a snapshot; the cut is at its return. It may also fail or never end."""
        async with self._call("checkpoint_coordinator", f"{checkpoint_id}"):
            self.order.snapshot_asked(checkpoint_id, checkpoint_id in self._monitor.savepoints)
            self.hangs = self._world.engine.faults.spend(self._world.random, HANGS)
            if self.hangs or self._chance(0.5):
                await self._stall()
            await self._send_inside()
        state = self.books.snapshot(checkpoint_id)
        for handles in self.books.handles.values():
            for handle in handles.values():
                handle.record.cut(checkpoint_id)
        self._world.tell(f"coordinator: this is the cut of {checkpoint_id}")
        return state

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_complete", f"{checkpoint_id}"):
            self.order.checkpoint_over(checkpoint_id, completed=True)
            self._check_committed(checkpoint_id)
            if self.books.rows is not None:
                state = self.books.output_of(checkpoint_id)
                assert state is not None
                self.books.rows.completed(checkpoint_id, state)
                self._clean_up()

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_aborted", f"{checkpoint_id}"):
            self.order.checkpoint_over(checkpoint_id, completed=False)
            if self.books.rows is not None:
                self.books.rows.aborted(checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_discarded", f"{checkpoint_id}"):
            self.order.checkpoint_discarded(checkpoint_id)
            if self.books.rows is not None:
                self.books.rows.discarded(checkpoint_id)
                self._clean_up()

    def _clean_up(self) -> None:
        """Destroy dead prepared rows, if the API says that no restart can need them (H64)."""
        if self.books.rows is not None:
            self.books.rows.clean_up(getattr(self.context, "checkpoints_in_doubt", ()))

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        async with self._call("reset_to_checkpoint", f"{checkpoint_id}"):
            if not self.started:
                self._world.restores(checkpoint_id)
                self.order.restored = self.order.last_asked = self.order.told_complete = checkpoint_id
                assert state is not None
                self.books.restore(checkpoint_id, state)
                return
            self._world.figures.resets += 1
            self.order.reset_all(checkpoint_id)
            self.books.reset_all(checkpoint_id, state)
            self._clean_up()

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        async with self._call("run_ended", f"{run_id}, well: {succeeded}"):
            self.order.run_ended(run_id, succeeded)
            self.books.handles.clear()
            self._check_gateways()
            if succeeded:
                self._check_whole_run(run_id)
                if self.books.truth is not None:
                    self.books.truth = self.books.truth[0], True

    # --- checks of the whole run ----------------------------------------------------------------------------------

    def _check_whole_run(self, run_id: int) -> None:
        """Check that a successful run exchanged everything once, for every key."""
        target = self._world.target(run_id)
        for key in range(self._application.settings.keys):
            log = self.books.base_of(key)
            check_whole(f"coordinator's view of key {key}", log.received, log.sent, target)

    def _check_committed(self, checkpoint_id: int) -> None:
        """Check that a checkpoint that covers all of a successful run commits its last output."""
        if self.order.uncommitted:
            state = read_coordinator(self.books.snapshots[checkpoint_id])[0]
            if all(state[key].plain() == log.plain() for key, log in self.books.base.items()):
                self.order.uncommitted = ""
