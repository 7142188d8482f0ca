# SPDX-License-Identifier: Apache-2.0

"""The plan of a stream: what Spark asks for again is the same, and nothing is planned twice or left out."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.coordination import CoordinatorStore
from actors.coordination.store import StoreRevoked
from headgate import CoordinatorContext, SourceCoordinator, SplitReader, StaticSplitEnumerator
from headgate.sources import (
    DiscoveringSplitEnumerator,
    HybridSource,
    Source,
    SplitAt,
    SplitEnumerator,
    SplitEnumeratorContext,
)
from headgate.testing import running_operator
from protocol.source_events import StreamBatch, decode_split
from protocol.wire.keys import KeyRing
from protocol.wire.messages import RestoreMode
from spark_bridge.common.certificates import encryption
from spark_bridge.common.control import ControlUnreachable, exchange
from spark_bridge.common.errors import StreamRefused
from spark_bridge.driver.stream_port import Streams
from spark_bridge.storage import CheckpointStorage, MemoryStorage, Storage, StorageError, StoragePort, StorageSession
from spark_bridge.streams.driver import FormatEnumerator, StreamPlanner, _PlanningContext
from spark_bridge.streams.task import StreamFailed, batch_between, next_of, reader_of_batch

pytestmark = pytest.mark.anyio


class Log(Source):
    """Two logs that grow, and never end. A part is ``[name, until]``."""

    def __init__(self) -> None:
        self.lengths = {"a": 0, "b": 0}

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return DiscoveringSplitEnumerator(lambda: sorted(self.lengths), state, every_s=60.0)

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        until, at = self.lengths[split], position or 0
        return None if until == at else (SplitAt([split, until], at), until)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return SplitReader


class Pages(Source):
    """Splits that end, as many as there are now."""

    def __init__(self, *names: str, every_s: float | None = 1e-9) -> None:
        self.names = list(names)
        self.every_s = every_s

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return DiscoveringSplitEnumerator(lambda: list(self.names), state, every_s=self.every_s)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return SplitReader


async def planner_of(source: Source, session: StorageSession, splits_max: int = 100) -> StreamPlanner:
    def port(stream: str) -> StoragePort:
        return session.port(f"orders.stream.{stream}" if stream else "orders.stream", RestoreMode.STREAMING)

    planner = StreamPlanner("orders", source, port, splits_max)
    await planner.open()
    return planner


async def read(planner: StreamPlanner, start: list[Any], end: list[Any]) -> list[Any]:
    batch = StreamBatch(start[0], start[1], end[1])
    assert await planner.answer("count", [batch.stream, batch.start, batch.end]) == len(planner.splits(batch))
    return list(map(decode_split, planner.splits(batch)))


async def test_a_split_that_never_ends_is_cut_where_it_is_now() -> None:  # H133
    source = Log()
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        assert await planner.answer("latest", start) == start, "there is nothing yet"
        source.lengths.update(a=3, b=2)
        first = await planner.answer("latest", start)
        assert await read(planner, start, first) == [SplitAt(["a", 3], 0), SplitAt(["b", 2], 0)]
        source.lengths.update(a=7)
        assert await planner.answer("latest", start) == first, "this batch was not read yet"
        second = await planner.answer("latest", first)
        assert await read(planner, first, second) == [SplitAt(["a", 7], 3)]
        assert len(await read(planner, start, second)) == 3


async def test_a_batch_that_is_asked_for_again_is_the_same_in_another_application(tmp_path: Path) -> None:  # H133
    source = Log()
    source.lengths.update(a=3)
    async with StorageSession(CheckpointStorage(str(tmp_path))) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        end = await planner.answer("latest", start)
        planned = await read(planner, start, end)
    source.lengths.update(a=9, b=9)
    async with StorageSession(CheckpointStorage(str(tmp_path))) as session:
        planner = await planner_of(source, session)
        assert await read(planner, start, end) == planned
        following = await planner.answer("latest", end)
        assert await read(planner, end, following) == [SplitAt(["a", 9], 3), SplitAt(["b", 9], 0)]


async def test_what_was_found_but_not_stored_is_found_again() -> None:
    class Failing(MemoryStorage):
        fails = False

        def store(self, *arguments: Any, **more: Any) -> str:
            if self.fails:
                raise StorageError("the disk is full")
            return super().store(*arguments, **more)

    storage, source = Failing(), Pages("1", "2")
    async with StorageSession(storage) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        storage.fails = True
        with pytest.raises(StorageError):
            await planner.answer("latest", start)
        storage.fails = False
        end = await planner.answer("latest", start)
        assert await read(planner, start, end) == ["1", "2"]


async def test_a_batch_has_so_many_splits_at_most() -> None:
    source = Pages(*map(str, range(7)))
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session, splits_max=3)
        at, sizes = await planner.answer("initial", None), []
        for _ in range(4):
            end = await planner.answer("latest", at)
            sizes.append(len(await read(planner, at, end)))
            at = end
        assert sizes == [3, 3, 1, 0]


async def test_a_committed_batch_is_forgotten_and_asking_for_it_says_what_is_wrong() -> None:
    source = Pages("1")
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        end = await planner.answer("latest", start)
        await planner.answer("commit", end)
        await planner.answer("commit", end)
        with pytest.raises(StreamRefused, match="do not belong together"):
            await read(planner, start, end)
        source.names.append("2")
        assert await read(planner, end, await planner.answer("latest", end)) == ["2"]


async def test_each_query_has_a_plan_that_no_other_one_touches(tmp_path: Path) -> None:  # H173
    source = Pages("1")
    async with StorageSession(CheckpointStorage(str(tmp_path))) as session:
        planner = await planner_of(source, session)
        starts = [await planner.answer("initial", None) for _ in range(20)]
        assert len({stream for stream, _ in starts}) == 20
        ends = [await planner.answer("latest", start) for start in starts]
        source.names.append("2")
        for start, end in zip(starts, ends, strict=True):
            assert await read(planner, start, end) == ["1"]
            assert await read(planner, end, await planner.answer("latest", end)) == ["2"]
    source.names.append("3")
    async with StorageSession(CheckpointStorage(str(tmp_path))) as session:
        planner = await planner_of(source, session)
        assert await planner.answer("initial", None) not in starts
        for stream, _ in starts:
            assert await read(planner, [stream, 2], await planner.answer("latest", [stream, 2])) == ["3"]


@pytest.mark.parametrize("behind", [None, 0, 1, 2], ids=["no commit", "immediately", "one behind", "two behind"])
async def test_what_is_there_at_a_time_is_planned_in_several_batches_and_nothing_that_comes_later(
    behind: int | None,
) -> None:  # H173
    source = Pages(*"abcdefgh")
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session, splits_max=3)
        start = await planner.answer("initial", None)
        target = await planner.answer("target", start)
        source.names.append("later")
        batches, at = [], offset(start)
        while (after := next_of(at, offset(target))) != at:
            batches.append(await read(planner, list(at.values()), list(after.values())))
            at = after
            if behind is not None and len(batches) > behind:
                await planner.answer("commit", [at["stream"], len(batches) - behind])
        assert batches == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]
        assert await planner.answer("target", target) == [target[0], 4]
        log = Log()
        log.lengths.update(a=3)
        planner = await planner_of(log, session, splits_max=1)
        start = await planner.answer("initial", None)
        end = await planner.answer("target", start)
        assert await read(planner, start, end) == [SplitAt(["a", 3], 0)], "the part of a log that is there, once"


def offset(pair: list[Any]) -> dict[str, Any]:
    return {"stream": pair[0], "batch": pair[1]}


async def test_a_query_may_ask_for_the_end_of_its_first_batch_before_its_beginning() -> None:
    """Spark 4.1 does, and never says where the query is."""
    source = Pages("1")
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        end = await planner.answer("latest", None)
        start = await planner.answer("initial", end)
        assert start == [end[0], 0]
        assert await read(planner, start, end) == ["1"]
        source.names.append("2")
        after = await planner.answer("latest", None)
        assert await read(planner, end, after) == ["2"]
        await planner.answer("commit", end)
        with pytest.raises(StreamRefused, match="register the source under another name"):
            await planner.answer("initial", await planner.answer("latest", None))


async def test_an_unknown_stream_says_where_its_plan_should_be() -> None:
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(Pages("1"), session)
        with pytest.raises(StreamRefused, match=r"SidecarConfig\(storage="):
            await planner.answer("latest", ["gone", 3])


async def test_a_source_after_another_one_begins_when_all_of_the_first_is_planned() -> None:
    log = Log()
    source = HybridSource(Pages("1", "2", every_s=None), log)
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        end = await planner.answer("latest", start)
        assert await read(planner, start, end) == [[0, "1"], [0, "2"]]
        log.lengths.update(b=4)
        following = await planner.answer("latest", end)
        assert await read(planner, end, following) == [SplitAt([1, ["b", 4]], 0)]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_fails_every_record_is_in_one_batch(seed: int, tmp_path: Path) -> None:  # H133
    chance = random.Random(seed)
    source = Log()
    storage: Callable[[], Storage] = lambda: CheckpointStorage(str(tmp_path))  # noqa: E731
    seen: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    at: list[Any] | None = None
    for _ in range(6):
        async with StorageSession(storage()) as session:
            planner = await planner_of(source, session)
            at = at or await planner.answer("initial", None)
            for _ in range(chance.randrange(5)):
                source.lengths[chance.choice("ab")] += chance.randrange(4)
                end = await planner.answer("latest", at)
                planned = await read(planner, at, end)
                if chance.random() < 0.3:
                    continue  # the query is restarted, and asks for the same again
                for part in planned:
                    name, until = part.split
                    seen[name].append((part.position, until))
                at = end
                if chance.random() < 0.5:
                    await planner.answer("commit", at)
    for ranges in seen.values():
        assert all(before[1] == after[0] for before, after in pairwise(ranges)), (seed, ranges)
        assert not ranges or ranges[0][0] == 0


async def test_a_format_tells_the_enumerator_of_its_source_which_attempts_have_ended() -> None:
    ended: list[tuple[int, int, bool]] = []

    class Noting(StaticSplitEnumerator):
        async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
            ended.append((subtask, attempt, succeeded))

    class Noted(Pages):
        def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
            return Noting(self.names, state)

    class Reader(SplitReader):
        def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
            self.context.sleep(1.0)
            yield 1, split

    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(Noted(), session)
        source = SourceCoordinator(lambda state: FormatEnumerator(Noted("a", "b"), planner))
        async with running_operator(source, parallelism=1) as world:
            task = await world.launch_operator(0, Reader)
            await world.advance(0.5)
            await world.kill(task)
            again = await world.retry(task)
            await world.advance(5.0)
            assert again.outputs == ["a", "b"]
    assert ended == [(0, 0, False), (0, 1, True)]


async def test_tasks_of_a_micro_batch_read_its_splits_and_those_of_another_one_are_refused() -> None:  # H133
    source = Pages("a", "b")
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        offsets = [await planner.answer("initial", None)]
        for names in (["a", "b"], ["a", "b", "c"]):
            source.names = names
            offsets.append(await planner.answer("latest", offsets[-1]))
        first, second = (StreamBatch(start[0], start[1], end[1]) for start, end in pairwise(offsets))

        class Reader(SplitReader):
            def read_split(self, split: Any, /) -> list[Any]:
                return [split]

        coordinator = SourceCoordinator(lambda state: FormatEnumerator(source, planner))
        async with running_operator(coordinator, parallelism=2) as world:
            reader = await world.launch_operator(0, partial(reader_of_batch, Reader, first))
            await world.advance(1.0)
            assert reader.outputs == ["a", "b"]
            await world.launch_operator(1, partial(reader_of_batch, Reader, second))
            await world.advance(1.0)
            assert "tasks of two micro-batches" in str(world.failures[0])


MEMBERS = sorted(name for name, _ in inspect.getmembers(CoordinatorContext) if not name.startswith("_"))


class Planned(Source):
    """Its enumerator does something with its context when it starts, and hands out the split "1" and what it finds."""

    def __init__(self, begin: Callable[[Finding, CoordinatorContext], object]) -> None:
        self._begin = begin

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return Finding(self._begin)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return SplitReader


class Finding(SplitEnumerator):
    def __init__(self, begin: Callable[[Finding, CoordinatorContext], object]) -> None:
        self._begin = begin
        self.found = ["1"]

    async def start(self, context: SplitEnumeratorContext) -> None:
        self.context = context
        self._begin(self, context.coordinator)

    async def handle_split_request(self, subtask: int) -> None:
        found, self.found = self.found, []
        await self.context.assign_splits(subtask, found)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        raise AssertionError("nobody reads")

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b""


@pytest.mark.parametrize("name", MEMBERS)
async def test_an_enumerator_that_is_planned_has_everything_of_its_coordinators_context(name: str) -> None:  # H133
    seen: list[object] = []
    source = Planned(lambda _, context: seen.append(getattr(context, name)))
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        await planner.answer("latest", await planner.answer("initial", None))
        await planner.close()
    assert len(seen) == 1


def test_an_enumerator_that_is_planned_has_everything_of_the_context_of_enumerators() -> None:  # H133
    own = {name for name in vars(SplitEnumeratorContext) if not name.startswith("_")} - {"parallelism"}
    assert own <= set(vars(_PlanningContext)), "each needs an answer, because there is no coordinator"


async def test_what_an_enumerator_finds_in_the_background_is_planned() -> None:  # H133
    found = anyio.Event()
    told: list[object] = []

    def begin(enumerator: Finding, context: CoordinatorContext) -> None:
        async def look(names: list[str]) -> list[str]:
            await found.wait()
            return names

        async def handle(names: list[str] | None, error: Exception | None) -> None:
            assert names is not None
            enumerator.found += names

        async def later() -> None:
            told.append(context.clock.now())

        context.run_in_background(look, ["2", "3"], handler=handle)
        context.call_soon_threadsafe(later)
        told.append((context.operator_id, context.parallelism, context.events_taken(0), list(context.gateways)))

    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(Planned(begin), session)
        start = await planner.answer("initial", None)
        first = await planner.answer("latest", start)
        found.set()
        await anyio.wait_all_tasks_blocked()
        second = await planner.answer("latest", first)
        assert await read(planner, first, second) == ["2", "3"]
        await planner.close()
    assert told[0] == ("orders", 1, 0, [])
    assert len(told) == 2


async def test_an_enumerator_that_fails_its_job_fails_the_query() -> None:  # H133, H8
    source = Planned(lambda _, context: context.fail_job(ValueError("no such table")))
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(source, session)
        start = await planner.answer("initial", None)
        for _ in range(2):
            with pytest.raises(ValueError, match="no such table"):
                await planner.answer("latest", start)


async def test_an_enumerator_that_is_closed_does_nothing_any_more() -> None:  # H133, G16
    ends: list[str] = []
    contexts: list[CoordinatorContext] = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ends.append("cancelled")

    async def handle(result: object, error: Exception | None) -> None:
        ends.append("handled")

    def begin(_: Finding, context: CoordinatorContext) -> None:
        contexts.append(context)
        context.run_in_background(wait, handler=handle)

    store = CoordinatorStore()
    async with StorageSession(MemoryStorage()) as session:
        port = session.port("orders.stream", RestoreMode.STREAMING)
        planner = StreamPlanner("orders", Planned(begin), lambda _: port, 100, store)
        await planner.open()
        await planner.answer("latest", await planner.answer("initial", None))
        await anyio.wait_all_tasks_blocked()
        contexts[0].store.put_if_absent("reader", "orders")
        await planner.close()
        assert ends == ["cancelled"]
        assert store.get("reader") == "orders", "all coordinators share it"
        with pytest.raises(StoreRevoked):
            contexts[0].store.put_if_absent("late", 1)
        contexts[0].fail_job("too late")


async def test_the_planning_process_asks_with_the_key_of_its_source_and_no_other() -> None:  # H76
    keys = KeyRing(b"the secret of this application!!")
    async with StorageSession(MemoryStorage()) as session:
        planner = await planner_of(Pages("1", "2"), session)
        async with Streams(keys, "127.0.0.1", "127.0.0.1", lambda port, at: at, encryption(False, keys)) as streams:
            client = await streams.serve("orders", planner)
            start = await anyio.to_thread.run_sync(client.initial)
            end = await anyio.to_thread.run_sync(client.latest, start)
            assert await anyio.to_thread.run_sync(client.count, batch_between(start, end)) == 2
            assert isinstance(client.ask, partial)
            (endpoint,) = client.ask.args
            endpoint = replace(endpoint, key=keys.task_key("orders"))
            stranger = replace(client, ask=partial(exchange, endpoint, **client.ask.keywords))
            with pytest.raises(ControlUnreachable, match="does not know this secret"):
                await anyio.to_thread.run_sync(stranger.initial)
            with pytest.raises(StreamFailed, match="not an offset of a Headgate source"):
                await anyio.to_thread.run_sync(client.latest, {"other": 1})
            await streams.release("orders")
            with pytest.raises(StreamFailed, match="not registered any more"):
                await anyio.to_thread.run_sync(client.initial)
