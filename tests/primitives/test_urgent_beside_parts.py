# SPDX-License-Identifier: Apache-2.0

"""Urgent events of an operator that does not define ``handle_urgent``, beside each ready-made part (H90)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate import Group, Permits, SharedValue, SubtaskContext, SubtaskOperator, WorkQueue, chain
from headgate.testing import RecordingCoordinator, running_operator
from spark_bridge.primitives.primitive import Primitive

pytestmark = pytest.mark.anyio

PARTS: list[Callable[[], Primitive]] = [
    lambda: SharedValue("part", 1),
    lambda: Permits("part", concurrency=1),
    lambda: Permits("part", per_s=1000.0, burst=100),
    lambda: Group("part", 1),
    lambda: WorkQueue("part", [1]),
]


class Listening(SubtaskOperator):
    """Keeps the events that it handles, and takes whatever records come."""

    def __init__(self) -> None:
        self.handled: list[Any] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        self.handled.append(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_changes_nothing_for_an_operator_without_handle_urgent(
    part: Callable[[], Primitive],
) -> None:  # H90
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, uses=[part()]) as world:
        task = await world.launch_operator(0, Listening)
        task.busy = True  # all of them wait in its mailbox
        for event, urgent in (("a", False), ("b", True), ("c", False), ("d", True)):
            await coordinator.gateways[0].send_event(event, urgent=urgent)
        await world.settle()
        task.busy = False
        await world.settle()
        assert task.operator.handled == ["a", "b", "c", "d"]  # type: ignore[attr-defined]
        assert task.outcome == ""


@pytest.mark.parametrize("part", PARTS)
async def test_nor_for_the_stages_of_a_chain(part: Callable[[], Primitive]) -> None:  # H80 H90
    first, second = RecordingCoordinator(), RecordingCoordinator()
    stages = chain(first=(first, Listening), second=(second, Listening))
    async with running_operator(stages, parallelism=1, uses=[part()]) as world:
        task = await world.launch_operator(0)
        await first.gateways[0].send_event("to the first", urgent=True)
        await second.gateways[0].send_event("to the second", urgent=True)
        await world.settle()
        assert task.stages["first"].handled == ["to the first"]  # type: ignore[attr-defined]
        assert task.stages["second"].handled == ["to the second"]  # type: ignore[attr-defined]
        assert task.outcome == ""


async def test_an_urgent_event_is_handled_in_its_place_at_a_checkpoint() -> None:  # H90 H92
    """Sent before the cut, it is handled before the snapshot, though the part beside it has another thread for its."""
    coordinator = RecordingCoordinator()
    seen: list[Any] = []

    class Snapping(Listening):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            seen.append(list(self.handled))
            return b""

    permits = Permits("part", concurrency=1)
    async with running_operator(coordinator, parallelism=1, mode="streaming", uses=[permits]) as world:
        task = await world.launch_operator(0, Snapping)
        task.busy = True
        await coordinator.gateways[0].send_event("before", urgent=True)
        answer = world.begin_checkpoint()
        await world.settle()
        await coordinator.gateways[0].send_event("after", urgent=True)
        task.busy = False
        await world.settle()
        assert answer.value == 1
        assert seen == [["before"]]
        assert task.operator.handled == ["before", "after"]  # type: ignore[attr-defined]
