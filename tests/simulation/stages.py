# SPDX-License-Identifier: Apache-2.0

"""Stages in a simulated application: a source, a transform and a sink, each with its own coordinator and state (H80).

In some worlds, the operator is a chain. Its main part is the simulated coordinator with its work. Its stages feed each
other in the tasks, in the real ``OperatorParts``, and each exchanges its own events and requests with its
own coordinator. What is checked of the operator is also checked of each stage: the order of its coordinator's calls,
and the invariant for its own events and its own state. In addition, each call reaches the stages in their order, and a
snapshot has each record either in all stages or in none.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from actors.coordination import CoordinatorContext, OperatorCoordinator, Reply, SubtaskGateway
from protocol.attempts import FailureReason
from protocol.errors import GatewayFull
from protocol.ids import ExecutionAttempt
from protocol.parts import join_states, split_states
from protocol.subtask import types as s
from protocol.wire import messages as m
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, Key
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.context import SubtaskContext
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import OperatorParts
from tests.simulation.application import EVENTS_MAX, OPERATOR, STAGES, Application, unpack
from tests.simulation.checkers import CallbackOrder, demand
from tests.simulation.coordinator import DEFERS, Books, Handle
from tests.simulation.invariant import REQUEST, Log, merge, split_wire_form, wire_form
from tests.simulation.parts import judged_parts

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.invariant_monitor import InvariantMonitor
    from tests.simulation.process import Process
    from tests.simulation.world import World

UNUSED_KEY = Key(NO_IDENTITY, bytes(KEY_BYTES))  # there is no connection
SHARE = 3
"""A stage's events are so many times fewer than those of the main part, as there are so many stages."""


def stage_target(target: int) -> int:
    """How many records of each key flow through the stages, and how many events each stage gets for it."""
    return -(-target // SHARE)


def sends(stage: str, number: int) -> bool:
    """Whether a stage sends an event about the record of this number: each record has one such stage."""
    return number % len(STAGES) == STAGES.index(stage)


# --- the driver -----------------------------------------------------------------------------------------------------


class Turns:
    """Checks that a call that concerns all stages reaches each in order, and then the main part."""

    def __init__(self) -> None:
        self._call = ""
        self._next = 0

    def take(self, place: int, call: str) -> None:
        text = f"H80: {call} reaches place {place} of the chain, after {self._call} had reached {self._next} places"
        demand(place == self._next and (place == 0 or call == self._call), text)
        self._call = call
        self._next = (place + 1) % (len(STAGES) + 1)

    def stopped(self) -> None:
        """A call has failed, so those behind it do not get it."""
        self._next = 0


class SimulatedStages:
    """Three stages beside the simulated coordinator."""

    def __init__(self, world: World, main: Coordinator, application: Application, monitor: InvariantMonitor) -> None:
        self.world = world
        main.turns = Turns()
        self.of_stage = {name: StageCoordinator(name, main, application, monitor) for name in STAGES}
        main.orders.extend(stage.order for stage in self.of_stage.values())
        self.parts = judged_parts(main, self.of_stage, STAGES)

    def can_send(self) -> bool:
        return any(stage.senders() for stage in self.of_stage.values())

    def send_something(self) -> None:
        """Let a stage send from the loop, outside of any method, as user code can."""
        stage = self.world.random.choice([stage for stage in self.of_stage.values() if stage.senders()])
        stage.send_to(self.world.random.choice(stage.senders()))


class StageCoordinator(OperatorCoordinator):
    """The coordinator of one stage. Its books are those of the main part, for its own events."""

    def __init__(self, name: str, judge: Coordinator, application: Application, monitor: InvariantMonitor) -> None:
        self.name = name
        self.books = Books(application)
        main = judge.order
        self.order = CallbackOrder(main.parallelism, main.batch, main.copies, main.concurrent_max)
        self._judge = judge
        self._world = judge._world
        self._application = application
        self._monitor = monitor

    @asynccontextmanager
    async def _call(self, method: str, told: str = "") -> AsyncIterator[None]:
        turn = None if method.startswith("handle_") else STAGES.index(self.name)
        async with self._judge.call(method, f"{self.name}: {told}", turn):
            yield

    # --- sending --------------------------------------------------------------------------------------------------

    def _wanting(self, handle: Handle) -> list[int]:
        logs = self.books.logs_of(handle.attempt)
        return [key for key, log in logs.items() if len(log.sent) < stage_target(handle.target)]

    def senders(self) -> list[Handle]:
        """The attempts that may take another event, and need one."""
        return [
            handle
            for handles in self.books.handles.values()
            for handle in handles.values()
            if handle.gateway.events_pending < EVENTS_MAX
            and not self._judge.waits_for_capacity_at(handle.attempt)
            and self._wanting(handle)
        ]

    def _next_event(self, handle: Handle) -> str:
        key = self._world.random.choice(self._wanting(handle))
        log = self.books.logs_of(handle.attempt)[key]
        log.sent.append(f"d{len(log.sent)}")
        return f"{handle.attempt.task_attempt_id}|{self.name}/{key}:{log.sent[-1]}"

    def send_to(self, handle: Handle) -> None:
        handle.gateway.send_event_nowait(self._next_event(handle))

    # --- callbacks ------------------------------------------------------------------------------------------------

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    def _take(self, payload: str) -> tuple[int, Log]:
        """Take an event of this stage; return its key and the attempt's log."""
        attempt: ExecutionAttempt = self._monitor.handling.attempt
        self.order.event(attempt.subtask, attempt.attempt)
        stage, _, rest = payload.partition("/")
        demand(stage == self.name, f"H80: {payload} of {attempt} comes to the coordinator of the stage {self.name}")
        _, key, event = split_wire_form(rest)
        log = self.books.logs_of(attempt)[key]
        log.received.append(event)
        self._world.figures.happen("an event of a stage")
        return key, log

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: str) -> None:
        async with self._call("handle_event_from_operator", f"{subtask}#{attempt}: {event}"):
            self._take(event)

    async def handle_request(self, subtask: int, attempt: int, request: str) -> str | Reply:
        async with self._call("handle_request", f"{subtask}#{attempt}: {request}"):
            key, log = self._take(request)
        message = self._monitor.handling
        answer = f"{self.name}/{key}:a{log.received[-1]}"
        if message.request_id is not None:  # else it is from a checkpoint, and nothing waits for the answer
            if self._world.random.random() < DEFERS:
                return self._judge.defer(key, answer, self.books, self.name)
            log.answers.append(answer)
            self._world.record(message.attempt.task_attempt_id).answered[message.request_id] = answer
        return answer

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        attempt = gateway.attempt
        async with self._call("subtask_ready", f"{attempt}"):
            self.order.ready(subtask, attempt.attempt, self._monitor.beside_ready(attempt))
            target = self._world.target_of(attempt.task_attempt_id)
            handle = Handle(gateway, target, self._world.record(attempt.task_attempt_id))
            self.books.ready(handle)
            if self._wanting(handle):
                await gateway.send_event(self._next_event(handle))

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        async with self._call("subtask_suspected", f"{subtask}#{attempt}"):
            self.order.suspected(subtask, attempt)

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        async with self._call("subtask_responsive", f"{subtask}#{attempt}"):
            self.order.responsive(subtask, attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        async with self._call("subtask_failed", f"{subtask}#{attempt}"):
            over: ExecutionAttempt = self._monitor.handling.attempt
            self.order.failed_attempt(subtask, attempt, *self._monitor.beside_failed(over))
            self.books.over(over)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        async with self._call("subtask_finished", f"{subtask}#{attempt}"):
            self.order.finish(subtask, attempt)
            self.books.finish(self._monitor.handling.attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        async with self._call("subtask_reset", f"{subtask} to checkpoint {checkpoint_id}"):
            self.order.reset(subtask, checkpoint_id)
            self.books.reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        async with self._call("checkpoint_coordinator", f"{checkpoint_id}"):
            self.order.snapshot_asked(checkpoint_id, checkpoint_id in self._monitor.savepoints)
        state = self.books.snapshot(checkpoint_id)
        self._judge.snapshot_of_part(self.name)
        return state

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_complete", f"{checkpoint_id}"):
            self.order.checkpoint_over(checkpoint_id, completed=True)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_aborted", f"{checkpoint_id}"):
            self.order.checkpoint_over(checkpoint_id, completed=False)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        async with self._call("notify_checkpoint_discarded", f"{checkpoint_id}"):
            self.order.checkpoint_discarded(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        async with self._call("reset_to_checkpoint", f"{checkpoint_id}"):
            if not self._judge.started:
                self.order.restored = self.order.last_asked = self.order.told_complete = checkpoint_id
                demand(state is not None, f"H80: the stage {self.name} is restored without its state")
                assert state is not None
                self.books.restore(checkpoint_id, state)
                return
            self.order.reset_all(checkpoint_id)
            self.books.reset_all(checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        async with self._call("run_ended", f"{run_id}, well: {succeeded}"):
            self.order.run_ended(run_id, succeeded)
            self.books.handles.clear()
            if succeeded:
                for key in range(self._application.settings.keys):
                    log = self.books.base_of(key)
                    name = f"coordinator's view of key {key}"
                    check_whole_stage(name, self.name, log.received, log.sent, self._world.target(run_id))


def check_whole_stage(name: str, stage: str, up: list[str], down: list[str], target: int) -> None:
    """Check that a stage exchanged everything with its coordinator, each event once and in order."""
    numbers = range(stage_target(target))
    demand(up == [f"u{n}" for n in numbers if sends(stage, n)], f"exactly once, up, {name}, stage {stage}: {up}")
    demand(down == [f"d{n}" for n in numbers], f"exactly once, down, {name}, stage {stage}: {down}")


# --- a task ---------------------------------------------------------------------------------------------------------


class Gone(Exception):
    """The task has ended in the middle of its records."""


class Stage(SubtaskOperator):
    """A stage in a task: takes records ``[key, number]``, and exchanges events with its coordinator.

    ``passed``: how many records of each key have gone through it.
    """

    def __init__(self, of: TaskStages, name: str) -> None:
        self.of = of
        self.name = name
        self.logs = {key: Log() for key in of.keys}
        self.passed = dict.fromkeys(of.keys, 0)
        self.heard: list[tuple[str, int]] = []
        self.closed = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        if state is not None:
            whole = json.loads(state)
            demand(whole["stage"] == self.name, f"H80: stage {self.name} restores the state of {whole['stage']}")
            restored = merge(f"stage {self.name} of task {self.of.process.tid}", [whole])
            demand(set(restored) <= set(self.of.keys), f"H52: {self.name} of {self.of.keys} restores {restored}")
            self.logs.update(restored)
            self.passed.update({int(key): count for key, count in whole["passed"].items()})

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        wholes = [json.loads(state) for state in states.values()]
        logs = merge(f"stage {self.name}", wholes)
        passed = {key: count for whole in wholes for key, count in whole["passed"].items()}
        return self._state({key: log.plain() for key, log in logs.items()}, passed, self._merged(wholes))

    def _merged(self, wholes: list[dict[str, Any]]) -> dict[str, Any]:
        """What the states have besides, joined."""
        return {}

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return self._state({key: log.plain() for key, log in self.logs.items()}, self.passed, self.own_state())

    def own_state(self) -> dict[str, Any]:
        """What its states have besides."""
        return {}

    def _state(self, logs: dict[int, Any], passed: dict[Any, int], own: dict[str, Any]) -> bytes:
        return json.dumps({"stage": self.name, "logs": logs, "passed": passed, **own}).encode()

    def handle_event(self, event: str) -> None:
        target, _, rest = event.partition("|")
        stage, _, rest = rest.partition("/")
        mine = int(target) == self.of.process.tid and stage == self.name
        demand(mine, f"H80: stage {self.name} of task {self.of.process.tid} gets {event}")
        key, _, name = rest.partition(":")
        self.logs[int(key)].received.append(name)

    def hear_answer(self, answer: str) -> None:
        stage, _, rest = answer.partition("/")
        key, _, _ = rest.partition(":")
        demand(stage == self.name, f"H80: stage {self.name} is answered {answer}")
        self.logs[int(key)].answers.append(answer)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.heard.append(("complete", checkpoint_id))

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.heard.append(("aborted", checkpoint_id))

    def close(self) -> None:
        after = self.of.stages[STAGES.index(self.name) + 1 :]
        demand(all(stage.closed for stage in after), f"H80: stage {self.name} is closed before the stages after it")
        self.closed = True

    def _tell(self, key: int, number: int) -> None:
        """Tell the coordinator of a record, or ask it, before the fields say so; if it is one of this stage."""
        if sends(self.name, number):
            told = wire_form(self.of.process.task.partition, key, f"u{number}")
            if number % 2 and self.of.asks:
                self.context.request(f"{self.name}/{REQUEST}{told}")
            else:
                self.context.send_event(f"{self.name}/{told}")
            self.logs[key].sent.append(f"u{number}")

    def _pass(self, key: int, number: int) -> None:
        """A record has gone through the stage."""
        self._tell(key, number)
        self.passed[key] += 1


class Reading(Stage):
    """The source: its positions are ``passed``, so it can be cut after each output. It has the records of the input."""

    snapshot_anywhere = True
    goes_on_after_restore = True

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        if self.of.process.records is not None and state is not None:
            whole = json.loads(state)["records"]
            merged = whole if isinstance(whole, list) else [whole]
            self.of.process.records.restore(merged, begins_again=context.input_begins_again)

    def own_state(self) -> dict[str, Any]:
        records = self.of.process.records
        return {} if records is None else {"records": records.state()}

    def _merged(self, wholes: list[dict[str, Any]]) -> dict[str, Any]:
        return {"records": [whole["records"] for whole in wholes if "records" in whole]}

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        own = self.of.process.records
        while own is not None and (wanting := own.wanting()):
            self.of.serve_mail()
            own.put(self.of.process.world.random.choice(wanting))
        for key in self.of.keys:
            while self.passed[key] < self.of.target:
                number = self.passed[key]
                self._pass(key, number)
                yield [key, number]


class Doubling(Stage):
    """The transform: two outputs for each record, so it cannot be cut between them, nor where it sends."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for key, number in records:
            self._tell(key, number)
            yield [key, number, 0]
            self.passed[key] += 1
            yield [key, number, 1]


class Keeping(Stage):
    """The sink: counts the second outputs of the transform."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for key, number, which in records:
            demand(number == self.passed[key], f"H80: the sink gets record {number} of key {key}: {self.passed}")
            if which:
                self._pass(key, number)
            yield number


class TaskStages:
    """The stages of a simulated task, in the real chain. The world lets it produce one output at a time."""

    worked: bool
    kinds: Sequence[type[Stage]] = (Reading, Doubling, Keeping)

    def __init__(self, process: Process) -> None:
        self.process = process
        self.keys = process.application.keys_of(process.task.partition)
        self.target = stage_target(process.work.target)
        self.asks = process.application.settings.requests > 0
        self.stages: list[Stage] = []
        self.outbox: deque[tuple[str, Any, bool]] = deque()  # until these are sent, the task waits: of whom, a request
        self.asked: dict[int, Stage] = {}
        kinds = dict(zip(STAGES, self.kinds, strict=True))
        self.chain = OperatorParts(
            None, {name: partial(self._made, kind, name) for name, kind in kinds.items()}, STAGES
        )
        self._outputs: Iterator[Any] | None = None
        self.worked = False

    def _made(self, kind: type[Stage], name: str) -> Stage:
        self.stages.append(kind(self, name))
        return self.stages[-1]

    @property
    def done(self) -> bool:
        return self.worked and all(
            len(log.received) >= self.target for stage in self.stages for log in stage.logs.values()
        )

    def open(self, states: list[dict[str, bytes]]) -> None:
        tid, application = self.process.tid, self.process.application
        joined = tuple(m.SubtaskState(index, join_states(b"", state, STAGES)) for index, state in enumerate(states))
        begins_again = self.process.records is None or self.process.input_begins_again
        registered = m.Registered(tid, 0, -1, joined, (), 0.0, 1, 1, (), input_begins_again=begins_again)
        mode = application.settings.mode
        endpoint = TaskEndpoint("host", 1, UNUSED_KEY, OPERATOR, application.parallelism, mode)
        identity = TaskIdentity(tid, self.process.task.partition, 0, 0)
        self.chain.open(cast("SubtaskChannel", self.channel()), endpoint, identity, registered)

    def channel(self) -> TaskChannel:
        return TaskChannel(self)

    def handle(self, name: str, event: Any) -> None:
        self.chain._handle(s.MailboxEvent(encode_event(event), self.process.index_of(name)))

    def hear_answer(self, request_id: int, error: str, payload: bytes) -> None:
        stage = self.asked.pop(request_id)
        if not error:
            stage.hear_answer(unpack(payload))

    def hear_end(self, checkpoint_id: int, *, completed: bool) -> None:
        self.chain._handle(s.MailboxCompleted(checkpoint_id) if completed else s.MailboxAborted(checkpoint_id))
        heard = [stage.heard for stage in self.stages]
        demand(all(one == heard[0] for one in heard), f"H80: the stages of task {self.process.tid} hear {heard}")

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, part: int, event: Any, *, asks: bool) -> None:
        """Send an event or a request of a stage, which handles what has come while it waits for capacity."""
        self.serve_mail()
        self.outbox.append((self.process.table.names[part], event, asks))
        self.flush()

    @property
    def blocked(self) -> bool:
        """Whether a stage waits for capacity."""
        return bool(self.outbox)

    def flush(self) -> None:
        """Send what waits for capacity, as far as there is any."""
        while self.outbox:
            name, event, asks = self.outbox[0]
            try:
                if asks:
                    self.asked[self.process.ask_of_part(name, event)] = self.stages[STAGES.index(name)]
                else:
                    self.process.send_of_part(name, event)
            except GatewayFull:
                self.process.waits_for_capacity = True
                return
            self.outbox.popleft()

    # --- what the stages do ---------------------------------------------------------------------------------------

    def background_actions(self) -> list[Callable[[], None]]:
        """What may happen in the task whatever its thread does."""
        return []

    def next_deadline(self) -> float | None:
        """When something may happen there next."""
        return None

    def actions(self) -> list[Callable[[], None]]:
        return [] if self.worked else [self.pull]

    def pull(self) -> None:
        """Let the last stage produce its next output; the others run as far as that needs."""
        if self._outputs is None:
            self._outputs = self.chain.outputs(iter(()))
        try:
            next(self._outputs)
        except StopIteration:
            self.worked = True
        except Gone:
            self.worked = True  # the task is over
        self.process.world.figures.happen("an output of a chain")

    def may_handle(self, item: s.MailboxItem) -> bool:
        """Whether the task may take this out of its mailbox now: a snapshot needs a moment between records."""
        return not isinstance(item, s.MailboxBarrier) or self.chain.snapshot_anywhere

    def serve_mail(self) -> None:
        """Between two outputs, or in the middle of one: handle what has come, perhaps."""
        process = self.process
        while process.may_handle_mail() and not self.blocked and process.world.random.random() < 0.7:
            process.handle_mail()
            if process.life.value == "gone":
                raise Gone

    def snapshot_state(self, checkpoint_id: int) -> dict[str, bytes]:
        states = split_states(self.chain.snapshot_state(checkpoint_id).data, STAGES)[1]
        self.check_cut(f"checkpoint {checkpoint_id} cuts the stages of task {self.process.tid}")
        return states

    def check_cut(self, which: str) -> None:
        """Check that a snapshot which was just taken has each record in all stages, or in none."""
        passed = [stage.passed for stage in self.stages]
        demand(all(one == passed[0] for one in passed), f"H80: {which} at {passed}")

    def final_state(self) -> dict[str, bytes]:
        return split_states(self.chain.final_state().data, STAGES)[1]

    def close(self) -> None:
        self.chain.close()

    def check_whole(self) -> None:
        """Check that a successful task has passed every record through every stage."""
        for stage in self.stages:
            for key, log in stage.logs.items():
                name = f"task {self.process.tid}, key {key}"
                check_whole_stage(name, stage.name, log.sent, log.received, self.process.work.target)


class TaskChannel:
    """As much of a ``SubtaskChannel`` as the stages of a simulated task need. What arrives does not come through it."""

    mailbox: Any = ()
    over = failure = None
    on_urgent_thread = False

    def __init__(self, of: TaskStages) -> None:
        self._of = of
        self.table = of.process.table
        self.poll = of.serve_mail
        self.at_barrier: Callable[[], None]

    def operator_opened(self, **_: Any) -> None:
        """The process says it itself."""

    def checkpoint_ended(self, checkpoint_id: int, *, completed: bool) -> None:
        """The stages have no state in files."""

    def submit_event(self, payload: bytes, part: int) -> None:
        self._of.send(part, decode_event(payload), asks=False)

    def ask(self, payload: bytes, timeout_s: float, part: int) -> bytes:
        """The answer reaches the stage later: in this world, no stage waits for it."""
        self._of.send(part, decode_event(payload), asks=True)
        return encode_event(None)
