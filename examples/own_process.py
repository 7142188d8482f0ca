# SPDX-License-Identifier: Apache-2.0

"""A coordinator in its own process: it adds up what the tasks report, and outlives the driver. So does a work queue.

This program starts the process, runs two jobs that are attached to it, and ends the process. It needs
``headgate[pyspark]``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

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


def run_driver(address: str, secret_file: Path) -> None:
    """In the driver: run both jobs; print what the coordinator answers, and how many pages there are."""
    spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").getOrCreate()
    with AttachedSidecar(spark, address, secret_file=secret_file) as sidecar:
        sidecar.operator("totals").run(Adder, range(1, 101))
        total: int = sidecar.request("totals", "total")

        operator = sidecar.operator("crawl")
        visited = operator.run(operator.subtask(crawl, operator.part("pages")))
    spark.stop()
    print("total:", total, "pages:", len(visited))


if __name__ == "__main__":
    program = Path(__file__)
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder, "headgate.secret")
        command = [sys.executable, "-m", "headgate", "sidecar", f"{program.stem}:factory"]
        command += ["--secret-file", str(secret_file), "--storage", str(Path(folder, "checkpoints"))]
        command += ["--port", "0", "--relay-port", "0", "--task-port", "0"]  # free ports
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=program.parent, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
            assert process.stdout is not None
            port = process.stdout.readline().split()[-1]  # sidecar: listening on port N
            try:
                run_driver(f"127.0.0.1:{port}", secret_file)
            finally:
                process.terminate()
