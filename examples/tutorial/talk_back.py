# SPDX-License-Identifier: Apache-2.0

"""The driver talks back: when the takings reach a goal, it tells all tasks to stop selling."""

import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

from headgate import (
    CoordinatorContext,
    OperatorCoordinator,
    Sidecar,
    SubtaskContext,
    SubtaskGateway,
    SubtaskOperator,
)

GOAL = 100_000


class Till(OperatorCoordinator):
    """On the driver."""

    def __init__(self) -> None:
        self.takings = [0, 0]

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        if sum(self.takings) >= GOAL:
            await gateway.send_event("closed")

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.takings[subtask] = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: int) -> None:
        still_open = sum(self.takings) < GOAL
        self.takings[subtask] += event
        if still_open and sum(self.takings) >= GOAL:
            await self.context.gateways.broadcast("closed")


class Seller(SubtaskOperator):
    """In each task."""

    def __init__(self) -> None:
        self.closed = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: str) -> None:
        self.closed = event == "closed"

    def process(self, orders: Iterator[int]) -> Iterator[str]:
        for amount in orders:
            if self.closed:
                yield "turned away"
            else:
                self.context.send_event(amount)
                yield "sold"
            time.sleep(0.001)  # the next customer


spark = SparkSession.builder.master("local[2,4]").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
with Sidecar(spark) as sidecar:
    till = sidecar.coordinate("till", Till, parallelism=2)
    orders = spark.sparkContext.parallelize(range(1, 1001), 2)
    outcomes = orders.mapPartitions(till.subtask(Seller)).countByValue()
    print(dict(outcomes), "together", sum(outcomes.values()))
spark.stop()
