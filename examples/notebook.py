# SPDX-License-Identifier: Apache-2.0

"""A notebook as a file: each ``# %%`` begins a cell, and every cell can be run again, in any state of the others.

Editors such as VS Code and Spyder show the cells. The file also runs as a program, and ends by itself. It
needs ``headgate[pyspark]``.
"""

# %% Start Spark and the sidecar.
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

import headgate
from headgate import OperatorCoordinator, SubtaskContext

spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
sidecar = headgate.start(spark)


# %% The two halves. Edit them, and run this cell and the next one again.
class Total(OperatorCoordinator):
    """On the driver: adds up what the tasks report."""

    def __init__(self) -> None:
        self.total = 0

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.total += event

    async def handle_client_request(self, payload: Any) -> int:
        return self.total


def double(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    """In a task: reports each record, and returns it doubled."""
    for record in records:
        context.send_event(record)
        yield 2 * record


# %% Run a job.
job = sidecar.coordinate("total", Total, parallelism=2, replace=True)
doubled = job.run(double, range(10))
print(doubled, "from a total of", sidecar.request("total", "total"))
