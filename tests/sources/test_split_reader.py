# SPDX-License-Identifier: Apache-2.0

"""A split reader takes part in checkpoints: its splits in hand, and their positions (H130)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate import CheckpointConfig, SourceCoordinator, SplitReader, StaticSplitEnumerator, SubtaskContext
from headgate.errors import CheckpointFailed
from headgate.sources import DiscoveringSplitEnumerator, SplitAt, SplitEnumerator, SplitEnumeratorContext
from headgate.testing import OperatorTask, World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.describing import line
from tests.primitives.stage_histories import Numbers, chain_history

pytestmark = pytest.mark.anyio

STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}


class Slow(Numbers):
    """Ten numbers in a second."""

    def __init__(self) -> None:
        super().__init__(10.0)


def source_of(*splits: Any, **settings: Any) -> Callable[[], SourceCoordinator]:
    return lambda: SourceCoordinator(lambda state: StaticSplitEnumerator(splits, state, **settings))


async def until_over(world: World, *tasks: OperatorTask) -> None:
    for _ in range(200):
        if all(task.outcome for task in tasks):
            return
        await world.advance(0.5)
    raise AssertionError(f"{tasks} do not end")


async def checkpoint_after(world: World, seconds: float) -> CompletedCheckpoint:
    await world.advance(seconds)
    answer = world.begin_checkpoint()
    await world.advance(0.2)
    assert answer.value
    return world.checkpoints[-1]


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_reads_every_row_once_whatever_dies(seed: int) -> None:  # H80
    asyncio.run(chain_history(seed))


async def test_a_lost_reader_goes_on_from_the_last_checkpoint_and_later_splits_go_back() -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator([[0, 10], [10, 20], [20, 30]], state))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Slow)
        await checkpoint_after(world, 0.5)
        await world.advance(1.0)
        assert max(task.outputs) > 10, "it has begun the second split"
        await world.kill(task)
        assert source.splits_given_back == 1, "the first one is in the checkpoint"
        again = await world.retry(task)
        await until_over(world, again)
        assert again.outputs == list(range(again.outputs[0], 30))
        assert 0 < again.outputs[0] < 10


class Whole(SplitReader):
    """Without positions. Lets the world move between its outputs."""

    def read_split(self, split: Any, /) -> Iterator[Any]:
        for number in range(*split):
            self.context.sleep(0.1)
            yield number


async def test_a_reader_without_positions_reads_a_split_either_completely_or_not_at_all() -> None:
    splits = [[0, 10], [10, 20], [20, 30]]
    async with running_operator(source_of(*splits, batch_size=3), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Whole)
        await world.advance(0.55)
        answer = world.begin_checkpoint()
        await world.advance(0.2)
        assert len(task.outputs) < 10
        with pytest.raises(AssertionError):
            _ = answer.value  # it waits for the end of the split
        await world.advance(0.5)
        assert answer.value == 1
        restored = world.checkpoints[-1]
    async with running_operator(source_of(*splits), parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Whole)
        await until_over(world, task)
        assert task.outputs == list(range(10, 30))


async def test_a_reader_without_positions_that_waits_inside_a_split_declines_the_checkpoint() -> None:
    class Waiting(SplitReader):
        def read_split(self, split: Any, /) -> Iterator[Any]:
            self.context.wait_for_event(timeout_s=1.0)
            yield split

    async with running_operator(source_of(1), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Waiting)
        with pytest.raises(CheckpointFailed, match="define read_from"):
            await world.checkpoint()
        await until_over(world, task)
        assert task.outputs == [1]


async def test_a_reader_that_keeps_its_own_state_still_does() -> None:
    class Own(SplitReader):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            self.restored = state

        def read_split(self, split: Any, /) -> Iterator[Any]:
            self.context.wait_for_event(timeout_s=1.0)
            yield split

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b"mine"

    async with running_operator(source_of(1), parallelism=1, **STREAMING) as world:
        await world.launch_operator(0, Own)
        await world.checkpoint()
        restored = world.checkpoints[0]
    async with running_operator(source_of(1), parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Own)
        assert isinstance(task.operator, Own)
        assert task.operator.restored == b"mine"
    async with running_operator(source_of(1), parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Whole)
        assert "was not made by a SplitReader" in str(task.error)


async def test_a_subclass_adds_its_own_state_to_that_of_the_splits() -> None:
    class Summing(Slow):
        total = 0

        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            total, _, splits = (state or b"0|").partition(b"|")
            self.total = int(total)
            super().open(context, splits or None)

        def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
            for after, number in super().read_from(split, position):
                self.total += number
                yield after, number

        def finish(self) -> list[Any]:
            return [("total", self.total)]

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b"%d|" % self.total + super().snapshot_state(checkpoint_id)

    async with running_operator(source_of([0, 20]), parallelism=1, **STREAMING) as world:
        await world.launch_operator(0, Summing)
        restored = await checkpoint_after(world, 0.75)
    async with running_operator(source_of([0, 20]), parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Summing)
        await until_over(world, task)
        assert task.outputs[-1] == ("total", sum(range(20)))


class FromPositions(SplitEnumerator):
    """Assigns one split from a position on, and notes with what it comes back."""

    def __init__(self) -> None:
        self.back: list[Any] = []
        self.pending: list[Any] = [SplitAt([0, 10], 4)]

    async def start(self, context: SplitEnumeratorContext) -> None:
        self.context = context

    async def handle_split_request(self, subtask: int) -> None:
        if self.pending:
            await self.context.assign_splits(subtask, [self.pending.pop()])
        else:
            await self.context.signal_no_more_splits(subtask)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self.back += splits
        self.pending += splits


async def test_a_split_is_assigned_from_a_position_on_and_comes_back_with_it() -> None:
    enumerator = FromPositions()
    source = SourceCoordinator(lambda state: enumerator)
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Slow)
        await world.advance(0.3)
        assert task.outputs[0] == 4
        await world.kill(task)
        assert enumerator.back == [SplitAt([0, 10], 4)]
        again = await world.retry(task)
        await until_over(world, again)
        assert again.outputs == list(range(4, 10))


async def test_a_reader_without_positions_refuses_a_split_from_a_position_on() -> None:
    async with running_operator(SourceCoordinator(lambda state: FromPositions()), parallelism=1) as world:
        task = await world.launch_operator(0, Whole)
        await world.settle()
        assert isinstance(task.error, TypeError)
        assert "has no positions: define read_from" in str(task.error)


class Log(SplitReader):
    """An unbounded reader of several partitions at the same time. What it reads is in ``LOGS``."""

    splits_open_max = 3

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        at = position or 0
        while True:
            if at < len(LOGS[split]):
                at += 1
                yield at, LOGS[split][at - 1]
            else:
                yield None

    def backlog(self, split: Any, position: Any) -> int:
        return len(LOGS[split]) - (position or 0)


LOGS: dict[str, list[str]] = {}


async def test_an_unbounded_reader_reads_its_splits_in_turns_and_goes_on_when_more_comes() -> None:
    LOGS.update({"a": ["a1", "a2", "a3"], "b": ["b1"], "c": []})

    class Assigning(SplitEnumerator):
        async def start(self, context: SplitEnumeratorContext) -> None:
            self.context = context

        async def add_reader(self, subtask: int) -> None:
            await self.context.assign_splits(subtask, ["a", "b", "c"])

    source = SourceCoordinator(lambda state: Assigning())
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Log)
        await world.settle()
        assert task.outputs == ["a1", "b1", "a2", "a3"]
        await world.checkpoint()
        LOGS["c"].append("c1")
        LOGS["b"].append("b2")
        await world.advance(0.5)
        assert sorted(task.outputs[4:]) == ["b2", "c1"]
        await world.kill(task)
        again = await world.retry(task)
        await world.advance(0.5)
        assert sorted(again.outputs) == ["b2", "c1"]


async def test_the_backlog_of_each_open_split_is_known_and_forgotten_with_its_reader() -> None:
    LOGS.update({"a": ["a1"], "b": []})

    class Slowly(Log):
        rate_limit_per_s = 1.0

    source = SourceCoordinator(lambda state: StaticSplitEnumerator(["a", "b"], state, batch_size=2))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        LOGS["a"] += ["x"] * 10
        task = await world.launch_operator(0, Slowly)
        await world.advance(1.5)
        reported = dict(source.backlogs[0])
        assert 0 < reported["a"] <= 10
        assert reported["b"] == 0
        assert source.backlog[:3] == (0, 2, sum(reported.values()))
        assert source.backlog.largest == ((0, "a", reported["a"]), (0, "b", 0))
        await world.kill(task)
        assert source.backlogs == {}
        assert list(source.backlog[:3]) == [2, 0, None], "they were given back"


async def test_the_backlog_of_a_source_has_what_is_open_what_waits_in_tasks_and_what_is_not_handed_out() -> None:
    class Counting(SplitReader):
        """Reads a number in each second, up to the split."""

        rate_limit_per_s = 1.0

        def read_from(self, split: str, position: int | None, /) -> Iterator[tuple[int, int]]:
            for number in range(position or 0, int(split)):
                yield number + 1, number

        def backlog(self, split: str, position: int | None) -> int:
            return int(split) - (position or 0)

    def enumerator(state: bytes | None) -> DiscoveringSplitEnumerator:
        return DiscoveringSplitEnumerator(
            lambda: ["8", "4", "2", "1"], state, batch_size=2, backlog=lambda split, position: int(split)
        )

    source = SourceCoordinator(enumerator)
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        assert source.backlog[:3] == (4, 0, 15)
        task = await world.launch_operator(0, Counting)
        await world.advance(2.0)
        pending, in_hand, amount = source.backlog[:3]
        assert (pending, in_hand) == (2, 2)
        assert 9 <= (amount or 0) < 15, "2 and 1 are pending, 4 waits in the task, and 8 is being read"
        await world.advance(30.0)
        assert task.outcome == "success"
        assert source.backlog[:3] == (0, 0, 0)


async def test_the_splits_with_the_most_left_are_shown_first_and_long_names_are_cut() -> None:
    left = {f"split {number} {'x' * 300}": number * 7 % 16 for number in range(16)}

    class Shown(SplitReader):
        splits_open_max = 8

        def read_from(self, split: str, position: int | None, /) -> Iterator[tuple[int, int] | None]:
            while True:
                yield None

        def backlog(self, split: str, position: int | None) -> int:
            return left[split]

    source = SourceCoordinator(lambda state: StaticSplitEnumerator(list(left), state, batch_size=8))
    async with running_operator(source, parallelism=2, **STREAMING) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, Shown)
        await world.advance(3.0)
        shown = source.backlog.largest
        assert [one.amount for one in shown] == [15, 14, 13, 12, 11, 10, 9, 8, 7, 6]
        assert {one.subtask for one in shown} == {0, 1}
        number = {amount: split for split, amount in left.items()}
        assert [one.split for one in shown] == [line(number[one.amount], 200) for one in shown]


async def test_splits_in_tasks_count_although_their_readers_do_not_say_what_is_left() -> None:
    class Silent(SplitReader):
        rate_limit_per_s = 1.0

        def read_from(self, split: Any, position: int | None, /) -> Iterator[tuple[int, int]]:
            yield from ((number + 1, number) for number in range(100))

    source = SourceCoordinator(lambda state: StaticSplitEnumerator(["a", "b", "c"], state, batch_size=2))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        await world.launch_operator(0, Silent)
        await world.advance(2.0)
        assert list(source.backlog) == [1, 2, None, ()]


async def test_the_rate_limit_is_for_all_tasks_together() -> None:
    class Limited(Numbers):
        def __init__(self) -> None:
            super().__init__(10.0)

        def weight(self, output: Any) -> float:
            return 2.0

    async with running_operator(source_of([0, 1000], [1000, 2000]), parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, Limited) for subtask in range(2)]
        await world.advance(20.0)
        assert sum(len(task.outputs) for task in tasks) == pytest.approx(100, abs=4)


async def test_a_reader_closes_its_splits_when_it_ends_early() -> None:
    closed: list[Any] = []

    class Closing(SplitReader):
        def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
            try:
                yield 1, split
                self.context.wait_for_event()
                raise ArithmeticError("woken")
            finally:
                closed.append(split)

    source = SourceCoordinator(lambda state: StaticSplitEnumerator(["only"], state))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Closing)
        await world.checkpoint()
        await world.settle()
        assert isinstance(task.error, ArithmeticError)
    assert closed == ["only"]
