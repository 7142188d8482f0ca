# SPDX-License-Identifier: Apache-2.0

"""A job for a scheduler, which writes the orders of a day, each once.

The day is its argument, such as ``2026-11-26``. If the driver dies, start it again with the same day: it continues. If
it had finished, it writes nothing. It needs ``headgate[pyspark]``.
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
    orders = [f"{day} order {number}" for number in range(100)]

    coordinator = TwoPhaseSinkCoordinator(sink)
    job = sidecar.coordinate("orders", coordinator, parallelism=2, mode="streaming", checkpoint=every_second)
    job.run(job.subtask(TwoPhaseSinkOperator, sink), orders, input_id=day)

    report = sidecar.coordinate("report", parallelism=2, mode="streaming", checkpoint=every_second)
    report.run(Reported, orders, input_id=day)
    print(dict(sorted(report.counters().items())))
spark.stop()
