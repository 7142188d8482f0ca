# SPDX-License-Identifier: Apache-2.0

"""The work queue on a real Spark: processes are killed, more tasks than slots, a second action."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import (
    CheckpointConfig,
    FixedDelay,
    Sidecar,
    SubtaskContext,
    SubtaskOperator,
    WorkQueue,
    chain,
    concurrently,
)
from tests.spark.operators import kill_once

pytestmark = pytest.mark.spark


def names(depth: int) -> list[str]:
    found, level = [], ["r"]
    for _ in range(depth):
        found += level
        level = [item + child for item in level for child in "ab"]
    return sorted(found)


def crawl(queue: WorkQueue[str], depth: int, fatal: dict[str, Path]) -> Any:
    """Each item adds its two children. The first process that meets a fatal item is killed."""

    def run(records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            if item in fatal:
                kill_once(fatal[item])
            if len(item) < depth:
                queue.add([item + "a", item + "b"])
            yield item

    return run


def test_every_item_counts_once_though_processes_are_killed(spark: SparkSession, tmp_path: Path) -> None:
    with Sidecar(spark) as sidecar:
        queue = sidecar.work_queue("tree", ["r"], in_hand=2)
        job = sidecar.coordinate("crawl", parallelism=2, uses=[queue])
        fatal = {item: tmp_path / item for item in ("rab", "rbbaa")}
        rdd = spark.sparkContext.parallelize(range(2), 2)
        results = rdd.mapPartitions(job.subtask(crawl(queue, 8, fatal))).collect()
        assert sorted(results) == names(8)
        assert queue.progress == (255, 255)
        assert all(file.exists() for file in fatal.values())


def visits(queue: WorkQueue[str], depth: int, fatal: dict[str, Path]) -> Any:
    """``crawl`` in coroutines, which are the stage that the queue feeds."""

    async def visit(item: str) -> str:
        await asyncio.sleep(0.01)
        if item in fatal:
            kill_once(fatal[item])
        if len(item) < depth:
            queue.add([item + "a", item + "b"])
        return item

    return concurrently(visit, limit=20, ordered=False)


def test_coroutines_work_off_a_queue_although_processes_are_killed(spark: SparkSession, tmp_path: Path) -> None:
    with Sidecar(spark) as sidecar:
        queue = sidecar.work_queue("tree", ["r"], in_hand=5)
        fatal = {item: tmp_path / item for item in ("rab", "rbbaa")}
        stages = chain(take=queue, visit=visits(queue, 8, fatal))
        job = sidecar.coordinate("crawl", stages, parallelism=2, uses=[queue])
        assert sorted(job.run()) == names(8)
        assert queue.progress == (255, 255)
        assert all(file.exists() for file in fatal.values())

        numbers = sidecar.work_queue("numbers", range(100))
        loops = sidecar.coordinate("loops", parallelism=2, uses=[numbers])

        async def take(_: int) -> list[int]:
            return [number async for number in numbers]

        taken = loops.run(concurrently(take, limit=5), range(10))
        assert sorted(number for some in taken for number in some) == [*range(100)]


def test_more_tasks_than_slots_and_a_second_action(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        queue = sidecar.work_queue("tree", ["r"])
        job = sidecar.coordinate("crawl", parallelism=7, uses=[queue])
        rdd = spark.sparkContext.parallelize(range(7), 7).mapPartitions(job.subtask(crawl(queue, 6, {})))
        assert sorted(rdd.collect()) == names(6)
        assert rdd.count() == 63


class HoldsOne(SubtaskOperator):
    """Has an item in hand in two checkpoints in which all have one, and then fails."""

    def __init__(self, queue: WorkQueue[str], folder: Path) -> None:
        self._queue, self._folder = queue, folder

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context, self.covered = context, 0

    def process(self, records: Iterator[Any]) -> Iterator[str]:
        for item in self._queue:
            (self._folder / item).touch()
            while self.covered < 2:
                self.context.wait_for_event()
            raise LookupError(f"by the test, with {item}")
        yield "nothing left"

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.covered += len(list(self._folder.iterdir())) == 2


def test_an_input_in_fewer_partitions_fails_if_a_checkpoint_has_items_for_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    """H100 H58: they are in the state of a subtask that has no partition now."""
    often = CheckpointConfig(interval_s=0.05, tolerated_failures=1000)
    with Sidecar(spark) as sidecar:
        queue = sidecar.work_queue("tree", ["a", "b"])
        settings: dict[str, Any] = {"mode": "streaming", "checkpoint": often, "allow_fewer": True}
        job = sidecar.coordinate("crawl", parallelism=2, uses=[queue], **settings)

        def run(subtask: Any, partitions: int) -> Any:
            rdd = spark.sparkContext.parallelize(range(2), partitions).mapPartitions(subtask)
            return sidecar.run(rdd.collect, restart=FixedDelay(restarts_max=0), input_id="today")

        with pytest.raises(Exception, match="by the test"):
            run(job.subtask(HoldsOne, queue, tmp_path), 2)
        with pytest.raises(
            Exception, match="a checkpoint holds 1 items of a work queue for subtasks that have no part"
        ):
            run(job.subtask(crawl(queue, 1, {})), 1)
        assert sorted(run(job.subtask(crawl(queue, 1, {})), 2)) == ["a", "b"]
