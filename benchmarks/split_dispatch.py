# SPDX-License-Identifier: Apache-2.0

"""``split_dispatch``: splits that a coordinator hands to running tasks, compared with a Spark task for each split.

A sample is the time of a whole job, from the action to its result, divided by its splits, in microseconds. The
subject is one job of two tasks, to which a ``SourceCoordinator`` hands the splits on demand, ``batch_size`` at a
time; with 1 each split needs a separate round trip. The baseline is plain Spark with a task for each split. To save
time its jobs have fewer splits; over all rounds there are as many as the subject has in one job. The work for one
split is the same and next to nothing. Both must come to the same total.
"""

from __future__ import annotations

import time
from itertools import count

from pyspark.sql import SparkSession

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from benchmarks.harness import Figure, Progress, interleave
from benchmarks.plain_tasks import read
from benchmarks.spark_session import spark_session
from benchmarks.spark_tasks import AddingReader
from spark_bridge.driver.sidecar import Sidecar

SUBTASKS = 2
BATCH_SIZES = (1, 32)
SPLITS = 10_000


def _coordinated(spark: SparkSession, sidecar: Sidecar, name: str, splits: int, batch_size: int) -> float:
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(range(splits), state, batch_size=batch_size))
    task = sidecar.coordinate(name, coordinator, parallelism=SUBTASKS).subtask(AddingReader)
    began = time.perf_counter()
    total = spark.sparkContext.parallelize(range(SUBTASKS), SUBTASKS).mapPartitions(task).sum()
    took_s = time.perf_counter() - began
    sidecar.release(name)
    _check(total, splits)
    return took_s / splits * 1e6


def _plain(spark: SparkSession, tasks: int) -> float:
    began = time.perf_counter()
    total = spark.sparkContext.parallelize(range(tasks), tasks).map(read).sum()
    took_s = time.perf_counter() - began
    _check(total, tasks)
    return took_s / tasks * 1e6


def _check(total: int, splits: int) -> None:
    if total != sum(map(read, range(splits))):
        raise RuntimeError(f"{splits} splits made {total}")


def split_dispatch(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one split of a job, handed to a running task, compared with one plain Spark task for each."""
    rounds, splits, tasks = (1, 500, 50) if quick else (10, SPLITS, SPLITS // 10)
    names = (f"splits-{number}" for number in count())

    def subject() -> list[float]:
        with Sidecar(spark) as sidecar:
            return [_coordinated(spark, sidecar, next(names), splits, batch_size) for batch_size in BATCH_SIZES]

    with spark_session(f"local[{SUBTASKS}]") as spark:
        samples, baseline = interleave(rounds, lambda: [_plain(spark, tasks)], subject, progress)
    figures = []
    for place, batch_size in enumerate(BATCH_SIZES):
        params = {"case": {"batch_size": batch_size}, "splits": splits, "subtasks": SUBTASKS, "tasks": tasks}
        params |= {"baseline": "a plain Spark task for each split"}
        figures.append(Figure("split_dispatch", "µs", [[of_round[place]] for of_round in samples], baseline, params))
    return figures
