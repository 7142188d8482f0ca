# SPDX-License-Identifier: Apache-2.0

"""Two tasks report each sale to the driver, which adds them up while they run."""

from collections.abc import Iterator

from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SubtaskContext, SubtaskOperator


class Till(OperatorCoordinator):
    """On the driver."""

    def __init__(self) -> None:
        self.takings = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: int) -> None:
        self.takings += event

    async def handle_client_request(self, request: object) -> int:
        return self.takings


class Seller(SubtaskOperator):
    """In each task."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, orders: Iterator[int]) -> None:
        for amount in orders:
            self.context.send_event(amount)


spark = SparkSession.builder.master("local[2,4]").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
with Sidecar(spark) as sidecar:
    till = sidecar.coordinate("till", Till, parallelism=2)
    till.run(Seller, range(1, 1001))
    print("takings:", sidecar.request("till", "takings"), "of", sum(range(1, 1001)))
spark.stop()
