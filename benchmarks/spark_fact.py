"""``spark_fact``: how soon a coordinator hears of what Spark's scheduler has seen, on a real Spark.

A sample is the time from the listener's callback in the driver's JVM, for the end of a job, to the coordinator's
``run_ended``: relay, bridge with its ledger, barrier tracker, coordinator. The baseline is the relay alone: from the
same callback to a function on the event loop. Both read the same machine's clock of the day, in the JVM and here. The
jobs have one task each, in ``local[2]``; when Spark itself gets round to calling back is not in the figure.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from pyspark import SparkContext
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from benchmarks.harness import Figure, Progress, interleave
from benchmarks.pair import running_driver_half
from protocol.facts import JobEnded
from spark_bridge.facts import RelayedFact
from spark_bridge.relay import open_relay
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask

WAIT_S = 30.0


class NothingToDo(SubtaskOperator):
    """A task that registers, opens and ends well."""

    def process(self, records: Iterator[Any]) -> None:
        for _ in records:
            pass


class CountingCoordinator(OperatorCoordinator):
    """Says when a run has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.ended.set()


@contextmanager
def _spark() -> Iterator[SparkContext]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.Builder().master("local[2]").appName("headgate-benchmarks")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session.sparkContext
    finally:
        session.stop()


async def _to_coordinator(context: SparkContext, jobs: int) -> list[float]:
    coordinator = CountingCoordinator()
    async with running_driver_half(coordinator, lambda bridge: open_relay(context, bridge.tell, kind="jvm")) as driver:
        task = SubtaskTask(NothingToDo, driver.endpoint)
        for _ in range(jobs):
            coordinator.ended.clear()
            await anyio.to_thread.run_sync(lambda: context.parallelize([0], 1).mapPartitions(task).count())
            async with asyncio.timeout(WAIT_S):
                await coordinator.ended.wait()
        return driver.statistics.fact_us.samples()


async def _relay_alone(context: SparkContext, jobs: int) -> list[float]:
    samples: list[float] = []
    ended = asyncio.Event()

    def hear(relayed: RelayedFact) -> None:
        if isinstance(relayed.fact, JobEnded):
            samples.append(time.time_ns() / 1000 - relayed.callback_us)
            ended.set()

    relay = open_relay(context, hear, kind="jvm")
    await relay.start()
    try:
        for _ in range(jobs):
            ended.clear()
            await anyio.to_thread.run_sync(lambda: context.parallelize([0], 1).count())
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
    finally:
        await relay.close()
    return samples


def spark_fact(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from the JVM's callback for the end of a job to the coordinator's ``run_ended``."""
    rounds, jobs = (1, 3) if quick else (4, 25)
    with _spark() as context:
        samples, baseline = interleave(
            rounds,
            lambda: asyncio.run(_relay_alone(context, jobs)),
            lambda: asyncio.run(_to_coordinator(context, jobs)),
            progress,
        )
    params = {"jobs": jobs, "rounds": rounds, "master": "local[2]", "baseline": "the relay alone"}
    return [Figure("spark_fact", "µs", samples, baseline, params)]
