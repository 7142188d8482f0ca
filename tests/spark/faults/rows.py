# SPDX-License-Identifier: Apache-2.0

"""The rows of a test's job, in the words that a driver and a client of Spark Connect have in common.

A scenario that says its job in these words runs in both: there over RDDs, here over DataFrames (``FrameRows`` in
``tests/spark/connect/frames.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark import RDD
from pyspark.sql import SparkSession

from spark_bridge.driver.handle import OperatorHandle

Each = Callable[[int, Iterable[Any]], Iterable[Any]]
"""Takes a partition and its rows, and gives the rows that come out."""


class Rows(ABC):
    """Rows in partitions, like an RDD of Python values. Every method but the last three gives new ones."""

    @abstractmethod
    def through(self, handle: OperatorHandle, operator: Any, *arguments: Any, barrier: bool = False) -> Rows:
        """The outputs of an operator's tasks over these rows."""

    @abstractmethod
    def each(self, function: Each) -> Rows:
        """The outputs of a function that is called with each partition."""

    @abstractmethod
    def shuffled(self, partitions: int, to: Callable[[Any], int]) -> Rows:
        """The same rows in other partitions: each in ``to(row)`` modulo ``partitions``."""

    @abstractmethod
    def coalesced(self, partitions: int) -> Rows:
        """The same rows in fewer partitions, without a shuffle."""

    @abstractmethod
    def cached(self) -> Rows:
        """The same rows, which Spark keeps in memory from the first action on."""

    @abstractmethod
    def uncache(self) -> None:
        """Let Spark forget what it has kept."""

    @abstractmethod
    def collect(self) -> list[Any]:
        """All rows. Blocks."""

    @abstractmethod
    def take(self, count: int) -> list[Any]:
        """The first rows. Blocks."""


class RddRows(Rows):
    """In a driver."""

    def __init__(self, rdd: RDD[Any]) -> None:
        self._rdd = rdd

    def through(self, handle: OperatorHandle, operator: Any, *arguments: Any, barrier: bool = False) -> Rows:
        tasks = self._rdd.barrier() if barrier else self._rdd
        return RddRows(tasks.mapPartitions(handle.subtask(operator, *arguments)))

    def each(self, function: Each) -> Rows:
        return RddRows(self._rdd.mapPartitionsWithIndex(function))

    def shuffled(self, partitions: int, to: Callable[[Any], int]) -> Rows:
        return RddRows(self._rdd.keyBy(to).partitionBy(partitions, lambda key: key).values())

    def coalesced(self, partitions: int) -> Rows:
        return RddRows(self._rdd.coalesce(partitions))

    def cached(self) -> Rows:
        return RddRows(self._rdd.cache())

    def uncache(self) -> None:
        self._rdd.unpersist()

    def collect(self) -> list[Any]:
        return self._rdd.collect()

    def take(self, count: int) -> list[Any]:
        return self._rdd.take(count)


class Jobs:
    """Where a scenario gets its first rows: a session in the driver."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark

    def numbers(self, partitions: int, of: range | None = None) -> Rows:
        """These numbers in so many partitions; by default, one number in each."""
        numbers = range(partitions) if of is None else of
        return RddRows(self.spark.sparkContext.parallelize(numbers, partitions))


def numbered(partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Number the rows: so the reducer that gets one depends on the partition's whole content."""
    return enumerate(rows)


def number_of(numbered_row: tuple[int, Any]) -> int:
    return numbered_row[0]
