# SPDX-License-Identifier: Apache-2.0

"""Counts that add up exactly, although a task is killed in the middle and its partition is computed again.

It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from headgate import Distribution, Sidecar, SubtaskContext

RECORDS = 3000
TASKS = 3
marker = Path(tempfile.mkdtemp()) / "killed"


def keep(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    for record in records:
        context.observe("size", record)
        if record % 3:
            context.count("kept")
            yield record


def keep_and_die_once(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    """Kill the first process that comes to record 1501."""
    for record in keep(context, records):
        if record == 1501 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield record


spark = SparkSession.builder.master(f"local[{TASKS},4]").config("spark.log.level", "OFF").getOrCreate()
with Sidecar(spark) as sidecar:
    job = sidecar.coordinate("keep", parallelism=TASKS)
    rows = job.run(keep_and_die_once, range(RECORDS))
    counters = job.counters()
spark.stop()
size = counters["size"]
assert isinstance(size, Distribution)
print(f"{counters['kept']} kept of {size.count}, and {len(rows)} came back; a process was killed: {marker.exists()}")
print(f"sizes from {size.minimum:g} to {size.maximum:g}, half of them below {size.quantile(0.5):.0f}")
