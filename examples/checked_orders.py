# SPDX-License-Identifier: Apache-2.0

"""Orders from Redis Streams, judged by rules that change while the tasks run, in a Delta table exactly once.

A task is killed, and then the whole job fails once. In the end Spark reads the files of the table, and each order must
be there once.

It needs ``headgate[pyspark,redis,delta]`` and a Redis server: its argument is a URL, by default
``redis://127.0.0.1:6379/0``. It replaces the streams ``orders:0`` to ``orders:2``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import redis
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headgate import CheckpointConfig, FixedDelay, Sidecar, SidecarConfig, chain
from headgate.sinks import DeltaSink
from headgate.sources import RedisStreamsSource

TASKS, STREAMS, ORDERS = 2, 3, 3_000
FAILURES = 3  # one attempt was killed before, and Spark allows four
ORDER = pyarrow.schema([("id", pyarrow.int64()), ("amount", pyarrow.int64())])
CHECKED = pyarrow.schema([("id", pyarrow.int64()), ("amount", pyarrow.int64()), ("limit", pyarrow.int64())])


def check(rules: Any, folder: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Add the limit that holds now to each order. One task kills its process, later one fails until the job does."""
    seen = 0
    for batch in batches:
        seen += batch.num_rows
        limits = pyarrow.array([rules.get()["limit"]] * batch.num_rows, pyarrow.int64())
        yield pyarrow.RecordBatch.from_arrays([*batch.columns, limits], schema=CHECKED)
        if seen > ORDERS // 6 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if seen > ORDERS // 5 and len(list(folder.glob("failed-*"))) < FAILURES:
            (folder / f"failed-{os.getpid()}-{seen}-{time.time_ns()}").touch()
            raise RuntimeError("this task fails as often as Spark allows, and with it the job")


def check_orders(spark: SparkSession, url: str, folder: Path) -> int:
    """Read what is in the streams; return how many attempts were lost."""
    source = RedisStreamsSource(
        url,
        [f"orders:{stream}" for stream in range(STREAMS)],
        ORDER,
        bounded=True,
        batch_rows=50,
        rate_limit_per_s=1500,
    )
    sink = DeltaSink(str(folder / "table"), CHECKED)
    often = CheckpointConfig(interval_s=0.2, tolerated_failures=100)
    with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
        rules = sidecar.shared("rules", {"limit": 100})
        stages = chain(source=source, transform=partial(check, rules, folder), sink=sink)
        job = sidecar.coordinate("checked", stages, parallelism=TASKS, uses=[rules], mode="streaming", checkpoint=often)
        done = threading.Event()

        def change_rules() -> None:
            while not done.wait(0.1):
                rules.update(lambda value: {"limit": value["limit"] + 1})

        changes = threading.Thread(target=change_rules)
        changes.start()
        try:
            job.run(restart=FixedDelay(restarts_max=5, delay_s=0.1))
        finally:
            done.set()
            changes.join()
        return int(job.statistics()["failures"])


def add_orders(url: str, orders: range) -> None:
    with redis.Redis.from_url(url) as server:
        for order in orders:
            server.xadd(f"orders:{order % STREAMS}", {"id": order, "amount": order % 97})


url = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
with redis.Redis.from_url(url) as server:
    server.delete(*(f"orders:{stream}" for stream in range(STREAMS)))
add_orders(url, range(ORDERS))
spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
with tempfile.TemporaryDirectory() as name:
    lost = check_orders(spark, url, Path(name))
    table = spark.read.parquet(*DeltaTable(str(Path(name, "table"))).file_uris())
    print(f"{table.count()} rows, {table.select('id').distinct().count()} different orders")
    print("attempts lost:", "several" if lost > 1 else lost)
    print("limits that were used:", "several" if table.select("limit").distinct().count() > 1 else "one")
    print(f"wrong rows: {table.where('amount != id % 97').count()}")
spark.stop()
