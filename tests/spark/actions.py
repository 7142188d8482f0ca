# SPDX-License-Identifier: Apache-2.0

"""Helpers that tests use to run Spark actions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pyspark import RDD
from pyspark.sql import SparkSession


def one_task_each(spark: SparkSession, partitions: int) -> RDD[int]:
    return spark.sparkContext.parallelize(range(partitions), partitions)


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
