# SPDX-License-Identifier: Apache-2.0

"""The work queue in a simulated application: every result counts once, whatever is lost meanwhile (H100)."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from headgate import SubtaskContext, WorkQueue
from headgate.testing import running_operator
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import StageLook
from protocol.wire.codec import encode_event
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.work_queue import driver as driver_half
from spark_bridge.primitives.work_queue.messages import Report
from tests.primitives.histories import (
    given_back_history,
    names,
    pause,
    queue_history,
    results,
    returned_early_history,
    returned_early_in_streaming_history,
    tree,
    until_done,
)

pytestmark = pytest.mark.anyio

SEEDS = range(25)


async def test_every_item_is_handed_out_once_and_the_work_ends_by_itself() -> None:
    queue = WorkQueue("tree", ["r"])
    async with running_operator(parallelism=3, uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask, tree(queue, 6), []) for subtask in range(3)]
        await until_done(world, tasks)
    assert results(tasks) == names(6)
    assert queue.progress == (63, 63)


@pytest.mark.parametrize("seed", SEEDS)
async def test_results_count_once_when_tasks_are_killed_and_copied(seed: int) -> None:
    await queue_history(seed)


@pytest.mark.parametrize("seed", SEEDS)
async def test_results_count_once_when_a_slow_task_gives_items_back(seed: int) -> None:
    await given_back_history(seed)


async def test_equal_keys_count_as_one_item() -> None:
    queue = WorkQueue("graph", [0], key=lambda item: item)

    def walk(records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            queue.add([(item * 2) % 50, (item + 7) % 50])
            yield item

    async with running_operator(parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask, walk, []) for subtask in range(2)]
        await until_done(world, tasks)
    assert results(tasks) == sorted(range(50))


async def test_keys_are_equal_if_they_are_encoded_equally() -> None:  # H171
    keys = [1, 1.0, True, numpy.int64(1), (1, 2), [1, 2], frozenset("ab"), {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    queue = WorkQueue("keys", range(2 * len(keys)), key=lambda number: keys[number % len(keys)])
    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, lambda _: iter(queue), [])
        await until_done(world, [task])
    assert task.outputs == [*range(len(keys))]


async def test_higher_priorities_come_first() -> None:
    queue = WorkQueue("ranks", ["root"])

    def work(records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            if item == "root":
                queue.add(["low"], priority=-1)
                queue.add(["normal 1", "normal 2"])
                queue.add(["high"], priority=5)
            yield item

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert task.outputs == ["root", "high", "normal 1", "normal 2", "low"]


async def test_a_task_without_work_gets_what_waits_in_anothers_hand() -> None:
    queue = WorkQueue("slow", range(8), in_hand=8)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            pause(context, 10.0)
            yield item

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0, work, [])
        await world.advance(1.0)  # the first has taken most of them
        second = await world.launch_operator(1, work, [])
        await until_done(world, [first, second])
    assert results([first, second]) == list(range(8))
    assert min(len(first.outputs), len(second.outputs)) >= 3


async def test_what_waits_stays_with_a_task_that_has_a_copy() -> None:
    """The copy may have begun what the first attempt would give back."""
    queue = WorkQueue("slow", range(6), in_hand=6)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            pause(context, 10.0 if context.attempt == 0 else 0.1)
            yield item

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0, work, [])
        await world.advance(1.0)
        copy = await world.launch_operator(0, work, [])
        await world.advance(0.15)
        second = await world.launch_operator(1, work, [])
        await until_done(world, [first, copy, second])
    assert results([first, copy, second]) == list(range(6))


async def test_items_that_are_added_later_are_not_given_to_a_copy_that_is_gone() -> None:
    """The copy asked for work after the first attempt had finished, and was ended without a reset."""
    queue = WorkQueue("numbers", [0])

    def adds(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            if item == 0:
                pause(context, 10.0)
                queue.add(range(1, 5))
            yield item

    def waits(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        if context.attempt == 0:
            pause(context, 2.0)
        else:
            pause(context, 1.5)
            yield from queue

    async with running_operator(parallelism=2, uses=[queue]) as world:
        second = await world.launch_operator(1, adds, [])
        await world.advance(0.1)
        first = await world.launch_operator(0, waits, [])
        await world.advance(0.5)
        await world.launch_operator(0, waits, [])
        await until_done(world, [first, second])
    assert results([first, second]) == list(range(5))


@pytest.mark.parametrize("seed", SEEDS)
async def test_results_count_once_when_functions_return_early(seed: int) -> None:
    await returned_early_history(seed)


async def test_what_only_a_copy_has_done_goes_to_others_when_the_first_attempt_has_returned_early() -> None:
    queue = WorkQueue("numbers", range(40), in_hand=3)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        if context.subtask == 1:
            pause(context, 5.0)
        for item in queue:
            context.sleep(8.0 if (context.subtask, context.attempt) == (0, 0) else 0.5)
            yield item
            if (context.subtask, context.attempt) == (0, 0):
                return

    async with running_operator(parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(0, work, [])]
        await world.advance(0.1)
        tasks.append(await world.launch_operator(0, work, []))
        tasks.append(await world.launch_operator(1, work, []))
        await until_done(world, tasks)
    assert len(tasks[0].outputs) == 1
    assert results(tasks) == list(range(40))


async def test_what_only_a_copy_had_done_when_the_work_ended_fails_the_job() -> None:
    """The others have been told that there is no more, so nobody would do it again."""
    queue = WorkQueue("numbers", range(4), in_hand=2)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        is_first = (context.subtask, context.attempt) == (0, 0)
        for item in queue:
            context.sleep(8.0 if is_first else 0.1)
            yield item
            if is_first:
                return
        context.sleep(20.0)

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0, work, [])
        await world.advance(0.1)
        await world.launch_operator(0, work, [])
        await world.launch_operator(1, work, [])
        await until_done(world, [first])
        await world.settle()
        assert "of its items, after a copy of it had done them and the work had ended" in str(world.failures)


async def test_in_batch_mode_a_task_may_give_back_what_it_had_at_a_checkpoint() -> None:
    queue = WorkQueue("slow", range(8), in_hand=8)

    def slow(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            pause(context, 1.0)
            yield item

    def late(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        pause(context, 2.5)
        yield from queue

    async with running_operator(parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(0, slow, []), await world.launch_operator(1, late, [])]
        await world.checkpoint()
        await until_done(world, tasks)
    assert results(tasks) == list(range(8))
    assert tasks[1].outputs


async def test_a_restored_task_adds_to_a_queue_that_has_not_ended() -> None:
    queue = WorkQueue("tree", ["r"])
    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [queue]}
    async with running_operator(**kept) as world:
        await world.launch_operator(0, tree(queue, 3, lambda item: 5.0), [])
        await world.advance(1.0)
        await world.launch_operator(1, tree(queue, 3), [])
        world.begin_checkpoint()
        await world.advance(1.0)
        assert world.checkpoints, "the root is in the first task's hand"
    async with running_operator(**kept, restored=world.checkpoints[-1]) as world:
        first = await world.launch_operator(0, tree(queue, 3, lambda item: 5.0), [])
        second = await world.launch_operator(1, tree(queue, 3), [])
        await until_done(world, [first, second])
    assert results([first, second]) == names(3)


async def test_a_streaming_task_that_returns_early_keeps_its_items_for_the_next_run_of_the_same_input() -> None:
    queue = WorkQueue("numbers", range(6), in_hand=3)

    def up_to(last: int) -> Any:
        def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
            for item in queue:
                pause(context, 5.0)
                yield item
                if item == last:
                    return

        return work

    async with running_operator(parallelism=1, mode="streaming", uses=[queue]) as world:
        world.input_id = "today's"
        first = await world.launch_operator(0, up_to(0), [])
        world.begin_checkpoint()
        await until_done(world, [first])
        assert world.checkpoints[0].checkpoint_id == 1, "it holds what the task has in hand"
        await world.advance(5.0)
        second = await world.launch_operator(0, up_to(99), [])
        await until_done(world, [second])
        await world.advance(5.0)
        world.input_id = "tomorrow's"
        third = await world.launch_operator(0, up_to(99), [])
        await until_done(world, [third])
    assert (first.outputs, second.outputs) == ([0], [1, 2, 3, 4, 5])
    assert third.outputs == [0, 1, 2, 3, 4, 5], "another input begins with the roots (H174)"


@pytest.mark.parametrize("restored", [False, True], ids=["of this application", "restored"])
async def test_a_job_whose_tasks_would_wait_for_what_a_streaming_task_kept_in_its_hand_fails(restored: bool) -> None:
    """A checkpoint may hold it for the task that has finished, so nobody else may have it (H100)."""
    queue = WorkQueue("numbers", range(6), in_hand=3)
    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [queue]}

    def one_only(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            pause(context, 1.0)
            yield item
            return

    def all_of_them(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        pause(context, 5.0)
        yield from queue

    checkpoint = None
    if restored:
        async with running_operator(**kept) as world:
            await world.launch_operator(0, one_only, [])
            await world.launch_operator(1, all_of_them, [])
            world.begin_checkpoint()
            await world.advance(0.5)
            (checkpoint,) = world.checkpoints
    async with running_operator(**kept, restored=checkpoint) as world:
        first = await world.launch_operator(0, one_only, [])
        second = await world.launch_operator(1, all_of_them, [])
        await until_done(world, [first, second], or_failed=True)
        assert first.outcome == "success"
        (failure,) = map(str, world.failures)
        assert "returned in subtask 0 before it had done 2 of the items in its hand" in failure


async def test_what_a_streaming_task_kept_in_its_hand_is_done_after_its_success_is_revoked() -> None:  # H100 H17
    queue = WorkQueue("numbers", range(6), in_hand=3)

    def all_but(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        pause(context, 5.0 * context.subtask)
        for item in queue:
            pause(context, 1.0)
            yield item
            if context.subtask == context.attempt == 0:
                return

    async with running_operator(parallelism=2, mode="streaming", uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask, all_but, []) for subtask in range(2)]
        world.begin_checkpoint()
        await until_done(world, tasks[:1])
        assert world.checkpoints, "it holds what the first one has in hand"
        await world.revoke(tasks[0])
        tasks.append(await world.launch_operator(0, all_but, []))
        await until_done(world, tasks)
        assert not world.failures
    assert results(tasks) == list(range(6))


@pytest.mark.parametrize("seed", SEEDS)
async def test_streaming_tasks_that_return_early_fail_the_job_or_leave_nothing_undone(seed: int) -> None:  # H100
    await returned_early_in_streaming_history(seed)


async def test_a_second_action_begins_with_the_roots_again() -> None:
    queue = WorkQueue("tree", ["r"])
    async with running_operator(parallelism=2, uses=[queue]) as world:
        for _ in range(2):
            tasks = [await world.launch_operator(subtask, tree(queue, 4), []) for subtask in range(2)]
            await until_done(world, tasks)
            assert results(tasks) == names(4)


@pytest.mark.parametrize("how", ["break", "raise"])
async def test_others_get_the_items_of_a_loop_that_was_left_although_its_function_goes_on(how: str) -> None:
    """H100 H176"""
    queue = WorkQueue("numbers", range(20), in_hand=8)

    def one_only(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        try:
            for item in queue:
                yield item
                context.wait_for_event(timeout_s=0.5)  # so that its hand is full
                if how == "break":
                    break
                raise KeyError
        except KeyError:
            pass
        context.sleep(60.0)

    def all_of_them(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        context.sleep(0.1)
        yield from queue

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0, one_only, [])
        second = await world.launch_operator(1, all_of_them, [])
        await world.advance(5.0)
        assert sorted([*first.outputs, *second.outputs]) == list(range(20))
        assert first.outputs == [0]
        assert queue.progress == (19, 20), "the last one belongs to the function that goes on"
        await until_done(world, [first, second])
    assert results([first, second]) == list(range(20))


async def test_a_task_may_loop_again_after_it_has_left_its_loop() -> None:  # H100 H176
    queue = WorkQueue("numbers", range(6), in_hand=3)

    def twice(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for item in queue:
            yield item
            context.wait_for_event(timeout_s=0.5)
            break
        context.wait_for_event(timeout_s=5.0)
        yield from queue

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, twice, [])
        await until_done(world, [task])
    assert sorted(task.outputs) == list(range(6))


async def test_what_is_added_outside_the_loop_is_refused() -> None:
    queue = WorkQueue("numbers", [1])

    def wrong(records: Iterator[Any]) -> Iterator[int]:
        queue.add([2])
        yield from queue

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, wrong, [])
        await world.advance(1.0)
    assert isinstance(task.error, LocalProtocolError)
    assert "add inside `for item in queue:`" in str(task.error)


def test_a_queue_says_how_it_is_used_outside_a_task() -> None:
    with pytest.raises(LocalProtocolError, match=r"handle\.subtask"):
        next(iter(WorkQueue("numbers", [1])))
    with pytest.raises(ValueError, match="in_hand must be an int of at least 1"):
        WorkQueue("numbers", [1], in_hand=0)


@pytest.mark.parametrize("one", ["https://example.org", b"bytes", 5])
async def test_a_single_item_is_not_taken_for_several(one: Any) -> None:
    with pytest.raises(TypeError, match=r"roots must be several items, such as a list with one, not"):
        WorkQueue("pages", one)
    queue = WorkQueue[str]("pages", ["root"])

    def crawl(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for _ in queue:
            with pytest.raises(TypeError, match=r"items must be several items"):
                queue.add(one)
            yield "refused"

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, crawl, [])
        await until_done(world, [task])
    assert task.outputs == ["refused"]


@pytest.mark.long
def test_a_million_open_items_take_at_most_200_bytes_each_beside_their_own() -> None:
    count = 1_000_000
    own = sum(sys.getsizeof(encode_event(number)) for number in range(count))
    gc.collect()
    tracemalloc.start()
    try:
        queue = WorkQueue("million", range(count))
        enumerator: Any = queue._enumerator(None)
        enumerator._begun.finish_now()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert queue.progress == (0, count)
    assert (taken - own) / count <= 200


class Readers:
    """The context of a queue's driver half: who runs, and what each subtask was given."""

    def __init__(self, running: dict[int, list[int]]) -> None:
        self.running = running
        self.given: list[tuple[int, str]] = []
        self.by_subtask: dict[int, list[int]] = {}
        self.told: list[int] = []  # that there is no more
        self.coordinator = SimpleNamespace(mode=RestoreMode.BATCH, handles_restored=False)

    def attempts(self, subtask: int) -> list[int]:
        return self.running[subtask]

    def registered_readers(self) -> list[int]:
        return list(self.running)

    def has_no_more_splits(self, subtask: int) -> bool:
        return subtask in self.told

    async def signal_no_more_splits(self, subtask: int) -> None:
        self.told.append(subtask)

    def assigned_splits(self, subtask: int) -> list[Any]:
        return []

    async def assign_splits(self, subtask: int, items: list[Any]) -> None:
        self.given += [(subtask, item[2]) for item in items]
        self.items, self.ids = items, [item[0] for item in items]
        self.by_subtask.setdefault(subtask, []).extend(self.ids)

    def take_back_splits(self, subtask: int, count: int, chosen: Callable[[Any], bool]) -> list[Any]:
        return [item for item in self.items if chosen(item)]


async def a_half(items: list[str], running: dict[int, list[int]]) -> tuple[Any, Readers]:
    readers = Readers(running)
    half: Any = WorkQueue("queue", items)._enumerator(None)
    await half.start(readers)
    return half, readers


def report(*finished: int, wanted: int = 0, last: bool = False) -> list[Any]:
    return Report(finished, (), (), wanted, last).as_event()


async def test_an_attempt_whose_copy_has_failed_goes_on_getting_items() -> None:
    half, readers = await a_half(["a", "b"], {0: [0, 1]})
    await half.handle_source_event(0, 0, report(wanted=1))
    readers.running[0] = [0]
    await half.attempt_ended(0, 1, False)
    await half.handle_source_event(0, 0, report(*readers.ids, wanted=1))
    assert readers.given == [(0, "a"), (0, "b")]


async def test_an_attempt_whose_copy_has_returned_gets_nothing_until_that_has_failed() -> None:
    """If the copy counts, this attempt does not, and what it was given would be done again."""
    half, readers = await a_half(["a"], {0: [0, 1], 1: [0]})
    await half.handle_source_event(0, 1, report(last=True))
    await half.handle_source_event(0, 0, report(wanted=1))
    assert readers.given == []
    readers.running[0] = [0]
    await half.attempt_ended(0, 1, False)
    assert readers.given == [(0, "a")]


async def test_a_subtask_that_is_lost_while_it_waits_gets_nothing_until_its_next_attempt_asks() -> None:
    half, readers = await a_half([], {0: [0], 1: [0]})
    await half.handle_source_event(1, 0, adding((1, 0, "a"), wanted=1))
    await half.handle_source_event(0, 0, report(wanted=1))
    await half.add_splits_back([], 0)
    await half.handle_source_event(1, 0, adding((2, 0, "b"), finished=(1,), wanted=1))
    assert readers.by_subtask == {1: [1, 2]}
    await half.handle_source_event(0, 1, report(wanted=1))
    await half.handle_source_event(1, 0, adding((3, 0, "c")))
    assert readers.by_subtask == {0: [3], 1: [1, 2]}


@pytest.mark.parametrize("copies", [[0], [0, 1]])
async def test_a_subtask_that_wants_nothing_any_more_gets_nothing(copies: list[int]) -> None:
    half, readers = await a_half([], {0: copies, 1: [0]})
    await half.handle_source_event(1, 0, adding((1, 0, "a"), wanted=1))
    await half.handle_source_event(0, 0, report(wanted=1))
    await half.handle_source_event(0, 0, report(wanted=0))
    await half.handle_source_event(1, 0, adding((2, 0, "b")))
    assert readers.by_subtask == {1: [1]}


async def test_what_an_attempt_wants_is_not_forgotten_when_its_copy_has_returned_and_failed() -> None:
    half, readers = await a_half([], {0: [0, 1], 1: [0]})
    await half.handle_source_event(1, 0, adding((1, 0, "a"), wanted=1))
    await half.handle_source_event(0, 1, report(wanted=1))
    await half.handle_source_event(0, 0, report(last=True))
    await half.handle_source_event(1, 0, adding((2, 0, "b")))
    assert readers.by_subtask == {1: [1]}
    readers.running[0] = [1]
    await half.attempt_ended(0, 0, False)
    assert readers.by_subtask == {0: [2], 1: [1]}


async def test_what_only_the_first_attempt_has_done_is_undone_if_its_copy_counts() -> None:  # H100
    half, readers = await a_half(["a", "b"], {0: [0]})
    await half.handle_source_event(0, 0, report(wanted=1))
    first = readers.items
    await half.handle_source_event(0, 0, report(wanted=1))
    both = readers.items = first + readers.items
    readers.assigned_splits = lambda subtask: both  # type: ignore[method-assign]
    await half.handle_source_event(0, 0, report(both[0][0]))
    assert half.progress == (1, 2)
    readers.running[0] = [0, 1]
    await half.handle_source_event(0, 1, report(last=True))
    await half.attempt_ended(0, 1, True)
    assert half.progress == (0, 2)


async def test_the_copy_of_an_attempt_that_counts_gets_nothing() -> None:
    half, readers = await a_half(["a"], {0: [0, 1], 1: [0]})
    readers.running[0] = [1]
    await half.attempt_ended(0, 0, True)
    await half.handle_source_event(0, 1, report(wanted=1))
    await half.handle_source_event(1, 0, report(wanted=1))
    assert readers.given == [(1, "a")]


async def test_the_work_is_over_when_an_attempt_counts_although_its_copy_has_done_less() -> None:
    half, readers = await a_half(["a"], {0: [0, 1], 1: [0]})
    await half.handle_source_event(0, 0, report(wanted=1))
    await half.handle_source_event(0, 1, report(last=True))
    await half.handle_source_event(0, 0, report(*readers.ids, last=True))
    assert readers.told == [], "if the copy counts, what it has not done is left"
    readers.running[0] = [1]
    await half.attempt_ended(0, 0, True)
    assert readers.told == [0, 1]


@pytest.mark.parametrize("kept", [False, True])
async def test_what_reaches_a_streaming_task_after_its_function_has_returned_goes_to_others(kept: bool) -> None:
    """Unlike what it keeps in its state, no checkpoint holds it (H100)."""
    failures: list[str] = []
    half, readers = await a_half(["a"], {0: [0], 1: [0]})
    readers.coordinator.mode, readers.coordinator.fail_job = RestoreMode.STREAMING, failures.append
    await half.handle_source_event(0, 0, report(wanted=1))
    await half.handle_source_event(0, 0, Report((), (), tuple(readers.ids) if kept else (), 0, last=True).as_event())
    readers.running[0] = []
    await half.attempt_ended(0, 0, True)
    await half.handle_source_event(1, 0, report(wanted=1))
    assert readers.given == [(0, "a")] + ([] if kept else [(1, "a")])
    assert len(failures) == kept


@pytest.mark.parametrize("partitions", [2, 3])
async def test_a_run_without_a_partition_for_restored_items_fails_in_place_of_waiting(partitions: int) -> None:  # H100
    """Two of three subtasks have an item in hand at the checkpoint, and the input comes again in two partitions."""

    async def look_at_run() -> StageLook:
        return StageLook(partition_count=partitions)

    failures: list[str] = []
    half, readers = await a_half(["a", "b"], {0: [0], 1: [], 2: [0]})
    readers.coordinator.mode = RestoreMode.STREAMING
    for subtask in (0, 2):
        await half.handle_source_event(subtask, 0, report(wanted=1))
    state = await half.snapshot_state(1)

    restored: Any = WorkQueue("queue", ["a", "b"])._enumerator(state)
    readers.running = {0: [0], 1: [0]}
    readers.coordinator.fail_job, readers.coordinator.look_at_run = failures.append, look_at_run
    await restored.start(readers)
    await restored.handle_source_event(1, 0, report(wanted=1))
    assert not failures, "subtask 0 still works on what it has restored"
    await restored.handle_source_event(0, 0, report(*readers.by_subtask[0], wanted=1))
    assert len(failures) == (partitions == 2)
    if failures:
        assert failures[0].startswith("a checkpoint holds 1 items of a work queue for subtasks that have no partition")


async def test_a_restored_report_of_a_function_that_had_returned_says_nothing_about_the_next_attempt() -> None:
    """It asks for items itself, or works on what it has restored (H100 H151)."""
    half, readers = await a_half(["a"], {0: [0]})
    readers.coordinator.mode, readers.coordinator.handles_restored = RestoreMode.STREAMING, True
    await half.handle_source_event(0, 0, report(last=True))
    readers.coordinator.handles_restored = False
    await half.handle_source_event(0, 0, report(wanted=1))
    assert readers.given == [(0, "a")]


# --- what tasks make the driver keep ----------------------------------------------------------------------------------


def adding(*items: tuple[int, int, Any], finished: tuple[int, ...] = (), wanted: int = 0) -> list[Any]:
    return Report(finished, items, (), wanted).as_event()


async def a_bounded_half(bytes_max: int, mode: RestoreMode = RestoreMode.BATCH, roots: Any = ()) -> tuple[Any, Readers]:
    readers = Readers({0: [0]})
    readers.coordinator.mode = mode
    half: Any = WorkQueue("queue", roots, bytes_max=bytes_max, in_hand=100)._enumerator(None)
    await half.start(readers)
    return half, readers


LIMIT = "what tasks have added to the work queue 'queue' would exceed the limit of {} bytes: add smaller items"


async def test_items_of_tasks_are_bounded_by_their_bytes_and_their_number() -> None:  # H157
    for value, most in (("x", 24), ("x" * 1000, 7), (None, 24)):
        half, _ = await a_bounded_half(10_000 + driver_half.PRIORITY_BYTES)
        for number in range(most):
            await half.handle_source_event(0, 0, adding((number, 0, value)))
        with pytest.raises(ValueError, match=LIMIT.format(11_000)):
            await half.handle_source_event(0, 0, adding((99, 0, value)))
        assert half.known == most, "what is refused changes nothing"


async def test_the_same_item_counts_once_and_roots_do_not_count() -> None:  # H157
    half, _ = await a_bounded_half(2000, roots=["x" * 100_000])
    for _ in range(100):
        await half.handle_source_event(0, 0, adding((1, 0, "item")))
    assert half.known == 2


async def test_each_priority_of_which_an_item_waits_counts() -> None:  # H157
    half, readers = await a_bounded_half(14_500)
    for number in range(10):
        await half.handle_source_event(0, 0, adding((number, number, None)))
    with pytest.raises(ValueError, match=LIMIT.format(14_500)):
        await half.handle_source_event(0, 0, adding((10, 10, None)))
    await half.handle_source_event(0, 0, adding(wanted=100))
    assert len(readers.given) == 10
    await half.handle_source_event(0, 0, adding((11, 11, None)))


async def test_in_batch_mode_finished_items_count_because_a_lost_task_gives_them_back() -> None:  # H157
    half, readers = await a_bounded_half(6_000)
    most = (6_000 - driver_half.PRIORITY_BYTES) // (driver_half.ITEM_BYTES + 1)
    for number in range(most):
        await half.handle_source_event(0, 0, adding((number, 0, None), wanted=1))
        assert readers.ids == [number]
        await half.handle_source_event(0, 0, adding(finished=(number,)))
    with pytest.raises(ValueError, match=LIMIT.format(6_000)):
        await half.handle_source_event(0, 0, adding((99, 0, None), wanted=1))


async def test_in_streaming_mode_items_count_until_a_checkpoint_after_them_is_complete() -> None:  # H157
    half, _ = await a_bounded_half(20_000, RestoreMode.STREAMING)

    async def work_off(first: int) -> None:
        for number in range(first, first + 20):
            await half.handle_source_event(0, 0, adding((number, 0, "x" * 300), wanted=1))
            await half.handle_source_event(0, 0, adding(finished=(number,)))

    await work_off(0)
    with pytest.raises(ValueError, match=LIMIT.format(20_000)):
        await work_off(20)
    half, _ = await a_bounded_half(20_000, RestoreMode.STREAMING)
    for checkpoint_id in range(1, 6):
        await work_off(20 * checkpoint_id)
        await half.snapshot_state(checkpoint_id)
        if checkpoint_id != 3:
            continue_with = half._account.total
            await half.notify_checkpoint_complete(checkpoint_id)
            assert half._account.total < continue_with
        else:
            break
    assert half._account.total > 20 * 700, "checkpoint 3 may still be restored without them"
    await half.notify_checkpoint_complete(4)
    assert half._account.total == 60 * driver_half.ID_BYTES, "the ids stay"


async def test_a_reset_charges_what_its_subtask_does_again_and_nothing_of_others() -> None:  # H153 H157
    half, readers = await a_bounded_half(20_000, RestoreMode.STREAMING)
    readers.running = {0: [0], 1: [0]}
    await half.handle_source_event(0, 0, adding((1, 0, "x" * 300), wanted=1))
    await half.handle_source_event(1, 0, adding((2, 0, "x" * 300), wanted=1))
    both = half._account.total
    assert readers.by_subtask == {0: [1], 1: [2]}
    for subtask in (0, 1):
        await half.handle_source_event(subtask, 0, adding(finished=(subtask + 1,)))
        await half.snapshot_state(subtask + 1)
    await half.subtask_reset(0, 0)
    await half.notify_checkpoint_complete(2)
    assert half._account.total == both // 2 + driver_half.ID_BYTES, "one is in work again, and the other one is done"


async def test_a_task_is_given_no_more_than_it_holds_at_a_time_whatever_it_wants() -> None:  # H157
    half, readers = await a_bounded_half(10**6, roots=range(1000))
    await half.handle_source_event(0, 0, adding(wanted=2**62))
    assert len(readers.given) == 100


@pytest.mark.parametrize(
    "event",
    [
        adding((-1, 0, None)),
        adding((1, 2**64, None)),
        adding(("id", 0, None)),  # type: ignore[arg-type]
        adding((1, "high", None)),  # type: ignore[arg-type]
        adding((1, 0)),  # type: ignore[arg-type]
        adding(finished=([],)),  # type: ignore[arg-type]
        Report((), (), ({},), 0).as_event(),  # type: ignore[arg-type]
        ["headgate/work-report", 1, 2, 3, 4, False, 0],
    ],
    ids=repr,
)
async def test_a_report_that_no_task_sends_is_refused(event: Any) -> None:  # H157
    half, _ = await a_bounded_half(10_000)
    with pytest.raises(RemoteProtocolError, match="not a report of a work queue"):
        await half.handle_source_event(0, 0, event)
    assert half.known == 0


async def test_large_items_leave_a_task_in_several_events() -> None:  # H157
    """All that one item adds in one event would exceed the limit of an event."""
    queue: WorkQueue[Any] = WorkQueue("large", [0])
    done: list[int] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for item in queue:
            if item == 0:
                queue.add(bytes(2**20) for _ in range(70))
            else:
                done.append(len(item))
        yield None

    async with running_operator(parallelism=1, uses=[queue]) as world:
        await until_done(world, [await world.launch_operator(0, run, [])])
    assert done == [2**20] * 70


async def test_a_task_that_adds_without_end_fails_its_operator_with_the_limit_and_no_other() -> None:  # H157
    queue: WorkQueue[Any] = WorkQueue("endless", [0], bytes_max=50_000)

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for _ in queue:
            while True:
                queue.add(["x" * 100] * 256)
                context.sleep(0.1)
        yield None

    async with running_operator(parallelism=1, uses=[queue]) as world:
        await world.launch_operator(0, run, [])
        await world.advance(5.0)
        (failure,) = map(str, world.failures)
    assert "'endless' would exceed the limit of 50000 bytes" in failure
    assert "raise bytes_max of the queue" in failure
