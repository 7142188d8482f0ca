# SPDX-License-Identifier: Apache-2.0

"""``Rows`` for a client of Spark Connect: a DataFrame, in which each row is one pickled Python value.

It travels by value, since the server has nothing of the tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headgate import OperatorHandle
from tests.spark.faults.rows import Each, Jobs, Rows

SCHEMA = "to int, row binary"


def decoded(batches: Iterable[Any]) -> Iterator[Any]:
    """The values in record batches: of these tests' own making, or of ``range``."""
    for batch in batches:
        values = batch.column(batch.num_columns - 1).to_pylist()
        yield from map(pickle.loads, values) if "row" in batch.schema.names else values


def encoded(rows: Iterable[Any], to: Callable[[Any], int] = lambda row: 0) -> Iterator[Any]:
    """One record batch for each value, so that nothing waits for more."""
    import pyarrow

    for row in rows:
        schema = pyarrow.schema([("to", pyarrow.int32()), ("row", pyarrow.binary())])
        yield pyarrow.RecordBatch.from_pylist([{"to": to(row), "row": pickle.dumps(row)}], schema)


def in_arrow(operator: type) -> type:
    """The operator, with record batches as its input and output."""

    class InArrow(operator):  # type: ignore[misc]
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            return encoded(super().process(decoded(records)) or ())

    return InArrow


def calling(function: Each) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For ``mapInArrow``."""

    def call(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return encoded(function(context.partitionId(), decoded(batches)))

    return call


class FrameRows(Rows):
    """Over a DataFrame of ``session.range``, or of ``SCHEMA``."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def through(self, handle: OperatorHandle, operator: Any, *arguments: Any, barrier: bool = False) -> Rows:
        subtask = handle.subtask(in_arrow(operator), *arguments)
        return FrameRows(self._frame.mapInArrow(subtask, SCHEMA, barrier=barrier))

    def each(self, function: Each) -> Rows:
        return FrameRows(self._frame.mapInArrow(calling(function), SCHEMA))

    def shuffled(self, partitions: int, to: Callable[[Any], int]) -> Rows:
        from pyspark.sql import functions

        def addressed(batches: Iterable[Any]) -> Iterator[Any]:
            return encoded(decoded(batches), lambda row: to(row) % partitions)

        return FrameRows(self._frame.mapInArrow(addressed, SCHEMA).repartitionById(partitions, functions.col("to")))

    def coalesced(self, partitions: int) -> Rows:
        return FrameRows(self._frame.coalesce(partitions))

    def cached(self) -> Rows:
        return FrameRows(self._frame.cache())

    def uncache(self) -> None:
        self._frame.unpersist()

    def collect(self) -> list[Any]:
        return [pickle.loads(row.row) for row in self._frame.collect()]

    def take(self, count: int) -> list[Any]:
        return [pickle.loads(row.row) for row in self._frame.take(count)]


class FrameJobs(Jobs):
    """A session of Spark Connect."""

    def numbers(self, partitions: int, of: range | None = None) -> Rows:
        numbers = range(partitions) if of is None else of
        return FrameRows(self.spark.range(numbers.start, numbers.stop, numbers.step, partitions))
