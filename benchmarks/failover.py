# SPDX-License-Identifier: Apache-2.0

"""``failover``: how soon a coordinator learns that a task has thrown, and has the next attempt ready.

One task throws again and again; the text of its exception contains the time. A sample is the time from then to the
coordinator's ``subtask_failed`` (case "failed"), and to its ``subtask_ready`` with the next attempt (case "ready").

The baseline is plain Spark in the same session: from the throw of a plain task until a bare socket fed by a Spark
listener receives the end of that task ("failed"), and until the first line of the next attempt runs ("ready"). The
attempt that Headgate calls ready has also loaded its operator, registered and opened by then.

All times are from the machine's wall clock.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.harness import Figure, Progress, interleave
from benchmarks.plain_tasks import Thrower
from benchmarks.spark_fact import MASTER, BareEnds, bare_relay
from benchmarks.spark_session import spark_session
from benchmarks.spark_tasks import ThrowingOperator
from protocol.attempts import FailureKind, FailureReason
from spark_bridge.driver.sidecar import Sidecar

PAUSE_S = 0.03
CASES = ("failed", "ready")
FLINK_MS = {"failed": 3.9, "ready": 12.0}
"""The times of Apache Flink for the same two cases, measured elsewhere; for comparison."""


class Listening(OperatorCoordinator):
    """Records when each attempt threw, failed and was ready, and tells it that it may throw."""

    def __init__(self) -> None:
        self.thrown_ns: list[int] = []
        self.failed_ns: list[int] = []
        self.ready_ns: list[int] = []

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.ready_ns.append(time.time_ns())
        await gateway.send_event("go on")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        if reason.kind is FailureKind.RUN_ENDED:
            return  # the last one has succeeded, and its operator is released before Spark has said so
        self.failed_ns.append(time.time_ns())
        self.thrown_ns.append(_thrown_ns(reason.text))


def _thrown_ns(text: str) -> int:
    found = re.search(r"thrown at (\d+)", text)
    if found is None:
        raise ValueError(f"the task failed otherwise: {text}")
    return int(found[1])


def _run(spark: SparkSession, task: Callable[[Any], Any]) -> None:
    spark.sparkContext.parallelize([0], 1).mapPartitions(task).count()


def _coordinated(spark: SparkSession, sidecar: Sidecar, name: str, failures: int) -> list[float]:
    """For each failure: milliseconds until it is known, and until the next attempt is ready; in turn."""
    coordinator = Listening()
    handle = sidecar.coordinate(name, coordinator, parallelism=1)
    _run(spark, handle.subtask(ThrowingOperator, failures, PAUSE_S))
    sidecar.release(name)
    return _in_turn(coordinator.thrown_ns, coordinator.failed_ns, coordinator.ready_ns[1:])


def _plain(spark: SparkSession, failures: int) -> list[float]:
    """For each failure: milliseconds until a bare listener received it, and until the next attempt runs; in turn."""
    ends = BareEnds()
    with tempfile.TemporaryDirectory(prefix="headgate-benchmark-") as folder, bare_relay(spark, ends.hear):
        notes = Path(folder) / "first-lines"
        _run(spark, Thrower(failures, PAUSE_S, str(notes)))
        began_ns = [int(line) for line in notes.read_text().splitlines()]
    thrown_ns = [_thrown_ns(text) for text in ends.texts]
    return _in_turn(thrown_ns, [int(us * 1000) for us in ends.heard_us], began_ns[1:])


def _in_turn(thrown_ns: list[int], failed_ns: list[int], next_ns: list[int]) -> list[float]:
    samples = []
    for thrown, failed, following in zip(thrown_ns, failed_ns, next_ns, strict=True):
        samples += [(failed - thrown) / 1e6, (following - thrown) / 1e6]
    return samples


def failover(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from a task's throw to ``subtask_failed`` and the next ``subtask_ready``, against plain Spark."""
    rounds, failures = (1, 2) if quick else (8, 16)
    names = (f"failover-{number}" for number in count())
    with spark_session(MASTER) as spark, Sidecar(spark) as sidecar:
        samples, baseline = interleave(
            rounds,
            lambda: _plain(spark, failures),
            lambda: _coordinated(spark, sidecar, next(names), failures),
            progress,
        )
    figures = []
    for place, case in enumerate(CASES):
        params = {"case": {"until": case}, "failures": failures, "pause_s": PAUSE_S, "master": MASTER}
        params |= {"baseline": "plain tasks and a bare listener", "flink_ms": FLINK_MS[case]}
        subject, raw = ([of_round[place :: len(CASES)] for of_round in side] for side in (samples, baseline))
        figures.append(Figure("failover", "ms", subject, raw, params))
    return figures
