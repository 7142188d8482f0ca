# SPDX-License-Identifier: Apache-2.0

"""A coordinator that a test directs, attempt by attempt, and an operator that returns its records when told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from actors.coordination import SubtaskGateway
from tests.spark.operators import Listening
from tests.spark.recorder import Recorder

Life = tuple[int, int]
"""A subtask and the number of one of its attempts."""


class Director(Recorder):
    """Keeps the gateway of every attempt, also of those that have ended, and greets each that becomes ready."""

    def __init__(self, *greeting: Any) -> None:
        super().__init__()
        self.lives: dict[Life, SubtaskGateway] = {}
        self._greeting = greeting
        self._greetings: dict[int, tuple[Any, ...]] = {}

    def greet(self, subtasks: Iterable[int], *events: Any) -> None:
        """From any thread: send these to later attempts of these subtasks instead of the default events."""
        for subtask in subtasks:
            self._greetings[subtask] = events

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.lives[subtask, gateway.attempt.attempt] = gateway
        for event in self._greetings.get(subtask, self._greeting):
            await gateway.send_event(event)
        await super().subtask_ready(subtask, gateway)

    def tell(self, life: Life, *events: Any) -> None:
        """From any thread: send these to one attempt."""

        async def send() -> None:
            for event in events:
                await self.lives[life].send_event(event)

        self.context.call_soon_threadsafe(send)

    def hear(self, life: Life, event: Any) -> None:
        """Send an event to an attempt, and wait for the answer, which proves that it is alive and connected."""
        self.tell(life, event)
        self.wait_for(lambda story: ("event", *life, ["echo", event]) in story)

    def wait_until_ready(self, lives: Iterable[Life]) -> None:
        wanted = {("ready", *life) for life in lives}
        self.wait_for(lambda story: wanted <= {callback for callback in story if callback[0] == "ready"})

    def task_of(self, life: Life) -> int:
        """Spark's task id."""
        return self.lives[life].attempt.task_attempt_id


class Gathering(Listening):
    """Reads its records, waits for ``stop``, then yields its identity, the events received and the sorted records."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        rows = sorted(records)
        for _ in super().process(iter(())):
            yield (self.context.subtask, self.context.attempt, self.received, rows)
