# SPDX-License-Identifier: Apache-2.0

"""What the ready-made parts cost, in real Spark tasks.

``work_item``: one item of a work queue, in microseconds: the time of a whole job of two tasks divided by its items,
with one item in hand and with 32. The baseline is plain Spark with a task for each item, as in ``split_dispatch``.

``permit``: one ``with permits:`` inside a task, in microseconds: of a rate that is not reached, so that permits are
held ahead of need, and of a number of users that is not reached. The baseline is one request and its answer in the same
task.

``shared_value``: from ``set(..., wait="all")`` to its return, in milliseconds: every task has applied the value. The
baseline is a coordinator's broadcast of the same event, until all have confirmed it: it is in their mailboxes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import CoordinatorContext, OperatorCoordinator
from benchmarks.harness import Figure, Progress, Rounds, interleave
from benchmarks.plain_tasks import read
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.primitives.permits.driver import Permits
from spark_bridge.primitives.shared_value.driver import SharedValue
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.subtask import SubtaskContext

TASKS = 2
ITEMS = 10_000
IN_HAND = (1, 32)
USES = 2_000
SETS = 20


def _queue_job(spark: SparkSession, sidecar: Sidecar, name: str, items: int, in_hand: int) -> float:
    queue: WorkQueue[int] = sidecar.work_queue(name, range(items), in_hand=in_hand)
    job = sidecar.coordinate(name, parallelism=TASKS, uses=[queue])

    def work(records: Iterator[int]) -> Iterator[int]:
        yield sum(read(item) for item in queue)

    began = time.perf_counter()
    total = spark.sparkContext.parallelize(range(TASKS), TASKS).mapPartitions(job.subtask(work)).sum()
    took_s = time.perf_counter() - began
    sidecar.release(name)
    _check(total, items)
    return took_s / items * 1e6


def _plain_job(spark: SparkSession, tasks: int) -> float:
    began = time.perf_counter()
    total = spark.sparkContext.parallelize(range(tasks), tasks).map(read).sum()
    took_s = time.perf_counter() - began
    _check(total, tasks)
    return took_s / tasks * 1e6


def _check(total: int, items: int) -> None:
    if total != sum(map(read, range(items))):
        raise RuntimeError(f"{items} items made {total}")


def work_item(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one item of a work queue, compared with one plain Spark task for each."""
    rounds, items, tasks = (1, 500, 50) if quick else (6, ITEMS, ITEMS // 10)
    names = (f"work-{number}" for number in count())

    def subject() -> list[float]:
        with Sidecar(spark) as sidecar:
            return [_queue_job(spark, sidecar, next(names), items, in_hand) for in_hand in IN_HAND]

    with spark_session(f"local[{TASKS}]") as spark:
        samples, baseline = interleave(rounds, lambda: [_plain_job(spark, tasks)], subject, progress)
    return [
        Figure(
            "work_item",
            "µs",
            [[of_round[place]] for of_round in samples],
            baseline,
            {"case": {"in_hand": in_hand}, "items": items, "baseline": "a plain Spark task for each item"},
        )
        for place, in_hand in enumerate(IN_HAND)
    ]


class _Answers(OperatorCoordinator):
    """Answers each request."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


def permit(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one use of a permit that is at hand, compared with a request in the same task."""
    rounds, uses = (1, 50) if quick else (6, USES)
    cases = {
        "rate": Permits("rate", per_s=100_000.0, burst=50_000),
        "users": Permits("users", concurrency=4),
    }

    def use(context: SubtaskContext, records: Iterator[int]) -> Iterator[list[float]]:
        for what in ("request", *cases):
            times = []
            for _ in range(uses):
                began = time.perf_counter()
                if what == "request":
                    context.request(1)
                else:
                    with cases[what]:
                        pass
                times.append((time.perf_counter() - began) * 1e6)
            yield times

    def measured() -> list[list[float]]:
        with Sidecar(spark) as sidecar:
            job = sidecar.coordinate("uses", _Answers, parallelism=1, uses=list(cases.values()))
            found: list[list[float]] = spark.sparkContext.parallelize([0], 1).mapPartitions(job.subtask(use)).collect()
            return found

    with spark_session("local[2]") as spark:
        measured()
        runs = []
        for number in range(rounds):
            runs.append(measured())
            progress(f"round {number + 1}/{rounds}")
    baseline = [run[0] for run in runs]
    params = {"uses": uses, "baseline": "a request in the same task"}
    return [
        Figure("permit", "µs", [run[place] for run in runs], baseline, {"case": {"limit": what}, **params})
        for place, what in enumerate(cases, start=1)
    ]


class _Broadcasts(OperatorCoordinator):
    """Broadcasts an event on request, and answers when all have confirmed it."""

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context

    async def handle_client_request(self, request: Any) -> Any:
        if request == "ready":
            return len(self._context.gateways)
        for confirmation in await self._context.gateways.broadcast(request):
            await confirmation
        return None


def shared_value(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds until every task has applied a new shared value, compared with a confirmed broadcast."""
    rounds, sets = (1, 3) if quick else (6, SETS)
    figures = []
    for tasks in (4,) if quick else (4, 64):
        with spark_session(f"local[{tasks}]") as spark, Sidecar(spark) as sidecar:
            value = SharedValue("value", {"number": 0, "end": False})
            samples, baseline = _measure_sets(spark, sidecar, value, tasks, rounds, sets, progress)
        params = {"case": {"tasks": tasks}, "sets": sets, "baseline": "a confirmed broadcast of the same event"}
        figures.append(Figure("shared_value", "ms", samples, baseline, params))
    return figures


def _measure_sets(
    spark: SparkSession,
    sidecar: Sidecar,
    value: SharedValue[dict[str, Any]],
    tasks: int,
    rounds: int,
    sets: int,
    progress: Progress,
) -> tuple[Rounds, Rounds]:
    job = sidecar.coordinate("reads", _Broadcasts, parallelism=tasks, uses=[value])

    def wait(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
        while not value.get()["end"]:
            context.wait_for_event(0.05)
        yield value.version

    rdd = spark.sparkContext.parallelize(range(tasks), tasks)
    action = threading.Thread(target=lambda: rdd.mapPartitions(job.subtask(wait)).collect())
    action.start()
    while sidecar.request("reads", "ready") < tasks:
        time.sleep(0.05)
    numbers = count()

    def timed(call: Any) -> list[float]:
        times = []
        for _ in range(sets):
            new = {"number": next(numbers), "end": False}
            began = time.perf_counter()
            call(new)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    try:
        return interleave(
            rounds,
            lambda: timed(lambda new: sidecar.request("reads", new)),
            lambda: timed(lambda new: value.set(new, wait="all")),
            progress,
        )
    finally:
        value.set({"number": -1, "end": True})
        action.join()
