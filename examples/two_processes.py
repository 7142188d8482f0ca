# SPDX-License-Identifier: Apache-2.0

"""Two sidecars in their own processes, each with its own event loop, and one job with a stage in each.

This program starts the processes, runs one job that is attached to both, and ends them. It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headgate import AttachedSidecar, FixedDelay, OperatorCoordinator, SidecarRuntime, SubtaskContext

SUBTASKS = 2


class Totals(OperatorCoordinator):
    """In a sidecar's process: adds up what the tasks have reported."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(range(SUBTASKS), 0)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._totals[subtask] += event

    async def handle_client_request(self, request: Any) -> int:
        return sum(self._totals.values())

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._totals[subtask] = 0

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self._totals = dict.fromkeys(range(SUBTASKS), 0)


def report(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    """In the tasks: reports the records to the coordinator and passes them on."""
    for record in records:
        context.send_event(record)
        yield record


async def orders(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate("orders", Totals, parallelism=SUBTASKS)


async def payments(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate("payments", Totals, parallelism=SUBTASKS)


def run_driver(spark: SparkSession, first_address: str, second_address: str, secret_file: Path) -> list[int]:
    """In the driver: run the job and return what both coordinators answer after it."""
    with (
        AttachedSidecar(spark, first_address, secret_file=secret_file) as first,
        AttachedSidecar(spark, second_address, secret_file=secret_file) as second,
    ):
        numbers = spark.sparkContext.parallelize(range(1, 101), SUBTASKS)
        ordered = numbers.mapPartitions(first.operator("orders").subtask(report))
        paid = ordered.repartition(SUBTASKS).mapPartitions(second.operator("payments").subtask(report))

        def action() -> int:
            return second.run(paid.count, restart=FixedDelay(restarts_max=0))

        first.run(action, operators=["orders"])
        return [first.request("orders", "total"), second.request("payments", "total")]


@contextmanager
def running_sidecar(factory: str, secret_file: Path, storage: Path) -> Iterator[str]:
    """A sidecar's process; gives its address."""
    program = Path(__file__)
    command = [sys.executable, "-m", "headgate", "sidecar", f"{program.stem}:{factory}"]
    command += ["--secret-file", str(secret_file), "--storage", str(storage)]
    command += ["--port", "0", "--relay-port", "0", "--task-port", "0"]  # free ports
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=program.parent, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().split()[-1]  # sidecar: listening on port N
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


if __name__ == "__main__":
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [
            stack.enter_context(running_sidecar(factory, folder / "headgate.secret", folder / factory))
            for factory in ("orders", "payments")
        ]
        spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").getOrCreate()
        print("totals:", run_driver(spark, addresses[0], addresses[1], folder / "headgate.secret"))
        spark.stop()
