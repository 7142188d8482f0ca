# SPDX-License-Identifier: Apache-2.0

"""How far a source is: splits count as read when their reader asks for more, and no longer when they are given back.

And how much it has left: nothing is said of that unless all of it is known (H199).
"""

from __future__ import annotations

from actors.coordination import SourceCoordinator, SplitEnumerator, StaticSplitEnumerator
from protocol.source_events import backlog_event
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


class Sized(StaticSplitEnumerator):
    """Its pending splits have 10 each."""

    @property
    def pending_backlog(self) -> int:
        return 10 * self.pending_count


async def test_what_is_left_in_splits_counts_those_that_wait_and_those_in_hand() -> None:
    coordinator = source()
    assert coordinator._whole_backlog(in_splits=True) == "the source has not begun"
    async with running_operator(coordinator) as world:
        assert coordinator._whole_backlog(in_splits=True) == "2 of 2 subtasks do not run"
        (first,) = await readers(world, 0)
        assert coordinator._whole_backlog(in_splits=True) == "1 of 2 subtasks do not run"
        (second,) = await readers(world, 1)
        assert coordinator._whole_backlog(in_splits=True) == SPLITS + 2, "either may have one of before a restore"
        await step(world, first)
        await step(world, second)
        assert coordinator._whole_backlog(in_splits=True) == SPLITS
        while not first.finished:
            await step(world, first)
        assert coordinator._whole_backlog(in_splits=True) == 1, "the second subtask has one"
        world.fail(second)
        await world.settle()
        assert coordinator._whole_backlog(in_splits=True) == "1 of 2 subtasks do not run"


async def test_an_enumerator_that_does_not_count_its_splits_says_so() -> None:
    coordinator = SourceCoordinator(lambda state: SplitEnumerator())
    async with running_operator(coordinator) as world:
        await readers(world, 0, 1)
        assert "define pending_count" in str(coordinator._whole_backlog(in_splits=True))
        assert "define pending_backlog" in str(coordinator._whole_backlog(in_splits=False))


async def test_what_is_left_in_units_is_known_when_every_subtask_has_reported() -> None:
    coordinator = SourceCoordinator(lambda state: Sized(range(SPLITS), state))
    async with running_operator(coordinator) as world:
        first, second = await readers(world, 0, 1)
        await step(world, first)
        assert "subtask 0 has not reported" in str(coordinator._whole_backlog(in_splits=False))
        first.send(backlog_event([(0, 7)]))
        await world.settle()
        said = str(coordinator._whole_backlog(in_splits=False))
        assert "subtask 1 has not reported" in said, "it has not asked either"
        await step(world, second)
        second.send(backlog_event([(1, 4)]))
        await world.settle()
        assert coordinator._whole_backlog(in_splits=False) == 10 * (SPLITS - 2) + 7 + 4
        await world.checkpoint()
        world.fail(second)
        await world.settle()
        await readers(world, 1)
        said = str(coordinator._whole_backlog(in_splits=False))
        assert "subtask 1 has not reported" in said, "its restored state may have splits"


async def test_readers_that_never_report_are_not_taken_for_idle_ones() -> None:
    coordinator = source()
    async with running_operator(coordinator) as world:
        first, second = await readers(world, 0, 1)
        for _ in range(3 * SPLITS):
            await step(world, first)
        await step(world, second)
        said = coordinator._whole_backlog(in_splits=False)
        assert "define backlog in the reader" in str(said)
        second.send(backlog_event([(1, 4)]))
        second.send(backlog_event([]))
        await world.settle()
        assert coordinator._whole_backlog(in_splits=False) == 0
