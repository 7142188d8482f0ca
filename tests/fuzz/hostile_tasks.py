# SPDX-License-Identifier: Apache-2.0

"""Attempts that Spark has started and the ledger has accepted, and that then send arbitrary messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from protocol.wire.codec import encode_event
from protocol.wire.messages import (
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    Confirm,
    EventMessage,
    Finished,
    HeldEvent,
    Message,
    Opened,
    Register,
    Registered,
    RequestCancelled,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    RestoreMode,
    Resume,
    StateFailed,
    StateStored,
)
from tests.fuzz import samples
from tests.fuzz.attackers import AT_MOST_ONE_LINE, Intruder
from tests.fuzz.line import Line

FLOOD = encode_event("flood")
LARGE = encode_event(bytes(300_000))  # travels in two parts


@dataclass(frozen=True, slots=True)
class Slot:
    """A task of the operator ``victim`` that Spark has just started."""

    task_attempt_id: int
    subtask: int
    attempt_number: int
    parallelism: int
    run_id: int


class _Speech:
    """Valid messages in an invalid order."""

    def __init__(self, random: Random, slot: Slot) -> None:
        self._random = random
        self._slot = slot
        self.seq = 0

    def next(self) -> Message:
        """Return a message, usually of this attempt and with the next number; otherwise it would soon be over."""
        random = self._random
        task = self._slot.task_attempt_id if random.random() < 0.95 else samples.natural(random)
        if random.random() < 0.96:
            self.seq += 1
            seq = self.seq
        else:
            seq = random.choice((max(1, self.seq), self.seq + 2, samples.natural(random, 1)))
        checkpoint_id = random.randrange(1, 30)
        payload = random.choice((FLOOD, b"\xc0", b"", b"\xc1", samples.blob(random, 2000)))
        choices: tuple[Callable[[], Message], ...] = (
            lambda: EventMessage(task, seq, LARGE if random.random() < 0.1 else payload),
            lambda: EventMessage(task, seq, encode_event(samples.event(random)), random.choice((0, 1, 5, 127))),
            lambda: RequestMessage(task, seq, random.randrange(50), payload, random.choice((0, 0, 0, 9))),
            lambda: RequestCancelled(task, seq, random.randrange(50)),
            lambda: RestoredEventMessage(task, seq, random.randrange(20), payload),
            lambda: RestoredRequestMessage(task, seq, random.randrange(20), payload),
            lambda: Opened(task, seq),
            lambda: ClosedForCheckpoint(task, seq, checkpoint_id),
            lambda: CheckpointDeclined(task, seq, checkpoint_id, samples.text(random, 200)),
            lambda: CheckpointAcknowledged(
                task, seq, checkpoint_id, bytes(random.choice((0, 100_000))), self._held(), samples.positions(random)
            ),
            lambda: CheckpointAcknowledged(task, seq, checkpoint_id, b"", (), (), 0, True),
            lambda: StateStored(task, seq, checkpoint_id, samples.handle(random)),
            lambda: StateFailed(task, seq, checkpoint_id, samples.text(random, 200)),
            lambda: Finished(
                task, seq, samples.text(random, 50), b"", samples.positions(random), samples.files(random)
            ),
            lambda: Confirm(task, random.choice((0, 1, 2, 5, samples.natural(random)))),
            lambda: Resume(task, "victim", 0, random.randbytes(32)),
            lambda: replace(samples.message(random), task_attempt_id=task),  # of either direction
        )
        weights = (20, 10, 10, 5, 3, 3, 8, 8, 4, 6, 3, 4, 2, 1, 6, 1, 1)
        return random.choices(choices, weights)[0]()

    def _held(self) -> tuple[HeldEvent, ...]:
        count = self._random.choice((0, 1, 5000))
        return tuple(HeldEvent(sender % 9, b"\xc0", sender % 2 == 1) for sender in range(count))


async def registered(
    intruder: Intruder, slot: Slot, operator: str = "victim", mode: RestoreMode = RestoreMode.BATCH
) -> Line | None:
    """Return a connection on which the driver has accepted the task; None if it did not."""
    line = await intruder.authenticated(AT_MOST_ONE_LINE, operator)
    register = Register(
        slot.task_attempt_id, operator, slot.subtask, slot.run_id, slot.attempt_number, mode, slot.parallelism,
        "hostile", "3.11",
    )  # fmt: skip
    await line.say(register)
    answers = await line.messages()
    if answers and isinstance(answers[0], Registered):
        return line
    await line.close()
    return None


async def talk_at_random(intruder: Intruder, slot: Slot) -> None:
    line = await registered(intruder, slot)
    if line is None:
        return
    speech = _Speech(intruder.random, slot)
    if intruder.random.random() < 0.7:
        await line.say(Opened(slot.task_attempt_id, 1))
        speech.seq = 1
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(line.until_closed())
        for _ in range(intruder.random.choice((3, 30, 200))):
            if listening.done():
                break
            await line.say(*(speech.next() for _ in range(intruder.random.choice((1, 1, 20)))))
            await asyncio.sleep(0)
        if intruder.random.random() < 0.5:
            line.reset()
        else:
            line.half_close()
    await line.close()


async def never_read(intruder: Intruder, slot: Slot) -> None:
    """Ask for more than the task will ever read; the waiting data is bounded, and the task is dropped at the bound."""
    line = await registered(intruder, slot)
    if line is None:
        return
    task = slot.task_attempt_id
    line.stop_reading()
    await line.say(Opened(task, 1), *(EventMessage(task, seq, FLOOD) for seq in range(2, 40)))
    for seq in range(40, 60):
        await line.say(EventMessage(task, seq, FLOOD))
        await asyncio.sleep(0.01)
    line.reset()


async def never_open(intruder: Intruder, slot: Slot) -> None:
    """Never become ready, and send everything that a driver might keep until then."""
    line = await registered(intruder, slot)
    if line is None:
        return
    task = slot.task_attempt_id
    await line.say(EventMessage(task, 1, b"\xc0"))
    for seq in range(2, 60):
        await line.say(CheckpointAcknowledged(task, seq, intruder.random.randrange(1, 30), bytes(500_000), (), ()))
    line.half_close()
    await line.until_closed()
    await line.close()


async def send_what_nobody_can_read(intruder: Intruder, slot: Slot) -> None:
    """Send an event that is cut off, for which the driver must have the task killed."""
    line = await registered(intruder, slot)
    if line is None:
        return
    await line.say(Opened(slot.task_attempt_id, 1), EventMessage(slot.task_attempt_id, 2, LARGE[:-1]))
    await line.until_closed()
    await line.close()


HostileTask = Callable[[Intruder, Slot], Awaitable[None]]
HOSTILE_TASKS: tuple[HostileTask, ...] = (
    talk_at_random,
    talk_at_random,
    never_read,
    never_open,
    send_what_nobody_can_read,
)
