# SPDX-License-Identifier: Apache-2.0

"""What ``OperatorHandle.run`` is asked for and returns, in a driver, on an event loop and over Spark Connect.

The module travels by value to a server of Spark Connect, which does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from headgate import (
    OperatorCoordinator,
    OperatorHandle,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    event,
)

SUBTASKS = 3
LARGE = [bytes([n]) * 700_000 for n in range(4)]  # two batches of Arrow in one subtask


@event
@dataclass(frozen=True)
class Reading:
    """A class of the user's."""

    sensor: int
    at: datetime


VALUES: list[Any] = [
    None,
    (1, "two"),
    [3.0, b"four"],
    {"five": frozenset({5, 6})},
    Decimal("7.70"),
    Reading(8, datetime(2026, 1, 2, tzinfo=UTC)),
    10**18,
    *LARGE,
]


def echo(records: Iterator[Any]) -> Iterator[Any]:
    yield from records


def numbered(context: SubtaskContext, records: Iterator[Any], factor: int) -> list[tuple[int, int]]:
    return [(context.subtask, factor * record) for record in records]


class Squares(SplitReader):
    def read_split(self, number: int) -> Iterator[int]:
        yield number * number


def squares() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(range(10), state))


class FailsFirst(OperatorCoordinator):
    """Fails the first run as soon as it is asked for something, and answers in later ones."""

    runs = 0

    async def start(self, context: Any) -> None:
        self.context = context
        FailsFirst.runs += 1

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if FailsFirst.runs == 1:
            self.context.fail_job("the first run")
        return request


def asking(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
    for record in records:
        yield context.request(record)


def typed(values: list[Any]) -> list[tuple[type, Any]]:
    return [(type(value), value) for value in values]


def check_values(job: OperatorHandle) -> None:
    """``job`` has no coordinator of the user's."""
    assert typed(job.run(echo, VALUES)) == typed(VALUES)
    assert job.run(job.subtask(numbered, factor=10), range(4)) == [(0, 0), (1, 10), (2, 20), (2, 30)]
    assert job.run(echo) == []
