# SPDX-License-Identifier: Apache-2.0

"""The paths that every event, message, task and checkpoint takes, for ``benchmarks.instructions`` to count.

Each function prepares a given number of steps and returns the function for one step, which is called with its number.
The inputs of a step (messages, inputs of machines) are made in advance, so that it costs only what the path costs.
"""

from __future__ import annotations

import itertools
import struct
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from actors import Actor, ActorContext, ActorSystem, MailboxConfig, Reply
from benchmarks.codec import SPLIT
from protocol.attempts import (
    AttemptAccepted,
    LedgerConfig,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    RegistrationArrived,
    SubtaskReady,
)
from protocol.attempts.ledger import AttemptLedger
from protocol.barrier_tracker import (
    CheckpointConfig,
    CheckpointStored,
    CheckpointTriggered,
    CoordinatorSnapshotTaken,
    SubtaskAcknowledged,
    SubtaskClosed,
    TrackerInput,
)
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.facts import JobStarted, StageSubmitted, TaskEnded, TaskOutcome, TaskStarted
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.parts import PartTable
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire.codec import FrameDecoder, decode_event, decode_message, encode_event, encode_message
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, Key
from protocol.wire.messages import (
    CheckpointAcknowledged,
    Confirm,
    EventMessage,
    HeldEvent,
    Message,
    Opened,
    OperatorPart,
    Register,
    Registered,
    RestoreMode,
)
from spark_bridge.bridge.relay.records import decode_record
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.subtask import SubtaskContext, SubtaskOperator, TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.parts import COUNTERS, OperatorParts, TaskPart

Step = Callable[[int], object]
AsyncStep = Callable[[int], Awaitable[object]]

OPERATOR, JOB, STAGE, TASK = "bench", 1, 1, 7
NOW = 0.0
"""The machines' clock, which stands still."""
EVENT = ["split", 12345, 1.5, b"." * 80]
PAYLOAD = encode_event(EVENT)
_SNAPSHOT = CheckpointAcknowledged(TASK, 1, 1, b"", tuple(HeldEvent(0, PAYLOAD) for _ in range(1000)), ())
CHECKPOINT_SUBTASKS = 16
TELLS_IN_A_ROW = 100


# --- codec ------------------------------------------------------------------------------------------------


def event_value_encoded(steps: int) -> Step:
    """A user's flat list of four."""
    return lambda number: encode_event(EVENT)


def event_value_decoded(steps: int) -> Step:
    return lambda number: decode_event(PAYLOAD)


def event_class_encoded(steps: int) -> Step:
    return lambda number: encode_event(SPLIT)


def event_class_decoded(steps: int) -> Step:
    payload = encode_event(SPLIT)
    return lambda number: decode_event(payload)


def event_frame_encoded(steps: int) -> Step:
    return _encoding(EventMessage(TASK, 1, PAYLOAD))


def event_frame_decoded(steps: int) -> Step:
    """One frame that comes alone: cut from the stream of bytes, then decoded."""
    return _decoding(EventMessage(TASK, 1, PAYLOAD))


def confirm_frame_encoded(steps: int) -> Step:
    return _encoding(Confirm(TASK, 1))


def confirm_frame_decoded(steps: int) -> Step:
    return _decoding(Confirm(TASK, 1))


def held_events_encoded(steps: int) -> Step:
    """A snapshot that holds a thousand events, as a task sends it."""
    return _encoding(_SNAPSHOT)


def held_events_decoded(steps: int) -> Step:
    return _decoding(_SNAPSHOT)


def relay_record_decoded(steps: int) -> Step:
    """The end of a failed task, as the relay in Spark's JVM writes it."""
    reason = b"ValueError: it failed"
    record = struct.pack(">BqqiiiiBH", 6, 1_700_000_000_000_000, TASK, STAGE, 0, 3, 0, 1, len(reason)) + reason
    return lambda number: decode_record(record)


def _encoding(message: Message) -> Step:
    return lambda number: encode_message(message)


def _decoding(message: Message) -> Step:
    data, decoder = encode_message(message), FrameDecoder()

    return lambda number: decode_message(decoder.whole(data))


# --- the machines of one attempt --------------------------------------------------------------------------


def _ready_gateway() -> GatewayMachine:
    gateway = GatewayMachine(ExecutionAttempt(OPERATOR, 0, 0, TASK), g.GatewayLimits())
    gateway.handle(g.ConnectionAttached(0), NOW)
    gateway.handle_batch([Opened(TASK, 1)], NOW)
    gateway.handle(g.ReadyAnnounced(), NOW)
    return gateway


def gateway_event_down(steps: int) -> Step:
    """The coordinator sends an event, and the subtask confirms it."""
    gateway = _ready_gateway()
    events = [g.EventSubmitted(number, PAYLOAD) for number in range(steps)]
    confirms = [[Confirm(TASK, number + 1)] for number in range(steps)]

    def step(number: int) -> None:
        gateway.handle(events[number], NOW)
        gateway.handle_batch(confirms[number], NOW)

    return step


def gateway_event_up(steps: int) -> Step:
    """An event of the subtask comes, and the coordinator receives it."""
    gateway = _ready_gateway()
    events = [[EventMessage(TASK, number + 2, PAYLOAD)] for number in range(steps)]
    taken = [g.ItemTaken(number + 2) for number in range(steps)]

    def step(number: int) -> None:
        gateway.handle_batch(events[number], NOW)
        gateway.handle(taken[number], NOW)

    return step


def _open_subtask() -> SubtaskMachine:
    subtask = SubtaskMachine(TASK, 0, s.SubtaskLimits(1024, 2**26, 10.0))
    subtask.handle(s.ConnectionAttached(0), NOW)
    subtask.handle(s.OperatorOpened(), NOW)
    subtask.handle_batch([Confirm(TASK, 1)], NOW)
    return subtask


def subtask_event_down(steps: int) -> Step:
    """An event of the coordinator goes into the mailbox and is confirmed."""
    subtask = _open_subtask()
    events = [[EventMessage(TASK, number + 1, PAYLOAD)] for number in range(steps)]
    return lambda number: subtask.handle_batch(events[number], NOW)


def subtask_event_up(steps: int) -> Step:
    """The operator sends an event, and the coordinator confirms it."""
    subtask = _open_subtask()
    events = [s.EventSubmitted(PAYLOAD) for _ in range(steps)]
    confirms = [[Confirm(TASK, number + 2)] for number in range(steps)]

    def step(number: int) -> None:
        subtask.handle(events[number], NOW)
        subtask.handle_batch(confirms[number], NOW)

    return step


# --- the parts of a task -----------------------------------------------------------------------------------


class _Passing(SubtaskOperator):
    """Yields each record."""

    waits_for_subtask_ready = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[int]) -> Iterator[int]:
        yield from records


class _Channel:
    """The ends of a task that has no connection: everything that is sent has left, and ``item`` arrives."""

    over = failure = None
    on_urgent_thread = False

    def __init__(self, parts: Iterable[str]) -> None:
        self.table = PartTable([OperatorPart(name) for name in ("", *parts)])
        self.mailbox: list[s.MailboxItem] = []
        self.item = s.MailboxEvent(PAYLOAD)

    def poll(self) -> None: ...

    def operator_opened(self, **_: object) -> None: ...

    def submit_event(self, payload: bytes, part: int) -> None: ...

    def wait_for_item(self, timeout_s: float | None) -> bool:
        self.mailbox.append(self.item)
        return True

    def take(self, *, events_only: bool) -> s.MailboxItem | None:
        return self.mailbox.pop() if self.mailbox else None


def _open_parts(*parts: str) -> tuple[OperatorParts, _Passing]:
    own, channel = _Passing(), _Channel((COUNTERS, *parts))
    operators = OperatorParts(lambda: own, {COUNTERS: CountersPart, **dict.fromkeys(parts, TaskPart)})
    endpoint = TaskEndpoint("host", 1, Key(NO_IDENTITY, bytes(KEY_BYTES)), OPERATOR, 1)
    registered = Registered(TASK, 0, -1, (), (), 0.0, 1, 1, ())
    operators.open(cast("SubtaskChannel", channel), endpoint, TaskIdentity(TASK, 0, STAGE, 0), registered)
    return operators, own


def task_output(steps: int) -> Step:
    """A record goes through an operator, and its output to Spark."""
    return _passing(_open_parts()[0])


def task_output_with_a_part(steps: int) -> Step:
    """The same, while user code can find a ready-made part."""
    return _passing(_open_parts("part")[0])


def _passing(parts: OperatorParts) -> Step:
    outputs = parts.outputs(itertools.count())

    def step(number: int) -> None:
        next(outputs)
        parts.between_outputs()

    return step


def task_event(steps: int) -> Step:
    """An operator waits for an event, and handles it."""
    _, own = _open_parts()
    return lambda number: own.context.wait_for_event()


def task_event_sent(steps: int) -> Step:
    """An operator sends an event, as far as to its channel."""
    _, own = _open_parts()
    return lambda number: own.context.send_event(EVENT)


# --- the machines of an operator and of an application ----------------------------------------------------


def checkpoint_of_16(steps: int) -> Step:
    """A checkpoint of 16 subtasks, from its trigger until it is complete."""
    tracker = BarrierTracker(OPERATOR, CHECKPOINT_SUBTASKS, CheckpointConfig())
    attempts = [ExecutionAttempt(OPERATOR, subtask, 0, TASK + subtask) for subtask in range(CHECKPOINT_SUBTASKS)]
    for attempt in attempts:
        tracker.handle(AttemptAccepted(attempt, RestoreMode.STREAMING, 1, attempt.task_attempt_id), NOW)
        tracker.handle(SubtaskReady(attempt), NOW)
    checkpoints = [_checkpoint(number + 1, attempts) for number in range(steps)]

    def step(number: int) -> None:
        for input in checkpoints[number]:
            tracker.handle(input, NOW)

    return step


def _checkpoint(checkpoint_id: int, attempts: list[ExecutionAttempt]) -> list[TrackerInput]:
    inputs: list[TrackerInput] = [CheckpointTriggered(checkpoint_id)]
    inputs += [SubtaskClosed(attempt, checkpoint_id) for attempt in attempts]
    inputs.append(CoordinatorSnapshotTaken(checkpoint_id, b"state"))
    inputs += [SubtaskAcknowledged(attempt, checkpoint_id, b"state") for attempt in attempts]
    inputs.append(CheckpointStored(checkpoint_id))
    return inputs


def task_start_to_end(steps: int) -> Step:
    """One task of a stage: it starts, registers, opens, sends its completion message and succeeds."""
    ledger = AttemptLedger(LedgerConfig())
    ledger.handle(OperatorAdded(OPERATOR, steps), NOW)
    ledger.handle(JobStarted(JOB, (STAGE,)), NOW)
    ledger.handle(StageSubmitted(STAGE, 0, steps), NOW)
    tasks = [_task(subtask, steps) for subtask in range(steps)]

    def step(number: int) -> None:
        for input in tasks[number]:
            ledger.handle(input, NOW)

    return step


def _task(subtask: int, parallelism: int) -> list[LedgerInput]:
    task = TASK + subtask
    registration = Register(task, OPERATOR, subtask, STAGE, 0, RestoreMode.BATCH, parallelism, "host/1", "3.11")
    return [
        TaskStarted(task, STAGE, 0, subtask, 0),
        RegistrationArrived(task, registration),
        OperatorOpened(OPERATOR, task),
        OperatorEnded(OPERATOR, task, ""),
        TaskEnded(task, STAGE, 0, subtask, 0, TaskOutcome.SUCCESS),
    ]


# --- actors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    reply_to: Reply[int]


class Sink(Actor["int | Ask"]):
    async def receive(self, context: ActorContext[int | Ask], message: int | Ask) -> None:
        if isinstance(message, Ask):
            message.reply_to.answer(0)


@types.coroutine
def turn_of_the_loop() -> Generator[None, None, None]:
    yield


def one_tell(system: ActorSystem) -> AsyncStep:
    """A message to an idle actor, and the turn of the loop in which it is handled."""
    sink = system.spawn(Sink, name="sink")

    async def step(number: int) -> None:
        sink.tell(number)
        await turn_of_the_loop()

    return step


def hundred_tells(system: ActorSystem) -> AsyncStep:
    """A hundred messages to an idle actor, and the turn of the loop in which they are handled."""
    sink = system.spawn(Sink, name="sink", mailbox=MailboxConfig(capacity=None))

    async def step(number: int) -> None:
        for message in range(TELLS_IN_A_ROW):
            sink.tell(message)
        await turn_of_the_loop()

    return step


def one_ask(system: ActorSystem) -> AsyncStep:
    """A question with a deadline, and its answer."""
    sink = system.spawn(Sink, name="sink")
    return lambda number: sink.ask(Ask, timeout_s=60)


PATHS: dict[str, Callable[[int], Step]] = {
    path.__name__: path
    for path in (
        event_value_encoded,
        event_value_decoded,
        event_class_encoded,
        event_class_decoded,
        event_frame_encoded,
        event_frame_decoded,
        confirm_frame_encoded,
        confirm_frame_decoded,
        held_events_encoded,
        held_events_decoded,
        relay_record_decoded,
        gateway_event_down,
        gateway_event_up,
        subtask_event_down,
        subtask_event_up,
        task_output,
        task_output_with_a_part,
        task_event,
        task_event_sent,
        checkpoint_of_16,
        task_start_to_end,
    )
}
ASYNC_PATHS: dict[str, Callable[[ActorSystem], AsyncStep]] = {
    path.__name__: path for path in (one_tell, hundred_tells, one_ask)
}
