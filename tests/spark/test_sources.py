# SPDX-License-Identifier: Apache-2.0

"""Ready sources on a real Spark: as a format, and as the first stage of a chain, while tasks are killed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headgate import CheckpointConfig, Sidecar, chain
from headgate.errors import SidecarError
from headgate.sinks import FileSink
from headgate.sources import FileSource, KafkaSource
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.sources.files.task import FileReader
from spark_bridge.sources.kafka.task import KafkaReader
from tests.kafka_brokers import KafkaBrokers
from tests.spark.operators import kill_once

pytestmark = pytest.mark.spark

FILES, ROWS = 6, 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orders")
    for number in range(FILES):
        ids = range(number * ROWS, (number + 1) * ROWS)
        table = pyarrow.table({"id": list(ids), "shop": [f"shop {one % 7}" for one in ids]})
        pyarrow.parquet.write_table(table, path / f"{number}.parquet", row_group_size=100)
    return path


class Dying(FileReader):
    """Kills its process, once, in the middle of a file."""

    def __init__(self, marker: str, *args: Any) -> None:
        super().__init__(*args)
        self._marker = marker

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        for number, item in enumerate(super().read_from(split, position)):
            if number == 2 and "3.parquet" in split[0]:
                kill_once(Path(self._marker))
            yield item


class DyingSource(FileSource):
    """A ``FileSource`` whose reader kills its process once."""

    def __init__(self, marker: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.marker = marker

    @property
    def operator(self) -> Any:
        make: Any = super().operator
        return partial(Dying, str(self.marker), *make.args)


def test_a_folder_is_a_format_of_spark_and_each_row_counts_once_although_a_task_is_killed(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    expected = sorted(spark.read.parquet(str(folder)).groupBy("shop").agg(F.count("*"), F.sum("id")).collect())
    with Sidecar(spark) as sidecar:
        source = DyingSource(tmp_path / "died", str(folder), batch_rows=50)
        handle = sidecar.source("orders", source, parallelism=2)
        orders = spark.read.format("orders").load()
        assert orders.columns == ["id", "shop"]
        assert sorted(orders.groupBy("shop").agg(F.count("*"), F.sum("id")).collect()) == expected
        assert (tmp_path / "died").exists()
        assert handle.statistics()["resets"] == 1
        [(stage, left)] = sidecar.status().operators["orders"].sources.items()
        assert (stage, left.splits_pending, left.splits_in_hand, left.backlog) == ("", 0, 0, 0)
        assert orders.limit(3).count() == 3
        assert [row.id for row in orders.filter("id = 1234").collect()] == [1234], "an action after one that took few"
        with pytest.raises(SidecarError, match="already coordinated"):
            sidecar.source("orders", source)


class DyingKafkaReader(KafkaReader):
    """Kills its process, once for each topic, after three batches of partition 1."""

    def __init__(self, markers: str, *args: Any) -> None:
        super().__init__(*args)
        self._markers = markers

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        batches = 0
        for item in super().read_from(split, position):
            batches += item is not None
            if batches == 3 and split[1] == 1:
                kill_once(Path(f"{self._markers}-{split[0]}"))
            yield item


class DyingKafka(KafkaSource):
    """A ``KafkaSource`` whose reader kills its process once for each topic."""

    def __init__(self, markers: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.markers = markers

    @property
    def operator(self) -> Any:
        make: Any = super().operator
        return partial(DyingKafkaReader, str(self.markers), *make.args)


def numbers_of(records: Iterator[Any]) -> Iterator[str]:
    for batch in records:
        yield from (value.decode() for value in batch["value"].to_pylist())


def finish(query: DataStreamWriter) -> None:
    """Run a query to its end. On a loaded machine, Spark may fail to start Python in time: one more restart."""
    for _ in range(5):
        try:
            query.start().awaitTermination()
            return
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
    raise AssertionError("the query has not begun five times")


@pytest.mark.long
def test_each_record_of_kafka_counts_once_in_a_chain_and_as_a_stream_although_tasks_are_killed(
    spark: SparkSession, kafka: KafkaBrokers, tmp_path: Path
) -> None:
    for topic in ("in-chain", "in-stream"):
        kafka.create_topic(topic, 4)
        for partition in range(4):
            kafka.append(topic, partition, range(partition * ROWS, (partition + 1) * ROWS))
    out, died = tmp_path / "out", tmp_path / "died"
    source = DyingKafka(died, kafka.servers, ["in-chain"], bounded=True, batch_rows=20, rate_limit_per_s=4000.0)
    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "checkpoints"))) as sidecar:
        job = sidecar.coordinate(
            "pipeline",
            chain(source=source, transform=numbers_of, sink=FileSink(str(out))),
            parallelism=2,
            mode="streaming",
            checkpoint=CheckpointConfig(interval_s=0.1, tolerated_failures=100),
        )
        with pytest.raises(TypeError, match="is a chain"):
            job.subtask(KafkaReader)
        tasks = spark.sparkContext.parallelize(range(2), 2)
        sidecar.run(lambda: tasks.mapPartitions(job.subtask()).collect())
        assert job.statistics()["checkpoints_completed"] > 1
        lines = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
        assert sorted(map(int, lines)) == list(range(4 * ROWS))

        sidecar.source("clicks", DyingKafka(died, kafka.servers, ["in-stream"], batch_rows=20), parallelism=2)
        clicks = spark.readStream.format("clicks").load().selectExpr("cast(cast(value as string) as int) id")
        copied = clicks.writeStream.format("parquet").option("path", str(tmp_path / "copied"))
        query = copied.option("checkpointLocation", str(tmp_path / "query")).trigger(availableNow=True)
        finish(query)
        assert len(list(tmp_path.glob("died-*"))) == 2, "a task of each job was killed"
        kafka.append("in-stream", 3, range(4 * ROWS, 5 * ROWS))
        finish(query)
    found = sorted(row.id for row in spark.read.parquet(str(tmp_path / "copied")).collect())
    assert found == list(range(5 * ROWS)), "each record once, also those that came between the queries"


@pytest.mark.long
def test_a_scan_that_shares_its_stage_says_what_to_do(spark: SparkSession, folder: Path) -> None:
    with Sidecar(spark) as sidecar:
        sidecar.source("orders", FileSource(str(folder)), parallelism=2)
        orders = spark.read.format("orders").load()
        with pytest.raises(Exception, match=r"repartition\(2\) or cache\(\)"):
            orders.union(orders).count()
        assert orders.repartition(2).union(orders.repartition(2)).count() == 2 * FILES * ROWS
