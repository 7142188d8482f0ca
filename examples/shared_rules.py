# SPDX-License-Identifier: Apache-2.0

"""Rules that the driver changes while the tasks run, without writing a coordinator."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import cycle

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import Sidecar, SubtaskContext

TASKS = 3


def main(arguments: Sequence[str]) -> int:
    try:
        spark = start_spark(arguments[0] if arguments else f"local[{TASKS},4]", "headgate shared rules")
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    try:
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
            numbers = spark.sparkContext.parallelize(range(100), TASKS)
            print(*numbers.mapPartitions(job.subtask(check)).collect(), sep="\n")
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
