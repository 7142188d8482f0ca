# SPDX-License-Identifier: Apache-2.0

"""Splits in a later run: a new enumeration, unless Spark joins its output with an earlier run's (H56, H68)."""

from __future__ import annotations

import random

from actors.coordination import RecreateOnReset, SourceCoordinator, StaticSplitEnumerator
from protocol.attempts import FailureKind, GlobalFailureRaised
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask
from tests.mutants.second_runs import check_history

SPLITS = list(range(10))
CACHE, OTHER_CACHE = 7, 9
CACHED = StageLook(frozenset({0, 1}), 2, frozenset({CACHE}))  # the first action over an RDD that is persisted
HALF_LOST = StageLook(frozenset({0, 1}), 2, frozenset({CACHE}), frozenset({CACHE}))


def source() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(SPLITS, state, batch_size=2))


async def readers(world: World, *subtasks: int) -> list[ReaderTask]:
    world.task_type = ReaderTask
    return [task for task in await world.running(*subtasks) if isinstance(task, ReaderTask)]


async def read(world: World, *tasks: ReaderTask, steps: int = 1000) -> None:
    """Step the readers in turn until all are over; each is a success then."""
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


async def next_run(world: World, look: StageLook | None = None, *, succeeded: bool = True) -> None:
    world.end_run(succeeded)
    world.look = look or world.look
    world.reset("a new run")
    await world.settle()


async def test_a_new_action_is_a_new_enumeration() -> None:  # H68
    built: list[StaticSplitEnumerator] = []

    def build(state: bytes | None) -> StaticSplitEnumerator:
        built.append(StaticSplitEnumerator(SPLITS, state, batch_size=2))
        return built[-1]

    async with running_operator(SourceCoordinator(build), mode=RestoreMode.BATCH) as world:
        first = await readers(world, 0, 1)
        await read(world, first[0])  # so that it gets all splits
        await read(world, first[1])
        await next_run(world)
        again = await readers(world, 1, 0)
        await read(world, again[0])
        await read(world, again[1])
        assert {task.attempt.subtask: task.done for task in again} == {1: SPLITS, 0: []}
    assert len(built) == 2


async def test_what_is_computed_again_beside_kept_output_reads_what_it_had_read_and_nothing_else() -> None:  # H56
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = CACHED
        first = await readers(world, 0, 1)
        await read(world, *first)
        assert sorted(first[0].done + first[1].done) == SPLITS
        for _ in range(2):
            await next_run(world, HALF_LOST)
            (again,) = await readers(world, 1)
            await read(world, again)
            assert again.done == first[1].done


async def test_what_fails_while_it_is_computed_again_keeps_its_splits() -> None:  # H56
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = CACHED
        first = await readers(world, 0, 1)
        await read(world, *first)
        await next_run(world, HALF_LOST)
        (failing,) = await readers(world, 1)
        failing.step()
        world.fail(failing)
        await world.settle()
        (again,) = await readers(world, 1)
        await read(world, again)
        assert again.done == first[1].done


async def test_of_a_failed_run_whose_output_is_kept_in_part_the_rest_is_for_anybody() -> None:  # H56
    shuffle = -1
    whole = StageLook(frozenset({0, 1}), 2, frozenset({shuffle}))
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = whole
        done, failing = await readers(world, 0, 1)
        done.step()
        failing.step()
        await world.settle()  # two splits each
        await read(world, done)
        assert len(done.done) == 8
        world.fail(failing, FailureKind.RUN_ENDED, reset=False)
        await next_run(world, StageLook(frozenset({1}), 2, whole.outputs, whole.outputs), succeeded=False)
        (again,) = await readers(world, 1)
        await read(world, again)
        assert sorted(done.done + again.done) == SPLITS


async def test_partitions_that_an_action_takes_later_read_what_the_first_ones_left() -> None:  # H56
    """``take`` runs a job for the first partition, and further jobs if that does not suffice."""
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = StageLook(frozenset({0}), 2)
        (early,) = await readers(world, 0)
        early.step()
        await world.settle()
        world.finish(early)  # its consumer has enough of this partition
        await next_run(world, StageLook(frozenset({1}), 2))
        (later,) = await readers(world, 1)
        await read(world, later)
        assert later.done == SPLITS[2:]
        await next_run(world, StageLook(frozenset({0}), 2))
        (another,) = await readers(world, 0)
        await read(world, another)
        assert another.done == SPLITS


async def test_output_whose_enumeration_is_forgotten_is_not_joined_with_another() -> None:  # H56, H68
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = CACHED
        await read(world, *await readers(world, 0, 1))
        await next_run(world, StageLook(frozenset({0, 1}), 2))
        await read(world, *await readers(world, 0, 1))
        await next_run(world, HALF_LOST)
        await readers(world, 1)
        assert "call unpersist()" in failure_of(world)


async def test_an_input_that_is_kept_in_part_is_not_an_output_of_an_earlier_run() -> None:  # H68
    async with running_operator(source(), mode=RestoreMode.BATCH) as world:
        world.look = CACHED
        await read(world, *await readers(world, 0, 1))
        other = frozenset({OTHER_CACHE})
        await next_run(world, StageLook(frozenset({0, 1}), 2, other, other))
        again = await readers(world, 0, 1)
        await read(world, again[1])
        assert again[1].done == SPLITS


async def test_an_enumerator_that_has_failed_is_good_for_no_other_run() -> None:  # H7, H56
    class Failing(StaticSplitEnumerator):
        async def handle_split_request(self, subtask: int) -> None:
            if self.pending_count == 4:
                raise ValueError("half changed")
            await super().handle_split_request(subtask)

    coordinator = SourceCoordinator(lambda state: Failing(SPLITS, state, batch_size=2))
    async with running_operator(coordinator, mode=RestoreMode.BATCH) as world:
        world.look = CACHED
        first = await readers(world, 0, 1)
        await read(world, *first, steps=4)
        assert "half changed" in failure_of(world)
        for task in first:
            world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        await next_run(world, HALF_LOST, succeeded=False)
        await readers(world, 1)
        assert "half changed" in failure_of(world)
        assert "inside the action" in failure_of(world)


async def test_a_new_source_refuses_to_complete_an_enumeration_it_does_not_know() -> None:  # H56, H68
    async with running_operator(RecreateOnReset(source), mode=RestoreMode.BATCH) as world:
        for look in (CACHED, StageLook(frozenset({0, 1}), 2)):
            world.look = look
            await read(world, *await readers(world, 0, 1))
            await next_run(world, StageLook(frozenset({0, 1}), 2))
        world.look = HALF_LOST
        await readers(world, 1)
        assert "pass an instance of SourceCoordinator" in failure_of(world)


async def test_in_streaming_mode_nothing_is_kept() -> None:
    async with running_operator(source(), parallelism=1) as world:
        (first,) = await readers(world, 0)
        await read(world, first)
        await next_run(world)
        (again,) = await readers(world, 0)
        assert again.batches == []


def failure_of(world: World) -> str:
    failure = world.reports[-1]
    assert isinstance(failure, GlobalFailureRaised)
    return failure.cause


def test_every_history_of_actions_reads_each_split_once() -> None:  # H56, H68
    first = random.randrange(10**6)
    for seed in range(first, first + 10):
        print(f"check_history({seed})")
        check_history(seed)


# --- copies ---------------------------------------------------------------------------------------------------------


async def test_a_copy_that_registers_before_a_checkpoint_completes_reads_what_the_original_reads() -> None:  # H13, H56
    """The copy restores the checkpoint that was complete when it registered. If the later checkpoint also completed,
    the records would leave out the splits that it covers, and the copy would never read them."""
    splits = list(range(6))
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(splits, state))
    async with running_operator(coordinator, parallelism=1, tolerated_failures=0) as world:
        world.task_type = ReaderTask
        original = world.accept(0)
        assert isinstance(original, ReaderTask)
        await world.settle()
        for _ in range(4):  # ask, read, ask, read
            original.step()
            await world.settle()
        original.unresponsive = True
        pending = await world.checkpoint()
        copy = world.accept(0)
        assert isinstance(copy, ReaderTask)
        copy.opens_immediately = False
        await world.settle()
        assert "2 concurrent attempts" in pending.reason()
        original.unresponsive = False
        await world.settle()
        refused = await world.checkpoint()
        assert "2 concurrent attempts" in refused.reason()
        assert not world.failures, "a copy counts as no failure of a checkpoint"
        copy.open()
        await world.settle()
        world.fail(original, FailureKind.SUPERSEDED, reset=False)
        while not copy.is_over:
            copy.step()
            await world.settle()
        assert copy.done == splits
