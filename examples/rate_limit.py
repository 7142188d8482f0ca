# SPDX-License-Identifier: Apache-2.0

"""One budget for all tasks: each asks the coordinator for a permit before it calls a service that must not be flooded.

The example shows requests with an answer. ``handle_request`` may not block, because a coordinator does one thing at a
time. So if the bucket is empty, it answers how long to wait, and the task asks again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import OperatorCoordinator, Sidecar, SubtaskContext, SubtaskOperator

SUBTASKS = 3
CALLS = 60
PERMITS_PER_S = 20.0
PERMITS_AT_ONCE = 10.0


class PermitBucket(OperatorCoordinator):
    """In the driver: a bucket that fills steadily; one permit allows one call."""

    def __init__(self) -> None:
        self._permits = PERMITS_AT_ONCE
        self._filled_at = time.monotonic()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> float:
        """Answer 0 for a permit, else the seconds after which to ask again."""
        now = time.monotonic()
        self._permits = min(PERMITS_AT_ONCE, self._permits + (now - self._filled_at) * PERMITS_PER_S)
        self._filled_at = now
        if self._permits < 1:
            return (1 - self._permits) / PERMITS_PER_S
        self._permits -= 1
        return 0.0


class Caller(SubtaskOperator):
    """In the tasks: calls the service once for each record, never without a permit."""

    def __init__(self) -> None:
        self.context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[int]) -> Iterator[tuple[int, int, int]]:
        calls = waits = 0
        for _ in records:
            while wait_s := self.context.request("permit"):
                waits += 1
                self.context.wait_for_event(wait_s)
            calls += 1  # here the service would be called
        yield self.context.subtask, calls, waits


def main(arguments: Sequence[str]) -> int:
    try:
        spark = start_spark(arguments[0] if arguments else f"local[{SUBTASKS},4]", "headgate rate limit")
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    try:
        with Sidecar(spark) as sidecar:
            permits = sidecar.coordinate("permits", PermitBucket, parallelism=SUBTASKS)
            records = spark.sparkContext.parallelize(range(CALLS), SUBTASKS)
            began = time.perf_counter()
            outputs = records.mapPartitions(permits.subtask(Caller)).collect()
            seconds = time.perf_counter() - began
    finally:
        spark.stop()
    for subtask, calls, waits in sorted(outputs):
        print(f"  subtask {subtask}: {calls} calls, told to wait {waits} times")
    allowed = PERMITS_AT_ONCE + seconds * PERMITS_PER_S
    print(f"{sum(calls for _, calls, _ in outputs)} calls in {seconds:.1f} s, where {allowed:.0f} were allowed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
