# SPDX-License-Identifier: Apache-2.0

"""Payments written to PostgreSQL exactly once, although a task is killed and the program is started twice.

It needs ``headgate[pyspark,postgres]`` and a database: its argument is a connection string such as
``"host=127.0.0.1 dbname=test user=me"``. It replaces the tables ``payments`` and ``balances``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from headgate import CheckpointConfig, FixedDelay, Sidecar, SidecarConfig
from headgate.sinks import PostgresSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator

TASKS = 2
PAYMENTS = 2000
EVERY_100_MS = CheckpointConfig(interval_s=0.1, tolerated_failures=1000)


class WritePayments(TwoPhaseSinkOperator):
    """Makes a row of each number, and kills its own process once, in the middle, after a checkpoint has completed."""

    def __init__(self, sink: PostgresSink, marker: Path) -> None:
        super().__init__(sink)
        self._marker = marker
        self._completed = False

    def encode(self, number: int) -> dict[str, Any]:
        return {"id": number, "account": number % 7, "amount": number / 100}

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._completed = True

    def process(self, numbers: Iterator[int]) -> None:
        super().process(self._disturbed(numbers))

    def _disturbed(self, numbers: Iterator[int]) -> Iterator[int]:
        for number in numbers:
            yield number
            if self.records_written == PAYMENTS // 4 and not self._marker.exists():
                while not self._completed:
                    self.context.wait_for_event()
                self._marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def write_payments(spark: SparkSession, conninfo: str, folder: Path) -> None:
    sink = PostgresSink(conninfo, "payments", ["id", "account", "amount"])
    with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
        coordinator = TwoPhaseSinkCoordinator(sink)
        job = sidecar.coordinate("payments", coordinator, parallelism=TASKS, mode="streaming", checkpoint=EVERY_100_MS)
        tasks = job.subtask(WritePayments, sink, folder / "killed")
        three = FixedDelay(restarts_max=3, delay_s=0.0)
        # The name of the input is what a later start recognises: without it, a second run would have other payments.
        job.run(tasks, range(PAYMENTS), restart=three, input_id="the payments of today")


def write_balances(spark: SparkSession, conninfo: str, folder: Path) -> None:
    sink = PostgresSink(conninfo, "balances", ["account", "balance"], key=["account"])
    with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
        job = sidecar.coordinate("balances", TwoPhaseSinkCoordinator(sink), parallelism=TASKS, mode="streaming")
        balances = [{"account": account, "balance": 10 * account} for account in (1, 2, 1, 3)]
        job.run(job.subtask(TwoPhaseSinkOperator, sink), balances)


conninfo = sys.argv[1] if len(sys.argv) > 1 else ""
with psycopg.connect(conninfo) as database:
    database.execute("DROP TABLE IF EXISTS payments, balances, headgate_staged_payments, headgate_staged_balances")
    database.execute("CREATE TABLE payments (id bigint, account int, amount numeric)")
    database.execute("CREATE TABLE balances (account int PRIMARY KEY, balance numeric)")
folder = Path(tempfile.mkdtemp())
spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
for attempt in ("first", "second"):  # the first finishes this input, so the second skips everything
    write_payments(spark, conninfo, folder)
    with psycopg.connect(conninfo) as database:
        found = database.execute("SELECT count(*), count(DISTINCT id) FROM payments").fetchone()
    print(f"after the {attempt} run, (payments, different ones): {found}, of {PAYMENTS}")
write_balances(spark, conninfo, folder)
with psycopg.connect(conninfo) as database:
    print("balances:", *database.execute("SELECT account FROM balances ORDER BY account").fetchall())
spark.stop()
print(f"a process was killed: {(folder / 'killed').exists()}")
