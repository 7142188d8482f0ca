# SPDX-License-Identifier: Apache-2.0

"""The jobs of ``word_count.py`` for a Spark Connect session, which has DataFrames but no RDDs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql import SparkSession

__all__ = ["coordinated_sums", "plain_sums", "record_batch"]

SCHEMA = "word string, number long"


def coordinated_sums(spark: SparkSession, subtask: Callable[[Any], Any], parallelism: int) -> dict[str, int]:
    """The sums of all subtasks. Each yields record batches of words and numbers."""
    subtasks = spark.range(0, parallelism, 1, parallelism)
    counted = subtasks.mapInArrow(subtask, SCHEMA)
    return {row[0]: row[1] for row in counted.groupBy("word").sum("number").collect()}


def plain_sums(
    spark: SparkSession, paths: list[str], count: Callable[[Iterable[str]], Iterable[tuple[str, int]]], tasks: int
) -> dict[str, int]:
    """The same sums, by tasks that ``count`` the words of their files."""

    def batches(records: Iterator[Any]) -> Iterator[Any]:
        names = [name for batch in records for name in batch.column(0).to_pylist()]
        yield record_batch(count(names))

    files = spark.createDataFrame([(path,) for path in paths], "path string").repartition(tasks)
    counted = files.mapInArrow(batches, SCHEMA)
    return {row[0]: row[1] for row in counted.groupBy("word").sum("number").collect()}


def record_batch(counts: Iterable[tuple[str, int]]) -> Any:
    """Words and numbers as Arrow wants them. Called in tasks."""
    import pyarrow

    rows = list(counts)
    columns = [pyarrow.array([row[0] for row in rows], "string"), pyarrow.array([row[1] for row in rows], "int64")]
    return pyarrow.RecordBatch.from_arrays(columns, names=["word", "number"])
