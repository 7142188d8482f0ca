# SPDX-License-Identifier: Apache-2.0

"""Two jobs of one sidecar, each in its own thread: one fails again and again, and the other never notices.

It shows what `sidecar.run` isolates. The coordinator of the "unlucky" operator raises `SystemExit` in each of its first
runs. That fails its job, and its action is called again. Meanwhile the "steady" operator hands out numbers: its action
is called once, its coordinator is never reset, and each number is handed out once.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from examples.quiet_spark import SparkDidNotStart, start_spark
from headgate import FixedDelay, OperatorCoordinator, Sidecar, SubtaskContext, SubtaskOperator

FAILURES = 3
NUMBERS = 100


class Unlucky(OperatorCoordinator):
    """In the driver: the first runs exit, and the next one succeeds."""

    def __init__(self, steady_works: threading.Event, over: threading.Event) -> None:
        self._steady_works = steady_works
        self._over = over
        self.failures = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> str:
        await asyncio.to_thread(self._steady_works.wait)  # fail in the middle of the other job
        if self.failures < FAILURES:
            self.failures += 1
            sys.exit(f"failure {self.failures}")
        self._over.set()
        return "at last"

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """The counts here include all runs."""


class Steady(OperatorCoordinator):
    """In the driver: hands out numbers, the second half of them after the other job has stopped failing."""

    def __init__(self, works: threading.Event, other_is_over: threading.Event) -> None:
        self._works = works
        self._other_is_over = other_is_over
        self.next = 0
        self.resets = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> int | None:
        if self.next == NUMBERS // 2:
            self._works.set()
            await asyncio.to_thread(self._other_is_over.wait)
        if self.next == NUMBERS:
            return None
        self.next += 1
        return self.next - 1

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.resets += 1
        self.next = 0


class Asker(SubtaskOperator):
    """In the tasks: yields the answers, up to the first one that is not a number."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[int]) -> Iterator[Any]:
        while isinstance(answer := self.context.request("what now?"), int):
            yield answer
        if answer is not None:
            yield answer


class CountedCalls:
    """An action that counts its calls."""

    def __init__(self, action: Callable[[], list[Any]]) -> None:
        self._action = action
        self.calls = 0

    def __call__(self) -> list[Any]:
        self.calls += 1
        return self._action()


def main(arguments: Sequence[str]) -> int:
    try:
        spark = start_spark(arguments[0] if arguments else "local[2,4]", "headgate two jobs")
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    works, over = threading.Event(), threading.Event()
    unlucky, steady = Unlucky(works, over), Steady(works, over)
    slot = spark.sparkContext.parallelize([0], 1)
    try:
        with Sidecar(spark) as sidecar, ThreadPoolExecutor(2) as threads:
            handles = [
                sidecar.coordinate("unlucky", unlucky, parallelism=1),
                sidecar.coordinate("steady", steady, parallelism=1),
            ]
            actions = [CountedCalls(slot.mapPartitions(handle.subtask(Asker)).collect) for handle in handles]
            restart = FixedDelay(restarts_max=FAILURES, delay_s=0.1)
            jobs = [threads.submit(sidecar.run, action, restart=restart) for action in actions]
            outcomes = [job.result() for job in jobs]
    finally:
        spark.stop()
    print(f"unlucky: called {actions[0].calls} times, {unlucky.failures} failures, then {outcomes[0][0]!r}")
    print(f"steady: called {actions[1].calls} time, {steady.resets} resets, {len(set(outcomes[1]))} different numbers")
    untouched = actions[1].calls == 1 and not steady.resets and outcomes[1] == list(range(NUMBERS))
    print("the steady job ran on untouched" if untouched else "THE STEADY JOB WAS DISTURBED")
    return 0 if untouched else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
