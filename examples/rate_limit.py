# SPDX-License-Identifier: Apache-2.0

"""One budget for all tasks: together they call a service at most 20 times a second, and two at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import Sidecar, SubtaskContext

TASKS = 3
CALLS = 60
CALLS_PER_S = 20.0
CALLS_AT_ONCE = 10


def main(arguments: Sequence[str]) -> int:
    try:
        spark = start_spark(arguments[0] if arguments else f"local[{TASKS},4]", "headgate rate limit")
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    try:
        with Sidecar(spark) as sidecar:
            permits = sidecar.permits("service", per_s=CALLS_PER_S, burst=CALLS_AT_ONCE, concurrency=2)
            job = sidecar.coordinate("call", parallelism=TASKS, uses=[permits])

            def call(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
                for record in records:
                    with permits:
                        context.count("calls")  # here the service would be called
                    yield record

            records = spark.sparkContext.parallelize(range(CALLS), TASKS)
            began = time.perf_counter()
            outputs = records.mapPartitions(job.subtask(call)).collect()
            seconds = time.perf_counter() - began
            calls = job.counters()["calls"]
    finally:
        spark.stop()
    allowed = CALLS_AT_ONCE + seconds * CALLS_PER_S
    print(f"{calls} calls for {len(outputs)} records in {seconds:.1f} s, where {allowed:.0f} were allowed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
