# SPDX-License-Identifier: Apache-2.0

"""Tasks, coordinator and driver may all die, and each sale counts once. Start it again to continue."""

import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pyspark.sql import SparkSession

from headgate import (
    CheckpointConfig,
    OperatorCoordinator,
    Sidecar,
    SidecarConfig,
    SubtaskContext,
    SubtaskOperator,
)


class Till(OperatorCoordinator):
    """On the driver."""

    def __init__(self) -> None:
        self.takings = [0, 0]
        self.cuts: dict[int, list[int]] = {}  # the takings at each checkpoint that may still be restored

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: int) -> None:
        self.takings[subtask] += event

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.cuts[checkpoint_id] = list(self.takings)
        return json.dumps(self.takings).encode()

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.cuts = {cut: takings for cut, takings in self.cuts.items() if cut >= checkpoint_id}
        print(f"checkpoint {checkpoint_id}: {sum(self.cuts[checkpoint_id])}", flush=True)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """One task went back: take back what it reported after the checkpoint."""
        self.takings[subtask] = self.cuts.get(checkpoint_id, [0, 0])[subtask]

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """All went back: a new driver, or the job runs again."""
        self.takings = json.loads(state) if state else [0, 0]
        self.cuts = {checkpoint_id: list(self.takings)}
        print(f"back to checkpoint {checkpoint_id}: {sum(self.takings)}", flush=True)

    async def handle_client_request(self, request: object) -> int:
        return sum(self.takings)


class Seller(SubtaskOperator):
    """In each task."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.sold = int(state) if state and context.input_begins_again else 0

    def process(self, orders: Iterator[int]) -> None:
        for amount in islice(orders, self.sold, None):
            self.context.send_event(amount)
            self.sold += 1
            time.sleep(0.02)  # the next customer

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return str(self.sold).encode()


Path("driver.pid").write_text(str(os.getpid()))
spark = SparkSession.builder.master("local[2,4]").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
with Sidecar(spark, SidecarConfig(storage="checkpoints")) as sidecar:
    every_second = CheckpointConfig(interval_s=1, tolerated_failures=100)
    till = sidecar.coordinate("till", Till, parallelism=2, mode="streaming", checkpoint=every_second)
    orders = spark.sparkContext.parallelize(range(1, 1001), 2)
    sidecar.run(lambda: orders.mapPartitions(till.subtask(Seller)).count(), input_id="1000 orders")
    print("takings:", sidecar.request("till", "takings"), "of", sum(range(1, 1001)))
spark.stop()
