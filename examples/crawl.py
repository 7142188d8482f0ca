# SPDX-License-Identifier: Apache-2.0

"""Work that discovers work: tasks walk through pages and add the links that they find, each page once.

One of the processes is killed on the way. Its pages go back to the queue, and every page still counts once. It needs
``headgate[pyspark]``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from headgate import Sidecar

PAGES = 200
TASKS = 3


def links_of(page: int) -> list[int]:
    """The links on a page of this small web."""
    return [(page * 2 + 1) % PAGES, (page * 2 + 2) % PAGES, (page + 7) % PAGES]


def die_once(page: int, marker: Path) -> None:
    """Kill the first process that visits page 42."""
    if page == 42 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


marker = Path(tempfile.mkdtemp()) / "killed"
spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
with Sidecar(spark) as sidecar:
    queue = sidecar.work_queue("pages", [0], key=lambda page: page)
    job = sidecar.coordinate("crawl", parallelism=TASKS, uses=[queue])

    def crawl(_: Iterator[int]) -> Iterator[int]:
        for page in queue:
            die_once(page, marker)
            queue.add(links_of(page))
            yield page

    visited = job.run(crawl)
spark.stop()
print(f"{len(visited)} pages visited, {len(set(visited))} of them different; a process was killed: {marker.exists()}")
