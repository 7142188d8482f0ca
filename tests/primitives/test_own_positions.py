# SPDX-License-Identifier: Apache-2.0

"""What a part counts is its own: positions, windows and figures depend on no other part and on no speed (H150)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from headgate import (
    CheckpointConfig,
    CoordinatorContext,
    GatewayLimits,
    OperatorCoordinator,
    Permits,
    SharedValue,
    SubtaskContext,
    SubtaskGateway,
    SubtaskOperator,
    chain,
)
from headgate.testing import running_operator
from headgate.testing._bookkeeping import with_held
from protocol.errors import GatewayFull

pytestmark = pytest.mark.anyio


class Caller(OperatorCoordinator):
    """Calls a service once for each event: it keeps the highest position outside of every reset."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.highest: dict[int, int] = {}

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        position = self.context.events_taken(subtask)
        if position > self.highest.get(subtask, 0):
            self.highest[subtask] = position
            self.calls.append(event)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass


class Sender(SubtaskOperator):
    """Sends each record, at any speed, while parts of its task say what they like."""

    def __init__(self, random: Random, permits: Permits, shared: SharedValue[int]) -> None:
        self.random = random
        self.permits = permits
        self.shared = shared

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.done = int(state or 0)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return str(self.done).encode()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for place, record in enumerate(records):
            if place < self.done:
                continue
            for _ in range(self.random.randrange(3)):
                self.context.count("rows")
                self.shared.get()
            if self.random.random() < 0.5:
                with self.permits:
                    self.context.sleep(self.random.choice((0.0, 0.6)))
            self.context.send_event(record)
            self.done += 1
            yield record
        yield from iter(self.context.wait_for_event, "never")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("staged", [False, True], ids=["alone", "as a stage"])
async def test_a_call_for_each_position_is_made_once_whatever_other_parts_send(staged: bool, seed: int) -> None:
    random = Random(seed)
    permits, shared, caller = Permits("service", per_s=200.0, burst=50), SharedValue("shared", 0), Caller()

    def make() -> Sender:
        return Sender(random, permits, shared)

    def loud(records: Iterator[Any]) -> Iterator[Any]:
        yield from records

    given: Any = chain(loud=loud, sender=(caller, make), after=loud) if staged else caller
    async with running_operator(
        given,
        parallelism=1,
        mode="streaming",
        uses=[permits, shared],
        checkpoint=CheckpointConfig(hold_events=seed % 2 == 0, tolerated_failures=100),
    ) as world:
        task = await world.launch_operator(0, None if staged else make, ["a", "b", "c", "d"][: random.randrange(1, 5)])
        await world.advance(random.choice((0.3, 3.0)))
        if random.random() < 0.5:
            world.begin_checkpoint()
            await world.advance(random.choice((0.0, 1.0)))
        await world.kill(task)
        await world.retry(task, ["a", "b", "c", "d"])
        await world.advance(20.0)
        statistics = world.statistics
        assert caller.calls[-1] == "d"
        assert len(caller.calls) == len(set(caller.calls)), caller.calls
        assert statistics.events_received == sum(
            part.events_received for part, users in zip(statistics.parts, statistics.table.users, strict=True) if users
        )


class Idle(SubtaskOperator):
    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records


class Filler(OperatorCoordinator):
    """Sends to a task that confirms nothing, until its own bound is reached."""

    async def start(self, context: CoordinatorContext) -> None:
        self.sent: list[int] = []

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        while True:
            try:
                gateway.send_event_nowait("event")
            except GatewayFull:
                self.sent.append(gateway.events_pending)
                return


async def test_the_bound_of_one_part_is_not_used_up_by_another() -> None:
    first, second = Filler(), Filler()
    stages = chain(first=(first, Idle), second=(second, Idle))
    async with running_operator(
        stages, parallelism=1, uses=[SharedValue("value", 1)], gateway=GatewayLimits(events_max=5)
    ) as world:
        await world.launch_operator(0, None, [])
        assert (first.sent, second.sent) == ([5], [5])
        assert world.statistics.snapshot()["parts"]["second"]["events_sent"] == 5
        assert world.statistics.events_sent == 10


async def test_the_window_of_the_user_is_not_used_up_by_ready_made_parts() -> None:
    """With a window of one event, a task that counts and waits for permits still sends what it has to."""
    permits = Permits("service", concurrency=1)

    class Listening(OperatorCoordinator):
        came: list[Any]

        async def start(self, context: CoordinatorContext) -> None:
            self.came = []

        async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
            self.came.append(event)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            context.count("rows")
            with permits:
                context.send_event(record)
            yield record

    listening = Listening()
    async with running_operator(
        listening, parallelism=2, uses=[permits], gateway=GatewayLimits(upward_events_max=1)
    ) as world:
        tasks = [await world.launch_operator(subtask, work, range(5)) for subtask in range(2)]
        await world.advance(60.0)
        assert [task.outcome for task in tasks] == ["success"] * 2
        assert sorted(listening.came) == sorted([*range(5), *range(5)])


@pytest.mark.parametrize("held", [[], [["applied", 1]], [["want", 1, False], ["applied", 1]]], ids=len)
async def test_a_part_without_a_state_can_be_dropped_and_added_whatever_the_checkpoint_holds(held: list[Any]) -> None:
    """H154"""
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}
    shared = SharedValue("shared", 0)
    async with running_operator(uses=[shared], **kept) as world:
        await world.launch_operator(0, Idle)
        await world.checkpoint()
        restored = with_held(world.checkpoints[-1], 0, held, part="shared")
    for uses in ([], [shared], []):
        async with running_operator(uses=uses, restored=restored, **kept) as world:
            task = await world.launch_operator(0, Idle, [])
            await world.advance(1.0)
            assert task.outcome == "success", task.error
            restored = world.checkpoints[-1]
