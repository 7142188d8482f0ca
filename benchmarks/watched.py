# SPDX-License-Identifier: Apache-2.0

"""What it costs to be looked at: events and checkpoints while somebody looks, compared with the same while nobody does.

``..._watched``: a process asks the sidecar for the data of its page and for Prometheus' figures every second.
``..._traced``: a timeline is written, as ``Sidecar.trace`` does. Each pair is measured in turns on the same task.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.checkpoint import checkpoint_ms, timed
from benchmarks.crowd import running_crowd
from benchmarks.events import IN_FLIGHT, PARAMS, PAYLOAD, measured, one_at_a_time, windows
from benchmarks.harness import Figure, Progress, Rounds, interleave_async
from benchmarks.raw_frames import EVENT
from benchmarks.spark_pair import Pair, running_pair
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.runtime import SidecarRuntime

PAGES = ("/status.json", "/metrics")
WATCHER = """
import sys, time, urllib.request
while True:
    for url in sys.argv[1:]:
        urllib.request.urlopen(url, timeout=10).read()
    print("looked", flush=True)
    time.sleep(1)
"""
EVENTS = 30_000
"""About two seconds of single events, so that somebody looks during each round."""
SUBTASKS = 256

Look = Callable[[SidecarRuntime], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def watching(sidecar: SidecarRuntime) -> AsyncIterator[None]:
    """Somebody looks every second, for as long as this lasts."""
    assert sidecar.status_address is not None
    host, port = sidecar.status_address
    watcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WATCHER, *(f"http://{host}:{port}{path}" for path in PAGES), stdout=subprocess.PIPE
    )
    try:
        assert watcher.stdout is not None
        assert await watcher.stdout.readline(), "the watcher has failed"
        yield
    finally:
        watcher.kill()
        await watcher.communicate()


@asynccontextmanager
async def tracing(sidecar: SidecarRuntime) -> AsyncIterator[None]:
    """A timeline is written, for as long as this lasts."""
    with tempfile.TemporaryDirectory() as folder:
        async with sidecar.trace(Path(folder, "trace.json")):
            yield


async def _seen_and_not(
    sidecar: SidecarRuntime, look: Look, rounds: int, measure: Callable[[], Awaitable[list[float]]], progress: Progress
) -> tuple[Rounds, Rounds]:
    async def seen() -> list[float]:
        async with look(sidecar):
            return await measure()

    return await interleave_async(rounds, measure, seen, progress)


def _events(
    name: str,
    look: Look,
    params: dict[str, object],
    measure: Callable[[Pair], Awaitable[list[float]]],
    progress: Progress,
) -> list[Figure]:
    rounds = params["rounds"]
    assert isinstance(rounds, int)

    async def compared(spark: SparkSession) -> list[Figure]:
        async with running_pair(spark, config=SidecarConfig(watching=Watching(status_port=0))) as pair:
            samples, baseline = await _seen_and_not(pair.sidecar, look, rounds, partial(measure, pair), progress)
        return [Figure(name, "µs", samples, baseline, {**PARAMS, **params, "baseline": "nobody looks"})]

    return measured(compared)


def _confirm(name: str, look: Look, quick: bool, progress: Progress) -> list[Figure]:
    rounds, count = (2, 100) if quick else (10, EVENTS)

    async def measure(pair: Pair) -> list[float]:
        return await one_at_a_time(count, lambda: pair.confirm(EVENT, PAYLOAD))

    return _events(name, look, {"in_flight": 1, "events": count, "rounds": rounds}, measure, progress)


def _pipelined(name: str, look: Look, quick: bool, progress: Progress) -> list[Figure]:
    in_flight = max(IN_FLIGHT)
    rounds, events, batches = (2, 1024, 1) if quick else (10, 16_384, 12)

    async def measure(pair: Pair) -> list[float]:
        return await windows(lambda: pair.gateway.send_event([EVENT, 0, PAYLOAD]), in_flight, events, batches)

    return _events(name, look, {"in_flight": in_flight, "events": events, "rounds": rounds}, measure, progress)


def _checkpoint(name: str, look: Look, quick: bool, progress: Progress) -> list[Figure]:
    subtasks, rounds, count = (16, 2, 2) if quick else (SUBTASKS, 10, 30)

    async def compared() -> Figure:
        async with running_crowd(
            subtasks, bare_too=False, config=SidecarConfig(watching=Watching(status_port=0))
        ) as crowd:
            await crowd.open(subtasks)
            samples, baseline = await _seen_and_not(
                crowd.runtime, look, rounds, lambda: timed(count, lambda: checkpoint_ms(crowd)), progress
            )
        params = {"subtasks": subtasks, "rounds": rounds, "checkpoints": count, "baseline": "nobody looks"}
        return Figure(name, "ms", samples, baseline, params)

    return [asyncio.run(compared())]


def event_confirm_watched(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` to the confirmation, one at a time."""
    return _confirm("event_confirm_watched", watching, quick, progress)


def event_confirm_traced(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` to the confirmation, one at a time."""
    return _confirm("event_confirm_traced", tracing, quick, progress)


def event_pipelined_watched(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one confirmed event with many in flight, averaged over each batch."""
    return _pipelined("event_pipelined_watched", watching, quick, progress)


def event_pipelined_traced(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one confirmed event with many in flight, averaged over each batch."""
    return _pipelined("event_pipelined_traced", tracing, quick, progress)


def checkpoint_watched(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a checkpoint, until both sides know of its end."""
    return _checkpoint("checkpoint_watched", watching, quick, progress)


def checkpoint_traced(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a checkpoint, until both sides know of its end."""
    return _checkpoint("checkpoint_traced", tracing, quick, progress)
