# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect client that uses its sidecar: ``client_behind_nat.py URL FOLDER WAY [LEASE_S]``.

It says in JSON what came of it. With a lease, it coordinates a job that waits forever.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from headgate import Addresses, Sidecar, SidecarConfig, SidecarLimits
from spark_bridge.driver.config import Way
from tests.spark import test_streams
from tests.spark.connect import jobs
from tests.spark.faults import file_gates, waiting


class RowReader(jobs.NumberReader):
    """Yields each split, which is a number, as a row."""

    def read_split(self, split: int) -> Iterator[Any]:
        yield (split,)


class RowSource(jobs.NumberSource):
    """Numbers, as rows."""

    @property
    def operator(self) -> Callable[[], RowReader]:
        return RowReader


def main(url: str, folder: str, way: Way, lease_s: str = "") -> None:
    for module in (jobs, test_streams, file_gates, waiting):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    spark = SparkSession.builder.remote(url).create()
    if lease_s:
        wait(spark, SidecarConfig(addresses=Addresses(way=way, relay_lease_s=float(lease_s))))
    with Sidecar(spark, SidecarConfig(addresses=Addresses(way=way), storage=folder)) as sidecar:
        numbers = jobs.Numbers(range(20), jobs.DieOnce(3))
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=2)
        rows = sidecar.run(lambda: jobs.read(spark, handle))
        streamed = stream(spark, sidecar, Path(folder))
        status = sidecar.status()
    print(json.dumps({"rows": rows, "lost": numbers.lost, "way": status.relay.way, "streamed": streamed}), flush=True)
    spark.stop()


def stream(spark: Any, sidecar: Sidecar, folder: Path) -> list[int]:
    """What a query of a source has written: Spark's planning process asks this process for each batch."""
    sidecar.source("counted", RowSource(10), schema="number long", parallelism=1)
    query = (
        spark.readStream.format("counted")
        .load()
        .writeStream.format("json")
        .option("checkpointLocation", str(folder / "query"))
        .trigger(availableNow=True)
        .start(str(folder / "out"))
    )
    query.awaitTermination()
    lines = [line for file in (folder / "out").glob("*.json") for line in file.read_text().splitlines()]
    return sorted(json.loads(line)["number"] for line in lines)


def wait(spark: Any, config: SidecarConfig) -> None:
    """Wait in a job, until the process is killed."""
    with Sidecar(spark, SidecarConfig(addresses=config.addresses, limits=SidecarLimits(connect_timeout_s=2.0))) as one:
        numbers = jobs.Held(range(4))
        handle = one.coordinate("numbers", lambda: numbers, parallelism=1)
        threading.Thread(target=jobs.read, args=(spark, handle), daemon=True).start()
        numbers.waiting.wait()
        print("waiting", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
