# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.large_states``: what sources with a million splits cost the event loop (H164).

For each kind of state, printed are the processor time and the longest turn of the loop, in milliseconds: for the start,
for the state of a checkpoint, for writing that to a local directory and reading it again, and for the restore. Another
task of the loop counts the turns, so a turn is what any other work would wait. A number is the best of several rounds.

``--known`` prints the memory of a discovering source that has found ten million files, and what looking costs it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import anyio

from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator
from actors.coordination.sources.source import (
    SourceCoordinator,
    SplitEnumerator,
    SplitEnumeratorContext,
    StaticSplitEnumerator,
)
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.kept_bytes import KeptBytes
from protocol.known_keys import KnownKeys
from protocol.wire.codec import encode_event
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.work_queue.driver import _Enumerator as WorkQueueEnumerator
from spark_bridge.primitives.work_queue.messages import ROOT, id_of_child
from spark_bridge.sources.postgres.driver import PostgresEnumerator, PostgresSource
from spark_bridge.sources.postgres.task import range_read_event
from spark_bridge.sources.source import Source
from spark_bridge.storage import CheckpointStorage, StorageSession
from spark_bridge.streams.driver import StreamPlanner

SPLITS = 1_000_000
KNOWN = 10_000_000
ROUNDS = 3

Measured = tuple[float, float]
"""Processor time and the longest turn, in milliseconds."""


async def measure(work: Callable[[], Awaitable[Any]]) -> tuple[Any, Measured]:
    """Do the work; return its result with the processor time of the process, and the longest turn meanwhile."""
    longest_s, is_over = 0.0, False

    async def count_turns() -> None:
        nonlocal longest_s
        before = time.perf_counter()
        while not is_over:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest_s, before = max(longest_s, now - before), now

    gc.collect()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        await asyncio.sleep(0)
        began = time.process_time()
        result = await work()
        took_s = time.process_time() - began
        is_over = True
    return result, (took_s * 1000, longest_s * 1000)


class Context(SplitEnumeratorContext):
    """One reader, which is given nothing."""

    def __init__(self) -> None:
        self.coordinator: Any = SimpleNamespace(call_later=lambda *_: None, mode=RestoreMode.STREAMING)

    @property
    def parallelism(self) -> int:
        return 1

    def registered_readers(self) -> list[int]:
        return []

    def attempts(self, subtask: int) -> list[int]:
        return []


class Files(Source):
    """Files for a stream, each read as a whole."""

    def __init__(self, count: int) -> None:
        self.count = count

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return DiscoveringSplitEnumerator(lambda: files(self.count), state, every_s=1e-9)

    @property
    def operator(self) -> Any:
        raise NotImplementedError


class Table(PostgresSource):
    """A table of so many ranges; no server is asked."""

    def __init__(self, count: int) -> None:
        super().__init__("", "orders", "id", changes="slot")
        self.count = count

    def create_slot(self) -> None:
        """Nothing to create."""

    def ranges(self) -> Iterator[list[Any]]:
        ends = [None, *(str(10_000 * number) for number in range(1, self.count)), None]
        return (["range", low, high] for low, high in pairwise(ends))


def files(count: int) -> Iterator[str]:
    """The names of so many files."""
    return (f"s3://bucket/orders/2026/11/26/part-{number:010}.parquet" for number in range(count))


async def static(count: int, state: bytes | None) -> SplitEnumerator:
    enumerator = StaticSplitEnumerator([[name, 0, 1 << 26] for name in files(count)] if state is None else (), state)
    return enumerator


async def discovering(count: int, state: bytes | None) -> SplitEnumerator:
    return DiscoveringSplitEnumerator(lambda: files(count), state, every_s=60.0)


async def postgres(count: int, state: bytes | None) -> SplitEnumerator:
    return PostgresEnumerator(Table(count), state)


async def work_queue(count: int, state: bytes | None) -> SplitEnumerator:
    return WorkQueueEnumerator(ROOTS if state is None else (), state, 16, KeptBytes(0, "the items", "none"))


ROOTS: list[tuple[int, bytes]] = []
ENUMERATORS = {"static": static, "discovering": discovering, "PostgreSQL": postgres, "work queue": work_queue}


async def of_enumerator(name: str, count: int) -> dict[str, Measured]:
    """The figures of an enumerator with so many splits."""
    make = ENUMERATORS[name]
    if name == "work queue" and len(ROOTS) != count:
        ROOTS[:] = [
            (id_of_child(ROOT, encode_event(one), number), encode_event(one)) for number, one in enumerate(files(count))
        ]
    figures: dict[str, Measured] = {}
    enumerators = [await make(count, None)]
    _, figures["start"] = await measure(lambda: enumerators[0].start(Context()))
    if name == "PostgreSQL":
        for _, low, high in islice(Table(count).ranges(), count // 2):
            await enumerators[0].handle_source_event(0, 0, range_read_event(low, high, f"{low}:{low}:"))
    state, figures["checkpoint"] = await measure(lambda: enumerators[0].snapshot_state(1))
    enumerators.clear()
    state, written = await stored(state)
    figures |= written

    async def restore() -> SplitEnumerator:
        again = await make(count, state)
        await again.start(Context())
        return again

    again, figures["restore"] = await measure(restore)
    if getattr(again, "pending_count", count) != count:
        raise RuntimeError(f"{name}: {count} splits became {again.pending_count}")
    return figures


async def stored(state: bytes) -> tuple[bytes, dict[str, Measured]]:
    with tempfile.TemporaryDirectory() as folder:
        async with StorageSession(CheckpointStorage(folder)) as session:
            port = session.port("operator", RestoreMode.STREAMING)
            checkpoint = CompletedCheckpoint(port.next_checkpoint_id(), 1, state, {})
            _, write = await measure(lambda: port.store(checkpoint))
        async with StorageSession(CheckpointStorage(folder)) as session:
            restored, read = await measure(session.port("operator", RestoreMode.STREAMING).restore_latest)
    if restored is None or restored.coordinator_state != state:
        raise RuntimeError("the storage has another state")
    return restored.coordinator_state, {"write": write, "read": read}


async def of_stream(count: int) -> dict[str, Measured]:
    """The figures of the plan of a stream: its first batch has all files."""
    figures: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with StorageSession(CheckpointStorage(folder)) as session:
            planner = StreamPlanner("orders", Files(count), lambda _: session.port("s", RestoreMode.STREAMING), count)
            start = await planner.answer("initial", None)
            end, figures["start"] = await measure(lambda: planner.answer("latest", start))
            _, figures["checkpoint"] = await measure(lambda: planner._first._store(planner._first.state))
            if await planner.answer("count", [*start, end[1]]) != count:
                raise RuntimeError("the plan does not have all files")
            await planner.close()
        async with StorageSession(CheckpointStorage(folder)) as session:
            again = StreamPlanner("orders", Files(count), lambda _: session.port("s", RestoreMode.STREAMING), count)
            _, figures["restore"] = await measure(again.open)
    return figures


async def of_reset(count: int) -> dict[str, Measured]:
    """The figures of a reset that gives back so many splits."""
    source = SourceCoordinator(lambda state: StaticSplitEnumerator((), state))
    context: Any = SimpleNamespace(mode=RestoreMode.BATCH, parallelism=1)
    await source.start(context)
    gateway: Any = SimpleNamespace(attempt=SimpleNamespace(attempt=0), send_event=_sent)
    source._met_run = True
    await source.subtask_ready(0, gateway)
    for first in range(0, count, 1000):
        await source.assign_splits(0, [[f"file-{number}", 0, 1] for number in range(first, first + 1000)])
    _, reset = await measure(lambda: source.subtask_reset(0, -1))
    return {"reset": reset}


async def _sent(event: Any) -> None:
    """Nobody reads it."""


def best(rounds: list[dict[str, Measured]]) -> dict[str, Measured]:
    """The lowest of each number."""
    return {step: (min(one[step][0] for one in rounds), min(one[step][1] for one in rounds)) for step in rounds[0]}


def known(count: int) -> None:
    """Print what it takes to remember so many files."""
    import resource

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    keys = KnownKeys()
    began = time.process_time()
    for name in files(count):
        keys.add(name)
    added_s = time.process_time() - began
    used_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    began = time.process_time()
    if not all(map(keys.see, files(count))):
        raise RuntimeError("a file is not known")
    seen_s = time.process_time() - began
    state_mb = sum(map(len, keys.buckets())) / 2**20
    print(f"{count:,} files: {used_mb:,.0f} MiB of memory, {state_mb:,.0f} MiB of state; ", end="")
    print(f"found in {added_s:.1f} s, looked up in {seen_s:.1f} s of processor time")


async def figures(count: int, rounds: int) -> dict[str, dict[str, Measured]]:
    """The figures of all kinds, with so many splits."""
    found = {name: best([await of_enumerator(name, count) for _ in range(rounds)]) for name in ENUMERATORS}
    found["stream"] = best([await of_stream(count) for _ in range(rounds)])
    found["reset"] = best([await of_reset(count) for _ in range(rounds)])
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["--known"]:
        known(KNOWN)
        return
    for name, steps in asyncio.run(figures(SPLITS, ROUNDS)).items():
        for step, (took_ms, longest_ms) in steps.items():
            print(f"{name:12} {step:10} {took_ms:8.0f} ms, longest turn {longest_ms:6.1f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
