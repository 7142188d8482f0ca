# SPDX-License-Identifier: Apache-2.0

"""One budget for all tasks: together they call a service at most 20 times a second, and two at a time.

It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

from headgate import Sidecar

TASKS = 3

spark = SparkSession.builder.master(f"local[{TASKS},4]").getOrCreate()
with Sidecar(spark) as sidecar:
    permits = sidecar.permits("service", per_s=20, burst=10, concurrency=2)
    job = sidecar.coordinate("call", parallelism=TASKS, uses=[permits])

    def call(records: Iterator[int]) -> Iterator[float]:
        for _ in records:
            with permits:
                called_at = time.time()  # here the service would be called
            yield called_at

    began = time.time()
    calls = job.run(call, range(60))
spark.stop()
seconds = max(calls) - began
print(f"{len(calls)} calls in {seconds:.1f} s, where {10 + 20 * seconds:.0f} were allowed")
