# SPDX-License-Identifier: Apache-2.0

"""What a group of four real Spark tasks costs, and how soon its members hear of a loss.

``group_call``: one call in rank 0, in milliseconds: a barrier, an all-reduce of 1 KiB and of 16 MiB. The baseline is
``allGather`` of 1 KiB in a barrier stage of Spark.

``peer_lost``: from the moment at which a member kills its process to ``PeerLost`` in each of the others, which wait in
a barrier, in milliseconds. The baseline is a barrier stage: from the same moment until its action has failed.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress, interleave
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.primitives.group.task import GroupMember
from spark_bridge.subtask.errors import PeerLost

MEMBERS = 4
CASES = {"barrier": 0, "all_reduce of 1 KiB": 1 << 10, "all_reduce of 16 MiB": 16 << 20}


def _times_ms(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _call(member: GroupMember, size_bytes: int) -> Callable[[], object]:
    array = np.zeros(size_bytes // 8)
    return (lambda: member.all_reduce(array)) if size_bytes else member.barrier


def group_call(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds for one collective of four tasks, compared with Spark's ``allGather``."""
    rounds, times = (1, 2) if quick else (4, 200)
    names = (f"group-{number}" for number in count())

    def calls(sidecar: Sidecar) -> list[list[float]]:
        group = sidecar.group("members", MEMBERS)
        job = sidecar.coordinate(next(names), parallelism=MEMBERS, uses=[group])

        def work(records: Iterator[int]) -> Iterator[list[list[float]]]:
            with group as member:
                taken = []
                for size_bytes in CASES.values():
                    call = _call(member, size_bytes)
                    call()
                    taken.append(_times_ms(call, times if size_bytes < 1 << 20 else max(2, times // 20)))
                if member.rank == 0:
                    yield taken

        (taken,) = _tasks(spark).mapPartitions(job.subtask(work)).collect()
        return list(taken)

    def gathers(records: Iterator[int]) -> Iterator[float]:
        context = BarrierTaskContext.get()
        taken = _times_ms(lambda: context.allGather("x" * 1024), 2 if quick else 3)
        if context.partitionId() == 0:
            yield from taken

    found: list[list[list[float]]] = []

    def subject() -> list[float]:
        with Sidecar(spark) as sidecar:
            found.append(calls(sidecar))
        return found[-1][0]

    with spark_session(f"local[{MEMBERS}]") as spark:
        _, baseline = interleave(
            rounds, lambda: _tasks(spark).barrier().mapPartitions(gathers).collect(), subject, progress
        )
    of_rounds = found[1:]  # without the warm-up
    return [
        Figure(
            "group_call",
            "ms",
            [of_round[place] for of_round in of_rounds],
            baseline,
            {"case": {"call": case}, "members": MEMBERS, "baseline": "allGather of 1 KiB in a barrier stage"},
        )
        for place, case in enumerate(CASES)
    ]


def _tasks(spark: SparkSession) -> Any:
    return spark.sparkContext.parallelize(range(MEMBERS), MEMBERS)


def peer_lost(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the death of a member to ``PeerLost`` in the others, compared with a barrier stage."""
    rounds = 1 if quick else 8
    names = (f"group-{number}" for number in count())

    def die(marker: Path) -> None:
        marker.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def subject() -> list[float]:
        marker = Path(folder) / next(names)
        with Sidecar(spark) as sidecar:
            group = sidecar.group("members", MEMBERS)
            job = sidecar.coordinate(marker.name, parallelism=MEMBERS, uses=[group])

            def work(records: Iterator[int]) -> Iterator[float]:
                try:
                    with group as member:
                        member.barrier()
                        if member.rank == 1 and not marker.exists():
                            time.sleep(0.2)  # the others wait
                            die(marker)
                        member.barrier()
                except PeerLost:
                    yield (time.time() - float(marker.read_text())) * 1e3
                    with group as member:
                        member.barrier()
                        member.barrier()

            return list(_tasks(spark).mapPartitions(job.subtask(work)).collect())

    def stage() -> list[float]:
        marker = Path(folder) / next(names)

        def work(records: Iterator[int]) -> Iterator[int]:
            context = BarrierTaskContext.get()
            if context.partitionId() == 1:
                time.sleep(0.2)
                die(marker)
            context.barrier()
            yield 0

        try:
            _tasks(spark).barrier().mapPartitions(work).collect()
        except (PySparkException, Py4JError):
            return [(time.time() - float(marker.read_text())) * 1e3]
        raise RuntimeError("a barrier stage has survived the death of a task")

    with tempfile.TemporaryDirectory() as folder, spark_session(f"local[{MEMBERS},4]") as spark:
        samples, baseline = interleave(rounds, stage, subject, progress)
    return [Figure("peer_lost", "ms", samples, baseline, {"members": MEMBERS, "baseline": "a barrier stage fails"})]
