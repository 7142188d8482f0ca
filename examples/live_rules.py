# SPDX-License-Identifier: Apache-2.0

"""Rules that change while the tasks run: a word that all tasks together have passed too often is blocked everywhere.

Each task sends its counts up after every batch. Only the coordinator sees the sum. When a word has passed ``LIMIT``
times, it sends the rule to all tasks, and only then lets this one continue. Events of one gateway keep their order,
so the task that reached the limit has the rule before its next batch. Each attempt gets the existing rules inside
``subtask_ready``, and handles them before it sees its first word. It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from headgate import (
    CoordinatorContext,
    OperatorCoordinator,
    Sidecar,
    SubtaskContext,
    SubtaskGateway,
    SubtaskOperator,
)

LIMIT = 500
BLOCKED = "dam"  # from the beginning
BATCH = 100
SUBTASKS = 3
WORDS = ("spam", "gate", "river", "spam", "weir", "sluice", "spam", "lock", "spam", "dam")
RECORDS = 3000


class WordFilter(SubtaskOperator):
    """In the tasks: passes words on, except blocked ones, and reports after every batch."""

    def __init__(self) -> None:
        self.context: SubtaskContext
        self.blocked: set[str] = set()
        self.may_go_on = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        match event:
            case ["block", word]:
                self.blocked.add(word)
            case ["go on"]:
                self.may_go_on = True

    def process(self, records: Iterator[str]) -> Iterator[tuple[str, int, int]]:
        passed: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        batch: Counter[str] = Counter()
        for word in records:
            if word in self.blocked:
                dropped[word] += 1
            else:
                batch[word] += 1
            if batch.total() == BATCH:
                passed.update(batch)
                self._report(batch)
                batch.clear()
        passed.update(batch)
        for word in passed.keys() | dropped.keys():
            yield word, passed[word], dropped[word]

    def _report(self, batch: Counter[str]) -> None:
        self.may_go_on = False
        self.context.send_event(["passed", dict(batch)])
        while not self.may_go_on:
            self.context.wait_for_event()


class RuleBook(OperatorCoordinator):
    """In the driver: adds up the counts and blocks words."""

    def __init__(self) -> None:
        self.rules: list[str] = [BLOCKED]
        self._totals: Counter[str] = Counter()
        self.context: CoordinatorContext

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        print(f"a word may pass about {LIMIT} times, {BLOCKED!r} never")

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        for word in self.rules:
            await gateway.send_event(["block", word])

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        _, batch = event
        self._totals.update(batch)
        for word in batch:
            if self._totals[word] >= LIMIT and word not in self.rules:
                self.rules.append(word)
                print(f"subtask {subtask} tips the scales: {word!r} has passed {self._totals[word]} times")
                await self.context.gateways.broadcast(["block", word])
        if not self.context.handles_restored:  # nobody waits for the answer to an event from a checkpoint
            await self.context.gateways.send(subtask, ["go on"], attempt=attempt)


spark = SparkSession.builder.master(f"local[{SUBTASKS},4]").getOrCreate()
with Sidecar(spark) as sidecar:
    rules = sidecar.coordinate("rules", RuleBook, parallelism=SUBTASKS)
    outputs = rules.run(WordFilter, [WORDS[n % len(WORDS)] for n in range(RECORDS)])
spark.stop()
for word in sorted(set(WORDS)):
    passed, dropped = (sum(output[n] for output in outputs if output[0] == word) for n in (1, 2))
    print(f"  {word:<8} {passed:>5} passed {dropped:>5} dropped")
