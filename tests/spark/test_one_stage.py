# SPDX-License-Identifier: Apache-2.0

"""What may be in one stage together: works exactly, or is refused with advice that works (H58).

Each row of the table in ``docs/reference/coordinators.md`` has a cell here, and each piece of advice as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark import RDD, StorageLevel
from pyspark.sql import SparkSession

from headgate import Group, OperatorCoordinator, Sidecar

pytestmark = pytest.mark.spark


class Summing(OperatorCoordinator):
    """Sums what each subtask sends, in the current run."""

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


def together(group: Group) -> Callable[[Any, Iterator[int]], Iterator[int]]:
    """Send, and meet the other members in the middle."""

    def run(context: Any, records: Iterator[int]) -> Iterator[int]:
        with group as member:
            member.barrier()
        yield from send(context, records)

    return run


On = Callable[[str, int], Callable[[RDD[int]], RDD[int]]]
Build = Callable[[On, RDD[int]], RDD[Any]]


def pairs(rdd: RDD[int]) -> RDD[Any]:
    return rdd.map(lambda record: (record % 3, record))


NUMBERED = r"call repartition\(2\) after its subtasks and before the union\(\) instead.*cartesian\(\)"
DIVIDED = r"repartition\({n}\) on each of them after its subtasks and before the union\(\)"
SEVERAL = r"use repartition\(\) in place of coalesce\(\)"
SHARED = r"cache\(\) what is used twice"
TWICE = r"coordinate\(\) another operator"

TABLE: dict[str, tuple[Build, str]] = {
    "one after the other": (lambda on, base: on("b", 2)(on("a", 2)(base)), ""),
    "zip": (lambda on, base: on("a", 2)(base).zip(on("b", 2)(base)), ""),
    "zip, one of them in a group": (lambda on, base: on("a", 2)(base).zip(on("group", 2)(base)), ""),
    "union, two subtasks each": (
        lambda on, base: on("a", 2)(base).union(on("b", 2)(base)),
        NUMBERED,
    ),
    "union, as many subtasks as the stage has tasks": (
        lambda on, base: on("a", 4)(base).union(on("b", 4)(base)),
        DIVIDED.format(n=4),
    ),
    "union, one of them in a group": (
        lambda on, base: on("a", 4)(base).union(on("group", 4)(base)),
        DIVIDED.format(n=4),
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
    "one operator twice in a task": (lambda on, base: on("a", 2)(on("a", 2)(base)), TWICE),
    "zipped with itself": (lambda on, base: (one := on("a", 2)(base)).zip(one), SHARED),
    "zipped with itself, cached": (lambda on, base: (one := filled(on("a", 2)(base))).zip(one), ""),
    "coalesce after the subtasks": (lambda on, base: on("a", 2)(base).coalesce(1), SEVERAL),
    "coalesce before the subtasks": (lambda on, base: on("a", 1)(base.coalesce(1)), ""),
    "repartition after the subtasks, in place of coalesce": (lambda on, base: on("a", 2)(base).repartition(1), ""),
    "cartesian": (lambda on, base: on("a", 2)(base).cartesian(on("b", 2)(base)), rf"{SHARED}|{NUMBERED}"),
    "cartesian, as many subtasks as the stage has tasks": (
        lambda on, base: on("a", 4)(base).cartesian(on("b", 4)(base)),
        SHARED,
    ),
    "cartesian, repartitioned after the subtasks": (
        lambda on, base: on("a", 2)(base).repartition(2).cartesian(on("b", 2)(base).repartition(2)),
        "",
    ),
    "cartesian with one partition": (lambda on, base: on("a", 2)(base).cartesian(base.coalesce(1)), ""),
    "cogroup": (lambda on, base: pairs(on("a", 2)(base)).cogroup(pairs(on("b", 2)(base))), NUMBERED),
    "cogroup, repartitioned after the subtasks": (
        lambda on, base: pairs(on("a", 2)(base).repartition(2)).cogroup(pairs(on("b", 2)(base).repartition(2))),
        "",
    ),
    "join": (lambda on, base: pairs(on("a", 2)(base)).join(pairs(on("b", 2)(base))), NUMBERED),
}


def filled(rdd: RDD[Any]) -> RDD[Any]:
    """Cached, and computed."""
    rdd.persist(StorageLevel.MEMORY_ONLY).count()
    return rdd


class Handles:
    """Coordinates each operator when it is first used."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self.made: dict[str, Any] = {}

    def on(self, name: str, parallelism: int) -> Callable[[RDD[int]], RDD[int]]:
        function: Callable[..., Any] = send
        uses = []
        if name == "group" and name not in self.made:
            uses = [self.sidecar.group("together", parallelism)]
            function = together(uses[0])
        if name not in self.made:
            handle = self.sidecar.coordinate(name, Summing, parallelism=parallelism, uses=uses)
            self.made[name] = handle, function
        handle, function = self.made[name]
        return lambda rdd: rdd.mapPartitions(handle.subtask(function))


@pytest.mark.parametrize("case", TABLE)
def test_it_works_exactly_or_is_refused_with_the_way_out(spark: SparkSession, case: str) -> None:
    build, refused = TABLE[case]
    with Sidecar(spark) as sidecar:
        handles = Handles(sidecar)
        result = build(handles.on, spark.sparkContext.parallelize(range(10), 2))
        if refused:
            with pytest.raises(Exception, match=refused):
                result.collect()
            return
        result.collect()
        for name, (handle, _) in handles.made.items():
            sums = sidecar.request(name, None)
            assert sum(sums.values()) == (90 if "after the union" in case else 45)
            assert len(sums) == handle.endpoint.parallelism


def test_a_cached_output_is_computed_once_and_what_is_missing_is_a_separate_run(spark: SparkSession) -> None:
    """What is missing was evicted, or never computed, as here: Spark computes it again, in a stage with the rest."""
    with Sidecar(spark) as sidecar:
        handles = Handles(sidecar)
        cached = handles.on("a", 2)(spark.sparkContext.parallelize(range(10), 2)).persist(StorageLevel.MEMORY_ONLY)
        assert cached.take(1) == [0]
        assert sidecar.request("a", None) == {0: sum(range(5))}
        assert sorted(cached.collect()) == [*range(10)]
        assert sidecar.request("a", None) == {1: sum(range(5, 10))}  # of the missing partition only
        assert cached.union(cached).collect() == [*range(10), *range(10)]  # no subtask runs
        assert sidecar.request("a", None) == {1: sum(range(5, 10))}
        cached.unpersist(True)
        assert sorted(cached.collect()) == [*range(10)]
        assert sidecar.request("a", None) == {0: sum(range(5)), 1: sum(range(5, 10))}


def test_an_action_that_is_several_jobs_is_explained_until_the_next_one(spark: SparkSession) -> None:
    """``take`` looks at one partition, and then at more; a coordinator that is built for each run has the last (N5)."""
    with Sidecar(spark) as sidecar:
        handles = Handles(sidecar)
        counted = handles.on("a", 2)(spark.sparkContext.parallelize(range(10), 2))
        assert counted.take(7) == [*range(7)]
        assert set(sidecar.request("a", None)) == {1}
        while not any("the last action over 'a' was 2 jobs" in one for one in sidecar.explain()):
            time.sleep(0.02)  # the end of a run comes after the action has returned
        counted.collect()
        while any("jobs" in one for one in sidecar.explain()):
            time.sleep(0.02)


@pytest.mark.parametrize("build", [lambda a, b, base: b(a(base)), lambda a, b, base: a(base).zip(b(base))])
def test_two_operators_in_streaming_mode_are_refused_with_the_way_out(spark: SparkSession, build: Any) -> None:  # H174
    with Sidecar(spark) as sidecar:
        made = [sidecar.coordinate(name, Summing, parallelism=2, mode="streaming") for name in ("a", "b")]
        a, b = (lambda rdd, handle=handle: rdd.mapPartitions(handle.subtask(send)) for handle in made)
        with pytest.raises(
            Exception, match=r"operators 'a' and 'b' are in streaming mode .* chain\(first=\.\.\., second="
        ):
            build(a, b, spark.sparkContext.parallelize(range(10), 2)).collect()
