# SPDX-License-Identifier: Apache-2.0

"""Read a folder that grows as a stream of Spark, each row once, although the query is started again.

It needs ``headgate[pyspark,dataframe]``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig
from headgate.sources import FileSource

CLICKS = 100  # in each file


def write_clicks(folder: Path, number: int) -> None:
    """Write a file of clicks under a hidden name, and show it when it is complete."""
    hidden = folder / f".{number}.jsonl"
    ids = range(number * CLICKS, (number + 1) * CLICKS)
    hidden.write_text("".join(json.dumps({"id": one, "page": f"/{one % 5}"}) + "\n" for one in ids))
    hidden.rename(folder / f"{number}.jsonl")


def read_new_clicks(spark: SparkSession, place: Path) -> None:
    """Append what is new to the Parquet files in ``out``."""
    folder, out, query_folder = (str(place / name) for name in ("in", "out", "query"))
    with Sidecar(spark, SidecarConfig(storage=str(place / "plans"))) as sidecar:
        source = FileSource(folder, discover_every_s=1.0)
        sidecar.source("clicks", source, parallelism=2)
        clicks = spark.readStream.format("clicks").load()
        query = clicks.writeStream.format("parquet").option("path", out).option("checkpointLocation", query_folder)
        query.trigger(availableNow=True).start().awaitTermination()


spark = SparkSession.builder.master("local[2,4]").getOrCreate()
with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    (place / "in").mkdir()
    for number in range(3):
        write_clicks(place / "in", number)
        read_new_clicks(spark, place)  # each time with a new sidecar, and a query that is started again
    clicks = spark.read.parquet(str(place / "out"))
    print(f"{clicks.count()} clicks, {clicks.select('id').distinct().count()} of them different")
spark.stop()
