# SPDX-License-Identifier: Apache-2.0

"""Enumerators that find splits while tasks read (H131), and several sources in a row (H132)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import isfunction
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordination.engine.inputs import RestoredInput
from actors.coordination.sources.enumerators import FAILURES_MAX, HybridSplitEnumerator
from headgate import CheckpointConfig, SourceCoordinator, SplitReader, StaticSplitEnumerator, SubtaskContext
from headgate.sources import (
    DiscoveringSplitEnumerator,
    HybridSource,
    Source,
    SplitAt,
    SplitEnumerator,
    SplitEnumeratorContext,
)
from headgate.testing import running_operator
from headgate.testing._bookkeeping import with_held
from protocol.errors import LocalProtocolError
from protocol.source_events import backlog_event, split_request_event, split_to_value
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.state import decode_state
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.sources.postgres.driver import POSTGRES, PostgresEnumerator
from spark_bridge.sources.postgres.task import CHANGES_READ
from tests.primitives.stage_histories import Numbers
from tests.sources.test_split_reader import until_over

pytestmark = pytest.mark.anyio

STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}


class Names(SplitReader):
    """Yields the name of each split."""

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        if position is None:
            yield 1, split


class Holding(Names):
    """Never ends with its first split."""

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        self.context.wait_for_event()
        yield 1, split


def discovering(found: list[str], **settings: Any) -> SourceCoordinator:
    return SourceCoordinator(lambda state: DiscoveringSplitEnumerator(lambda: list(found), state, **settings))


async def test_new_splits_are_found_while_tasks_wait_and_each_is_read_once() -> None:
    found = ["a", "b"]
    async with running_operator(discovering(found, every_s=1.0), parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, Names) for subtask in range(2)]
        await world.settle()
        assert sorted(tasks[0].outputs + tasks[1].outputs) == ["a", "b"]
        found += ["c", "a"]
        await world.advance(1.0)
        found.append("d")
        await world.advance(1.0)
        assert sorted(tasks[0].outputs + tasks[1].outputs) == ["a", "b", "c", "d"]
        assert not tasks[0].outcome, "it waits for more"


async def test_a_restored_enumerator_knows_what_was_found_and_looks_for_what_is_new() -> None:
    found = ["a", "b"]
    async with running_operator(discovering(found, every_s=1.0), parallelism=1, **STREAMING) as world:
        await world.launch_operator(0, Names)
        await world.settle()
        await world.checkpoint()
        restored = world.checkpoints[-1]
    found.append("c")
    async with running_operator(
        discovering(found, every_s=1.0), parallelism=1, restored=restored, **STREAMING
    ) as world:
        task = await world.launch_operator(0, Names)
        await world.advance(3.0)
        assert task.outputs == ["c"]


async def test_without_discovery_the_source_ends_with_what_it_found_first_also_after_a_restore() -> None:
    found = ["a", "b", "c"]
    async with running_operator(discovering(found, batch_size=2), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Names)
        await until_over(world, task)
        assert task.outputs == ["a", "b", "c"]
        restored = world.checkpoints[-1]
    found.append("too late")
    ways: list[tuple[RestoredInput, list[str]]] = [("same", []), ("other", ["too late"])]
    for input_is, outputs in ways:  # H174
        async with running_operator(
            discovering(found), parallelism=1, restored=restored, restored_input=input_is, **STREAMING
        ) as world:
            task = await world.launch_operator(0, Names)
            await until_over(world, task)
            assert task.outputs == outputs


async def test_what_a_lost_task_gives_back_goes_to_one_that_waits() -> None:
    async with running_operator(discovering(["a"], every_s=60.0), parallelism=2, **STREAMING) as world:
        first = await world.launch_operator(0, Holding)
        second = await world.launch_operator(1, Names)
        await world.kill(first)
        await world.settle()
        assert second.outputs == ["a"]


async def test_what_is_found_while_a_task_reads_goes_to_others_that_ask() -> None:
    found = ["a"]
    async with running_operator(discovering(found, every_s=1.0), parallelism=2, **STREAMING) as world:
        await world.launch_operator(0, Holding)
        await world.settle()
        found += ["b", "c"]
        await world.advance(1.5)
        second = await world.launch_operator(1, Names)
        await world.settle()
        assert sorted(second.outputs) == ["b", "c"]


async def test_discovery_that_fails_is_tried_again_and_fails_the_job_in_the_end() -> None:
    looks: list[int] = []

    def failing() -> list[str]:
        looks.append(1)
        if len(looks) in (1, 3):
            return ["a", str(len(looks))]
        raise OSError("the storage is away")

    source = SourceCoordinator(lambda state: DiscoveringSplitEnumerator(failing, state, every_s=1.0))
    async with running_operator(source, parallelism=1) as world:
        task = await world.launch_operator(0, Names)
        await world.advance(2.5)
        assert task.outputs == ["a", "1", "3"]
        await world.advance(FAILURES_MAX - 1.0)
        assert not world.failures
        await world.advance(1.0)
        assert [str(error) for error in world.failures] == ["the storage is away"]


async def test_discovery_that_fails_at_the_start_keeps_the_coordinator_from_starting() -> None:
    def failing() -> list[str]:
        raise OSError("no such folder")

    with pytest.raises(OSError, match="no such folder"):
        async with running_operator(SourceCoordinator(lambda state: DiscoveringSplitEnumerator(failing, state))):
            pass


@pytest.mark.parametrize("settings", [{"every_s": 0.0}, {"batch_size": 0}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        DiscoveringSplitEnumerator(list, None, **settings)


# --- several sources in a row --------------------------------------------------------------------------------------


class Past(Source):
    """Numbers in splits, read at ten a second for each task."""

    def __init__(self, *splits: list[int]) -> None:
        self.splits = splits

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> StaticSplitEnumerator:
        return StaticSplitEnumerator(self.splits, state)

    @property
    def operator(self) -> Any:
        return Numbers


class Live(Past):
    """Begins where the source before it has ended."""

    def __init__(self, story: list[Any]) -> None:
        super().__init__()
        self.story = story

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> StaticSplitEnumerator:
        self.story.append((state is not None, type(previous).__name__))
        return StaticSplitEnumerator([[100, 110], [110, 120]], state)


class Seeing(Past):
    """Its reader notes in the order of time what it reads."""

    def __init__(self, seen: list[int], *splits: list[int]) -> None:
        super().__init__(*splits)
        self.seen = seen

    @property
    def operator(self) -> Any:
        seen = self.seen

        class Noting(Numbers):
            def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
                for after, number in super().read_from(split, position):
                    self.context.sleep(0.1)
                    seen.append(number)
                    yield after, number

        return Noting


async def test_a_source_begins_when_the_one_before_it_is_read_to_its_end() -> None:
    seen: list[int] = []
    first, second = Seeing(seen, [0, 3], [3, 20]), Seeing(seen, [100, 110], [110, 120])
    source = HybridSource(first, second)
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await until_over(world, *tasks)
        assert sorted(tasks[0].outputs + tasks[1].outputs) == [*range(20), *range(100, 120)]
    assert max(seen.index(number) for number in range(20)) < min(seen.index(number) for number in range(100, 120))


class Uncounted(SplitEnumerator):
    """An enumerator of a user's own: it tells each reader that there is no more, and nobody else."""

    def __init__(self, splits: list[list[int]]) -> None:
        self._splits = splits
        self._context: SplitEnumeratorContext

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context

    async def handle_split_request(self, subtask: int) -> None:
        if self._splits:
            await self._context.assign_splits(subtask, [self._splits.pop(0)])
        else:
            await self._context.signal_no_more_splits(subtask)


class Own(Past):
    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> Any:
        return Uncounted(list(self.splits))


async def test_a_source_that_does_not_count_its_splits_hands_over_when_every_reader_has_been_told() -> None:
    source = HybridSource(Own([0, 3], [3, 20]), Past([100, 110], [110, 120]))
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await until_over(world, *tasks)
        outputs = [task.outputs for task in tasks]
    assert sorted(outputs[0] + outputs[1]) == [*range(20), *range(100, 120)]


async def test_a_task_that_is_lost_before_the_hand_over_delays_it() -> None:
    seen: list[int] = []
    first, second = Seeing(seen, [0, 3], [3, 20]), Seeing(seen, [100, 110], [110, 120])
    source = HybridSource(first, second)
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(0.5)
        answer = world.begin_checkpoint()
        await world.advance(0.3)
        assert answer.value == 1
        slow = next(task for task in tasks if 3 in task.outputs)
        await world.kill(slow)
        await world.advance(1.0)
        assert max(seen) < 100, "the split of the lost task is in its checkpoint, and not yet read"
        again = await world.retry(slow)
        await until_over(world, again, *[task for task in tasks if task is not slow])
    late = len(seen) - 1 - seen[::-1].index(19)
    assert late < seen.index(min(number for number in seen if number >= 100))


async def test_the_next_source_is_built_from_the_one_before_it_once() -> None:
    story: list[Any] = []
    source = HybridSource(Past([0, 5]), Live(story))
    async with running_operator(source.coordinator, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, source.operator)
        await until_over(world, task)
    assert story == [(False, "StaticSplitEnumerator")]


async def test_a_task_that_returns_early_does_not_keep_the_others_from_the_next_source() -> None:  # H132
    """As after a ``limit``: nobody reads what it has left."""

    class Limited(HybridReader):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            return islice(super().process(records), None if self.context.subtask else 1)

    source = HybridSource(Past([0, 10], [10, 12]), Past([100, 105]))
    make = partial(Limited, [Numbers, Numbers])
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, make) for subtask in range(2)]
        await until_over(world, *tasks)
        assert [task.outputs for task in tasks] == [[0], [10, 11, *range(100, 105)]]


def test_a_state_of_more_sources_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="that of 2 sources, but there are 1"):
        HybridSplitEnumerator([Past().enumerator], encode_event([b"", b""]))
    with pytest.raises(ValueError, match="at least one source"):
        HybridSource()


class Counted(Numbers):
    """Has its own state and a rate limit that counts each number twice, and notes each notification."""

    def __init__(self, story: list[Any], limit_per_s: float | None) -> None:
        super().__init__(limit_per_s)
        self.story = story
        self.read = 0

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        own, mine = decode_event(state) if state else (None, 0)
        self.read = mine
        self.story.append(("opened", mine))
        super().open(context, own)

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        for item in super().read_from(split, position):
            self.read += 1
            yield item

    def weight(self, output: Any) -> float:
        return 2.0

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event([super().snapshot_state(checkpoint_id), self.read])

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return encode_event([None, sum(decode_event(state)[1] for state in states.values() if state)])

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.story.append(("complete", checkpoint_id))

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.story.append(("aborted", checkpoint_id))

    def handle_source_event(self, event: Any) -> None:
        self.story.append(("event", event))


class Telling(StaticSplitEnumerator):
    """Sends an event to each reader that asks for its first split."""

    async def add_reader(self, subtask: int) -> None:
        await self._context.send_event(subtask, {"of": len(self._pending)})


class CountedSource(Past):
    def __init__(self, story: list[Any], limit_per_s: float | None, *splits: list[int]) -> None:
        super().__init__(*splits)
        self.story = story
        self.limit_per_s = limit_per_s

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> StaticSplitEnumerator:
        return Telling(self.splits, state)

    @property
    def operator(self) -> Any:
        return partial(Counted, self.story, self.limit_per_s)


async def test_each_reader_of_a_hybrid_source_keeps_its_state_and_hears_of_checkpoints_and_events() -> None:
    """H132. Otherwise a reader of changes would never let its server forget the log."""
    first: list[Any] = []
    second: list[Any] = []
    source = HybridSource(CountedSource(first, 20.0, [0, 40], [40, 80]), CountedSource(second, None, [100, 105]))
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(1.05)
        counts = [len(task.outputs) for task in tasks]
        assert max(counts) <= 10, "ten numbers in two seconds for each task"
        await world.checkpoint()
        await world.settle()
        restored = world.checkpoints[-1]
    assert ("event", {"of": 2}) in first
    assert second == [("opened", 0), ("opened", 0), ("complete", 1), ("complete", 1)]
    assert first.count(("complete", 1)) == 2
    first.clear()
    async with running_operator(source.coordinator, parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, source.operator)
        await until_over(world, task)
        assert first[0] == ("opened", 80 - sum(number < 100 for number in task.outputs))
        assert sorted(task.outputs)[-5:] == [*range(100, 105)]
        assert ("event", {"of": 1}) in second
    source.operator().notify_checkpoint_aborted(9)
    assert first[-1] == second[-1] == ("aborted", 9)


class Reported(Past):
    """Its readers report each split that they have read, and its enumerator notes that."""

    def __init__(self, heard: list[Any], *splits: list[int]) -> None:
        super().__init__(*splits)
        self.heard = heard

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> StaticSplitEnumerator:
        heard = self.heard

        class Noting(StaticSplitEnumerator):
            async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
                heard.append(event)

        return Noting(self.splits, state)

    @property
    def operator(self) -> Any:
        class Reporting(Numbers):
            def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
                yield from super().read_from(split, position)
                self.context.send_event(split)

        return partial(Reporting, 20.0)


async def test_a_report_on_a_split_of_the_first_source_reaches_its_enumerator_after_the_hand_over_too() -> None:
    """H132."""
    first: list[Any] = []
    second: list[Any] = []
    source = HybridSource(Reported(first, [0, 3], [3, 20]), Reported(second, [100, 140], [140, 180]))
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(1.0)
        await world.checkpoint()
        await world.advance(3.0)
        slow = next(task for task in tasks if 3 in task.outputs)
        assert any(number >= 100 for task in tasks for number in task.outputs), "the second source has begun"
        await world.kill(slow)
        again = await world.retry(slow)
        await until_over(world, again, *[task for task in tasks if task is not slow])
    assert sorted(first) == [[0, 3], [3, 20], [3, 20]], "the lost task has read it twice"
    assert all(start >= 100 for start, _ in second)
    assert not world.failures


async def test_an_event_to_a_source_that_has_not_begun_is_refused() -> None:
    hybrid = HybridSplitEnumerator([Past([0, 1]).enumerator, Past().enumerator])
    with pytest.raises(ValueError, match="sent 'early' to source 1, which has not begun: send it later"):
        await hybrid.handle_source_event(0, 0, [1, "early"])


async def test_a_checkpoint_of_another_source_is_refused_by_a_hybrid_source() -> None:
    context: SubtaskContext = SubtaskContext.__new__(SubtaskContext)
    reader = HybridSource(Past()).operator()
    with pytest.raises(LocalProtocolError, match="not made by a hybrid source"):
        reader.open(context, b"something")
    two = HybridSource(Past(), Past()).operator()
    with pytest.raises(LocalProtocolError, match="of 2 sources, but there are 1: add sources only at the end"):
        reader.open(context, two.snapshot_state(1))
    two.open(context, Numbers().snapshot_state(1))


async def test_a_reader_without_positions_is_refused_in_a_hybrid_source() -> None:
    class Old(Past):
        @property
        def operator(self) -> Any:
            class Reader(SplitReader):
                def read_split(self, split: Any, /) -> list[Any]:
                    return [split]

            return Reader

    with pytest.raises(TypeError, match="has no positions"):
        HybridSource(Old()).operator()


async def test_a_split_that_grows_before_it_is_handed_out_leaves_nothing_in_the_backlog() -> None:
    sizes = {"a": 3, "b": 5}
    made: list[DiscoveringSplitEnumerator] = []

    def build(state: bytes | None) -> DiscoveringSplitEnumerator:
        made.append(DiscoveringSplitEnumerator(lambda: ["a", "b"], state, backlog=lambda split, position: sizes[split]))
        return made[-1]

    async with running_operator(SourceCoordinator(build), parallelism=1, **STREAMING) as world:
        await world.settle()
        assert made[0].pending_backlog == 8
        sizes["a"] = 100
        task = await world.launch_operator(0, Names)
        await until_over(world, task)
        assert made[0].pending_backlog == 0


async def test_the_backlog_of_a_hybrid_source_is_that_of_the_sources_that_have_begun() -> None:
    def build(splits: list[str]) -> Any:
        return lambda state, previous: DiscoveringSplitEnumerator(
            lambda: splits, state, backlog=lambda split, position: int(split)
        )

    made: list[HybridSplitEnumerator] = []

    def hybrid(state: bytes | None) -> HybridSplitEnumerator:
        made.append(HybridSplitEnumerator([build(["1", "2"]), build(["40", "50"])], state))
        return made[-1]

    class Tagged(Names):
        def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
            yield from super().read_from(split[1], position)

    class Slowly(Tagged):
        rate_limit_per_s = 1.0

    async with running_operator(SourceCoordinator(hybrid), parallelism=1, **STREAMING) as world:
        await world.settle()
        assert made[0].pending_backlog == 3, "the second source has not begun"
        task = await world.launch_operator(0, Tagged)
        await until_over(world, task)
        assert task.outputs == ["1", "2", "40", "50"]
        assert made[0].pending_backlog == 0
    async with running_operator(SourceCoordinator(hybrid), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Slowly)
        await world.advance(2.5)
        assert task.outputs == ["1", "2", "40"]
        await world.kill(task)
        await world.settle()
        assert made[1].pending_backlog == 93, "splits of both were given back"
    assert HybridSplitEnumerator([build([])], None).pending_backlog is None


async def test_what_is_given_back_or_restored_counts_from_its_position() -> None:
    """In the backlog of what is not handed out."""

    class Counting(SplitReader):
        """Reads a number in each second, up to the split."""

        rate_limit_per_s = 1.0

        def read_from(self, split: str, position: int | None, /) -> Iterator[tuple[int, int]]:
            for number in range(position or 0, int(split)):
                yield number + 1, number

    made: list[DiscoveringSplitEnumerator] = []

    def build(state: bytes | None) -> DiscoveringSplitEnumerator:
        left = lambda split, position: int(split) - (position or 0)  # noqa: E731
        made.append(DiscoveringSplitEnumerator(lambda: ["10"], state, backlog=left))
        return made[-1]

    async with running_operator(SourceCoordinator(build), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Counting)
        await world.settle()
        assert made[0].pending_backlog == 0
        await world.kill(task)
        await world.settle()
        assert made[0].pending_backlog == 10, "it was given back"
        state = await made[0].snapshot_state(1)
    assert build(state).pending_backlog == 10
    assert build(encode_event({"pending": [split_to_value(SplitAt("10", 4))], "known": ["10"]})).pending_backlog == 6


# --- what a reset returns, and what a restored message does ----------------------------------------------------------


def slowly(*splits: list[int]) -> Seeing:
    return Seeing([], *splits)


async def one_after_the_other(world: Any, make: Any, outputs: list[Any]) -> None:
    """Run the tasks as in a cluster with one slot."""
    for subtask in range(world.parallelism):
        task = await world.launch_operator(subtask, make)
        await until_over(world, task)
        assert task.outcome == "success"
        outputs += task.outputs


@pytest.mark.parametrize("parallelism", [2, 3])
@pytest.mark.parametrize("seconds", [0.0, 0.45, 1.5])
async def test_a_restored_hybrid_source_needs_no_more_slots_than_before(seconds: float, parallelism: int) -> None:
    """H132 H153. No checkpoint holds anything for subtasks that have not run, so none of them is waited for."""
    source = HybridSource(slowly([0, 5], [5, 10]), slowly([100, 105]), slowly([200, 205]))
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        task = await world.launch_operator(0, source.operator)
        await world.advance(seconds)
        world.begin_checkpoint()
        await world.advance(0.2)
        before = list(task.outputs)
        restored = world.checkpoints[-1] if world.checkpoints else None
    assert restored is not None
    outputs: list[Any] = []
    async with running_operator(source.coordinator, parallelism=parallelism, restored=restored, **STREAMING) as world:
        await one_after_the_other(world, source.operator, outputs)
    assert outputs == sorted(outputs)
    assert {*before, *outputs} == {*range(10), *range(100, 105), *range(200, 205)}


async def test_in_batch_mode_a_lost_task_that_gave_everything_back_is_not_waited_for() -> None:  # H132 H153
    source = HybridSource(slowly([0, 5], [5, 10]), slowly([100, 105]))
    async with running_operator(source.coordinator, parallelism=2) as world:
        first = await world.launch_operator(0, source.operator)
        second = await world.launch_operator(1, source.operator)
        await world.advance(0.2)
        await world.lose_executor(second)  # and its slot is gone
        await until_over(world, first)
        assert sorted(first.outputs) == [*range(10), *range(100, 105)]


async def test_a_held_request_is_dropped_whose_sender_does_not_exist_any_more() -> None:  # H151
    requests = [split_request_event(), backlog_event([("a", 1)])]
    for source in (discovering(["a", "b", "c"]), SourceCoordinator(lambda _: StaticSplitEnumerator(["a", "b", "c"]))):
        async with running_operator(source, parallelism=3, **STREAMING) as world:
            for subtask in range(3):
                await world.launch(subtask)
            await world.checkpoint()
            restored = world.checkpoints[-1]
        for subtask in range(3):
            restored = with_held(restored, subtask, requests)
        async with running_operator(source, parallelism=1, restored=restored, **STREAMING) as world:
            task = await world.launch_operator(0, Names)
            await until_over(world, task)
            assert not world.failures
            assert task.outputs == ["a", "b", "c"]


class Answering(StaticSplitEnumerator):
    """Gives a split to the sender of each event, or says that there is none."""

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        await self._context.send_event(subtask, "heard")
        await self.handle_split_request(subtask)


async def test_an_enumerator_may_answer_the_first_sender_of_a_restored_event() -> None:  # H151
    def source() -> SourceCoordinator:
        return SourceCoordinator(lambda state: Answering(["a", "b", "c"], state))

    async with running_operator(source(), parallelism=4, **STREAMING) as world:
        for subtask in range(4):
            await world.launch(subtask)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    for subtask in (1, 2, 3, 3):
        restored = with_held(restored, subtask, [["mine", subtask]] * 2)
    async with running_operator(source(), parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Names)
        await until_over(world, task)
        assert not world.failures
        assert sorted(task.outputs) == ["a", "b", "c"]


async def test_the_end_of_the_changes_is_known_as_at_the_checkpoint_to_which_their_reader_returns() -> None:  # H153
    source: Any = SimpleNamespace(range_rows=10, has_changes=True)
    enumerator = PostgresEnumerator(source, encode_event({"pending": [], "count": 0, "begun": True, "read": []}))

    async def changes_to(checkpoint_id: int) -> Any:
        return decode_state(POSTGRES, await enumerator.snapshot_state(checkpoint_id))["changes_to"]

    assert await changes_to(1) is None
    await enumerator.handle_source_event(0, 0, [CHANGES_READ, 70])
    await enumerator.add_splits_back([], 1)
    assert await changes_to(2) == 70
    await enumerator.add_splits_back([], 0)
    assert await changes_to(3) is None, "it reads them again from where checkpoint 1 has it"
    await enumerator.handle_source_event(0, 1, [CHANGES_READ, 80])
    assert await changes_to(4) == 80
    await enumerator.notify_checkpoint_complete(4)
    await enumerator.add_splits_back([], 0)
    assert await changes_to(5) == 80


async def test_a_restored_hybrid_source_waits_for_those_for_which_the_checkpoint_has_something() -> None:  # H132 H153
    source = HybridSource(slowly([0, 5], [5, 20]), slowly([100, 105]))
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, source.operator)
        await world.advance(0.25)
        world.begin_checkpoint()
        await world.advance(0.2)
        restored = world.checkpoints[-1]
    async with running_operator(source.coordinator, parallelism=2, restored=restored, **STREAMING) as world:
        first = await world.launch_operator(0, source.operator)
        await world.advance(5.0)
        assert max(first.outputs) < 100, "the other one has something left of the first source"
        second = await world.launch_operator(1, source.operator)
        await until_over(world, first, second)
        assert {*range(100, 105)} <= {*first.outputs, *second.outputs}


async def test_the_progress_of_a_source_counts_what_a_reset_returns_as_not_read() -> None:  # H153
    source = slowly([0, 5], [5, 10]).coordinator
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, slowly().operator)
        await world.advance(0.25)
        world.begin_checkpoint()
        await world.advance(0.1)
        assert world.checkpoints
        assert source.splits_progress == (0, 2)
        await world.advance(0.6)
        assert source.splits_progress == (1, 2)
        await world.kill(task)
        assert source.splits_progress == (0, 2), "both are read again, the first one from its position on"


class Synchronous(StaticSplitEnumerator):
    def handle_split_request(self, subtask: int) -> None:  # type: ignore[override]
        """Nobody awaits it."""


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda state: object(), "which is not a SplitEnumerator: return a new one each time"),
        (lambda state: Synchronous([], state), r"handle_split_request"),
    ],
)
async def test_what_a_source_cannot_call_is_refused_before_it_is_called(build: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        SourceCoordinator(build)._build_checked(None)


HOOKS = [name for name, one in vars(SplitEnumerator).items() if isfunction(one) and not name.startswith("_")]


class Listening(StaticSplitEnumerator):
    """Notes which of its methods are called, with their arguments."""

    def __init__(self, calls: list[tuple[Any, ...]], splits: list[Any], state: bytes | None) -> None:
        super().__init__(splits, state)
        for name in HOOKS:
            setattr(self, name, self._noted(calls, name, getattr(self, name)))

    @staticmethod
    def _noted(calls: list[tuple[Any, ...]], name: str, method: Any) -> Any:
        async def noted(*args: Any) -> Any:
            calls.append((name, *args))
            return await method(*args)

        return noted


class Sending(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        self.context.send_event({"reads": split})
        while True:
            yield None


async def test_an_enumerator_hears_of_everything_that_happens() -> None:
    calls: list[tuple[Any, ...]] = []
    source = SourceCoordinator(lambda state: Listening(calls, ["a", "b"], state))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Sending)
        await world.checkpoint()
        world.storage_error = OSError("the disk is full")
        answer = world.begin_checkpoint()
        await world.settle()
        assert answer.error is not None
        world.storage_error = None
        await world.kill(task)
        await world.retry(task)
        assert ("notify_checkpoint_complete", 1) in calls
        assert ("notify_checkpoint_aborted", 2) in calls
        assert ("notify_checkpoint_discarded", 2) in calls
        assert ("attempt_ended", 0, 0, False) in calls
        assert ("subtask_reset", 0, 1) in calls
        assert ("handle_source_event", 0, 0, {"reads": "a"}) in calls
    assert {call[0] for call in calls} >= set(HOOKS) - {"add_splits_back"}, "splits are taken back encoded"
    assert calls[-1] == ("close",)
