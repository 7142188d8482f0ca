# SPDX-License-Identifier: Apache-2.0

"""From an API with pages to files, exactly once: your own reader, a function and a sink in one chain.

A task is killed in the middle. Its successor asks for the pages after the last checkpoint, and each row is in the
files once. It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headgate import CheckpointConfig, Sidecar, SidecarConfig, SplitReader, StaticSplitEnumerator, chain
from headgate.sinks import FileSink
from headgate.sources import Source, SplitEnumerator

SHOPS = ("north", "south", "east", "west", "centre")
PAGES, ROWS = 40, 10
TASKS = 2


def fetch(shop: str, page: int) -> list[dict[str, Any]]:
    """One page of the orders of a shop; an empty one after the last."""
    return [{"shop": shop, "order": page * ROWS + row} for row in range(ROWS)] if page < PAGES else []


class Pages(SplitReader):
    rate_limit_per_s = 60.0  # pages, over all tasks

    def read_from(self, shop: str, position: int | None, /) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        page = position or 0
        while rows := fetch(shop, page):
            page += 1
            yield page, rows

    def backlog(self, shop: str, position: int | None) -> int:
        return PAGES - (position or 0)


class ShopSource(Source):
    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return StaticSplitEnumerator(SHOPS, state)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return Pages


def enrich(marker: Path, pages: Iterator[list[dict[str, Any]]]) -> Iterator[str]:
    """Each order as a line; the process dies once, at the order 150 of the eastern shop."""
    for page in pages:
        for row in page:
            if row == {"shop": "east", "order": 150} and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield json.dumps({**row, "value": row["order"] * 3})


folder = Path(tempfile.mkdtemp())
out = str(folder / "out")
spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
stages = chain(
    source=ShopSource(),
    transform=partial(enrich, folder / "killed"),
    sink=FileSink(out, suffix=".jsonl"),
)
with Sidecar(spark, SidecarConfig(storage=str(folder / "checkpoints"))) as sidecar:
    often = CheckpointConfig(interval_s=0.5, tolerated_failures=10)
    job = sidecar.coordinate("pipeline", stages, parallelism=TASKS, mode="streaming", checkpoint=often)
    job.run()
    statistics = job.statistics()
spark.stop()
lines = [line for file in Path(out).glob("*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
checkpoints = "several" if statistics["checkpoints_completed"] > 1 else "one"
print(f"{len(lines)} rows, {len(set(lines))} of them different")
print(f"attempts lost: {statistics['failures']}; checkpoints: {checkpoints}")
