# SPDX-License-Identifier: Apache-2.0

"""``async_records``: the processor time of one record in an async stage, in microseconds, in real Spark tasks.

The call is empty, but lets others run once, and 1,000 are in flight in each of two tasks. The time is that of the whole
worker process: the task's thread, the loop's thread and the I/O thread. The baseline is asyncio alone in the same kind
of task: as many workers take the records from one iterator, and await the same call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from itertools import count

from benchmarks.harness import Figure, Progress, interleave
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask.coroutines.concurrently import concurrently

TASKS = 2
RECORDS = 50_000
IN_FLIGHT = 1_000


async def call(record: int) -> int:
    await asyncio.sleep(0)
    return record


def of_process(results: Iterable[int]) -> Iterator[float]:
    """The processor time that this process takes for each result."""
    began = time.process_time()
    results_seen = sum(1 for _ in results)
    yield (time.process_time() - began) / results_seen * 1e6


def bare(records: Iterable[int]) -> Iterator[int]:
    """What the least code does with asyncio."""
    results: list[int] = []

    async def work() -> None:
        for record in records:
            results.append(await call(record))

    async def work_together() -> None:
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))

    asyncio.run(work_together())
    yield from results


def async_records(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds of processor time for one record, compared with bare asyncio."""
    rounds, records = (1, 2_000) if quick else (6, RECORDS)
    names = (f"async-{number}" for number in count())
    with spark_session(f"local[{TASKS}]") as spark:
        inputs = spark.sparkContext.parallelize(range(TASKS * records), TASKS)

        def subject() -> list[float]:
            with Sidecar(spark) as sidecar:
                job = sidecar.coordinate(next(names), parallelism=TASKS)
                stage = concurrently(call, limit=IN_FLIGHT, ordered=False)
                times: list[float] = sidecar.run(
                    inputs.mapPartitions(job.subtask(stage)).mapPartitions(of_process).collect
                )
                return times

        def baseline() -> list[float]:
            times: list[float] = inputs.mapPartitions(bare).mapPartitions(of_process).collect()
            return times

        samples, baseline_samples = interleave(rounds, baseline, subject, progress)
    params = {"records": records, "in_flight": IN_FLIGHT, "tasks": TASKS, "baseline": "asyncio alone"}
    return [Figure("async_records", "µs", samples, baseline_samples, params)]
