# SPDX-License-Identifier: Apache-2.0

"""What a group of real Spark tasks costs, and how soon its members hear of a loss.

``group_call``: one call in rank 0, in milliseconds: a barrier of 4 and of 64, an all-reduce of 1 KiB and of 16 MiB
among four. The baseline is ``allGather`` of 1 KiB in a barrier stage of Spark of as many tasks.

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
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress, interleave, percentile
from benchmarks.spark_session import spark_session
from protocol.gateway.types import GatewayLimits
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.primitives.group.task import GroupMember
from spark_bridge.subtask.errors import PeerLost

MEMBERS = 4
CROWD = 64
"""So many members, in as many processes, take part in one barrier."""
CASES = {"barrier": 0, "all_reduce of 1 KiB": 1 << 10, "all_reduce of 16 MiB": 16 << 20}


def _times_ms(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _call(member: GroupMember, size_bytes: int) -> Callable[[], object]:
    """The call, which has been made once."""
    array = np.zeros(size_bytes // 8)
    call: Callable[[], object] = (lambda: member.all_reduce(array)) if size_bytes else member.barrier
    call()
    return call


def _call_gloo(size_bytes: int) -> Callable[[], object]:
    """The same with torch, in the default process group."""
    torch: Any = import_module("torch")
    array = torch.zeros(size_bytes // 8, dtype=torch.float64)
    torch.distributed.all_reduce(array)
    return lambda: torch.distributed.all_reduce(array)


def group_call(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds for one collective of real tasks, compared with Spark's ``allGather``.

    ``details`` has the time of gloo's ``all_reduce`` for the same array and the same tasks, where torch is installed.
    """
    crowd = {"barrier": 0}
    return [
        *_calls_of(MEMBERS, CASES, (1, 2) if quick else (4, 200), progress),
        *_calls_of(2 * MEMBERS if quick else CROWD, crowd, (1, 2) if quick else (3, 50), progress),
    ]


def _calls_of(members: int, cases: Mapping[str, int], effort: tuple[int, int], progress: Progress) -> list[Figure]:
    rounds, times = effort
    names = (f"group-{number}" for number in count())
    in_gloo = find_spec("torch") is not None

    def of_size(size_bytes: int) -> int:
        return times if size_bytes < 1 << 20 else max(2, times // 20)

    def calls(sidecar: Sidecar) -> tuple[list[list[float]], list[list[float]]]:
        group = sidecar.group("members", members)
        job = sidecar.coordinate(next(names), parallelism=members, uses=[group])

        def work(records: Iterator[int]) -> Iterator[tuple[list[list[float]], list[list[float]]]]:
            with group as member:
                own = [_times_ms(_call(member, size), of_size(size)) for size in cases.values()]
                gloo: list[list[float]] = []
                if in_gloo:
                    with member.torch():
                        gloo = [_times_ms(_call_gloo(size), of_size(size)) for size in cases.values() if size]
                if member.rank == 0:
                    yield own, gloo

        (taken,) = _tasks(spark, members).mapPartitions(job.subtask(work)).collect()
        return taken[0], taken[1]

    def gathers(records: Iterator[int]) -> Iterator[float]:
        context = BarrierTaskContext.get()
        taken = _times_ms(lambda: context.allGather("x" * 1024), 2)
        if context.partitionId() == 0:
            yield from taken

    found: list[tuple[list[list[float]], list[list[float]]]] = []

    def subject() -> list[float]:
        with Sidecar(spark) as sidecar:
            found.append(calls(sidecar))
        return found[-1][0][0]

    with spark_session(f"local[{members}]") as spark:
        _, baseline = interleave(
            rounds, lambda: _tasks(spark, members).barrier().mapPartitions(gathers).collect(), subject, progress
        )
    figures, reductions = [], iter(range(len(cases)))
    for place, (case, size) in enumerate(cases.items()):
        own = [of_round[place] for of_round, _ in found[1:]]  # without the warm-up
        params = {"case": {"call": case, "members": members}, "baseline": "allGather of 1 KiB in a barrier stage"}
        details = {}
        if size and in_gloo:
            reduction = next(reductions)
            gloo = [took_ms for _, of_round in found[1:] for took_ms in of_round[reduction]]
            details = {"gloo_p50_ms": percentile(gloo, 0.5), "gloo_p99_ms": percentile(gloo, 0.99)}
        figures.append(Figure("group_call", "ms", own, baseline, params, details))
    return figures


def _tasks(spark: SparkSession, members: int = MEMBERS) -> Any:
    return spark.sparkContext.parallelize(range(members), members)


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
        for case, (number, elastic, rounds) in list(cases.items())[: 1 if quick else None]:
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
    heartbeats = GatewayLimits(heartbeat_interval_s=0.25) if number == signal.SIGSTOP else None
    with Sidecar(spark) as sidecar:
        group = sidecar.group("members", MEMBERS, min_size=MEMBERS - elastic, start_wait_s=60.0)
        job = sidecar.coordinate(marker.name, parallelism=MEMBERS, uses=[group], gateway=heartbeats)

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
