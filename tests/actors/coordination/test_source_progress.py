# SPDX-License-Identifier: Apache-2.0

"""How far a source is: splits count as read when their reader asks for more, and no longer when they are given back."""

from __future__ import annotations

from actors.coordination import SourceCoordinator, SplitEnumerator, StaticSplitEnumerator
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask

SPLITS = 6


def source() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(range(SPLITS), state))


async def readers(world: World, *subtasks: int) -> list[ReaderTask]:
    world.task_type = ReaderTask
    return [task for task in await world.running(*subtasks) if isinstance(task, ReaderTask)]


async def step(world: World, reader: ReaderTask, times: int = 1) -> None:
    for _ in range(times):
        reader.step()
        await world.settle()


async def test_progress_grows_with_each_split_and_falls_back_with_a_reset() -> None:
    assert source().splits_progress == (0, None), "there is no enumerator yet"
    coordinator = source()
    async with running_operator(coordinator, mode=RestoreMode.BATCH) as world:
        first, second = await readers(world, 0, 1)
        assert coordinator.splits_progress == (0, SPLITS)
        seen = []
        while not (first.finished and second.finished):
            await step(world, first)
            await step(world, second)
            seen.append(coordinator.splits_progress)
        assert seen == sorted(seen), "nothing was lost"
        assert len({done for done, _ in seen}) > 2, "it was seen to grow"
        assert seen[-1] == (SPLITS, SPLITS)
        read = len(second.done)
        world.fail(second)
        await world.settle()
        assert coordinator.splits_progress == (SPLITS - read, SPLITS)
        (again,) = await readers(world, 1)
        while not again.finished:
            await step(world, again)
        assert coordinator.splits_progress == (SPLITS, SPLITS)


async def test_an_enumerator_that_does_not_say_how_many_there_are_has_no_total() -> None:
    coordinator = SourceCoordinator(lambda state: SplitEnumerator())
    async with running_operator(coordinator):
        assert coordinator.splits_progress == (0, None)
