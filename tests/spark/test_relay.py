"""The relay on a real Spark: what it says of a job, and what it can have Spark do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession

from protocol.facts import (
    JobEnded,
    JobStarted,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
)
from spark_bridge.relay.janino import JaninoRelay
from tests.spark.facts_log import FactsLog

pytestmark = pytest.mark.spark


@asynccontextmanager
async def a_relay(spark: SparkSession, **options: Any) -> AsyncIterator[tuple[JaninoRelay, FactsLog]]:
    log = FactsLog()
    relay = JaninoRelay(spark, log.receive, **options)
    await relay.start()
    try:
        yield relay, log
    finally:
        await relay.close()


def fail_one_and_hang_one(rows: Iterable[int]) -> Iterable[int]:
    """The first attempt of partition 1 raises, that of partition 2 hangs until somebody kills it."""
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 1:
        raise ValueError("the first attempt of partition 1 fails")
    if context.attemptNumber() == 0 and context.partitionId() == 2:
        threading.Event().wait(120)
    yield sum(rows)


def run_three_tasks(context: SparkContext) -> list[int]:
    return context.parallelize(range(9), 3).mapPartitions(fail_one_and_hang_one).collect()


async def test_a_job_with_a_failure_and_a_kill_is_told_attempt_by_attempt(spark: SparkSession) -> None:
    # spark-facts 16: exactly the attempt that was named is killed, and another one takes its place.
    async with a_relay(spark) as (relay, log):
        job = asyncio.get_running_loop().run_in_executor(None, run_three_tasks, spark.sparkContext)
        hanging = await log.wait_for(TaskStarted, lambda fact: fact.partition == 2)
        await relay.kill_task(hanging.task_attempt_id, "it went deaf")
        assert await job == [3, 12, 21]
        ended = await log.wait_for(JobEnded)

        [started] = log.of(JobStarted)
        assert ended == JobEnded(started.job_id, succeeded=True)
        outcomes = sorted(
            (fact.partition, fact.attempt_number, fact.outcome.name) for fact in log.of(TaskEnded)
        )
        assert outcomes == [
            (0, 0, "SUCCESS"),
            (1, 0, "FAILED"),
            (1, 1, "SUCCESS"),
            (2, 0, "KILLED"),
            (2, 1, "SUCCESS"),
        ]
        killed = next(fact for fact in log.of(TaskEnded) if fact.outcome is TaskOutcome.KILLED)
        assert (killed.task_attempt_id, killed.reason) == (hanging.task_attempt_id, "it went deaf")
        failed = next(fact for fact in log.of(TaskEnded) if fact.outcome is TaskOutcome.FAILED)
        assert "the first attempt of partition 1 fails" in failed.reason
