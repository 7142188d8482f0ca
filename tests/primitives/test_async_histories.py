# SPDX-License-Identifier: Apache-2.0

"""Random histories of a chain with an async stage: drivers and tasks die, and every record has one result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from actors.coordination import OperatorCoordinator
from headgate import CheckpointConfig, SubtaskContext, SubtaskOperator, chain
from headgate.testing import World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.parts import split_states
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.state import decode_entry, decode_state
from spark_bridge.subtask.coroutines.calls import Failed
from spark_bridge.subtask.coroutines.concurrently import concurrently
from spark_bridge.subtask.coroutines.retry import Retry
from tests.primitives.stage_histories import INCARNATIONS, ROWS, SPLITS, disturb, hybrid_source, simple_source
from tests.simulation.checkers import demand

pytestmark = pytest.mark.anyio

KNOWN = {"source", "plain", "enrich", "sink", "headgate.counters"}
NUMBERS = range(SPLITS * ROWS)


class Service:
    """What each record pays for. It knows what a checkpoint holds, and refuses to be paid again for that."""

    def __init__(self, chance: random.Random, limit: int) -> None:
        self.chance = chance
        self.limit = limit
        self.done: dict[int, set[int]] = {-1: set()}  # by checkpoint: the numbers with a result
        self.open: dict[int, int] = {}  # by task
        self.world: World

    def learn(self, checkpoint: CompletedCheckpoint) -> None:
        if checkpoint.checkpoint_id in self.done:
            return
        done = self.done[checkpoint.checkpoint_id] = set()
        for parts in states_of(checkpoint):
            done.update(number for number, _ in (decode_event(parts["sink"]) if parts["sink"] else []))
            for encoded, result in decode_state("an async stage", parts["enrich"])["flights"]:
                if result is not None:
                    done.add(number_of(result[1]) if not encoded else decode_entry(encoded))

    async def call(self, context: Any, number: int) -> list[Any]:
        for checkpoint in self.world.checkpoints:
            self.learn(checkpoint)
        restored = context._context.checkpoint_id
        demand(number not in self.done[restored], f"H180: {number} is in checkpoint {restored}, and is computed again")
        task = context._context.task_attempt_id
        self.open[task] = self.open.get(task, 0) + 1
        demand(self.open[task] <= self.limit, f"H181: {self.open[task]} are in flight")
        try:
            context.send_event(number)
            context.count("results")
            for _ in range(self.chance.randrange(4)):
                await asyncio.sleep(self.chance.choice([0.0, 0.05, 0.5]))
            if number % 13 == 5:
                raise ValueError("never")
            if number % 7 == 3 and context.tries == 1:
                raise ConnectionError("not now")
        finally:
            self.open[task] -= 1
        return [number, "enriched"]


def number_of(value: Any) -> int:
    number: int = value.record if isinstance(value, Failed) else value[0]
    return number


class Events(OperatorCoordinator):
    """Knows each event, also one that comes twice."""

    def __init__(self) -> None:
        self.came: list[int] = []

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came.append(event)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.came = [] if state is None else decode_event(state)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return encode_event(self.came)


class Sink(SubtaskOperator):
    """Its state is what has reached it, and how many snapshots came while it had a record."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.rows: list[Any] = decode_event(state) if state else []

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return encode_event([row for state in states.values() for row in decode_event(state)])

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.rows.append([record.record, record.error] if isinstance(record, Failed) else record)
            if self.rows[-1][0] % 3 == 0:
                self.context.wait_for_event(timeout_s=0.02)
            yield from ()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(self.rows)


def states_of(checkpoint: CompletedCheckpoint) -> Iterator[dict[str, bytes]]:
    for snapshot in checkpoint.subtask_states.values():
        for _, state, *_ in snapshot.states:
            yield split_states(state, KNOWN)[1]


async def history(seed: int) -> None:
    chance = random.Random(seed)
    make_source = chance.choice([simple_source, hybrid_source])
    ordered, limit, plain = chance.random() < 0.5, chance.randint(1, 6), chance.random() < 0.5
    service = Service(chance, limit)
    enrich = concurrently(
        service.call, limit=limit, ordered=ordered, retry=Retry(2, pause_s=0.1), on_error="yield", timeout_s=60.0
    )
    restored: CompletedCheckpoint | None = None
    events, counters = Events(), {}
    for incarnation in range(INCARNATIONS):
        events = Events()
        stages: dict[str, Any] = {"source": make_source(), "enrich": (events, enrich), "sink": Sink}
        if plain:
            stages = {"source": stages.pop("source"), "plain": passed_on, **stages}
        last = incarnation == INCARNATIONS - 1
        async with running_operator(
            chain(**stages),
            parallelism=chance.choice([1, 2, 3]),
            mode="streaming",
            checkpoint=CheckpointConfig(tolerated_failures=1000),
            restored=restored,
            attempts_max=1000,
            seed=seed,
        ) as world:
            service.world = world
            over = await disturb(world, chance, calm=last)
            await world.advance(1.0)
            counters = world.counters()
            demand(not world.failures, f"the job fails: {world.failures}")
            restored = world.checkpoints[-1] if world.checkpoints else restored
            if restored is not None:
                service.learn(restored)
        if over:
            break
    assert restored is not None, "there is no final checkpoint"
    rows = [row for parts in states_of(restored) for row in (decode_event(parts["sink"]) if parts["sink"] else [])]
    failed = {number for number, what in rows if what == "ValueError: never"}
    demand(sorted(number for number, _ in rows) == list(NUMBERS), f"H180: {sorted(rows)}")
    demand(failed == {number for number in NUMBERS if number % 13 == 5}, f"H180: {failed} have failed")
    well = set(NUMBERS) - failed
    demand(set(events.came) == well, f"H180: the events are {sorted(events.came)}")  # some again, after a reset
    demand(counters == {"results": len(well), "failed": len(failed)}, f"H180: {counters}")


def passed_on(records: Iterator[Any]) -> Iterator[Any]:
    yield from records


@pytest.mark.parametrize("seed", range(12))
async def test_each_record_has_one_result_when_drivers_and_tasks_die(seed: int) -> None:  # H180, H181
    print(f"seed {seed}")
    await history(seed)
