# SPDX-License-Identifier: Apache-2.0

"""Tasks that wait for each other: in every round each task reports a number, and all of them get the total.

The example shows deferred replies. ``handle_request`` returns a ``Reply`` instead of an answer, and the coordinator
settles all replies of a round when the last task has reported. Nobody polls, and meanwhile the coordinator is free.
It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from headgate import (
    CoordinatorContext,
    FailureReason,
    OperatorCoordinator,
    Reply,
    Sidecar,
    SubtaskContext,
    SubtaskOperator,
)

SUBTASKS = 4
ROUNDS = 3


class Meeting(OperatorCoordinator):
    """In the driver: adds up the numbers of a round, and answers all tasks when the last one has reported."""

    def __init__(self) -> None:
        self.context: CoordinatorContext
        self.totals: list[int] = []  # of the rounds that are over
        self.waiting: dict[int, tuple[int, Reply]] = {}  # by subtask: its number in this round

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Reply:
        round_number, number = request
        mine = Reply()
        if round_number < len(self.totals):  # a task that was retried catches up
            mine.answer(self.totals[round_number])
            return mine
        self.waiting[subtask] = number, mine
        if len(self.waiting) == self.context.parallelism:
            self.totals.append(sum(number for number, _ in self.waiting.values()))
            for _, reply in self.waiting.values():
                reply.answer(self.totals[-1])
            self.waiting.clear()
        return mine

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.waiting.pop(subtask, None)  # its retry reports again


class Member(SubtaskOperator):
    """In the tasks: goes from round to round with all others."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[int]) -> Iterator[tuple[int, list[int]]]:
        number, totals = sum(records), []
        for round_number in range(ROUNDS):
            total = self.context.request([round_number, number], timeout_s=300)
            totals.append(total)
            number += total
        yield self.context.subtask, totals


if __name__ == "__main__":
    spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").getOrCreate()
    with Sidecar(spark) as sidecar:
        meeting = sidecar.coordinate("meeting", Meeting, parallelism=SUBTASKS)
        outputs = meeting.run(Member, range(100))
    spark.stop()
    for subtask, totals in sorted(outputs):
        print(f"  subtask {subtask}: the totals of its rounds are {totals}")
