# SPDX-License-Identifier: Apache-2.0

"""Files that others wrote, in a real Spark: each value equals what Spark's own reader gives, or is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig
from headgate.sources import FileSource

pytestmark = pytest.mark.spark

WRITTEN = """
    select id, timestamp'9999-12-31 23:59:59.999999' + make_interval(0, 0, 0, 0, 0, 0, 0) as late,
        timestamp'1500-01-01 00:00:00' as early, timestamp'2026-03-08 02:30:00' as skipped_hour,
        timestamp_ntz'2026-03-08 02:30:00' as naive, date'0001-01-01' as first, date'9999-12-31' as last,
        cast('1.50' as decimal(38, 10)) as exact, cast(id as tinyint) as tiny, cast('nan' as float) as nan,
        named_struct('t', timestamp'1883-11-18 12:00:00', 'l', array(date'1600-01-01', null)) as nested,
        map('k', timestamp'2026-01-01 00:00:00') as by_key, cast(null as binary) as nothing, x'00ff' as bytes
    from range(3)
"""


@pytest.fixture
def zone(spark: SparkSession, request: pytest.FixtureRequest) -> Any:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    spark.conf.unset("spark.sql.sources.partitionColumnTypeInference.enabled")


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "UTC"], indirect=True)
def test_what_spark_writes_arrives_as_spark_reads_it(spark: SparkSession, tmp_path: Path, zone: str) -> None:  # H171
    spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")  # 02 is not 2
    with Sidecar(spark) as sidecar:
        for form in ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"):
            folder = f"{tmp_path}/{form}/_day=2026-01-01"
            written = spark.sql(WRITTEN)
            written.coalesce(1).write.option("outputTimestampType", form).parquet(folder)
            sidecar.source(form, FileSource(f"{tmp_path}/{form}", "parquet"), parallelism=1)
            ours, theirs = spark.read.format(form).load(), spark.read.parquet(f"{tmp_path}/{form}")
            assert ours.schema.simpleString() == theirs.schema.simpleString()
            texts = [f"cast({name} as string)" for name in theirs.columns]
            assert ours.selectExpr(*texts).sort("id").collect() == theirs.selectExpr(*texts).sort("id").collect()


def test_what_others_write_arrives_with_each_value_or_is_refused(spark: SparkSession, tmp_path: Path) -> None:  # H171
    instant = datetime(1960, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    columns: dict[str, tuple[pa.Array, Any]] = {
        "dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
        "large": (pa.array(["a"], pa.large_string()), "a"),
        "uint64": (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
        "zone": (pa.array([instant], pa.timestamp("us", "Europe/Berlin")), "1960-01-01 00:00:00.000001"),
        "naive": (pa.array([instant.replace(tzinfo=None)], pa.timestamp("ns")), "1960-01-01 00:00:00.000001"),
        "day": (pa.array([date(1, 1, 1)], pa.date64()), "0001-01-01"),
        "time": (pa.array([time(1, 2)], pa.time32("s")), "01:02:00"),
        "span": (pa.array([timedelta(days=1)], pa.duration("ms")), "INTERVAL '1 00:00:00' DAY TO SECOND"),
        "list": (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), "[1, 2]"),
        "null": (pa.nulls(1), None),
    }
    pa.parquet.write_table(pa.table({name: column for name, (column, _) in columns.items()}), tmp_path / "a.parquet")
    with Sidecar(spark) as sidecar:
        sidecar.source("others", FileSource(str(tmp_path)), parallelism=1)
        texts = [f"cast(`{name}` as string)" for name in columns]
        (row,) = spark.read.format("others").load().selectExpr(*texts).collect()
        assert list(row) == [text for _, text in columns.values()]
        odd = tmp_path / "odd.parquet"
        pa.parquet.write_table(pa.table({"t": pa.array([1], pa.timestamp("ns"))}), odd)
        sidecar.source("odd", FileSource(str(odd)), parallelism=1)
        with pytest.raises(Exception, match=r"column 't' is timestamp\[ns\], and cannot be timestamp\[us\]"):
            spark.read.format("odd").load().collect()
        pa.parquet.write_table(pa.table({"t": pa.array([1], pa.decimal256(60, 0))}), odd)
        with pytest.raises(ValueError, match="column 't' is decimal256"):
            sidecar.source("wide", FileSource(str(odd)), parallelism=1)


def test_a_query_reads_all_that_is_there_and_another_one_changes_nothing_for_it(
    spark: SparkSession, tmp_path: Path
) -> None:  # H173
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.csv").write_text("v\n" + "".join(f"{number}.{row}\n" for row in range(10)))
    batches: list[int] = []

    def run(place: str) -> list[int]:
        """Run the production's query, or one that keeps nothing."""
        batches.clear()
        frame = spark.readStream.format("lines").load()
        writer = frame.writeStream.foreachBatch(lambda rows, _: batches.append(rows.count()))
        if place:
            writer = writer.option("checkpointLocation", f"{tmp_path}/{place}")
        writer.trigger(availableNow=True).start().awaitTermination()
        return list(batches)

    for application in range(2):
        with Sidecar(spark, SidecarConfig(storage=f"{tmp_path}/plans")) as sidecar:
            source = FileSource(str(folder), schema=pa.schema([("v", pa.string())]), discover_every_s=0.01)
            sidecar.source("lines", source, parallelism=2, splits_max=3)
            assert run("production") == ([30, 30, 30, 10] if application == 0 else [10])
            assert run("") == [30, 30, 30, 10 + 10 * application]
            assert run("production") == []
            queries = [
                spark.readStream.format("lines").load().writeStream.format("memory").queryName(f"beside_{name}")
                for name in ("one", "another")
            ]
            for query in [query.trigger(availableNow=True).start() for query in queries]:
                query.awaitTermination()
            for name in ("one", "another"):  # both at the same time
                assert spark.table(f"beside_{name}").count() == 100 + 10 * application
        (folder / "more.csv").write_text("v\n" + "".join(f"more {row}\n" for row in range(10)))
