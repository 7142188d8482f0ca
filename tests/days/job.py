# SPDX-License-Identifier: Apache-2.0

"""One day of a daily job, as its own process: ``python -m tests.days.job FOLDER KIND DAY CONNINFO REDIS_URL``.

The program, its storage and its operator are the same every day; the rows are others. It says ``begun`` when its first
task runs, and ``done``, with the operator's count of rows, when all is committed. It may be killed at any moment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headgate import CheckpointConfig, Sidecar, SidecarConfig, SplitReader, StaticSplitEnumerator, chain
from headgate.sinks import TwoPhaseSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator
from headgate.sources import FileSource, Source, SplitEnumerator
from spark_bridge.driver.handle import OperatorHandle
from tests.pipelines.pairs import SCHEMA, Pair
from tests.spark.quiet_session import quiet_session

ROWS = 60  # of a day
TASKS = 2
ROW_S = 0.01
SINKS = ("files", "postgres", "prepared", "redis", "delta", "iceberg")
PARTS = ("splits", "found", "queue")
"""A source with fixed splits, a source that looks for files, and a work queue; all of them write to files."""
OPERATOR = "days"


def rows_of(day: int) -> range:
    return range(1000 * day, 1000 * day + ROWS)


def pair_of(kind: str, folder: str, conninfo: str, redis_url: str) -> Pair:
    return Pair("files", kind if kind in SINKS else "files", folder, conninfo, redis_url)


class WriteRows(TwoPhaseSinkOperator):
    """Takes its time for each row."""

    def __init__(self, sink: TwoPhaseSink[Any], as_lines: bool) -> None:
        super().__init__(sink)
        self._as_lines = as_lines

    def encode(self, record: int) -> Any:
        time.sleep(ROW_S)
        self.context.count("rows")
        return str(record) if self._as_lines else {"id": record, "name": f"row {record}"}


class WriteItems(WriteRows):
    """The records are those of a queue."""

    def __init__(self, sink: TwoPhaseSink[Any], queue: Any) -> None:
        super().__init__(sink, as_lines=True)
        self._queue = queue

    def process(self, records: Iterator[Any]) -> None:
        for item in self._queue:
            self.write(item)


class ReadNumbers(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, str]]:
        first, last = split
        for number in range(position or first, last):
            time.sleep(ROW_S)
            yield number + 1, str(number)


class Numbers(Source):
    """Six fixed splits, which are others every day."""

    def __init__(self, day: int) -> None:
        rows = rows_of(day)
        self._splits = [[first, first + ROWS // 6] for first in rows[:: ROWS // 6]]

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return StaticSplitEnumerator(self._splits, state)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return ReadNumbers


def as_lines(batches: Iterable[Any]) -> Iterator[str]:
    for batch in batches:
        for number in batch["id"].to_pylist():
            time.sleep(ROW_S)
            yield str(number)


def action_of(spark: SparkSession, sidecar: Sidecar, kind: str, day: int, pair: Pair) -> tuple[OperatorHandle, Any]:
    """The operator and the action of the day."""
    settings: dict[str, Any] = {
        "parallelism": TASKS,
        "mode": "streaming",
        "checkpoint": CheckpointConfig(interval_s=0.1, tolerated_failures=1000),
    }
    sink = pair.sink()
    records = spark.sparkContext.parallelize(rows_of(day) if kind in SINKS else range(TASKS), TASKS)
    match kind:
        case "splits":
            handle = sidecar.coordinate(OPERATOR, chain(read=Numbers(day), write=sink), **settings)
            return handle, records.mapPartitions(handle.subtask()).count
        case "found":
            source = FileSource(f"{pair.folder}/found", schema=SCHEMA, format="parquet", batch_rows=5)
            handle = sidecar.coordinate(OPERATOR, chain(read=source, lines=as_lines, write=sink), **settings)
            return handle, records.mapPartitions(handle.subtask()).count
        case "queue":
            queue = sidecar.work_queue("rows", [*rows_of(day)])
            handle = sidecar.coordinate(OPERATOR, TwoPhaseSinkCoordinator(sink), uses=[queue], **settings)
            return handle, records.mapPartitions(handle.subtask(WriteItems, sink, queue)).count
        case _:
            handle = sidecar.coordinate(OPERATOR, TwoPhaseSinkCoordinator(sink), **settings)
            task = handle.subtask(WriteRows, sink, pair.sink_kind == "files")
            return handle, records.mapPartitions(task).count


def say(what: str) -> None:
    print(what, flush=True)


def main(folder: str, kind: str, day: int, conninfo: str, redis_url: str) -> None:
    spark = quiet_session(f"local[{TASKS},4]", "headgate days")
    with Sidecar(spark, SidecarConfig(storage=str(Path(folder, "kept")))) as sidecar:
        handle, action = action_of(spark, sidecar, kind, day, pair_of(kind, folder, conninfo, redis_url))
        say("begun")
        sidecar.run(action, input_id=f"day {day}")
        say(f"done {handle.counters().get('rows', 0)}")
    spark.stop()
    say("left")


__all__ = ["PARTS", "ROWS", "SINKS", "main", "pair_of", "rows_of"]

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
