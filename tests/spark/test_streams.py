# SPDX-License-Identifier: Apache-2.0

"""A source as an input of Structured Streaming, while tasks are killed, queries restarted and drivers replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.sql import DataFrame, SparkSession

from headgate import Sidecar, SidecarConfig, StorageDetails
from headgate.sources import FileSource
from spark_bridge.storage import CheckpointStorage
from tests.spark.cluster import ROOT
from tests.spark.test_sources import DyingSource
from tests.spark_bridge.object_stores import STORES

pytestmark = pytest.mark.spark

ROWS = 400


def add_files(folder: Path, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        table = pyarrow.table({"id": list(range(number * ROWS, (number + 1) * ROWS))})
        hidden = folder / f".{number}.parquet"
        pyarrow.parquet.write_table(table, hidden, row_group_size=100)
        hidden.rename(folder / f"{number}.parquet")


class Stream:
    """A streaming query from a folder to another one, which can be run again and again."""

    def __init__(self, spark: SparkSession, place: Path, plans: str = "", options: Any = None) -> None:
        self._spark = spark
        self._place = place
        self.folder = place / "in"
        self.config = SidecarConfig(
            storage=plans or str(place / "plans"), storage_details=StorageDetails(options=options)
        )

    def run(self, frame: DataFrame) -> int:
        """Read what there is, and return how many micro-batches it took."""
        query = (
            frame.writeStream.format("parquet")
            .option("path", str(self._place / "out"))
            .option("checkpointLocation", str(self._place / "query"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return len([one for one in query.recentProgress if one["numInputRows"]])

    def rows(self) -> list[int]:
        return sorted(row.id for row in self._spark.read.parquet(str(self._place / "out")).collect())


def test_each_row_of_a_stream_counts_once_over_a_killed_task_a_restarted_query_and_another_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    add_files(stream.folder, range(4))
    with Sidecar(spark, stream.config) as sidecar:
        source = DyingSource(tmp_path / "died", str(stream.folder), batch_rows=50, discover_every_s=0.01)
        handle = sidecar.source("growing", source, parallelism=2)
        growing = spark.readStream.format("growing").load()
        assert stream.run(growing) == 1
        assert (tmp_path / "died").exists()
        assert handle.statistics()["resets"] == 1
        assert stream.rows() == list(range(4 * ROWS))
        add_files(stream.folder, range(4, 6))
        stream.run(growing)
        assert stream.rows() == list(range(6 * ROWS)), "the query was restarted"
    add_files(stream.folder, range(6, 7))
    with Sidecar(spark, stream.config) as sidecar:
        sidecar.source("growing", FileSource(str(stream.folder), discover_every_s=0.01), parallelism=2)
        stream.run(spark.readStream.format("growing").load())
        assert stream.rows() == list(range(7 * ROWS)), "another sidecar continues from the stored plan"
    with Sidecar(spark, SidecarConfig()) as sidecar:
        sidecar.source("growing", FileSource(str(stream.folder), discover_every_s=0.01), parallelism=2)
        with pytest.raises(Exception, match=r"keep its plan with SidecarConfig\(storage=...\)"):
            stream.run(spark.readStream.format("growing").load())


DRIVER = """
import json, os, signal, sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pyspark.sql import SparkSession
from headgate import Sidecar
from headgate.sources import FileSource
from spark_bridge.sources.files.task import FileReader
from tests.spark.conftest import start_spark
from tests.spark.test_streams import Stream, add_files


class KillsTheDriver(FileReader):
    def __init__(self, place, driver, *args):
        super().__init__(*args)
        self.place, self.driver = place, driver

    def read_from(self, split, position, /):
        for number, item in enumerate(super().read_from(split, position)):
            marker = os.path.join(self.place, "died-at-" + os.path.basename(split[0]))
            if number == 2 and ("2.parquet" in split[0] or "5.parquet" in split[0]) and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(self.driver, signal.SIGKILL)
            yield item


class Killing(FileSource):
    def __init__(self, place, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.place = place

    @property
    def operator(self):
        return partial(KillsTheDriver, self.place, os.getpid(), *super().operator.args)


place = Path(sys.argv[1])
spark = start_spark("local[2,3]")
stream = Stream(spark, place, sys.argv[2], json.loads(sys.argv[3]))
with Sidecar(spark, stream.config) as sidecar:
    source = Killing(str(place), str(stream.folder), batch_rows=50, discover_every_s=0.01)
    sidecar.source("growing", source, parallelism=2, splits_max=2)
    growing = spark.readStream.format("growing").load()
    stream.run(growing)
    add_files(stream.folder, range(4, 8))
    stream.run(growing)
    rows = stream.rows()
    print("ROWS", len(rows), len(set(rows)))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_driver_that_dies_within_a_micro_batch_loses_and_doubles_nothing(tmp_path: Path, kind: str) -> None:
    """Its plans are checkpoints on an object store, so the storage of a real job is there too."""
    with STORES[kind]() as store:
        run_and_kill(tmp_path, f"{store.protocol}://{store.new_bucket()}/plans", store.options)


def run_and_kill(tmp_path: Path, url: str, options: dict[str, Any]) -> None:
    add_files(tmp_path / "in", range(4))
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    command = [sys.executable, str(program), str(tmp_path), url, json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    ended = [run()]
    while ended[-1].returncode and len(ended) < 10:  # a loaded machine may fail to start a query: one more restart
        ended.append(run())
    story = "\n\n".join(f"ended with {done.returncode}: {done.stdout}{done.stderr[-2000:]}" for done in ended)
    assert ended[-1].returncode == 0, story
    assert len(list(tmp_path.glob("died-at-*"))) == 2, f"the driver was killed twice\n{story}"
    assert f"ROWS {8 * ROWS} {8 * ROWS}" in ended[-1].stdout, story
    stored = CheckpointStorage(url, options=options)
    assert stored.list()
    assert stored.verify() == []
