# SPDX-License-Identifier: Apache-2.0

"""Every change of a PostgreSQL table, copied into a table of its history exactly once, although drivers are killed.

It starts itself as a driver again and again. A task of each driver but the last one kills it, at some place of the
copying, while the balances continue to change. In the end, the history of each account must have each of its balances
once.

It needs ``headgate[pyspark,postgres,dataframe]`` and a database with ``wal_level = logical``: its first argument is a
connection string such as ``"host=127.0.0.1 dbname=test user=me"``, and the second how often drivers are killed. It
replaces the tables ``accounts`` and ``history``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow
from pyspark.sql import SparkSession

from headgate import CheckpointConfig, Sidecar, SidecarConfig, chain
from headgate.sinks import PostgresSink
from headgate.sources import PostgresSource

TASKS, ACCOUNTS, DEATHS = 2, 2_000, 5


def as_rows(
    driver: int, folder: Path, kill_at: int, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[dict[str, Any]]:
    """The rows of the batches. The first task that has seen ``kill_at`` of them kills the driver; none does for 0."""
    seen = 0
    for batch in batches:
        for row in batch.to_pylist():
            seen += 1
            if seen == kill_at:
                with suppress(FileExistsError):  # by a task that outlives the driver for a moment, as this one may
                    (folder / f"killed-at-{kill_at}").touch(exist_ok=False)
                    os.kill(driver, signal.SIGKILL)
            yield row


def copy_changes(conninfo: str, folder: Path, kill_at: int) -> None:
    """One driver: continue where the last checkpoint is, and end when there is nothing more."""
    source = PostgresSource(conninfo, "accounts", "id", changes="accounts_copy", range_rows=500, bounded=True)
    sink = PostgresSink(conninfo, "history", ["id", "balance", "op", "lsn"])
    stages = chain(source=source, transform=partial(as_rows, os.getpid(), folder, kill_at), sink=sink)
    often = CheckpointConfig(interval_s=0.2, tolerated_failures=100)
    spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
    with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
        job = sidecar.coordinate("history", stages, parallelism=TASKS, mode="streaming", checkpoint=often)
        job.run()
    spark.stop()


def change_balances(database: psycopg.Connection, times: int) -> None:
    """Raise each balance by one, so many times: 0, 1, 2 and so on."""
    for _ in range(times):
        database.execute("UPDATE accounts SET balance = balance + 1")


def main(arguments: Sequence[str]) -> int:
    conninfo = arguments[0] if arguments else ""
    if "--driver" in arguments:
        copy_changes(conninfo, Path(arguments[2]), int(arguments[3]))
        return 0
    deaths_wanted = int(arguments[1]) if len(arguments) > 1 else DEATHS
    with tempfile.TemporaryDirectory() as name, psycopg.connect(conninfo, autocommit=True) as database:
        database.execute("DROP TABLE IF EXISTS accounts, history, headgate_staged_history, headgate_commits")
        database.execute("CREATE TABLE accounts (id int PRIMARY KEY, balance bigint)")
        database.execute("CREATE TABLE history (id int, balance bigint, op text, lsn bigint)")
        database.execute("INSERT INTO accounts SELECT one, 0 FROM generate_series(1, %s) one", (ACCOUNTS,))
        source = PostgresSource(conninfo, "accounts", "id", changes="accounts_copy")
        source.drop_slot()
        deaths = changes = 0
        while True:
            kill_at = 0
            if deaths < deaths_wanted:
                # Some task sees more than 600 accounts: what has been copied has changed since, and one task reads all
                # changes; the rest are rows of the table, which two tasks read. So the place of the kill is reached.
                kill_at = 100 + 500 * deaths // deaths_wanted
                change_balances(database, 1)
            driver = subprocess.Popen([sys.executable, __file__, conninfo, "--driver", name, str(kill_at)])
            if kill_at:
                change_balances(database, 2)
                changes += 3
            if driver.wait() != -signal.SIGKILL:
                break
            deaths += 1
        if driver.returncode:
            return 1
        balance = (
            "max(balance) = %s AND count(*) = max(balance) - min(balance) + 1 AND count(DISTINCT balance) = count(*)"
        )
        whole = f"SELECT count(*) FROM (SELECT id FROM history GROUP BY id HAVING {balance}) whole"
        found = database.execute(whole, (changes,)).fetchone() or (0,)
        print(f"the driver was killed {deaths} times")
        print(f"{found[0]} of {ACCOUNTS} accounts have each balance once, up to the last one")
        source.drop_slot()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
