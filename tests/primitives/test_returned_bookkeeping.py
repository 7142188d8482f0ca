# SPDX-License-Identifier: Apache-2.0

"""What a reset returns to ready-made parts, and what a restored message does to them (H151, H153)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headgate import SharedValue, SubtaskContext, SubtaskOperator, WorkQueue
from headgate.testing import running_operator
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.counters.book import Book
from spark_bridge.primitives.counters.driver import CountersCoordinator
from tests.primitives.histories import pause, until_done

pytestmark = pytest.mark.anyio


class Visiting(SubtaskOperator):
    """Adds other children in each visit of an item. Its state is what it has done."""

    def __init__(self, queue: WorkQueue[str], done: list[str], visits: list[str]) -> None:
        self.queue = queue
        self.all_done = done
        self.visits = visits

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[str]:
        for item in self.queue:
            pause(self.context, 1.0 if item == "slow" else 10.0 * (self.context.attempt == 0) + 0.1)
            if item == "slow":
                self.visits.append(item)
                self.queue.add([f"child {len(self.visits)}"])
            self.all_done.append(item)
            yield item

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"there"


@pytest.mark.parametrize("in_hand", [1, 2, 5])
@pytest.mark.parametrize("key", [None, str])
@pytest.mark.parametrize("others", [0, 1, 3])
async def test_what_a_restored_task_finds_in_its_second_visit_of_an_item_is_not_lost(
    others: int, key: Any, in_hand: int
) -> None:
    queue = WorkQueue("queue", ["slow", *(f"quick {number}" for number in range(others))], key=key, in_hand=in_hand)
    done: list[str] = []  # H153
    visits: list[str] = []

    def make() -> Visiting:
        return Visiting(queue, done, visits)

    async with running_operator(parallelism=2, uses=[queue], mode="streaming") as world:
        first = await world.launch_operator(0, make, [])
        await world.settle()
        second = await world.launch_operator(1, make, [])
        await world.kill(second)
        second = await world.launch_operator(1, make, [])  # its items take less time
        world.begin_checkpoint()
        await world.advance(0.5)
        assert world.checkpoints, "the checkpoint has the slow item in the first task's hand"
        await world.advance(0.7)
        assert "slow" in done, "and the driver knows that it is finished"
        await world.kill(first)
        await world.advance(1.0)  # what was given back is done meanwhile, and the rest is in work again
        again = await world.launch_operator(0, make, [])
        await until_done(world, [again, second])
        assert not world.failures
    assert len(visits) == 2
    assert "child 2" in done


async def test_a_copy_of_a_task_that_is_lost_still_has_its_items_in_work() -> None:  # H153
    queue = WorkQueue("queue", ["slow", "long"])

    def crawl(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            context.sleep({"slow": 1.0 + 3.0 * context.attempt, "long": 2.0}.get(item, 0.1))
            if item == "slow" and context.attempt:
                queue.add(["child of the copy"])
            yield item

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = await world.launch_operator(0, crawl, [])
        await world.settle()
        tasks = [await world.launch_operator(subtask, crawl, []) for subtask in (0, 1)]
        await world.advance(1.5)
        assert first.outputs == ["slow"]
        await world.kill(first)
        await until_done(world, tasks)
        assert not world.failures
    assert sorted(tasks[0].outputs + tasks[1].outputs) == ["child of the copy", "long", "slow"]


async def test_what_only_a_copy_that_counts_has_found_after_the_work_ended_fails_the_job() -> None:  # H153
    """Every other task was told that there is no more, so nobody would do it."""
    queue = WorkQueue("queue", ["slow"])

    def crawl(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            pause(context, 1.0 + 3.0 * context.attempt)
            if context.attempt:
                queue.add(["child of the copy"])
            yield item
        pause(context, 60.0 * (1 - context.attempt))

    async with running_operator(parallelism=1, uses=[queue]) as world:
        tasks = [await world.launch_operator(0, crawl, []) for _ in range(2)]
        await until_done(world, tasks)
        await world.settle()
        assert "after a copy of it had done the same items" in str(world.failures)


async def test_the_end_of_copies_that_do_not_count_takes_back_nothing() -> None:
    """H100: a subtask with three attempts, of which one has succeeded; the other two are lost one after the other."""
    queue = WorkQueue("queue", ["a", "b", "c"])

    def take(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        yield from queue
        pause(context, 100.0 * context.attempt)

    async with running_operator(parallelism=2, uses=[queue]) as world:
        first = [await world.launch_operator(0, take) for _ in range(3)]
        await world.advance(1.0)
        assert first[0].outcome == "success"
        assert queue.progress == (3, 3)
        await until_done(world, [await world.launch_operator(1, take)])
        assert queue.progress == (3, 3)


async def test_each_of_several_equal_items_is_done_without_a_key() -> None:  # H100
    queue = WorkQueue("queue", ["root"])

    def crawl(records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            if item == "root":
                queue.add(["same", "same", "other", "same"])
            yield item

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, crawl, [])
        await until_done(world, [task])
    assert sorted(task.outputs) == ["other", "root", "same", "same", "same"]


async def test_what_was_finished_before_a_checkpoint_is_not_waited_for_after_a_reset_to_it() -> None:  # H153
    queue = WorkQueue("queue", range(6))

    def make() -> Visiting:
        return Visiting(cast("WorkQueue[str]", queue), [], [])

    async with running_operator(parallelism=1, uses=[queue], mode="streaming") as world:
        await world.kill(await world.launch_operator(0, make, []))
        task = await world.launch_operator(0, make, [])
        await world.advance(0.25)
        world.begin_checkpoint()
        await world.advance(0.2)
        assert world.checkpoints
        await world.kill(task)
        again = await world.launch_operator(0, make, [])
        await until_done(world, [again])
        assert queue.progress == (6, 6)


class Quiet:
    """The context of a coordinator that nothing happens to."""

    mode = RestoreMode.STREAMING
    parallelism = 2
    handles_restored = False
    input_begins_again = True
    log: Any = None


async def counting(*counts: tuple[int | None, int]) -> CountersCoordinator:
    counters = CountersCoordinator()
    context: Any = Quiet()
    await counters.start(context)
    for checkpoint_id, number in counts:
        await report(counters, checkpoint_id, number)
    return counters


async def report(counters: CountersCoordinator, checkpoint_id: int | None, number: int) -> None:
    book = Book()
    book.count("rows", number)
    await counters.handle_event_from_operator(0, 0, [checkpoint_id, book.as_value()])


async def test_counts_return_to_a_checkpoint_before_which_nothing_was_counted_but_one_was_aborted() -> None:
    """H153. The task files its counts once, under the aborted checkpoint, because they have not changed since."""
    for late in (False, True):
        counters = await counting((None, 5))
        await counters.checkpoint_coordinator(1)
        await report(counters, 1, 5)
        await counters.notify_checkpoint_complete(1)
        await counters.checkpoint_coordinator(2)
        if not late:
            await report(counters, 2, 9)
        await counters.notify_checkpoint_aborted(2)
        if late:
            await report(counters, 2, 9)
        await counters.checkpoint_coordinator(3)
        await counters.notify_checkpoint_complete(3)
        await report(counters, None, 12)
        failed: Any = None
        await counters.subtask_failed(0, 0, failed)
        await counters.subtask_reset(0, 3)
        assert counters.totals() == {"rows": 9}


async def test_aborted_checkpoints_leave_no_counts_behind() -> None:  # H153 H157
    counters = await counting((None, 5))
    await counters.checkpoint_coordinator(1)
    for number in range(2, 50):
        await counters.checkpoint_coordinator(number)
        await report(counters, number, number)
        await counters.notify_checkpoint_aborted(number)
    assert len(counters._filed[0]) <= 2


class Restoring(Quiet):
    """A coordinator's context while a message of a restored checkpoint is handled. Whatever is sent fails."""

    handles_restored = True
    operator_id = "operator"
    clock = SimpleNamespace(now=lambda: 0.0)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a restored message makes it use {name}")

    def call_soon_threadsafe(self, handler: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("part", "events"),
    [
        (SharedValue("value", 1), [["want", 1, False], ["applied", 1]]),
    ],
)
async def test_a_restored_event_of_a_part_is_not_answered_and_changes_nothing(part: Any, events: list[Any]) -> None:
    half = part.coordinator("operator")  # H151
    await half.start(Restoring())
    for event in events:
        await half.handle_event_from_operator(7, 0, event)
    assert part.version == 1
