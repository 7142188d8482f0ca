"""Splits in a later run of a batch operator, of whose earlier output Spark may have kept a part (H55, H56)."""

from __future__ import annotations

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from protocol.attempts import FailureKind
from protocol.messages import RestoreMode
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask

SPLITS = list(range(10))


def source() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(SPLITS, state, batch_size=2))


async def readers(world: World, *subtasks: int) -> list[ReaderTask]:
    world.task_type = ReaderTask
    return [task for task in await world.running(*subtasks) if isinstance(task, ReaderTask)]


async def read(world: World, *tasks: ReaderTask, steps: int = 1000) -> None:
    """By turns, until all are over; each is a success then."""
    for _ in range(steps):
        for task in tasks:
            task.step()
            await world.settle()
        if all(task.is_over for task in tasks):
            break
    for task in tasks:
        if task.is_over:
            world.finish(task)
    await world.settle()


async def next_run(world: World, *, succeeded: bool = True) -> None:
    world.end_run(succeeded)
    world.reset("a new run")
    await world.settle()


async def test_a_subtask_that_runs_again_alone_reads_what_it_had_read_and_nothing_else() -> None:
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        first = await readers(world, 0, 1)
        await read(world, *first)
        await next_run(world)
        (again,) = await readers(world, 1)
        await read(world, again)
        assert again.done == first[1].done
        assert sorted(first[0].done + again.done) == SPLITS


async def test_a_run_of_all_subtasks_reads_every_split_once_each_where_it_was_read_before() -> None:
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        first = await readers(world, 0, 1)
        await read(world, first[0])  # so that it gets all of them
        await read(world, first[1])
        for _ in range(2):
            await next_run(world)
            again = await readers(world, 1, 0)
            await read(world, *again)
            assert {task.attempt.subtask: task.done for task in again} == {0: SPLITS, 1: []}


async def test_of_a_failed_run_what_had_finished_keeps_its_splits_and_the_rest_is_for_anybody() -> None:
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        done, failing = await readers(world, 0, 1)
        done.step()
        failing.step()
        await world.settle()  # two splits each
        await read(world, done)
        assert len(done.done) == 8
        world.fail(failing, FailureKind.RUN_ENDED, reset=False)
        await next_run(world, succeeded=False)
        again = await readers(world, 0, 1)
        await read(world, *again)
        by_subtask = {task.attempt.subtask: task.done for task in again}
        assert by_subtask[0][:8] == done.done
        assert sorted(by_subtask[0] + by_subtask[1]) == SPLITS


async def test_a_reader_that_left_early_goes_on_behind_what_it_had() -> None:
    """``take(1)`` ends the task well before its input has."""
    async with running_operator(source(), parallelism=1, mode=RestoreMode.BATCH) as world:
        (early,) = await readers(world, 0)
        early.step()
        await world.settle()
        world.finish(early)
        await world.settle()
        await next_run(world)
        (again,) = await readers(world, 0)
        await read(world, again)
        assert again.done == SPLITS


async def test_an_attempt_that_fails_in_the_later_run_gives_back_only_what_it_got_beyond_its_own() -> None:
    async with running_operator(source(), parallelism=1, mode=RestoreMode.BATCH) as world:
        (early,) = await readers(world, 0)
        early.step()
        await world.settle()
        world.finish(early)
        await next_run(world)
        for _ in range(3):
            (failing,) = await readers(world, 0)
            await read(world, failing, steps=5)
            assert failing.batches[0] == [0, 1]
            world.fail(failing)
            await world.settle()
        (again,) = await readers(world, 0)
        await read(world, again)
        assert again.done == SPLITS


async def test_in_streaming_mode_nothing_is_kept() -> None:
    async with running_operator(source(), parallelism=1) as world:
        (first,) = await readers(world, 0)
        await read(world, first)
        await next_run(world)
        (again,) = await readers(world, 0)
        assert again.batches == []


async def test_the_books_of_what_is_withheld_do_not_grow_with_the_splits_of_an_endless_input() -> None:  # H27
    coordinator = source()
    async with running_operator(coordinator, parallelism=1) as world:
        (reader,) = await readers(world, 0)
        await read(world, reader)
        assert reader.done == SPLITS
        assert not coordinator._withheld
