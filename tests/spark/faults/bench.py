"""Where faults are tried: one long-lived cluster, session and sidecar, on which one fault follows the other.

A test that takes only ``bench`` leaves it as it was (nodes that it killed are back, its operators are released), so
that the soak can run such tests in any order, for as long as it likes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import RDD
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskOperator
from tests.spark.actions import Action
from tests.spark.cluster import StandaloneCluster


class Bench:
    """Not thread-safe but for what Spark and the sidecar say of themselves."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar, cluster: StandaloneCluster) -> None:
        self.spark = spark
        self.sidecar = sidecar
        self.cluster = cluster
        self._numbers = itertools.count(1)

    @contextmanager
    def coordinated(
        self, coordinator: OperatorCoordinator, parallelism: int = 2, **options: Any
    ) -> Iterator[OperatorHandle]:
        """An operator with a name of its own, released at the end; ``options`` as for ``Sidecar.coordinate``."""
        operator_id = f"fault-{next(self._numbers)}"
        handle = self.sidecar.coordinate(operator_id, coordinator, parallelism=parallelism, **options)
        try:
            yield handle
        finally:
            self.sidecar.release(operator_id)

    def numbers(self, partitions: int) -> RDD[int]:
        """One number in each partition."""
        return self.spark.sparkContext.parallelize(range(partitions), partitions)

    def collect(
        self, coordinator: OperatorCoordinator, operator: Callable[..., SubtaskOperator], parallelism: int = 2
    ) -> list[Any]:
        """The plainest job: coordinate, run an operator over ``numbers``, give its sorted output."""
        with self.coordinated(coordinator, parallelism) as handle:
            return sorted(self.numbers(parallelism).mapPartitions(handle.subtask(operator)).collect())

    def start_collecting(self, rdd: RDD[Any]) -> Action:
        """``collect`` in a thread of its own; its ``result()`` is the list, or what it raised."""
        return Action(rdd.collect)
