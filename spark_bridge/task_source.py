# SPDX-License-Identifier: Apache-2.0

"""A subtask as a data source of Spark: ``spark.read.format(name)`` runs it in the tasks of a scan.

Spark pickles the class of a data source, plans it in a Python process beside the driver, and calls ``read`` in the
tasks. A scan, or a micro-batch of ``spark.readStream``, is one run of the operator, and a partition of it is a subtask.
In no folder of this package, for the reason of ``task_entry``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from spark_bridge.common.arrow_types import arrow_form, conform
from spark_bridge.streams.task import StreamClient, batch_between, next_of, reader_of_batch

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # Spark 4.1 takes one batch of what is new, whatever it can have

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        pass


if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_bridge.task_entry import SubtaskTask

__all__ = ["source_format"]


def source_format(
    name: str, schema: StructType, task: SubtaskTask, stream: StreamClient, parallelism: int
) -> type[DataSource]:
    """Return the class of a format that reads with ``task``, in ``parallelism`` partitions.

    ``stream`` plans the micro-batches of ``readStream``.
    """

    class Registered(DataSource):
        """One format. Spark makes an instance for each ``load``, so all that it needs is in the class."""

        _planned = False

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> StructType:
            return schema

        def reader(self, schema: StructType) -> DataSourceReader:
            self._planned = True
            return _Reader(name, task, parallelism, schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            self._planned = True
            return _StreamReader(name, task, stream, parallelism, schema)

        def __reduce__(self) -> tuple[Any, ...]:
            """Spark Connect starts the process that plans a stream without the artifacts of the session.

            What is pickled after a reader was made goes to the tasks, which must not get the key in ``stream`` (H76).
            """
            import spark_bridge  # here, because this class travels with its code, and so would what it refers to

            packages = str(Path(spark_bridge.__file__).parent.parent)
            made: tuple[Any, ...] = (_Planned, name) if self._planned else (type(self), self.options)
            return _load, (packages, cloudpickle.dumps(made))  # type: ignore[no-untyped-call]

    return Registered


def _load(packages: str, pickled: bytes) -> DataSource:
    """Return a data source that was pickled in another process of this machine, with its Headgate in ``packages``.

    Spark unpickles it before the reader, in the planning process and in each task, so that both can import Headgate.
    """
    import sys
    from importlib.util import find_spec

    from pyspark import cloudpickle

    if find_spec("spark_bridge") is None:
        sys.path.append(packages)
    cls, argument = cloudpickle.loads(pickled)
    return cls(argument)  # type: ignore[no-any-return]


_load.__module__ = "__main__"  # so it is pickled with its code: a process that needs it cannot import this module


class _Reader(DataSourceReader):
    def __init__(self, name: str, task: SubtaskTask, parallelism: int, schema: StructType) -> None:
        self._name = name
        self._task = task
        self._parallelism = parallelism
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(subtask) for subtask in range(self._parallelism)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        _check_place(self._name, partition.value, f"with repartition({self._parallelism}) or cache() after load()")
        return _as_declared(self._task(iter(())), self._schema)


class _Planned(DataSource):
    """All that a task has of its data source: the name, for Spark's errors."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:  # type: ignore[override]
        return self._name


class _BatchReader(DataSourceStreamReader):
    """Reads in tasks. It has no key that opens the plan."""

    def __init__(self, name: str, task: SubtaskTask, parallelism: int, schema: StructType) -> None:
        self._name = name
        self._task = task
        self._parallelism = parallelism
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[Any]:
        subtask, batch = partition.value
        _check_place(self._name, subtask, f"with repartition({self._parallelism}) after load()")
        return _as_declared(self._task.wrapped(reader_of_batch, batch)(iter(())), self._schema)


class _StreamReader(_BatchReader, SupportsTriggerAvailableNow):
    """Plans in Spark's planning process, one for each start of a query. Tasks get the ``_BatchReader`` in it."""

    def __init__(
        self, name: str, task: SubtaskTask, stream: StreamClient, parallelism: int, schema: StructType
    ) -> None:
        super().__init__(name, task, parallelism, schema)
        self._stream = stream
        self._initial: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None  # what Spark was told last
        self._ends = False  # when it has read what is there at its start
        self._target: dict[str, Any] | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Spark calls it before it says where the query is, so the plan is made when it asks for the first batch."""
        self._ends = True

    def initialOffset(self) -> dict[str, Any]:
        """Spark asks again and again until there is something to read: it is the same stream."""
        if self._initial is None:
            self._initial = self._stream.initial(self._latest)
        return self._initial

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Spark 4.1 does not say where the query is, and asks for the end of a first batch before its beginning."""
        if self._ends and start is not None:
            if self._target is None:
                self._target = self._stream.target(start)
            return next_of(start, self._target)
        self._latest = self._stream.latest(start, self._latest)
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        batch = batch_between(start, end)
        count = min(self._parallelism, self._stream.count(batch))
        return [InputPartition((subtask, batch)) for subtask in range(count)]

    def commit(self, end: dict[str, Any]) -> None:
        self._stream.commit(end)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BatchReader, (self._name, self._task, self._parallelism, self._schema)


def _as_declared(records: Iterable[Any], schema: StructType) -> Iterator[Any]:
    """Give Arrow batches exactly the declared columns, as Spark demands; rows are converted by Spark itself."""
    arrow_schema = None
    for record in records:
        if not hasattr(record, "schema"):
            yield record
            continue
        if arrow_schema is None:
            arrow_schema = arrow_form(schema)
        yield conform(record, arrow_schema)


def _check_place(name: str, subtask: int, way_out: str) -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.partitionId() != subtask:
        raise RuntimeError(
            f"partition {subtask} of {name!r} is partition {context.partitionId()} of its stage, because the stage "
            f"unites several scans or has merged partitions: read it in a separate stage, {way_out}"
        )
