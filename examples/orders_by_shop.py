# SPDX-License-Identifier: Apache-2.0

"""A folder of Parquet files as a format of Spark: tasks take the next file when they are free.

One task is killed. It needs ``headgate[pyspark,dataframe]``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyspark.sql import SparkSession

from headgate import Sidecar, SplitReader
from headgate.sources import FileSource

ORDERS, FILES, SHOPS = 60_000, 12, 5


def write_orders(folder: Path) -> None:
    """Write files of very different sizes, as real folders have them: the last one has half of all orders."""
    first = 0
    for number in range(FILES):
        last = ORDERS if number == FILES - 1 else first + ORDERS // (2 * FILES)
        ids = range(first, last)
        orders = pyarrow.table({"id": list(ids), "shop": [f"shop {one % SHOPS}" for one in ids]})
        pyarrow.parquet.write_table(orders, folder / f"{number:02}.parquet", row_group_size=1_000)
        first = last


class DyingReader(SplitReader):
    """Reads as another reader does, but kills its process once, in the middle of a file."""

    def __init__(self, make_reader: Callable[[], SplitReader], marker: Path) -> None:
        self.reader = make_reader()
        self.marker = marker

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        for number, item in enumerate(self.reader.read_from(split, position)):
            if number == 1 and "03.parquet" in split[0] and not self.marker.exists():
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


class DyingSource(FileSource):
    """A folder whose reader dies once."""

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(DyingReader, super().operator, Path(tempfile.mkdtemp()) / "killed")


spark = SparkSession.builder.master("local[2,4]").config("spark.log.level", "OFF").getOrCreate()
with tempfile.TemporaryDirectory() as folder, Sidecar(spark) as sidecar:
    write_orders(Path(folder))
    handle = sidecar.source("orders", DyingSource(folder, batch_rows=1_000), parallelism=2)
    orders = spark.read.format("orders").load()
    for shop, count in sorted(orders.groupBy("shop").count().collect()):
        print(f"{shop}: {count} orders")
    print(f"attempts lost: {handle.statistics()['failures']}")
spark.stop()
