# SPDX-License-Identifier: Apache-2.0

"""Async stages that work off a work queue, in virtual time: what they add, and what is lost meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import SubtaskContext, SubtaskOperator, WorkQueue, chain, concurrently
from headgate.testing import OperatorTask, World, running_operator
from protocol.errors import LocalProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.state import encode_state
from spark_bridge.primitives.work_queue.task import _HAND, WorkQueuePart
from spark_bridge.subtask.coroutines.retry import Retry
from tests.primitives.histories import disturb, in_turn, names, results, spread, until_done
from tests.primitives.stand_ins import open_alone

pytestmark = pytest.mark.anyio

DEPTH = 5


class Collect(SubtaskOperator):
    """The last stage: its state is what has come, as of a sink."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.done: list[Any] = decode_event(state) if state else []

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return encode_event([one for state in states.values() for one in decode_event(state)])

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(self.done)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.done.append(record)
        yield from self.done


def stages_of(queue: WorkQueue[str], seed: int, where: str) -> Any:
    """A chain that walks the tree of ``names``, whose children are added by the coroutine or by the stage after it."""
    failed: set[str] = set()

    def children(item: str) -> list[str]:
        return [item + "a", item + "b"] if len(item) < DEPTH else []

    async def visit(item: str) -> str:
        await asyncio.sleep(0.1 * spread(item, seed))
        if where == "in the coroutine":
            queue.add(children(item))
        if item not in failed and spread(item, seed + 1) == 0:
            failed.add(item)
            raise ConnectionError(item)  # what this try has added does not count
        return item

    def add_after(visited: Iterator[str]) -> Iterator[str]:
        for item in visited:
            if where == "after it":
                queue.add(children(item))
            yield item

    chance = random.Random(seed)
    work = concurrently(visit, limit=chance.choice([1, 2, 10]), ordered=chance.random() < 0.5, retry=Retry(3))
    return chain(take=queue, visit=work, add=add_after, collect=Collect)


async def queue_history(seed: int, where: str, mode: str) -> None:
    """Every item of the queue has one result, whatever is lost meanwhile (H100, H180)."""
    chance = random.Random(seed)
    queue = WorkQueue("tree", ["r"], in_hand=chance.choice([1, 1, 2, 5]))
    stages = stages_of(queue, seed, where)
    settings: Any = {"uses": [queue], "seed": seed, "attempts_max": 100, "checkpoint": in_turn(seed), "mode": mode}
    async with running_operator(stages, parallelism=2, **settings) as world:
        tasks = [await world.launch_operator(subtask) for subtask in range(2)]
        if mode == "batch":
            await disturb(world, tasks, chance, None, [])
        else:
            await disturb_with_checkpoints(world, tasks, chance)
            await until_done(world, tasks)
    assert results(tasks) == names(DEPTH)


async def disturb_with_checkpoints(world: World, tasks: list[OperatorTask], chance: random.Random) -> None:
    for _ in range(chance.randrange(3, 25)):
        if chance.random() < 0.5:
            world.begin_checkpoint()
        await world.advance(chance.choice([0.0, 0.1, 0.1, 0.3]))
        running = [task for task in tasks if not task.outcome]
        if running and chance.random() < 0.3:
            victim = chance.choice(running)
            await (world.kill if chance.random() < 0.5 else world.lose_executor)(victim)
            tasks.append(await world.launch_operator(victim.attempt.subtask))


@pytest.mark.parametrize("mode", ["batch", "streaming"])
@pytest.mark.parametrize("where", ["in the coroutine", "after it"])
@pytest.mark.parametrize("seed", range(6))
async def test_each_item_has_one_result_when_tasks_are_killed(seed: int, where: str, mode: str) -> None:  # H100 H180
    await queue_history(seed, where, mode)


@pytest.mark.parametrize("where", ["in the coroutine", "after it"])
async def test_items_that_were_in_flight_at_a_checkpoint_end_the_work_of_the_next_run(where: str) -> None:  # H100
    """With fewer tasks, too: what two had in flight, one has."""
    queue = WorkQueue("tree", ["r"], in_hand=2)
    stages = stages_of(queue, 3, where)
    kept: dict[str, Any] = {"mode": "streaming", "uses": [queue]}
    async with running_operator(stages, parallelism=2, **kept) as world:
        for subtask in range(2):
            await world.launch_operator(subtask)
        for _ in range(4):
            await world.advance(0.3)
            await world.checkpoint()
    async with running_operator(stages, parallelism=1, restored=world.checkpoints[-1], **kept) as world:
        task = await world.launch_operator(0)
        await until_done(world, [task])
    assert sorted(task.outputs) == names(DEPTH)


def walk(queue: WorkQueue[str], seed: int) -> Any:
    """Coroutines that loop over the queue, each over what it gets."""

    async def visit(number: int) -> list[str]:
        visited = []
        async for item in queue:
            await asyncio.sleep(0.1 * spread(item, seed))
            if len(item) < DEPTH:
                queue.add([item + "a"])
                await asyncio.sleep(0.1 * spread(item, seed + 1))
                queue.add([item + "b"])
            visited.append(item)
            if spread(item, seed + 2) == number:
                break  # the others take the rest
        async for item in queue:
            visited.append(item)
            if len(item) < DEPTH:
                queue.add([item + "a", item + "b"])
        return visited

    return concurrently(visit, limit=random.Random(seed).choice([1, 2, 5]), retry=Retry(3))


@pytest.mark.parametrize("seed", range(8))
async def test_coroutines_that_loop_over_a_queue_share_its_items(seed: int) -> None:  # H100
    queue = WorkQueue("tree", ["r"], in_hand=random.Random(seed).choice([1, 2, 5]))
    work, records = walk(queue, seed), range(4)
    async with running_operator(parallelism=2, uses=[queue], seed=seed, attempts_max=100) as world:
        tasks = [await world.launch_operator(subtask, work, records) for subtask in range(2)]
        await disturb(world, tasks, random.Random(seed), work, records)
    assert sorted(item for visited in results(tasks) for item in visited) == names(DEPTH)


async def test_an_item_that_comes_for_a_coroutine_that_has_given_up_goes_to_another() -> None:  # H100
    queue = WorkQueue("numbers", [0])

    async def work(patient: bool) -> list[int] | str:
        if patient:
            taken = []
            async for item in queue:
                taken.append(item)
                await asyncio.sleep(5.0)
                if item == 0:
                    queue.add([1])
            return taken
        await asyncio.sleep(1.0)
        try:
            async with asyncio.timeout(1.0):
                async for _ in queue:
                    pass
        except TimeoutError:
            return "gave up"
        return "got one"

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, concurrently(work), [True, False])
        await until_done(world, [task])
    assert task.outputs == [[0, 1], "gave up"]


async def test_a_coroutine_that_fails_in_its_loop_fails_the_task_whatever_is_said_of_failures() -> None:  # H100
    queue = WorkQueue("numbers", range(4))

    async def work(number: int) -> list[int]:
        taken = []
        async for item in queue:
            taken.append(item)
            if item == 2:
                raise ConnectionError(item)
        return taken

    stage = concurrently(work, retry=Retry(5), on_error="skip")
    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, stage, [0])
        await world.advance(10.0)
    assert isinstance(task.error, ConnectionError)
    assert "retry and on_error have no effect" in "".join(task.error.__notes__)


@pytest.mark.parametrize("how", ["streaming", "blocking"])
async def test_loops_that_cannot_be_right_in_a_coroutine_are_refused(how: str) -> None:
    queue = WorkQueue("numbers", range(4))

    async def work(number: int) -> None:
        if how == "blocking":
            for _ in queue:
                pass
        async for _ in queue:
            pass

    mode: Any = "streaming" if how == "streaming" else "batch"
    async with running_operator(parallelism=1, uses=[queue], mode=mode) as world:
        task = await world.launch_operator(0, concurrently(work), [0])
        await world.advance(1.0)
    assert isinstance(task.error, LocalProtocolError)
    assert ("chain(take=queue" if how == "streaming" else "async for item in queue") in str(task.error)


async def test_a_stage_without_a_coroutine_takes_the_items_too() -> None:
    queue = WorkQueue("tree", ["r"])

    def visit(items: Iterator[str]) -> Iterator[str]:
        for item in items:
            if len(item) < 3:
                queue.add([item + "a", item + "b"])
            yield item

    async with running_operator(chain(take=queue, visit=visit), parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask) for subtask in range(2)]
        await until_done(world, tasks)
    assert results(tasks) == names(3)
    assert queue.progress == (7, 7)


async def test_others_are_asked_for_what_waits_and_not_for_what_is_in_flight() -> None:
    """A task with much in flight and nothing in its hand is asked once, and not again and again."""
    queue = WorkQueue("slow", range(8), in_hand=1)

    async def slow(item: int) -> int:
        await asyncio.sleep(100.0)
        return item

    stages = chain(take=queue, work=concurrently(slow, limit=50))
    async with running_operator(stages, parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0)
        await world.advance(1.0)
        second = await world.launch_operator(1)
        await world.advance(1.0)
        received = first._channel.statistics.events_received
        await world.advance(50.0)
        assert first._channel.statistics.events_received == received
        await until_done(world, [first, second])
    assert results([first, second]) == list(range(8))


async def test_equal_items_of_one_parent_are_several_wherever_they_are_added() -> None:
    queue = WorkQueue("equal", ["root"])

    async def visit(item: str) -> str:
        if item == "root":
            queue.add(["leaf", "leaf"])
        return item

    def add_after(visited: Iterator[str]) -> Iterator[str]:
        for item in visited:
            if item == "root":
                queue.add(["leaf"])
            yield item

    stages = chain(take=queue, visit=concurrently(visit), add=add_after)
    async with running_operator(stages, parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0)
        await until_done(world, [task])
    assert task.outputs == ["root", "leaf", "leaf", "leaf"]


def one_by_one(items: Iterator[int]) -> Iterator[int]:
    yield from items


@pytest.mark.parametrize("how", ["a loop", "a function between"])
async def test_a_loop_that_would_hold_back_results_is_refused(how: str) -> None:
    queue = WorkQueue("numbers", range(3))

    async def same(item: int) -> int:
        return item

    def looping(items: Any) -> Iterator[int]:
        yield from queue

    first: dict[str, Any] = {"take": looping} if how == "a loop" else {"take": queue, "same": one_by_one}
    stages = chain(**first, work=concurrently(same))
    async with running_operator(stages, parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0)
        await world.advance(1.0)
    assert isinstance(task.error, LocalProtocolError)
    assert "put the queue itself before the async stage" in str(task.error)


@pytest.mark.parametrize("uses", [[], [WorkQueue("ids", ["a"])]])
async def test_a_queue_that_feeds_a_chain_without_a_half_on_the_driver_is_refused(uses: list[WorkQueue[str]]) -> None:
    async def visit(item: str) -> str:
        return item

    stages = chain(take=WorkQueue("ids", ["a"]), visit=concurrently(visit))
    with pytest.raises(ValueError, match=r"queue 'ids', .* uses=\[queue\]"):
        async with running_operator(stages, uses=uses):
            pass


async def test_what_an_earlier_input_has_in_flight_finishes_no_item_of_this_one() -> None:  # H100, H174
    """The place of a restored flight, which is none of the items of this input, is used again for an item."""

    async def slow(item: str) -> str:
        await asyncio.sleep(1.0)
        return item

    def stages(queue: WorkQueue[str]) -> Any:
        return chain(take=queue, work=concurrently(slow, limit=1))

    before = WorkQueue("ids", ["before"])
    async with running_operator(stages(before), parallelism=1, mode="streaming", uses=[before]) as world:
        await world.launch_operator(0)
        await world.advance(0.5)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    now = WorkQueue("ids", ["one", "two", "three"])
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming", "uses": [now]}
    async with running_operator(stages(now), **kept, restored=restored, restored_input="other") as world:
        task = await world.launch_operator(0)
        await until_done(world, [task])
    assert task.outputs == ["before", "one", "two", "three"]
    assert now.progress == (3, 3)


async def test_others_get_what_a_function_that_returns_early_has_not_taken() -> None:  # H100
    queue = WorkQueue("numbers", range(6), in_hand=3)

    def take(items: Iterator[int]) -> Iterator[int]:
        yield next(items)

    stages = chain(take=queue, work=take)
    async with running_operator(stages, parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask) for subtask in range(2)]
        await until_done(world, tasks)
    assert [len(task.outputs) for task in tasks] == [1, 1]
    assert len(set(results(tasks))) == 2


async def test_an_item_that_comes_in_the_moment_of_a_cancellation_goes_back_to_the_hand() -> None:  # H100
    posted: list[Callable[[], None]] = []
    part = WorkQueuePart("numbers", 1, False)
    open_alone(part, SimpleNamespace(now=lambda: 0.0, post=posted.append))
    part._hand.append((7, 0, "item"))
    waits = asyncio.get_running_loop().create_task(part._next_on_loop(None))
    await asyncio.sleep(0)
    posted.pop()()  # its thread gives it the item
    asyncio.get_running_loop().call_soon(waits.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert list(part._in_loops) == [7]
    posted.pop()()
    assert (list(part._hand), part._in_loops) == ([(7, 0, "item")], {})


def test_states_of_subtasks_without_items_are_empty() -> None:
    part = WorkQueuePart("numbers", 1, False)
    assert part.merge_states({0: b"", 1: b""}) == b""
    state = encode_state(_HAND, {"items": [[7, 0, "item"]], "begun": [8]})
    assert part.merge_states({0: b"", 1: state, 2: b""}) == state


def test_what_the_result_of_an_earlier_input_has_found_is_not_added() -> None:
    part = WorkQueuePart("numbers", 1, False)
    open_alone(part, SimpleNamespace(now=lambda: 0.0))
    part.add_found([[1, 0, "of an item that this input has not"]])
    assert part._found == []
    part.giving_out(7)
    part.add_found([[1, 0, "of this input"]])
    assert part._found == [(1, 0, "of this input")]
