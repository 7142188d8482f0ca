# SPDX-License-Identifier: Apache-2.0

"""What may be in one stage together: works exactly, or is refused with advice that works (H58)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar

pytestmark = pytest.mark.spark


class Summing(OperatorCoordinator):
    """Sums what each subtask sends."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: int) -> None:
        self.sums[subtask] = self.sums.get(subtask, 0) + event

    async def handle_client_request(self, request: Any) -> dict[int, int]:
        return self.sums


def send(context: Any, records: Iterator[int]) -> Iterator[int]:
    for record in records:
        context.send_event(record)
        yield record


Build = Callable[[Callable[[str, int], Callable[[RDD[int]], RDD[int]]], RDD[int]], RDD[Any]]

TABLE: dict[str, tuple[Build, str]] = {
    "one after the other": (lambda on, base: on("b", 2)(on("a", 2)(base)), ""),
    "zip": (lambda on, base: on("a", 2)(base).zip(on("b", 2)(base)), ""),
    "union, two subtasks each": (
        lambda on, base: on("a", 2)(base).union(on("b", 2)(base)),
        r"repartition\(2\) after its subtasks and before the union\(\)",
    ),
    "union, as many subtasks as the stage has tasks": (
        lambda on, base: on("a", 4)(base).union(on("b", 4)(base)),
        r"repartition\(4\) on each of them after its subtasks and before the union\(\)",
    ),
    "union, repartitioned after the subtasks": (
        lambda on, base: on("a", 2)(base).repartition(2).union(on("b", 2)(base).repartition(2)),
        "",
    ),
    "subtasks after the union": (lambda on, base: on("a", 4)(base.union(base)), ""),
    "union with itself": (
        lambda on, base: (one := on("a", 2)(base)).union(one),
        r"repartition\(2\) after its subtasks and before the union\(\)",
    ),
    "join with itself": (
        lambda on, base: (one := on("a", 2)(base).keyBy(abs)).join(one),
        r"repartition\(2\) after its subtasks and before the union\(\)",
    ),
    "zipped with itself": (
        lambda on, base: (one := on("a", 2)(base)).zip(one),
        r"a zip with itself has put two subtasks into one task",
    ),
    "one operator twice in a task": (
        lambda on, base: on("a", 2)(on("a", 2)(base)),
        r"coordinate\(\) another operator",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_it_works_exactly_or_is_refused_with_the_way_out(spark: SparkSession, case: str) -> None:
    build, refused = TABLE[case]
    with Sidecar(spark) as sidecar:
        handles: dict[str, Any] = {}

        def on(name: str, parallelism: int) -> Callable[[RDD[int]], RDD[int]]:
            if name not in handles:
                handles[name] = sidecar.coordinate(name, Summing, parallelism=parallelism)
            return lambda rdd: rdd.mapPartitions(handles[name].subtask(send))

        base = spark.sparkContext.parallelize(range(10), 2)
        result = build(on, base)
        if refused:
            with pytest.raises(Exception, match=refused):
                result.collect()
            return
        result.collect()
        for name, handle in handles.items():
            sums = sidecar.request(name, None)
            assert sum(sums.values()) == (90 if "after the union" in case else 45)
            assert len(sums) == handle.endpoint.parallelism


@pytest.mark.parametrize("build", [lambda a, b, base: b(a(base)), lambda a, b, base: a(base).zip(b(base))])
def test_two_operators_in_streaming_mode_are_refused_with_the_way_out(spark: SparkSession, build: Any) -> None:  # H174
    with Sidecar(spark) as sidecar:
        made = [sidecar.coordinate(name, Summing, parallelism=2, mode="streaming") for name in ("a", "b")]
        a, b = (lambda rdd, handle=handle: rdd.mapPartitions(handle.subtask(send)) for handle in made)
        with pytest.raises(
            Exception, match=r"operators 'a' and 'b' are in streaming mode .* chain\(first=\.\.\., second="
        ):
            build(a, b, spark.sparkContext.parallelize(range(10), 2)).collect()
