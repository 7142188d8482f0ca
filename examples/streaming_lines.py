# SPDX-License-Identifier: Apache-2.0

"""A streaming query whose micro-batches commit with Headgate's checkpoints: lines of files, each written exactly once.

Three files come in, one for each batch. In the second batch the driver's own code fails, first before its lines are
written, then after their commit. The query is started again each time, and continues from the matching checkpoint. It
needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from headgate import OperatorHandle, Sidecar, SidecarConfig
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator

SUBTASKS = 2
FILES = 3
LINES = 100

BatchFunction = Callable[[DataFrame, int], None]


def bring_in(folder: Path) -> None:
    """The input: files whose age gives their order."""
    folder.mkdir()
    for number in range(FILES):
        path = folder / f"{number}.txt"
        path.write_text("".join(f"line {number}.{line}\n" for line in range(LINES)))
        os.utime(path, (1_700_000_000 + number,) * 2)


def lines_to(sink: FileSink, handle: OperatorHandle) -> BatchFunction:
    def write_lines(frame: DataFrame, batch_id: int) -> None:
        lines = frame.repartition(SUBTASKS).rdd.map(lambda row: row.value)
        lines.mapPartitions(handle.subtask(TwoPhaseSinkOperator, sink)).count()

    return write_lines


class FailingOnce:
    """Raises in the second batch the first time, before ``function`` or after it."""

    def __init__(self, function: BatchFunction, *, ahead: bool) -> None:
        self._function = function
        self._ahead = ahead
        self._failed = False

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if self._ahead:
            self._fail_in(batch_id, "ahead of the action")
        self._function(frame, batch_id)
        if not self._ahead:
            self._fail_in(batch_id, "after the commit, before Spark has noted it")

    def _fail_in(self, batch_id: int, where: str) -> None:
        if batch_id == 1 and not self._failed:
            self._failed = True
            raise RuntimeError(where)


def run_query(spark: SparkSession, folder: Path, function: BatchFunction) -> bool:
    """Run from Spark's own checkpoint to the end of the input; return False if the query has failed."""
    source = spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder / "in"))
    query = (
        source.writeStream.foreachBatch(function)
        .option("checkpointLocation", str(folder / "spark"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        reason = next(line for line in str(error).splitlines() if line.startswith("RuntimeError"))
        print(f"  the query failed: {reason.removeprefix('RuntimeError: ')}")
        return False
    return True


def run(spark: SparkSession, folder: Path) -> None:
    sink = FileSink(str(folder / "out"))
    with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
        coordinator = TwoPhaseSinkCoordinator(sink)
        handle = sidecar.coordinate("lines", coordinator, parallelism=SUBTASKS, mode="streaming")
        write_lines = FailingOnce(lines_to(sink, handle), ahead=True)
        for_each_batch = FailingOnce(sidecar.for_each_batch(handle, write_lines), ahead=False)
        while not run_query(spark, folder, for_each_batch):
            print("  it is started again")


spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").config("spark.log.level", "OFF").getOrCreate()
with tempfile.TemporaryDirectory() as place:
    bring_in(Path(place, "in"))
    run(spark, Path(place))
    lines = [line for path in Path(place, "out").glob("part-*") for line in path.read_text().splitlines()]
spark.stop()
print(f"{len(lines)} lines written, {len(set(lines))} different ones, of {FILES * LINES}")
