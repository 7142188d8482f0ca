# SPDX-License-Identifier: Apache-2.0

"""Helpers that tests use to run Spark actions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import RDD
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.operators import Listening


def one_task_each(spark: SparkSession, partitions: int) -> RDD[int]:
    return spark.sparkContext.parallelize(range(partitions), partitions)


class Job:
    """One operator in a sidecar."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar, handle: OperatorHandle, parallelism: int) -> None:
        self.sidecar = sidecar
        self.handle = handle
        self._spark = spark
        self._parallelism = parallelism

    def tasks(self, operator: Any = Listening, *arguments: Any, partitions: int = 0) -> RDD[Any]:
        """The operator's tasks over one number each; ``partitions`` if they are not as many as its subtasks."""
        return one_task_each(self._spark, partitions or self._parallelism).mapPartitions(
            self.handle.subtask(operator, *arguments)
        )

    def action(self, operator: Any, *arguments: Any) -> Callable[[], list[Any]]:
        """Collects the tasks' outputs, in order."""
        tasks = self.tasks(operator, *arguments)
        return lambda: sorted(tasks.collect())


@contextmanager
def coordinated(
    spark: SparkSession,
    coordinator: OperatorCoordinator | Callable[[], OperatorCoordinator],
    parallelism: int = 1,
    *,
    config: SidecarConfig | None = None,
    **options: Any,
) -> Iterator[Job]:
    """Coordinate the operator ``op`` in a sidecar until the block is left."""
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=parallelism, **options)
        yield Job(spark, sidecar, handle, parallelism)


def what_the_user_reads(action: Callable[[], Any]) -> str:
    """The text of the exception that the action raises."""
    try:
        result = action()
    except Exception as error:
        return str(error)
    raise AssertionError(f"it was to fail, and gave {result!r}")


class Action(threading.Thread):
    """Run a Spark action in a separate thread."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(name="action", daemon=True)
        self._action = action
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(300)
        assert not self.is_alive(), "the action hangs"
        if self._error is not None:
            raise self._error
        return self._result
