# SPDX-License-Identifier: Apache-2.0

"""A job that runs every day, with enumerators and parts: it begins at its first record, or goes on (H174)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator
from headgate import CheckpointConfig, SourceCoordinator, SplitReader, StaticSplitEnumerator
from headgate.testing import World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.primitives.work_queue.driver import WorkQueue

pytestmark = pytest.mark.anyio

DAYS = 3
SCHEMA = pyarrow.schema([("id", pyarrow.int64())])
Ids = list[int]


class Reads(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        for number in range(position or 0, 3):
            yield number + 1, f"{split}.{number}"


def of_splits(splits: Iterable[str]) -> list[str]:
    return sorted(f"{split}.{number}" for split in splits for number in range(3))


async def until_over(world: World) -> None:
    for _ in range(300):
        await world.advance(0.5)
        if world.failures or all(task.outcome for task in world.tasks):
            break
    await world.advance(1.0)
    assert not world.failures, world.failures[0]


async def a_day(
    coordinator: Any, restored: CompletedCheckpoint | None, make: Callable[[], Any] | None = None, **settings: Any
) -> tuple[list[Any], CompletedCheckpoint]:
    checkpoint = CheckpointConfig(interval_s=2.0, tolerated_failures=9)
    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "restored": restored, "checkpoint": checkpoint}
    async with running_operator(coordinator, **kept, **settings) as world:
        tasks: list[Any] = []
        for subtask in range(2):
            tasks.append(await (world.launch_operator(subtask, make) if make else world.launch_operator(subtask)))
        await until_over(world)
        return [output for task in tasks for output in task.outputs], world.checkpoints[-1]


@pytest.mark.parametrize("in_one_application", [True, False])
async def test_fixed_splits_are_all_read_every_day(in_one_application: bool) -> None:  # H174
    days = [["a", "b"], ["c", "d", "e"], ["a", "b"]]
    if in_one_application:
        day, left = days[0], iter(days)
        coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(day, state))
        async with running_operator(coordinator, parallelism=2, mode="streaming") as world:
            for day in left:
                world.tasks.clear()
                for subtask in range(2):
                    await world.launch_operator(subtask, Reads)
                await until_over(world)
                assert sorted(output for task in world.tasks for output in task.outputs) == of_splits(day)  # type: ignore[attr-defined]
        return
    restored = None
    for day in days:
        coordinator = SourceCoordinator(lambda state, day=day: StaticSplitEnumerator(day, state))  # type: ignore[misc]
        outputs, restored = await a_day(coordinator, restored, Reads)
        assert sorted(outputs) == of_splits(day)


async def test_what_an_enumerator_finds_by_looking_is_only_the_new_every_day() -> None:  # H174
    found, restored = ["a"], None
    for day in range(DAYS):
        found.append(f"new {day}")
        coordinator = SourceCoordinator(lambda state: DiscoveringSplitEnumerator(lambda: list(found), state))
        outputs, restored = await a_day(coordinator, restored, Reads)
        assert sorted(outputs) == of_splits([f"new {day}"] if day else ["a", "new 0"])


async def test_a_work_queue_begins_every_day_with_its_roots() -> None:  # H174
    restored = None
    for day in range(DAYS):
        queue = WorkQueue("items", [f"{day}-{item}" for item in range(5)])

        def work(context: Any, records: Iterator[Any], queue: WorkQueue[str] = queue) -> Iterator[str]:
            yield from queue

        async with running_operator(parallelism=2, mode="streaming", restored=restored, uses=[queue]) as world:
            tasks = [await world.launch_operator(subtask, work, []) for subtask in range(2)]
            await until_over(world)
            restored = world.checkpoints[-1]
        assert sorted(output for task in tasks for output in task.outputs) == [f"{day}-{item}" for item in range(5)]


async def test_the_splits_in_hand_of_an_interrupted_run_are_void_if_the_next_one_has_other_input() -> None:  # H174
    class Slow(Reads):
        def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
            yield 1, split
            while True:
                yield None

    first = SourceCoordinator(lambda state: StaticSplitEnumerator(["a", "b", "c", "d"], state, batch_size=2))
    async with running_operator(first, parallelism=2, mode="streaming") as world:
        for subtask in range(2):
            await world.launch_operator(subtask, Slow)
        await world.advance(1.0)
        await world.checkpoint()
        interrupted = world.checkpoints[-1]
    other = SourceCoordinator(lambda state: StaticSplitEnumerator(["x", "y"], state))
    outputs, _ = await a_day(other, interrupted, Reads, restored_input="other")
    assert sorted(outputs) == of_splits(["x", "y"])
    same = SourceCoordinator(lambda state: StaticSplitEnumerator(["x", "y"], state))
    outputs, _ = await a_day(same, interrupted, Reads)
    assert sorted(outputs) == sorted(one for one in of_splits(["a", "b", "c", "d"]) if one not in ("a.0", "c.0"))
