# SPDX-License-Identifier: Apache-2.0

"""What coroutines of real Spark tasks wait for: their coordinator, a cache and a budget.

``async_operation``: one operation of a cache or of a budget in microseconds, with 1,000 coroutines in one task: the
time of all of them, divided by their number. ``known``: the task has met the key before. ``new``: it has not, and
computes the value. ``reserved``: some of a budget is reserved and settled. The baseline is one request and its answer,
with as many coroutines in the same task.

``async_request``: one ``await context.request`` in an async stage, in milliseconds, while there are checkpoints and the
stage before it blocks the task's thread for most of the time. The baseline is the same without checkpoints. The
longest one matters: a checkpoint must not make it wait for the task's thread.

``async_limit``: from the first to the last call of two tasks that share permits, in milliseconds, each call at the
moment at which it has its permit. The baseline is the shortest time that the limit allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from benchmarks.harness import Figure, Progress, interleave
from benchmarks.spark_session import spark_session
from headgate import CheckpointConfig, Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator, chain
from spark_bridge.subtask import SubtaskContext
from spark_bridge.subtask.coroutines.concurrently import concurrently

COROUTINES = 1_000
OPERATIONS = 10_000
BLOCKED = 8
BLOCKED_S = 0.2
REQUESTS = 50
INTERVAL_S = 0.05
LIMIT_PER_S, BURST = 200.0, 20
LIMITED_CALLS = 2_000


class _Answers(OperatorCoordinator):
    """Answers each request."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


# --- a cache and a budget --------------------------------------------------------------------------------------------


async def _all(call: Callable[[int], Awaitable[Any]], operations: int) -> float:
    """Call it so many times; return the microseconds for each."""
    numbers = iter(range(operations))

    async def work() -> None:
        for number in numbers:
            await call(number)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(COROUTINES)))
    return (time.perf_counter() - began) / operations * 1e6


def async_operation(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one operation of a cache or a budget, compared with a request in the same task."""
    rounds, operations = (1, 2_000) if quick else (5, OPERATIONS)

    def measured(spark: SparkSession) -> dict[str, float]:
        with Sidecar(spark) as sidecar:
            cache, budget = sidecar.cache("answers"), sidecar.budget("usd", 1_000_000.0)

            def work(context: SubtaskContext, records: Iterator[int]) -> Iterator[tuple[str, float]]:
                async def make() -> str:
                    return "the answer"

                async def look_up(number: int) -> None:
                    await cache.get_async(number, make)

                async def spend(number: int) -> None:
                    async with budget.reserve(0.01) as spent:
                        spent.settle(0.01)

                async def main() -> Iterator[tuple[str, float]]:
                    calls: dict[str, Callable[[int], Awaitable[Any]]] = {
                        "request": context.request_async,
                        "new": look_up,
                        "known": look_up,
                        "reserved": spend,
                    }
                    return iter([(name, await _all(call, operations)) for name, call in calls.items()])

                yield from asyncio.run(main())

            job = sidecar.coordinate("operations", _Answers, parallelism=1, uses=[cache, budget])
            return dict(spark.sparkContext.parallelize([0], 1).mapPartitions(job.subtask(work)).collect())

    with spark_session("local[2]") as spark:
        measured(spark)
        runs = []
        for number in range(rounds):
            runs.append(measured(spark))
            progress(f"round {number + 1}/{rounds}")
    params = {"operations": operations, "coroutines": COROUTINES, "baseline": "a request in the same task"}
    baseline = [[run["request"]] for run in runs]
    cases = {
        "new": {"of": "cache", "what": "a new key"},
        "known": {"of": "cache", "what": "a known key"},
        "reserved": {"of": "budget", "what": "reserved and settled"},
    }
    return [
        Figure("async_operation", "µs", [[run[what]] for run in runs], baseline, {"case": case, **params})
        for what, case in cases.items()
    ]


# --- a limit ---------------------------------------------------------------------------------------------------------


def async_limit(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the first permitted call to the last one, compared with the shortest time that is allowed."""
    rounds, calls = (1, 200) if quick else (5, LIMITED_CALLS)
    names = (f"limited-{number}" for number in count())

    def run() -> list[float]:
        permits = sidecar.permits("service", per_s=LIMIT_PER_S, burst=BURST)

        async def call(number: int) -> float:
            async with permits:
                began = time.time()
                await asyncio.sleep(0.2)
                return began

        job = sidecar.coordinate(next(names), parallelism=2, uses=[permits])
        times = job.run(concurrently(call, limit=500, ordered=False), range(calls))
        return [(max(times) - min(times)) * 1e3]

    with spark_session("local[2]") as spark, Sidecar(spark) as sidecar:
        shortest_ms = (calls - BURST) / LIMIT_PER_S * 1e3
        samples, baseline = interleave(rounds, lambda: [shortest_ms], run, progress)
    params = {"calls": calls, "per_s": LIMIT_PER_S, "burst": BURST, "baseline": "the shortest time that is allowed"}
    return [Figure("async_limit", "ms", samples, baseline, params)]


# --- requests under checkpoints --------------------------------------------------------------------------------------


class _Numbers(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        for number in range(position or 0, split):
            yield number + 1, number


def blocks(records: Iterator[int]) -> Iterator[int]:
    """The stage before: it has something to do after each record, and Headgate sees nothing of the task's thread."""
    for record in records:
        yield record
        time.sleep(BLOCKED_S)


async def ask(context: Any, record: int) -> list[float]:
    times = []
    for number in range(REQUESTS):
        began = time.perf_counter()
        await context.request(number)
        times.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.002)
    return times


def async_request(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds for one request of a coroutine under checkpoints, compared with the same without them."""
    rounds, records = (1, 3) if quick else (5, BLOCKED)
    names = (f"asks-{number}" for number in count())

    def run(interval_s: float | None) -> list[float]:
        numbers = SourceCoordinator(partial(_static, [records])), _Numbers
        stages = chain(read=numbers, blocks=blocks, ask=(_Answers, concurrently(ask, limit=records, ordered=False)))
        config = CheckpointConfig(interval_s=interval_s)
        job = sidecar.coordinate(next(names), stages, parallelism=1, mode="streaming", checkpoint=config)
        found = sidecar.run(spark.sparkContext.parallelize([0], 1).mapPartitions(job.subtask()).collect)
        return [ms for times in found for ms in times]

    with spark_session("local[2]") as spark, Sidecar(spark) as sidecar:
        samples, baseline = interleave(rounds, lambda: run(None), lambda: run(INTERVAL_S), progress)
    params = {"records": records, "interval_s": INTERVAL_S, "blocked_s": BLOCKED_S, "baseline": "without checkpoints"}
    return [Figure("async_request", "ms", samples, baseline, params)]


def _static(splits: list[Any], state: bytes | None, *_: Any) -> StaticSplitEnumerator:
    return StaticSplitEnumerator(splits, state)
