# SPDX-License-Identifier: Apache-2.0

"""Rules that the driver changes while the tasks run, without writing a coordinator.

It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import cycle

from pyspark.sql import SparkSession

from headgate import Sidecar, SubtaskContext

TASKS = 3


spark = SparkSession.builder.master(f"local[{TASKS},4]").getOrCreate()
with Sidecar(spark) as sidecar:
    rules = sidecar.shared("rules", {"limit": 10, "last": False})
    job = sidecar.coordinate("check", parallelism=TASKS, uses=[rules])

    def check(context: SubtaskContext, numbers: Iterator[int]) -> Iterator[str]:
        limits = {rules.get()["limit"]}
        context.count("started")
        for number in cycle(numbers):
            now = rules.get()
            limits.add(now["limit"])
            if number > now["limit"]:
                context.count("above the limit")
            if now["last"]:
                break
        yield f"task {context.subtask} has worked with the limits {sorted(limits)}"

    def change_rules() -> None:
        while job.counters().get("started") != TASKS:
            time.sleep(0.05)
        rules.set({"limit": 50, "last": False}, wait="all")
        rules.update(lambda value: {**value, "last": True})

    threading.Thread(target=change_rules).start()
    print(*job.run(check, range(100)), sep="\n")
spark.stop()
