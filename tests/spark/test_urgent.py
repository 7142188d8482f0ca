# SPDX-License-Identifier: Apache-2.0

"""Urgent events reach a task of a real Spark while its own thread is in native code (H90 to H93)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated

pytestmark = pytest.mark.spark


class Freeing(OperatorCoordinator):
    """Sends an urgent event to each task that says that it is about to block."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway] = {}
        self.events: list[Any] = []

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway
        await gateway.send_event("at the beginning", urgent=True)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.events.append((subtask, attempt, event))
        if event == "blocks":
            for number in range(3):
                await self.gateways[subtask].send_event(["free", number], urgent=True)


class Blocked(SubtaskOperator):
    """Blocks in ``recv``, without the interpreter lock, until ``handle_urgent`` shuts the socket down."""

    def __init__(self, fails_once: bool = False) -> None:
        self.fails_once = fails_once
        self.seen: list[Any] = []
        self.all_seen = threading.Event()
        self.ours, self.theirs = socket.socketpair()

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_urgent(self, event: Any) -> None:
        self.seen.append(event)
        match event:
            case ["free", 2]:
                self.context.send_event("frees")
                self.ours.shutdown(socket.SHUT_RDWR)
                self.all_seen.set()
                if self.fails_once and self.context.attempt == 0:
                    raise ValueError("handle_urgent does not want to")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        before = list(self.seen)
        self.context.send_event("blocks")
        received = self.ours.recv(1)
        self.all_seen.wait()
        if self.fails_once and self.context.attempt == 0:
            while not self.context.cancelled:
                self.context.wait_for_event(1.0)
        yield before, received, self.seen

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


SEEN = ["at the beginning", ["free", 0], ["free", 1], ["free", 2]]


def test_tasks_that_block_in_native_code_are_freed(spark: SparkSession) -> None:  # H90, H91, H92
    coordinator = Freeing()
    with coordinated(spark, coordinator, 2) as job:
        outputs = job.tasks(Blocked).collect()

    assert outputs == [(["at the beginning"], b"", SEEN)] * 2
    assert sorted(coordinator.events) == [(n, 0, what) for n in range(2) for what in ("blocks", "frees")]
