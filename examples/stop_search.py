# SPDX-License-Identifier: Apache-2.0

"""A search over all tasks that ends everywhere as soon as one task has found something.

Each task tries keys in one long call, and takes no record meanwhile. So the coordinator stops it with an *urgent*
event: the task handles that on a separate thread, while its own thread computes. It needs
``headgate[pyspark]``.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from headgate import CoordinatorContext, OperatorCoordinator, Sidecar, SubtaskContext, SubtaskGateway, SubtaskOperator

SUBTASKS = 3
SALT = b"the salt of this search, which makes it last a little: "
ITERATIONS = 2000
PASSWORD = 4321
WANTED = hashlib.pbkdf2_hmac("sha256", b"%d" % PASSWORD, SALT, ITERATIONS)


class StopAtTheFirst(OperatorCoordinator):
    """In the driver: the first task that reports a find ends the search of all."""

    def __init__(self) -> None:
        self.context: CoordinatorContext
        self._found: Any = None

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        if self._found is not None:
            await gateway.send_event(["stop"], urgent=True)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._found = event
        await self.context.gateways.broadcast(["stop"], urgent=True)


class Searcher(SubtaskOperator):
    """In the tasks: tries its share of the keys until somebody has found the right one."""

    def __init__(self) -> None:
        self.context: SubtaskContext
        self.stop = threading.Event()

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_urgent(self, event: Any) -> None:
        self.stop.set()

    def process(self, records: Iterator[int]) -> Iterator[tuple[int, int, int | None]]:
        for first in records:
            tried, found = self._search(first)
            yield self.context.subtask, tried, found

    def _search(self, first: int) -> tuple[int, int | None]:
        key, tried = first, 0
        while not self.stop.is_set():  # would go on without end
            tried += 1
            if hashlib.pbkdf2_hmac("sha256", b"%d" % key, SALT, ITERATIONS) == WANTED:
                self.context.send_event(["found", key])
                return tried, key
            key += SUBTASKS
        return tried, None


spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").getOrCreate()
with Sidecar(spark) as sidecar:
    search = sidecar.coordinate("search", StopAtTheFirst, parallelism=SUBTASKS)
    outputs = search.run(Searcher, range(SUBTASKS))
spark.stop()
for subtask, tried, found in sorted(outputs):
    what = "stopped" if found is None else f"found {found}"
    print(f"  subtask {subtask}: {what} after {tried} keys")
