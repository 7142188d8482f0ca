# SPDX-License-Identifier: Apache-2.0

"""The states of sources and parts have the limits of a checkpoint, never those of an event (H164).

Each has a little more than an event can have here, and a million entries in the long tests.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from actors.coordination.sources.enumerators import (
    DiscoveringSplitEnumerator,
    HybridSplitEnumerator,
    OwnedSplitEnumerator,
)
from actors.coordination.sources.source import SourceCoordinator, SplitEnumerator, StaticSplitEnumerator, text_of_split
from actors.coordination.user_calls import FIRST_STEPS
from benchmarks.large_states import Files, Table, files
from headgate import CheckpointConfig, SplitReader
from headgate.sources import FileSource, SplitAt
from headgate.testing import running_operator
from protocol.errors import EventEncodeError
from protocol.kept_bytes import KeptBytes
from protocol.source_events import REPORTED_MAX, decode_split
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import RestoreMode
from protocol.wire.state import CHUNK_ENTRIES
from spark_bridge.primitives.work_queue.driver import _Enumerator as WorkQueueEnumerator
from spark_bridge.primitives.work_queue.messages import ROOT, id_of_child
from spark_bridge.primitives.work_queue.task import WorkQueuePart
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.sources.postgres.driver import PostgresEnumerator
from spark_bridge.sources.postgres.ranges import pack_ranges, unpack_ranges
from spark_bridge.sources.postgres.task import PostgresReader, range_read_event
from spark_bridge.storage import MemoryStorage, StorageSession
from spark_bridge.streams.driver import StreamPlanner
from spark_bridge.subtask.context import SubtaskContext
from tests.sources.test_old_states import Reader, Taking, handed_out
from tests.sources.test_split_reader import until_over

pytestmark = pytest.mark.anyio

COUNTS = [300_000, pytest.param(1_000_000, marks=pytest.mark.long)]
STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}

VALUES: list[Any] = [
    ("a tuple", 1),
    [np.arange(3), "array first"],
    [np.arange(3), "array first", 1],
    np.arange(4),
    np.int64(7),
    dt.datetime(2026, 11, 26, 12, tzinfo=dt.UTC),
    {"a": np.arange(2)},
    SplitAt([np.arange(2), "with a position"], np.arange(5)),
    "plain",
]
"""Splits of all kinds. ``==`` between two of them may raise."""


@asynccontextmanager
async def counted_turns() -> AsyncIterator[list[int]]:
    """A list whose length is the number of turns that other work of the loop has had."""
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(1)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        yield turns
        tasks.cancel_scope.cancel()


async def in_many_turns(count: int, work: Callable[[], Awaitable[Any]]) -> Any:
    """Do the work, during which others have a turn for about each thousand entries."""
    async with counted_turns() as turns:
        result = await work()
        assert len(turns) >= count // CHUNK_ENTRIES - FIRST_STEPS - 1, "a constructor has done some steps"
    return result


def names(count: int) -> Iterator[str]:
    return (f"part-{number}" for number in range(count))


async def restarted(enumerator: SplitEnumerator, make: Callable[[bytes], SplitEnumerator], count: int) -> Any:
    """The enumerator that is built from this one's state; both in many turns."""
    state = await in_many_turns(count, lambda: enumerator.snapshot_state(1))
    again = make(state)
    await in_many_turns(count, lambda: again.start(Taking()))
    return again


@pytest.mark.parametrize("count", COUNTS)
async def test_a_static_enumerator(count: int) -> None:  # H164
    first = StaticSplitEnumerator(names(count), batch_size=1000)
    await in_many_turns(count, lambda: first.start(Taking()))
    again = await restarted(first, lambda state: StaticSplitEnumerator((), state, batch_size=1000), count)
    assert again.pending_count == count
    assert await handed_out(again) == list(names(count))


async def test_equal_splits_are_refused_among_many_too() -> None:
    many = StaticSplitEnumerator([*names(100_000), "part-7"])
    with pytest.raises(ValueError, match=r"two splits are equal, .*: add something"):
        await many.start(Taking())
    with pytest.raises(ValueError, match=r"two splits are equal, .*: add something"):
        StaticSplitEnumerator([np.arange(3), np.arange(3)])


def test_a_split_that_no_event_can_have_is_refused_where_it_is_given() -> None:
    """Not when a reader asks for it."""
    with pytest.raises(EventEncodeError, match="entries"):
        StaticSplitEnumerator([list(range(DEFAULT_LIMITS.event_items_max + 1))])
    with pytest.raises(EventEncodeError, match=r"is of type builtins\.object"):
        StaticSplitEnumerator([object()])


@pytest.mark.parametrize("count", COUNTS)
async def test_a_discovering_enumerator(count: int) -> None:  # H164
    make = partial(DiscoveringSplitEnumerator, lambda: names(count), every_s=1.0, batch_size=1000)
    first, taking = make(None), Taking()
    await first.start(taking)
    await first.handle_split_request(0)
    again = make(await in_many_turns(count, lambda: first.snapshot_state(1)))
    found = await handed_out(again)
    assert [*taking.found, *found] == list(names(count)), "what was found is known"


async def test_a_hybrid_enumerator_has_states_of_any_size() -> None:  # H164
    def make(state: bytes | None) -> HybridSplitEnumerator:
        return HybridSplitEnumerator(
            [lambda state, _: StaticSplitEnumerator(names(140_000), state, batch_size=50_000)], state
        )

    first = make(None)
    await first.start(Taking())
    again = make(await first.snapshot_state(1))
    assert await handed_out(again) == [[0, name] for name in names(140_000)]


async def test_an_owned_enumerator_hands_out_without_looking_at_all_splits_each_time() -> None:
    """Each split's owner is asked for once, and its state has what was not handed out."""
    asked: list[Any] = []

    def place(split: int) -> int:
        asked.append(split)
        return split

    def make(state: bytes | None) -> OwnedSplitEnumerator:
        return OwnedSplitEnumerator(lambda: range(4000), state, key=str, place=place, backlog=lambda *_: 1)

    class Two(Taking):
        parallelism = 2

    first, context = make(None), Two()
    await first.start(context)
    for _ in range(5):
        await first.handle_split_request(0)
    assert context.found == list(range(0, 4000, 2))
    assert len(asked) == 4000
    assert (first.pending_count, first.pending_backlog) == (2000, 2000)
    again, context = make(await first.snapshot_state(1)), Two()
    await again.start(context)
    await again.handle_split_request(1)
    assert context.found == list(range(1, 4000, 2))
    assert (again.pending_count, again.pending_backlog) == (0, 0)


@pytest.mark.parametrize("count", [262_000, pytest.param(1_000_000, marks=pytest.mark.long)])
async def test_a_stream_continues_after_its_262_144th_file(count: int) -> None:  # H164
    source = Files(count)
    async with StorageSession(MemoryStorage()) as session:
        planner = StreamPlanner(
            "files", source, lambda _: session.port("files.stream", RestoreMode.STREAMING), count - 1
        )
        await planner.open()
        start = await planner.answer("initial", None)
        first = await planner.answer("latest", start)
        source.count += 400
        second = await planner.answer("latest", first)
        again = StreamPlanner("files", source, lambda _: session.port("files.stream", RestoreMode.STREAMING), count)
        await in_many_turns(count, again.open)
        await in_many_turns(count, lambda: again._first._store(again._first.state))
        assert await again.answer("count", [*start, second[1]]) == count + 400
        planned = again._first.state.batches
        assert [decode_split(one) for batch in planned for one in batch] == list(files(count + 400))


@pytest.mark.parametrize("count", [70_000, pytest.param(1_000_000, marks=pytest.mark.long)])
async def test_a_postgres_source_reads_all_ranges_and_begins_the_changes(count: int) -> None:  # H164, H134
    """The changes are one split, which is an event, and says of each range what it contains.

    Before, 65,536 ranges were too many for it.
    """
    source = Table(count)
    first, taking = PostgresEnumerator(source, None), Taking()
    await first.start(taking)
    for number in range(count):
        if number == count // 2:
            first = await restarted(first, lambda state: PostgresEnumerator(source, state), count)
            taking = Taking()
            await first.start(taking)
        await first.handle_split_request(0)
        low, high = taking.found[-1][1:]
        await first.handle_source_event(0, 0, range_read_event(low, high, f"{number // 100}:{number + 9}:"))
    await in_many_turns(count, lambda: first.snapshot_state(2))
    await first.notify_checkpoint_complete(2)
    await first.handle_split_request(0)
    name, ranges = decode_event(encode_event(taking.found[-1], DEFAULT_LIMITS))
    assert name == "changes"
    highs, snapshots = unpack_ranges(ranges)
    assert highs == [*(str(10_000 * number) for number in range(1, count)), None]
    assert snapshots == [f"{number // 100}:{number + 9}:" for number in range(count)]


def test_the_ranges_of_a_small_table_are_packed_in_the_order_of_the_key() -> None:
    left = pack_ranges({"5": encode_event(["5", "40", "1:1:"]), "100": encode_event(["100", "200", "2:2:"])}, 6)
    assert unpack_ranges(left) == (["5", "40", "100", "200", None], ["0:0:", "1:1:", "0:0:", "2:2:", "0:0:"])
    assert unpack_ranges(pack_ranges({}, 0)) == ([], [])
    assert unpack_ranges([[None, "5", "1:1:"], ["5", None, "2:2:"]]) == (["5", None], ["1:1:", "2:2:"])


def test_a_report_of_the_backlog_does_not_have_all_ranges() -> None:
    assert PostgresReader._reported(SimpleNamespace(), ["changes", bytes(10**6)]) == ["changes"]  # type: ignore[arg-type]
    assert PostgresReader._reported(SimpleNamespace(), ["range", "1", "2"]) == ["range", "1", "2"]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", COUNTS)
def test_a_reader(count: int) -> None:  # H164
    """Its hand may be large: it has the splits of all subtasks if the parallelism was lowered to 1."""
    reader, context = Reader(), SubtaskContext.__new__(SubtaskContext)
    reader.splits.extend([("file", number) for number in range(count)])
    state = reader.snapshot_state(1)
    with pytest.raises(EventEncodeError):
        encode_event(list(reader.splits))
    again = Reader()
    again.open(context, Reader().merge_states({0: state, 1: Reader().snapshot_state(1), 2: b""}))
    assert again.splits == reader.splits
    hybrid = HybridReader([Reader])
    hybrid._readers[0].splits.extend(reader.splits)
    hybrid_again = HybridReader([Reader])
    hybrid_again.open(context, hybrid.snapshot_state(1))
    assert hybrid_again._readers[0].splits == reader.splits


def work_queue(roots: list[tuple[int, bytes]], state: bytes | None) -> WorkQueueEnumerator:
    return WorkQueueEnumerator(roots, state, 16, KeptBytes(0, "the items", "none"))


@pytest.mark.parametrize("count", COUNTS)
async def test_a_work_queue(count: int) -> None:  # H164, H100
    roots = [
        (id_of_child(ROOT, encode_event(name), number), encode_event(name)) for number, name in enumerate(names(count))
    ]
    first = work_queue(roots, None)
    await in_many_turns(count, lambda: first.start(Taking()))
    again = await restarted(first, lambda state: work_queue([], state), count)
    assert again.progress == (0, count)
    assert [value for _, _, value in again._take(count)] == list(names(count))


def test_the_hand_of_a_work_queue() -> None:  # H164
    part = WorkQueuePart("q", 1, keyed=False)
    part._hand.extend((number, 0, ("item", number)) for number in range(150_000))
    again = WorkQueuePart("q", 1, keyed=False)
    context: Any = SimpleNamespace(now=None, input_begins_again=True)
    again.open(context, again.merge_states({0: part.snapshot_state(1), 1: b""}))
    assert again._hand == part._hand


@pytest.mark.parametrize("count", COUNTS)
async def test_a_reset_gives_back_many_splits_in_order(count: int) -> None:  # H164, H56
    source = SourceCoordinator(lambda state: StaticSplitEnumerator((), state, batch_size=1000))
    gateway: Any = SimpleNamespace(attempt=SimpleNamespace(attempt=0), send_event=anyio.lowlevel.checkpoint)
    gateway.send_event = lambda event: anyio.lowlevel.checkpoint()
    await source.start(SimpleNamespace(mode=RestoreMode.STREAMING, parallelism=1))
    await source.subtask_ready(0, gateway)
    await source.assign_splits(0, list(names(count)))
    await in_many_turns(count, lambda: source.subtask_reset(0, -1))
    assert await handed_out(source.enumerator) == list(names(count))


async def test_an_enumerator_that_defines_how_splits_come_back_is_given_them_decoded() -> None:
    given: list[Any] = []

    class Own(StaticSplitEnumerator):
        async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
            given.extend(splits)
            await super().add_splits_back(splits, subtask)

    class OwnDiscovering(DiscoveringSplitEnumerator):
        async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
            given.extend(splits)
            await super().add_splits_back(splits, subtask)

    for make in (lambda state: Own(["a"], state), lambda state: OwnDiscovering(lambda: ["a"], state)):
        async with running_operator(SourceCoordinator(make), parallelism=1, **STREAMING) as world:
            task = await world.launch_operator(0, Waiting)
            await world.settle()
            await world.kill(task)
            await world.settle()
    assert given == ["a", "a"]


class Waiting(SplitReader):
    """Keeps its first split."""

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        self.context.wait_for_event()
        yield 1, split


def first_of_two(
    make: Callable[[bytes | None], SplitEnumerator], state: bytes | None, previous: SplitEnumerator | None
) -> SplitEnumerator:
    return make(state)


@pytest.mark.parametrize("seed", range(10))
async def test_values_of_every_kind_are_splits_in_every_state(seed: int) -> None:  # H164
    """Nothing compares them, and each comes back as it was."""
    random_ = random.Random(seed)
    splits = random_.sample(VALUES, random_.randint(1, len(VALUES)))
    makers: list[Callable[[bytes | None], SplitEnumerator]] = [
        lambda state: StaticSplitEnumerator(splits, state),
        lambda state: DiscoveringSplitEnumerator(lambda: list(splits), state, key=repr),
        lambda state: DiscoveringSplitEnumerator(lambda: list(splits), state, backlog=lambda split, position: 3),
    ]
    for make in makers:
        first = make(None)
        await first.start(Taking())
        state = await first.snapshot_state(1)
        assert repr(await handed_out(make(state))) == repr(splits)
        sources = [partial(first_of_two, make)]
        hybrid = HybridSplitEnumerator(sources)
        await hybrid.start(Taking())
        again = HybridSplitEnumerator(sources, await hybrid.snapshot_state(1))
        assert len(await handed_out(again)) == len(splits)


async def test_splits_of_every_kind_are_read_and_restored() -> None:  # H164
    """As events, too: a split that begins with an array is not an event of ours."""
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(VALUES, state))
    async with running_operator(source, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Each)
        await world.advance(0.45)
        await world.checkpoint()
        restored = world.checkpoints[-1]
        read = list(task.outputs)
    assert 0 < len(read) < len(VALUES)
    async with running_operator(source, parallelism=1, restored=restored, **STREAMING) as world:
        task = await world.launch_operator(0, Each)
        await until_over(world, task)
        assert [*read, *task.outputs] == [repr(one.split if isinstance(one, SplitAt) else one) for one in VALUES]


class Each(SplitReader):
    rate_limit_per_s = 10.0

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        if not isinstance(position, str):
            yield "read", repr(split)


async def test_a_position_may_nest_deeper_than_an_event() -> None:  # H164
    position: Any = 0
    for _ in range(DEFAULT_LIMITS.event_nesting_max - 1):
        position = [position]
    reader = Reader()
    reader.splits.append(SplitAt("split", position))
    again = Reader()
    again.open(SimpleNamespace(), reader.snapshot_state(1))  # type: ignore[arg-type]
    assert list(again.splits) == [SplitAt("split", position)]


def test_what_a_reader_returns_may_be_an_array() -> None:
    """Its truth value is asked by nobody."""

    class Arrays(SplitReader):
        def read_split(self, split: Any, /) -> Any:
            return np.arange(3)

        def finish(self) -> Any:
            return np.arange(2)

    reader = Arrays()
    reader.context = SimpleNamespace(send_event=lambda event: None, handle_pending=lambda: None)  # type: ignore[assignment]
    reader.splits.append("split")
    reader._no_more = True
    assert [int(one) for one in reader.process(iter(()))] == [0, 1, 2, 0, 1]


def test_a_report_of_the_backlog_names_some_splits_and_adds_up_the_others() -> None:
    """A reader that has many would send an event that is too large."""

    class Counting(Reader):
        def backlog(self, split: Any, position: Any) -> int | None:
            return 2

    sent: list[Any] = []
    reader = Counting()
    reader.context = SimpleNamespace(send_event_nowait=sent.append)  # type: ignore[assignment]
    reader.splits.extend(range(REPORTED_MAX + 50))
    reader._send_backlog()
    ((_, entries),) = sent
    assert entries[REPORTED_MAX - 1 :] == [[REPORTED_MAX - 1, 2], ["50 more splits", 100]]


class Page(NamedTuple):
    url: str
    depth: int


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (["s3://bucket/part-0.parquet", 0, 67_108_864], "s3://bucket/part-0.parquet, 0, 67108864"),
        ([1, ["range", None, 500]], "1, range, None, 500"),
        ("50 more splits", "50 more splits"),
        ("line\nbreak", "line\\nbreak"),
        ("x" * 300, "x" * 199 + "…"),
        ({"table": "events"}, "{'table': 'events'}"),
        (Page("https://example.org", 1), "Page(url='https://example.org', depth=1)"),
        ([], "[]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, 8]"),
        ([[["deep"]]], "['deep']"),
    ],
    ids=range(10),
)
def test_the_status_shows_a_split_without_the_brackets_and_quotes_of_python(split: Any, text: str) -> None:
    assert text_of_split(split) == text


async def test_the_status_shows_a_split_that_cannot_describe_itself() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    source = SourceCoordinator(lambda state: StaticSplitEnumerator((), state))
    source._backlogs = {0: ((Silent(), 3), (np.arange(10**6), 4))}
    largest = source.backlog.largest
    assert [one.amount for one in largest] == [4, 3]
    assert largest[1].split == "Silent <its __repr__ raised RuntimeError>"


# --- what is known -------------------------------------------------------------------------------------------------


class Names(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        if position is None:
            yield 1, split


async def test_a_split_that_was_gone_for_long_is_forgotten_and_read_again() -> None:  # H164
    """What is known is bounded by what exists. A split that is gone for a shorter time is remembered."""
    found = ["kept", "returns early", "returns late"]

    def build(state: bytes | None) -> DiscoveringSplitEnumerator:
        made.append(DiscoveringSplitEnumerator(lambda: list(found), state, every_s=1.0, forget_after_s=100.0))
        return made[-1]

    made: list[DiscoveringSplitEnumerator] = []
    async with running_operator(SourceCoordinator(build), parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, Names)
        await world.advance(50.0)
        found[:] = ["kept"]
        await world.advance(95.0)
        found[:] = ["kept", "returns early"]
        await world.advance(5.0)
        assert task.outputs == ["kept", "returns early", "returns late"]
        assert await world.checkpoint() is not None
        restored = world.checkpoints[-1]
    async with running_operator(SourceCoordinator(build), parallelism=1, restored=restored, **STREAMING) as world:
        """The time until then counts, although this is another driver."""
        task = await world.launch_operator(0, Names)
        await world.advance(120.0)
        assert len(made[-1]._known) == 2
        found.append("returns late")
        await world.advance(2.0)
        assert task.outputs == ["returns late"]


async def test_nothing_is_forgotten_unless_asked_or_while_looks_fail() -> None:  # H164
    found: list[str] | None = ["a"]

    def look() -> list[str]:
        if found is None:
            raise OSError("the storage is away")
        return list(found)

    for forget_after_s in (None, 3.0):
        found = ["a"]
        make = partial(DiscoveringSplitEnumerator, look, every_s=1.0, forget_after_s=forget_after_s)
        source = SourceCoordinator(make)
        async with running_operator(source, parallelism=1, **STREAMING) as world:
            task = await world.launch_operator(0, Names)
            await world.advance(1.5)
            found = None if forget_after_s else []
            await world.advance(4.0)
            found = ["a"]
            await world.advance(20.0)
            assert task.outputs == ["a"]


def test_an_impossible_time_to_forget_is_refused() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="forget_after_s must be a positive number of seconds"):
            DiscoveringSplitEnumerator(list, None, forget_after_s=wrong)
        with pytest.raises(ValueError, match="forget_after_s must be a positive number of seconds"):
            FileSource("/data", forget_after_s=wrong)


class Whole(SplitReader):
    """Yields each split as it is."""

    def read_split(self, split: Any) -> list[Any]:
        return [split]


async def test_a_batch_of_splits_may_be_larger_than_an_event() -> None:  # H164
    splits = [[number, *range(1000)] for number in range(400)]
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(splits, state, batch_size=len(splits)))
    async with running_operator(source, parallelism=1) as world:
        task = await world.launch_operator(0, Whole)
        await world.advance(3.0)
        assert task.outputs == splits
