# SPDX-License-Identifier: Apache-2.0

"""A job for a scheduler: ``python examples/daily_job.py 2026-11-26`` writes the orders of that day, each once.

If the driver dies, start it again with the same day: it continues. If it had finished, it writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

from pyspark.sql import SparkSession

from headgate import CheckpointConfig, Sidecar, SidecarConfig, SubtaskContext, SubtaskOperator
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator


class Reported(SubtaskOperator):
    """Your own operator: it processes each record of an input once."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.reported = int(state) if state and context.input_begins_again else 0

    def process(self, orders: Iterator[str]) -> None:
        for order in islice(orders, self.reported, None):
            self.context.count(order.partition(" ")[0])
            self.reported += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return str(self.reported).encode()


day = sys.argv[1] if len(sys.argv) > 1 else "2026-11-26"
folder = Path(sys.argv[2] if len(sys.argv) > 2 else gettempdir()) / "headgate-daily-job"
spark = SparkSession.builder.master("local[2,4]").getOrCreate()
with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
    sink = FileSink(str(folder / "orders"))
    every_second = CheckpointConfig(interval_s=1, tolerated_failures=100)
    orders = spark.sparkContext.parallelize([f"{day} order {number}" for number in range(100)], 2)

    coordinator = TwoPhaseSinkCoordinator(sink)
    job = sidecar.coordinate("orders", coordinator, parallelism=2, mode="streaming", checkpoint=every_second)
    sidecar.run(orders.mapPartitions(job.subtask(TwoPhaseSinkOperator, sink)).count, input_id=day)

    report = sidecar.coordinate("report", parallelism=2, mode="streaming", checkpoint=every_second)
    sidecar.run(orders.mapPartitions(report.subtask(Reported)).count, input_id=day)
    print(dict(sorted(report.counters().items())))
spark.stop()
