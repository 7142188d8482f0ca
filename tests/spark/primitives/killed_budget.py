# SPDX-License-Identifier: Apache-2.0

"""A program that spends a budget, notes each amount in a file, and kills itself in the middle of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, SubtaskContext

COST = 0.25


def main(storage: str, notes: str) -> None:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    with Sidecar(spark, SidecarConfig(storage=storage)) as sidecar:
        budget = sidecar.budget("usd", 100.0)
        job = sidecar.coordinate("call", parallelism=2, uses=[budget])

        def call(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
            with (Path(notes) / str(context.subtask)).open("a") as spent_here:
                for record in records:
                    with budget.reserve(2 * COST) as spent:
                        print(COST, file=spent_here, flush=True)
                        spent.settle(COST)
                    yield record

        def kill() -> None:
            while budget.spent < 20.0:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        job.run(call, range(1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
