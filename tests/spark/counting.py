# SPDX-License-Identifier: Apache-2.0

"""A coordinator and an operator that count their messages and detect lost or duplicated ones.

The coordinator numbers its events to each subtask, and each subtask numbers its events to the coordinator. Both sides
keep their counts in their state, so after any restore the two counts must match exactly (the invariant).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.wire.codec import decode_event, encode_event
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.recorder import Recorder


class Counting(SubtaskOperator):
    """Takes ``["number", n]`` and answers ``["seen", n]``; its state is the last n. A gap or a duplicate raises."""

    def __init__(self, folder: str = "") -> None:
        self.context: SubtaskContext
        self.last = 0
        self.stopping = False
        self._folder = folder

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.last = 0 if state is None else decode_event(state)

    def handle_event(self, event: Any) -> None:
        match event:
            case ["number", number]:
                if number != self.last + 1:
                    raise ValueError(f"number {number} after {self.last}")
                self.last = number
                self.context.send_event(["seen", number])
            case "stop":
                self.stopping = True
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "compute":
                self.compute()

    def compute(self) -> None:
        """Sends an event, computes without reading the mailbox until the file ``go on`` exists, and sends another."""
        self.context.send_event("computing")
        go_on = Path(self._folder, "go on")
        while not go_on.exists():
            sum(range(1000))
        self.context.send_event("computed")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while not self.stopping:
            self.context.wait_for_event()
        yield (self.context.subtask, self.last)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(self.last)


class CountingCoordinator(Recorder):
    """Sends numbers on request and records the answers; its state is both, per subtask."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.wrong: list[str] = []
        self._cuts: dict[int, tuple[dict[int, int], dict[int, int]]] = {-1: ({}, {})}

    def send_numbers(self, subtask: int, count: int) -> None:
        """From any thread: send the next ``count`` numbers to a subtask."""

        async def send() -> None:
            for _ in range(count):
                self.sent[subtask] = self.sent.get(subtask, 0) + 1
                await self.gateways[subtask].send_event(["number", self.sent[subtask]])

        self.context.call_soon_threadsafe(send)

    def tell(self, subtask: int, event: Any) -> None:
        """From any thread: send one event."""

        async def send() -> None:
            self.confirmations.append(await self.gateways[subtask].send_event(event))

        self.context.call_soon_threadsafe(send)

    def stop_all(self) -> None:
        async def send() -> None:
            for gateway in self.gateways.values():
                await gateway.send_event("stop")

        self.context.call_soon_threadsafe(send)

    def wait_until_seen(self, subtask: int, number: int) -> None:
        self.wait_for(
            lambda story: any(
                callback[:2] == ("event", subtask) and callback[3] == ["seen", number] for callback in story
            )
        )

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case ["seen", number]:
                expected = self.seen.get(subtask, 0) + 1
                if number != expected:
                    self.wrong.append(f"subtask {subtask} has seen {number}, expected {expected}")
                self.seen[subtask] = number
        await super().handle_event_from_operator(subtask, attempt, event)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        await super().checkpoint_coordinator(checkpoint_id)
        self._cuts[checkpoint_id] = (dict(self.sent), dict(self.seen))
        return encode_event([self.sent, self.seen])

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await super().subtask_reset(subtask, checkpoint_id)
        sent, seen = self._cuts[checkpoint_id]
        self.sent[subtask], self.seen[subtask] = sent.get(subtask, 0), seen.get(subtask, 0)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await super().reset_to_checkpoint(checkpoint_id, state)
        sent, seen = ({}, {}) if state is None else decode_event(state)
        self._cuts[checkpoint_id] = (dict(sent), dict(seen))
        self.sent, self.seen = dict(sent), dict(seen)
