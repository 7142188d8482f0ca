# SPDX-License-Identifier: Apache-2.0

"""What a group of four real Spark tasks costs, and how soon its members hear of a loss.

``group_call``: one call in rank 0, in milliseconds: a barrier, an all-reduce of 1 KiB and of 16 MiB. The baseline is
``allGather`` of 1 KiB in a barrier stage of Spark.

``peer_lost``: from the moment at which a member kills or stops its process to ``PeerLost`` in each of the others, which
wait in a barrier, in milliseconds. ``next_step``: from the same moment until each of the others has made the first call
of the next generation, with the retry of the lost member, or without it in an elastic group. The baseline of both is a
barrier stage whose member is killed: until its action has failed. One whose member stands still hangs without end.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
    """Milliseconds from the loss of a member to ``PeerLost`` in the others, compared with a barrier stage."""
    cases = {"killed": (signal.SIGKILL, False, 6), "stopped": (signal.SIGSTOP, False, 4)}
    return _figures("peer_lost", cases, 0, quick, progress)


def next_step(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the loss of a member to the next call of the others, compared with a barrier stage."""
    cases = {"killed, with its retry": (signal.SIGKILL, False, 6), "killed, elastic": (signal.SIGKILL, True, 6)}
    return _figures("next_step", cases, 1, quick, progress)


def _figures(
    name: str, cases: Mapping[str, tuple[int, bool, int]], place: int, quick: bool, progress: Progress
) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder, spark_session(f"local[{MEMBERS},4]") as spark:
        markers = (Path(folder) / f"group-{number}" for number in count())
        for case, (number, elastic, rounds) in cases.items():
            samples, baseline = interleave(
                1 if quick else rounds,
                lambda: _stage_fails(spark, next(markers)),
                lambda number=number, elastic=elastic: _lose(spark, next(markers), number, elastic)[place],  # type: ignore[misc]
                progress,
            )
            params = {"case": {"member": case}, "members": MEMBERS, "baseline": "a barrier stage fails"}
            figures.append(Figure(name, "ms", samples, baseline, params))
    return figures


def _since(marker: Path) -> float:
    return (time.time() - float(marker.read_text())) * 1e3


def _suffer(marker: Path, number: int) -> None:
    time.sleep(0.2)  # the others wait
    marker.write_text(str(time.time()))
    os.kill(os.getpid(), number)


def _lose(spark: SparkSession, marker: Path, number: int, elastic: bool) -> tuple[list[float], list[float]]:
    """Lose a member, and return when each of the others has raised ``PeerLost``, and has made the next call."""
    heartbeats: Any = {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 1.0} if number == signal.SIGSTOP else {}
    with Sidecar(spark) as sidecar:
        group = sidecar.group("members", MEMBERS, min_size=MEMBERS - elastic, start_wait_s=60.0)
        job = sidecar.coordinate(marker.name, parallelism=MEMBERS, uses=[group], **heartbeats)

        def work(records: Iterator[int]) -> Iterator[tuple[float, float]]:
            if elastic and marker.exists():
                return  # the retry, without which the others have gone on
            try:
                with group as member:
                    member.barrier()
                    if member.rank == 1 and not marker.exists():
                        _suffer(marker, number)
                    member.barrier()
            except PeerLost:
                lost_ms = _since(marker)
                with group as member:
                    member.barrier()
                    next_ms = _since(marker)
                    member.barrier()
                yield lost_ms, next_ms

        found = list(_tasks(spark).mapPartitions(job.subtask(work)).collect())
        return [lost_ms for lost_ms, _ in found], [next_ms for _, next_ms in found]


def _stage_fails(spark: SparkSession, marker: Path) -> list[float]:
    """Kill a task of a barrier stage, and return when its action has failed."""

    def work(records: Iterator[int]) -> Iterator[int]:
        context = BarrierTaskContext.get()
        if context.partitionId() == 1:
            _suffer(marker, signal.SIGKILL)
        context.barrier()
        yield 0

    try:
        _tasks(spark).barrier().mapPartitions(work).collect()
    except (PySparkException, Py4JError):
        return [_since(marker)]
    raise RuntimeError("a barrier stage has survived the death of a task")
