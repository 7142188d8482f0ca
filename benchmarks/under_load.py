# SPDX-License-Identifier: Apache-2.0

"""Events while checkpoints are taken of many subtasks, and what very many subtasks cost.

Both are measured with checkpoints that hold events back, and with those that record them (``crowd.MODES``).

``load``: milliseconds of an event from one of 2,000 subtasks to the coordinator's method, with 2,000 such events a
second from random subtasks at random moments, and a checkpoint every second. The baseline is the same stream without
checkpoints. The sidecar freezes its heap, as one in its own process does. ``details`` has p99.9, how long the
checkpoints took, and the longest turn of the driver's event loop: the time between two looks for news from the system,
the processor time of the same turns, and the garbage collector's.

``crowd``: 10,000 subtasks. Case "registration": seconds until all are ready, beside as many bare connections. Case
"checkpoint": milliseconds, beside bare frames as in ``benchmarks.checkpoint``. Case "memory": bytes of resident memory
on the driver for each subtask, beside those for each bare connection.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from selectors import BaseSelector
from typing import Any

from benchmarks.checkpoint import BASELINE, checkpoint_ms, raw_checkpoint_ms, timed
from benchmarks.crowd import MODES, Crowd, running_crowd
from benchmarks.harness import Figure, Progress, flatten, interleave_async, percentile
from benchmarks.many_endpoints import resident_bytes
from headgate import SidecarConfig, SidecarLimits
from spark_bridge.driver.loop import SUBTASKS_MIN, bounded_loop

SUBTASKS, EVENTS_PER_S, INTERVAL_S = 2_000, 2_000, 1.0
TICK_S = 0.25
"""The subtasks are told what to send for this long at a time."""
CROWD = 10_000


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Turns:
    """The turns of an event loop, in milliseconds, and the processor time that each has taken."""

    # Arrays, because the garbage collector would visit every float of a list.
    wall_ms: array[float] = field(default_factory=_no_times)
    processor_ms: array[float] = field(default_factory=_no_times)
    collector_ms: array[float] = field(default_factory=_no_times)
    """The processor time of each run of Python's garbage collector, which is a part of some turn."""
    full_collector_ms: array[float] = field(default_factory=_no_times)
    """The same of its full runs alone."""

    def as_dict(self) -> dict[str, Any]:
        named = (
            ("wall", self.wall_ms),
            ("processor", self.processor_ms),
            ("collector", self.collector_ms),
            ("full collector", self.full_collector_ms),
        )
        return {
            name: {"max": max(turns), "p999": percentile(turns, 0.999), "p99": percentile(turns, 0.99)}
            for name, turns in named
            if turns
        }

    def add(self, other: Turns) -> None:
        """Add the turns of another time."""
        self.wall_ms += other.wall_ms
        self.processor_ms += other.processor_ms
        self.collector_ms += other.collector_ms
        self.full_collector_ms += other.full_collector_ms


@contextmanager
def watched_turns() -> Iterator[Turns]:
    """Measure the turns of the running loop: from the end of one look for news from the system to the next look."""
    selector: BaseSelector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    turns, look = Turns(), selector.select
    began = time.perf_counter(), time.thread_time()

    def select(timeout: float | None = None) -> Any:
        nonlocal began
        turns.wall_ms.append((time.perf_counter() - began[0]) * 1e3)
        turns.processor_ms.append((time.thread_time() - began[1]) * 1e3)
        try:
            return look(timeout)
        finally:
            began = time.perf_counter(), time.thread_time()

    collection_began = 0.0

    def collect(phase: str, info: dict[str, int]) -> None:
        nonlocal collection_began
        if phase == "start":
            collection_began = time.thread_time()
            return
        turns.collector_ms.append((time.thread_time() - collection_began) * 1e3)
        if info["generation"] == 2:
            turns.full_collector_ms.append(turns.collector_ms[-1])

    selector.select = select  # type: ignore[method-assign]
    gc.callbacks.append(collect)
    try:
        yield turns
    finally:
        gc.callbacks.remove(collect)
        del selector.select


class _Stream:
    """Events from random subtasks at random moments."""

    def __init__(self, crowd: Crowd, seconds: float) -> None:
        self._crowd = crowd
        self._seconds = seconds
        self._dice = random.Random(1)
        self.turns = Turns()
        self.checkpoints_ms: list[float] = []

    async def without(self) -> array[float]:
        return await self._events()

    async def during(self) -> array[float]:
        """The same while a checkpoint is taken every second; one that takes longer delays the next."""
        with watched_turns() as turns:
            async with asyncio.TaskGroup() as group:
                events = group.create_task(self._events())
                while not events.done():
                    due = time.monotonic() + INTERVAL_S
                    self.checkpoints_ms.append((await self._crowd.checkpoint()).took_ms)
                    await asyncio.sleep(due - time.monotonic())
        await self._crowd.settle()
        self.turns.add(turns)
        return events.result()

    async def _events(self) -> array[float]:
        subtasks, children = len(self._crowd.coordinator.gateways), self._crowd.children
        ticks, each = round(self._seconds / TICK_S), round(EVENTS_PER_S * TICK_S)
        async with asyncio.TaskGroup() as group:
            latencies = group.create_task(self._latencies(ticks * each))
            began = time.monotonic()
            for tick in range(1, ticks + 1):
                moments = [(self._dice.uniform(0, TICK_S), self._dice.randrange(subtasks)) for _ in range(each)]
                for place, child in enumerate(children):
                    child.tell(do="send", at=[moment for moment in moments if moment[1] % len(children) == place])
                await asyncio.sleep(began + tick * TICK_S - time.monotonic())
        return latencies.result()

    async def _latencies(self, count: int) -> array[float]:
        """In milliseconds. The events are not kept: the garbage collector would visit what the benchmark keeps, too.

        Floats of a list would make the process grow, so that the sidecar makes a full run of the collector.
        """
        latencies = _no_times()
        for _ in range(count):
            event, at = await self._crowd.coordinator.arrived.get()
            latencies.append((at - event[1]) / 1e6)
        return latencies


def load(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of an event up while checkpoints of 2,000 subtasks are taken, compared with none."""
    return [_run_bounded(_measure_load(mode, quick, partial(_say, progress, mode))) for mode in MODES]


def _run_bounded(measured: Coroutine[None, None, Figure]) -> Figure:
    with asyncio.Runner(loop_factory=bounded_loop) as runner:
        return runner.run(measured)


def _say(progress: Progress, prefix: str, text: str) -> None:
    progress(f"{prefix}: {text}")


async def _measure_load(mode: str, quick: bool, progress: Progress) -> Figure:
    subtasks, rounds, seconds = (16, 1, 1.0) if quick else (SUBTASKS, 3, 10.0)
    progress(f"{subtasks} subtasks: connecting")
    config = SidecarConfig(limits=SidecarLimits(freeze_heap=True))
    async with running_crowd(subtasks, bare_too=False, config=config, checkpoint=MODES[mode]) as crowd:
        await crowd.open(subtasks)
        await checkpoint_ms(crowd)
        while subtasks >= SUBTASKS_MIN and not gc.get_freeze_count():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.1)
        stream = _Stream(crowd, seconds)
        samples, baseline = await interleave_async(rounds, stream.without, stream.during, progress)
    params = {"case": {"mode": mode}, "subtasks": subtasks, "events_per_s": EVENTS_PER_S, "interval_s": INTERVAL_S}
    params |= {"rounds": rounds, "seconds": seconds, "baseline": "the same events without checkpoints"}
    details = {
        "p999_ms": percentile(flatten(samples), 0.999),
        "baseline_p999_ms": percentile(flatten(baseline), 0.999),
        "checkpoint_p50_ms": percentile(stream.checkpoints_ms, 0.5),
        "checkpoints": len(stream.checkpoints_ms),
        "turns_ms": stream.turns.as_dict(),
    }
    return Figure("load", "ms", samples, baseline, params, details)


def crowd(quick: bool, progress: Progress) -> list[Figure]:
    """What 10,000 subtasks cost: their registration, a checkpoint, memory; compared with bare connections."""
    subtasks, processes = (64, 2) if quick else (CROWD, 3)
    progress(f"{subtasks} bare connections")
    bare = _in_new_process(_measure_bare, subtasks, processes)
    figures = []
    for mode in MODES:
        progress(f"{mode}: {subtasks} subtasks")
        ours = _in_new_process(_measure_crowd, subtasks, processes, mode)
        for what, unit, samples, baseline, floor in (
            ("registration", "s", [ours.opened_s], [bare.opened_s], "asyncio.Protocol, connected"),
            ("checkpoint", "ms", ours.checkpoints_ms, bare.checkpoints_ms, BASELINE),
            ("memory", "bytes", [ours.bytes_each], [bare.bytes_each], "asyncio.Protocol with a bytearray, connected"),
        ):
            params: dict[str, Any] = {"case": {"of": what, "mode": mode}, "subtasks": subtasks, "processes": processes}
            figures.append(Figure("crowd", unit, [samples], [baseline], {**params, "baseline": floor}))
    return figures


@dataclass(frozen=True, slots=True)
class _Costs:
    opened_s: float
    checkpoints_ms: list[float]
    bytes_each: float


def _in_new_process(measure: Callable[..., Coroutine[None, None, _Costs]], *arguments: Any) -> _Costs:
    """In one whose memory nothing else has used before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_run, measure, *arguments).result()


def _run(measure: Callable[..., Coroutine[None, None, _Costs]], *arguments: Any) -> _Costs:
    return asyncio.run(measure(*arguments))


async def _measure_bare(subtasks: int, processes: int) -> _Costs:
    async with running_crowd(subtasks, bare_too=False, processes=processes) as crowd:
        return await _costs(
            subtasks, lambda: crowd.open_raw(subtasks), lambda: timed(3, lambda: raw_checkpoint_ms(crowd))
        )


async def _measure_crowd(subtasks: int, processes: int, mode: str) -> _Costs:
    async with running_crowd(subtasks, bare_too=False, processes=processes, checkpoint=MODES[mode]) as crowd:
        return await _costs(subtasks, lambda: crowd.open(subtasks), lambda: timed(3, lambda: checkpoint_ms(crowd)))


async def _costs(
    subtasks: int, begin: Callable[[], Awaitable[None]], checkpoints: Callable[[], Awaitable[list[float]]]
) -> _Costs:
    before, began = resident_bytes(), time.monotonic()
    await begin()
    took_s, size = time.monotonic() - began, resident_bytes() - before
    return _Costs(took_s, await checkpoints(), size / subtasks)
