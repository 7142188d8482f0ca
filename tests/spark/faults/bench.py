# SPDX-License-Identifier: Apache-2.0

"""A test bench for faults: one long-lived cluster, session and sidecar, on which one fault follows another.

A test that takes only ``bench`` leaves it as it was (killed nodes are back, its operators are released), so that the
soak can run such tests in any order, for any length of time.
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
    """Not thread-safe, except for what Spark and the sidecar document as thread-safe."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar, cluster: StandaloneCluster) -> None:
        self.spark = spark
        self.sidecar = sidecar
        self.cluster = cluster
        self._numbers = itertools.count(1)

    @contextmanager
    def coordinated(
        self, coordinator: OperatorCoordinator, parallelism: int = 2, **options: Any
    ) -> Iterator[OperatorHandle]:
        """Coordinate an operator with a unique name, released at the end; ``options`` as for ``Sidecar.coordinate``."""
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
        """The simplest job: coordinate, run an operator over ``numbers``, return its sorted output."""
        with self.coordinated(coordinator, parallelism) as handle:
            return sorted(self.numbers(parallelism).mapPartitions(handle.subtask(operator)).collect())

    def start_collecting(self, rdd: RDD[Any]) -> Action:
        """Run ``collect`` in a separate thread; its ``result()`` is the list, or raises what ``collect`` raised."""
        return Action(rdd.collect)
