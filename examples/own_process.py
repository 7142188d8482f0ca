# SPDX-License-Identifier: Apache-2.0

"""A coordinator in its own process: it adds up what the tasks report, and outlives the driver. So does a work queue.

This program starts the process, runs two jobs that are attached to it, and ends the process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import AttachedSidecar, OperatorCoordinator, SidecarRuntime, SubtaskContext, SubtaskOperator, WorkQueue

SUBTASKS = 2
PAGES = 100


class Totals(OperatorCoordinator):
    """In the sidecar's process: adds up what the tasks have reported."""

    def __init__(self) -> None:
        self._total = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._total += event

    async def handle_client_request(self, request: Any) -> int:
        return self._total

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return str(self._total).encode()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self._total = int(state or 0)


class Adder(SubtaskOperator):
    """In the tasks: reports the records to the coordinator."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[int]) -> None:
        for record in records:
            self.context.send_event(record)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b""


async def factory(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate("totals", Totals, parallelism=SUBTASKS, mode="streaming")
    pages = sidecar.work_queue("pages", [1])
    await sidecar.coordinate("crawl", parallelism=SUBTASKS, uses=[pages])


def crawl(_: Iterator[int], pages: WorkQueue[int]) -> Iterator[int]:
    for page in pages:
        pages.add([linked for linked in (2 * page, 2 * page + 1) if linked <= PAGES])
        yield page


def run_driver(address: str, secret_file: Path, master: str) -> tuple[int, int]:
    """In the driver: run both jobs; return what the coordinator answers, and how many pages there are."""
    spark = start_spark(master, "headgate own process")
    try:
        with AttachedSidecar(spark, address, secret_file=secret_file) as sidecar:
            numbers = spark.sparkContext.parallelize(range(1, 101), SUBTASKS)
            task = sidecar.operator("totals").subtask(Adder)
            sidecar.run(lambda: numbers.mapPartitions(task).count())
            total: int = sidecar.request("totals", "total")

            slots = spark.sparkContext.parallelize(range(SUBTASKS), SUBTASKS)
            operator = sidecar.operator("crawl")
            visited = sidecar.run(slots.mapPartitions(operator.subtask(crawl, operator.part("pages"))).collect)
            return total, len(visited)
    finally:
        spark.stop()


def main(arguments: Sequence[str]) -> int:
    master = arguments[0] if arguments else f"local[{SUBTASKS},4]"
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder, "headgate.secret")
        command = [sys.executable, "-m", "headgate", "sidecar", "examples.own_process:factory"]
        command += ["--secret-file", str(secret_file), "--storage", str(Path(folder, "checkpoints"))]
        command += ["--port", "0", "--relay-port", "0", "--task-port", "0"]  # free ports
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            port = process.stdout.readline().split()[-1]  # sidecar: listening on port N
            total, pages = run_driver(f"127.0.0.1:{port}", secret_file, master)
            print("total:", total, "pages:", pages)
        except SparkDidNotStart as error:
            print(f"Spark did not start: {error}", file=sys.stderr)
            return 2
        finally:
            process.terminate()
            process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
