# SPDX-License-Identifier: Apache-2.0

"""Shared values on a real Spark."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import SharedValue, Sidecar, SubtaskContext
from spark_bridge.primitives.shared_value.encoding import CHUNK_BYTES

pytestmark = pytest.mark.spark


def until_told(rules: SharedValue[dict[str, Any]]) -> Any:
    """Computes without looking at its records until the rules say that it may end."""

    def compute(context: SubtaskContext, records: Iterator[int]) -> Iterator[tuple[int, list[int]]]:
        seen: list[int] = []
        while not rules.get()["end"]:
            if rules.changed():
                seen.append(rules.version)
            if context.cancelled:
                return
        if rules.changed():  # or the last version came between `get` and `changed`
            seen.append(rules.version)
        yield context.subtask, seen

    return compute


def attempts_of(sidecar: Sidecar) -> int:
    """How many attempts the coordinator of "compute" knows."""
    return sum(attempt.known_to_coordinator for attempt in sidecar.status().operators["compute"].attempts)


def test_tasks_have_new_values_while_they_compute_and_the_program_knows_it(spark: SparkSession) -> None:
    """H110"""
    with Sidecar(spark) as sidecar:
        rules = sidecar.shared("rules", {"end": False, "limit": 0})
        job = sidecar.coordinate("compute", parallelism=2, uses=[rules])
        rdd = spark.sparkContext.parallelize(range(2), 2)
        results: list[Any] = []
        action = threading.Thread(
            target=lambda: results.extend(rdd.mapPartitions(job.subtask(until_told(rules))).collect())
        )
        action.start()
        while attempts_of(sidecar) < 2:
            time.sleep(0.02)
        for limit in range(1, 6):
            assert rules.set({"end": False, "limit": limit}, wait="all") == limit + 1
        assert sidecar.status().operators["compute"].parts == {"rules": {"version": 6}}
        rules.update(lambda value: {**value, "end": True})
        action.join(60)
        assert not action.is_alive()
    assert sorted(subtask for subtask, _ in results) == [0, 1]
    for _, seen in results:  # a task that is away may miss a version, which its half has applied
        assert seen == sorted(set(seen))
        assert seen[-1] == 7
    assert rules.version == 7


def test_a_large_value_reaches_every_task(spark: SparkSession) -> None:
    model: dict[str, Any] = {"weights": bytes(range(256)) * 16384, "name": "first"}  # 4 MiB
    with Sidecar(spark) as sidecar:
        shared = sidecar.shared("model", model)
        job = sidecar.coordinate("apply", parallelism=4, uses=[shared])

        def apply(records: Iterator[int]) -> Iterator[tuple[int, str]]:
            value = shared.get()
            yield sum(value["weights"][:1024]), value["name"]

        rdd = spark.sparkContext.parallelize(range(4), 4)
        assert rdd.mapPartitions(job.subtask(apply)).collect() == [(sum(range(256)) * 4, "first")] * 4
        shared.update(lambda value: {**value, "name": "second"})
        assert rdd.mapPartitions(job.subtask(apply)).collect() == [(sum(range(256)) * 4, "second")] * 4


def test_a_new_worker_reads_what_another_one_of_its_executor_has_fetched(spark: SparkSession, tmp_path: Path) -> None:
    """H110"""
    with Sidecar(spark) as sidecar:
        shared = sidecar.shared("model", {"weights": random.Random(3).randbytes(4 << 20)})
        job = sidecar.coordinate("apply", parallelism=2, uses=[shared])

        def apply(context: SubtaskContext, records: Iterator[int]) -> Iterator[tuple[int, int]]:
            marker = tmp_path / f"{context.subtask}"
            if (tmp_path / "all may die").exists() and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield os.getpid(), len(shared.get()["weights"])

        rdd = spark.sparkContext.parallelize(range(2), 2)
        first = rdd.mapPartitions(job.subtask(apply)).collect()
        sent = job.statistics()["parts"]["model"]["events_sent"]
        assert sent >= 4 * (1 << 20) / CHUNK_BYTES, "somebody has fetched it"
        (tmp_path / "all may die").touch()
        second = rdd.mapPartitions(job.subtask(apply)).collect()
        assert [size for _, size in first + second] == [4 << 20] * 4
        assert not {pid for pid, _ in first} & {pid for pid, _ in second}, "new processes"
        assert job.statistics()["parts"]["model"]["events_sent"] == sent + 4, (
            "an offer for each of four attempts, and no chunk"
        )
