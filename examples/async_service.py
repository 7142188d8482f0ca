# SPDX-License-Identifier: Apache-2.0

"""An asyncio service that runs Spark jobs with coordinators on its own event loop, several of them at the same time.

Each request has its own operator, and a limit for its time. SIGTERM and Ctrl-C end the service: the jobs that still run
fail, and everything is closed. It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SidecarRuntime, SubtaskContext

REQUESTS = {"small": 10, "medium": 1_000, "large": 100_000}


class Total(OperatorCoordinator):
    """On the driver: adds up what the tasks report."""

    def __init__(self) -> None:
        self.total = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.total += event

    async def handle_client_request(self, payload: Any) -> int:
        return self.total


def report(context: SubtaskContext, records: Iterator[int]) -> None:
    """In a task: reports the sum of its partition."""
    context.send_event(sum(records))


async def total_below(sidecar: SidecarRuntime, name: str, count: int, *, timeout_s: float = 60.0) -> int:
    """Add up the numbers below ``count`` in a Spark job. Raises ``TimeoutError`` after ``timeout_s`` seconds."""
    job = await sidecar.coordinate(name, Total, parallelism=2)
    try:
        async with asyncio.timeout(timeout_s):
            await job.run(report, range(count))
        total: int = await sidecar.request(name, "total")
        return total
    finally:
        await sidecar.release(name)


async def serve(spark: SparkSession) -> None:
    """Answer all requests concurrently."""

    async def answer(name: str, count: int) -> None:
        print(f"  {name}: {await total_below(sidecar, name, count)}", flush=True)

    async with Sidecar(spark) as sidecar, asyncio.TaskGroup() as requests:
        for name, count in REQUESTS.items():
            requests.create_task(answer(name, count))


async def serve_until_stopped(spark: SparkSession) -> None:
    """Let SIGTERM and Ctrl-C cancel it."""
    this_task = asyncio.current_task()
    assert this_task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)
    await serve(spark)


def main() -> None:
    spark = SparkSession.builder.master("local[4]").getOrCreate()
    with suppress(asyncio.CancelledError):
        asyncio.run(serve_until_stopped(spark))
    spark.stop()


if __name__ == "__main__":
    main()
