# SPDX-License-Identifier: Apache-2.0

"""The work queue on a real Spark: processes are killed, more tasks than slots, a second action."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import Sidecar, WorkQueue

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
                try:
                    fatal[item].touch(exist_ok=False)
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
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


def test_more_tasks_than_slots_and_a_second_action(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        queue = sidecar.work_queue("tree", ["r"])
        job = sidecar.coordinate("crawl", parallelism=7, uses=[queue])
        rdd = spark.sparkContext.parallelize(range(7), 7).mapPartitions(job.subtask(crawl(queue, 6, {})))
        assert sorted(rdd.collect()) == names(6)
        assert rdd.count() == 63
