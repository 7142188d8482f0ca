# SPDX-License-Identifier: Apache-2.0

"""Counts that add up exactly, although a task is killed in the middle and its partition is computed again."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import Distribution, Sidecar, SubtaskContext

RECORDS = 3000
TASKS = 3


def keep(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    for record in records:
        context.observe("size", record)
        if record % 3:
            context.count("kept")
            yield record


def killed_once(marker: Path, records: Iterator[int]) -> Iterator[int]:
    """Kill the first process that comes to record 1500."""
    for record in records:
        if record == 1500 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield record


def main(arguments: Sequence[str]) -> int:
    try:
        spark = start_spark(arguments[0] if arguments else f"local[{TASKS},4]", "headgate counters")
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    marker = Path(tempfile.mkdtemp()) / "killed"
    try:
        with Sidecar(spark) as sidecar:
            job = sidecar.coordinate("keep", parallelism=TASKS)
            records = spark.sparkContext.parallelize(range(RECORDS), TASKS)
            disturbed = records.mapPartitions(lambda rows: killed_once(marker, iter(rows)))
            rows = disturbed.mapPartitions(job.subtask(keep)).collect()
            counters = job.counters()
    finally:
        spark.stop()
    size = counters["size"]
    assert isinstance(size, Distribution)
    print(
        f"{counters['kept']} kept of {size.count}, and {len(rows)} came back; a process was killed: {marker.exists()}"
    )
    print(f"sizes from {size.minimum:g} to {size.maximum:g}, half of them below {size.quantile(0.5):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
