# SPDX-License-Identifier: Apache-2.0

"""Short jobs that all succeed: tasks that raise or die once, iterators left early, events for tasks that have ended.

After the marker nothing may be written to standard error: Spark's log is off, so any output there is Headgate's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from protocol.attempts import FailureReason
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator, TimedOut

MARKER = "--- from here on, nothing ---"
JOBS = 20


class Talkative(OperatorCoordinator):
    """Sends as much as it can to attempts that are about to end, and answers late."""

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway
        for number in range(50):
            await gateway.send_event(number)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        for number in range(50):
            self.gateway.send_event_nowait(number)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return [request] * 1000

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        pass


class Ends(SubtaskOperator):
    """Ends its first attempt in the given way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        pass

    def process(self, records: Iterator[Any]) -> Iterator[int]:
        self.context.send_event("about to end")
        if self.how == "impatiently":
            with suppress(TimedOut):
                self.context.request("anything", timeout_s=0.0001)
        if self.context.attempt == 0 and self.how == "raising":
            raise ValueError("once")
        if self.context.attempt == 0 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        yield from records


def main() -> None:
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    hows = ("well", "raising", "early", "killed", "impatiently")
    with Sidecar(spark) as sidecar:
        print(MARKER, file=sys.stderr, flush=True)
        for job in range(JOBS):
            how = hows[job % len(hows)]
            handle = sidecar.coordinate(f"job-{job}", Talkative(), parallelism=2)
            rdd = spark.sparkContext.parallelize(range(20), 2).mapPartitions(handle.subtask(Ends, how))
            rows = rdd.take(1) if how == "early" else rdd.collect()
            assert len(rows) == (1 if how == "early" else 20)
            sidecar.release(handle.operator_id)
    spark.stop()


if __name__ == "__main__":
    main()
