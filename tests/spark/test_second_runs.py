# SPDX-License-Identifier: Apache-2.0

"""Several actions over one operator: no run accidentally sees the state of the run before it (H68)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import RDD
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from protocol.restart import FixedDelay
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated
from tests.spark.growing import NODES, TreeReader, TreeSource

pytestmark = pytest.mark.spark

ITEMS = list(range(10))
BOTH_WAYS_OUT = r"pass the class or a factory, .* or override reset_to_checkpoint"


class Queue(OperatorCoordinator):
    """Hands out each item once, and has no method to reset that."""

    def __init__(self) -> None:
        self.items = list(ITEMS)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return self.items.pop(0) if self.items else None


class Holding(Queue):
    def __init__(self, items: list[int]) -> None:
        self.items = list(items)


class FillsUpAgain(Queue):
    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.items = list(ITEMS)


class Takes(SubtaskOperator):
    """Yields what the queue has for it."""

    def __init__(self) -> None:
        self.context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[int]:
        for _ in records:
            pass
        while (item := self.context.request("next")) is not None:
            yield item


def taking(spark: SparkSession, sidecar: Sidecar, given: Any) -> RDD[int]:
    handle = sidecar.coordinate("queue", given, parallelism=2)
    return spark.sparkContext.parallelize(range(2), 2).mapPartitions(handle.subtask(Takes))


@pytest.mark.parametrize(
    "given", [Queue, partial(Holding, ITEMS), FillsUpAgain()], ids=["class", "factory", "instance"]
)
def test_each_action_begins_with_a_coordinator_that_remembers_nothing(
    spark: SparkSession, given: OperatorCoordinator | Callable[[], OperatorCoordinator]
) -> None:  # H68
    with Sidecar(spark) as sidecar:
        rdd = taking(spark, sidecar, given)
        assert [sorted(rdd.collect()) for _ in range(3)] == [ITEMS] * 3


def test_the_second_action_over_an_instance_that_cannot_forget_is_refused(spark: SparkSession) -> None:  # H68
    with Sidecar(spark) as sidecar:
        rdd = taking(spark, sidecar, Queue())
        assert sorted(rdd.collect()) == ITEMS
        for _ in range(2):
            with pytest.raises(Py4JJavaError, match=BOTH_WAYS_OUT):
                rdd.collect()
        sidecar.release("queue")
        assert sorted(taking(spark, sidecar, Queue()).collect()) == ITEMS


# --- splits that are found as they are read -------------------------------------------------------------------------


@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_each_action_enumerates_its_splits_again(spark: SparkSession, relay: Any) -> None:  # H68
    source = TreeSource()
    with coordinated(spark, source, 2, config=SidecarConfig(relay=relay)) as job:
        rdd = job.tasks(TreeReader)
        for _ in range(3):
            assert sorted(rdd.collect()) == list(range(NODES))
    assert [len(enumerator.read) for enumerator in source.built] == [NODES] * 3


class BreaksInTheMiddle(TreeSource):
    """Fails the job when the tenth node is reported, in each of the first two runs."""

    broken = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        await super().handle_event_from_operator(subtask, attempt, event)
        if self.broken < 2 and len(self.built[-1].read) == 10:
            self.broken += 1
            raise RuntimeError("in the middle of the tree")


@pytest.mark.parametrize("after", ["the result", pytest.param("a shuffle", marks=pytest.mark.long)])
def test_a_restart_enumerates_its_splits_again(spark: SparkSession, after: str) -> None:  # H68, H15
    source = BreaksInTheMiddle()
    with coordinated(spark, source, 2) as job:
        rdd = job.tasks(TreeReader)
        if after == "a shuffle":
            rdd = rdd.keyBy(lambda node: node).partitionBy(2).values()
        rows = job.sidecar.run(rdd.collect, restart=FixedDelay(restarts_max=2, delay_s=0.0))
    assert sorted(rows) == list(range(NODES))
    assert source.broken == 2
