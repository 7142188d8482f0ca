# SPDX-License-Identifier: Apache-2.0

"""``job_overhead``: the cost of a sidecar for a job that does not use it.

A sample is the time of a plain Spark job of many tasks, in milliseconds. The subject has a sidecar attached, which is
notified of each task and coordinates none of them; the baseline has none. Case "python": each task does a trivial
thing in a Python worker. Case "jvm": it counts its one row without leaving the JVM, which takes least, and so shows
most. A smaller job comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress, interleave
from benchmarks.plain_tasks import read
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar

MASTER = "local[2]"
TASKS = 2_000


def _python_job(spark: SparkSession, tasks: int) -> None:
    spark.sparkContext.parallelize(range(tasks), tasks).map(read).count()


def _jvm_job(spark: SparkSession, tasks: int) -> None:
    spark.range(0, tasks, 1, tasks).write.format("noop").mode("overwrite").save()


JOBS: dict[str, tuple[Callable[[SparkSession, int], None], int]] = {"python": (_python_job, 3), "jvm": (_jvm_job, 40)}
"""The job of each case, and its number of rounds."""


def _measure(spark: SparkSession, case: str, quick: bool, progress: Progress) -> Figure:
    job, rounds = JOBS[case]
    tasks = 50 if quick else TASKS

    def plain() -> list[float]:
        job(spark, tasks // 10)  # the end of a sidecar's start, or of the last one, is not a cost of the job
        began = time.perf_counter()
        job(spark, tasks)
        return [(time.perf_counter() - began) * 1e3]

    def attached() -> list[float]:
        with Sidecar(spark):
            return plain()

    rounds = 1 if quick else rounds
    samples, baseline = interleave(rounds, plain, attached, lambda text: progress(f"{case}, {text}"))
    params = {"case": {"tasks": case}, "task_count": tasks, "master": MASTER, "baseline": "without a sidecar"}
    return Figure("job_overhead", "ms", samples, baseline, params)


def job_overhead(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a plain job of 2000 tasks with a sidecar attached, compared with the same job without one."""
    with spark_session(MASTER) as spark:
        return [_measure(spark, case, quick, progress) for case in JOBS]
