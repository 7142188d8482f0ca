# SPDX-License-Identifier: Apache-2.0

"""Ready-made parts in a query in Spark's real-time mode, whose tasks run as long as a batch and see rows as they come.

Spark 4.3 refuses Python functions there unless its list of what is allowed is not looked at; then they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from pyspark import __version__ as spark_version
from pyspark.sql import DataFrame, SparkSession

from headgate import Sidecar, SubtaskContext

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROW_BY_ROW = {
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
    "spark.sql.streaming.realTimeMode.minBatchDuration": "1s",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
}


def until(condition: Callable[[], bool], query: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert query.exception() is None, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Rows:
    """A source that serves real-time mode without a broker, of two partitions."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark.sparkContext._jvm
        sources = jvm.org.apache.spark.sql.execution.streaming.sources
        self._lists, self._converters = jvm.java.util.ArrayList, jvm.scala.jdk.javaapi.CollectionConverters
        encoder = jvm.org.apache.spark.sql.Encoders.STRING()
        self._stream = sources.LowLatencyMemoryStream.apply(spark._jsparkSession, 2, encoder)
        self.frame = DataFrame(self._stream.toDF(), spark)

    def add_until(self, partition: int, limit: int, condition: Callable[[], bool], query: Any) -> None:
        """Add rows until the condition holds. They are long, because Spark passes 64 KiB to Python at a time."""

        def add_another() -> bool:
            rows = self._lists()
            rows.add(f"{limit}.{partition}{' ' * 70_000}")
            self._stream.addData(partition, self._converters.asScala(rows))
            return condition()

        until(add_another, query)


@pytest.mark.skipif(Version(spark_version) < Version("4.3"), reason="real-time mode for Python came with Spark 4.3")
def test_rules_change_while_a_real_time_batch_runs_and_rows_are_counted_live(
    spark: SparkSession, tmp_path: Path
) -> None:  # H101, H110
    for name, value in ROW_BY_ROW.items():
        spark.conf.set(name, value)
    try:
        _change_rules(spark, tmp_path)
    finally:
        for name in ROW_BY_ROW:
            spark.conf.unset(name)


def _change_rules(spark: SparkSession, folder: Path) -> None:
    with Sidecar(spark) as sidecar:
        rules = sidecar.shared("rules", {"limit": 0})
        job = sidecar.coordinate("check", parallelism=2, uses=[rules])

        def check(context: SubtaskContext, batches: Iterator[Any]) -> Iterator[Any]:
            context.count("started")
            for batch in batches:
                context.count(f"row {str(batch.column(0)[0]).strip()}, limit {rules.get()['limit']}")
                yield batch

        def seen(limit: int, partition: int) -> bool:
            return f"row {limit}.{partition}, limit {limit}" in job.counters()

        source = Rows(spark)
        checked = source.frame.mapInArrow(job.subtask(check), "value string")
        writer = checked.writeStream.foreach(lambda row: None).outputMode("update")
        writer = writer.option("checkpointLocation", str(folder))
        query = writer.trigger(realTime="600 seconds").start()  # type: ignore[call-overload] # Spark does not type it
        try:
            until(lambda: job.counters().get("started") == 2, query)
            for limit in range(1, 4):
                rules.set({"limit": limit}, wait="all", timeout_s=60)
                for partition in range(2):
                    source.add_until(partition, limit, lambda: seen(limit, partition), query)  # noqa: B023
            assert job.counters()["started"] == 2  # the same tasks all the time
        finally:
            query.stop()
