# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.keyed_counts [RECORDS [KEYS]]``: a count by key, here and with Spark's own keyed states.

The records are keys in Parquet files, in two partitions; 200,000 records with 50,000 keys. Each way counts them twice,
so that half of the reads find a value, and has its states in RocksDB: ``KeyedState`` in two subtasks, which take a
checkpoint each second and at the end; ``transformWithStateInPandas`` and the JVM's own ``count``, as a streaming query
that takes all files as one batch. Printed are seconds without the first start of Spark, and records a second.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from benchmarks.spark_session import spark_session
from headgate import CheckpointConfig, Sidecar, SidecarConfig, SubtaskContext, SubtaskOperator
from headgate.types import KeyedState, KeyGroups, RestoredFiles, StateFiles

TASKS = 2
GROUPS = KeyGroups(128)
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Counts(SubtaskOperator):
    """The program of the page on large states."""

    goes_on_after_restore = True

    def open(self, context: SubtaskContext[Any], state: bytes | RestoredFiles | None) -> None:
        self.values = KeyedState(context, GROUPS)
        self.done = 0
        if isinstance(state, RestoredFiles) and context.input_begins_again:
            self.done = int(state.data or 0)

    def process(self, records: Iterator[tuple[int, None]]) -> Iterator[int]:
        for key, _ in islice(records, self.done, None):
            self.values.put(key, b"%d" % (int(self.values.get(key) or 0) + 1))
            self.done += 1
        yield self.done

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        return KeyedState.merge(pieces)

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return self.values.snapshot(checkpoint_id, b"%d" % self.done)

    def close(self) -> None:
        self.values.close()


class SparkCounts(StatefulProcessor):
    """The same for ``transformWithStateInPandas``."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "count LONG")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        before = self.count.get()
        count = (0 if before is None else before[0]) + sum(map(len, rows))
        self.count.update((count,))
        yield pd.DataFrame({"key": [key[0]], "count": [count]})

    def close(self) -> None:
        pass


def write_records(folder: Path, records: int, keys: int) -> None:
    random = Random(1)
    for number in range(TASKS):
        table = pyarrow.table({"key": [random.randrange(keys) for _ in range(records // TASKS)]})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet")


def with_headgate(spark: SparkSession, records: Path, place: Path) -> None:
    keys = spark.read.parquet(str(records)).rdd.map(lambda row: (row[0], None))
    by_key = keys.partitionBy(TASKS, partial(GROUPS.subtask_of, parallelism=TASKS))
    each_second = CheckpointConfig(interval_s=1.0)
    with Sidecar(spark, SidecarConfig(storage=place / "storage")) as sidecar:
        handle = sidecar.coordinate("counts", parallelism=TASKS, mode="streaming", checkpoint=each_second)
        action = by_key.mapPartitions(handle.subtask(Counts)).sum
        for day in range(2):
            sidecar.run(action, input_id=f"day {day}")


def _query(spark: SparkSession, counted: DataFrame, place: Path) -> None:
    query = counted.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    query.option("checkpointLocation", str(place / "checkpoint")).start().awaitTermination()


def _stream(spark: SparkSession, records: Path, place: Path) -> DataFrame:
    """The records as files that a query has not seen, however often it is called with one place."""
    seen = place / "seen"
    seen.mkdir(exist_ok=True)
    for file in records.iterdir():
        shutil.copy(file, seen / f"{time.monotonic_ns()}.parquet")
    return spark.readStream.schema("key LONG").parquet(str(seen))


def with_pandas(spark: SparkSession, records: Path, place: Path) -> None:
    for _ in range(2):
        keys = _stream(spark, records, place).groupBy("key")
        counted = keys.transformWithStateInPandas(SparkCounts(), "key LONG, count LONG", "Update", "None")
        _query(spark, counted, place)


def with_the_jvm(spark: SparkSession, records: Path, place: Path) -> None:
    for _ in range(2):
        _query(spark, _stream(spark, records, place).groupBy("key").count(), place)


def main(arguments: Iterable[str]) -> None:
    records, keys = [*map(int, arguments), 200_000, 50_000][:2]
    settings = {
        "spark.sql.shuffle.partitions": str(TASKS),
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    }
    ways = {
        "KeyedState": with_headgate,
        "transformWithStateInPandas": with_pandas,
        "count() of the JVM": with_the_jvm,
    }
    with tempfile.TemporaryDirectory() as root, spark_session(f"local[{TASKS}]", **settings) as spark:
        for size, told in ((1_000, False), (records, True)):  # the first ones start what is started once
            folder = Path(root, f"records-{size}")
            folder.mkdir()
            write_records(folder, size, min(keys, size))
            for number, (name, way) in enumerate(ways.items()):
                place = Path(root, f"{size}-{number}")
                place.mkdir()
                began = time.perf_counter()
                way(spark, folder, place)
                spent_s = time.perf_counter() - began
                if told:
                    print(f"{name:30}{spent_s:8.1f} s {2 * size / spent_s:12,.0f} records a second", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
