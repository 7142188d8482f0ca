# SPDX-License-Identifier: Apache-2.0

"""The definitions of a declarative pipeline, which a test copies into a project; ``spark-pipelines`` imports the copy.

``RELAY_SECRET`` names the client's file, without which the relay would have to travel. ``LINES`` is a folder of text
files, and the first reader of split 7 creates ``DIED`` and dies.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

import headgate
from headgate import (
    Addresses,
    OperatorCoordinator,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    SubtaskOperator,
)

DIED = os.environ["DIED"]


class Square(SplitReader):
    """Yields the square of each split, which is a number."""

    def read_split(self, split: int) -> Iterator[pyarrow.RecordBatch]:
        if split == 7 and not Path(DIED).exists():
            Path(DIED).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield pyarrow.RecordBatch.from_pydict({"square": [split * split]})


class Numbers(OperatorCoordinator):
    """Gives each line a number."""

    def __init__(self) -> None:
        self.given = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> int:
        self.given += 1
        return self.given

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Each micro-batch is a run; the numbers go on."""


class NumberLines(SubtaskOperator):
    """Asks for a number for each line."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in records:
            lines = batch.column("value").to_pylist()
            numbers = [self.context.request(line) for line in lines]
            yield pyarrow.RecordBatch.from_pydict({"line": lines, "number": numbers})


spark = SparkSession.active()
config = SidecarConfig(addresses=Addresses(relay_secret_file=os.environ.get("RELAY_SECRET")))
sidecar = headgate.start(spark, config)
squares = sidecar.coordinate(
    "squares", lambda: SourceCoordinator(lambda state: StaticSplitEnumerator(range(10), state)), parallelism=2
)
numbers = sidecar.coordinate("numbers", Numbers, parallelism=1)
# Spark asks the server for the columns of a frame before it adds `mapInArrow`, which a query function may not do.
squared = spark.range(0, 2, 1, 2).mapInArrow(squares.subtask(Square), "square long")
lines = spark.readStream.text(os.environ["LINES"]).repartition(1)
numbered = lines.mapInArrow(numbers.subtask(NumberLines), "line string, number long")


@dp.materialized_view
def all_squares() -> DataFrame:
    return squared


@dp.materialized_view
def even_squares() -> DataFrame:
    return spark.read.table("all_squares").where("square % 2 = 0")


@dp.table
def numbered_lines() -> DataFrame:
    return numbered
