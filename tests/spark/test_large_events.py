# SPDX-License-Identifier: Apache-2.0

"""Large events between tasks of a real Spark and their coordinator, when a task dies in the middle too (H112, H115)."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated

pytestmark = [pytest.mark.spark, pytest.mark.long]

LARGE = 64 * 2**20 - 64
FRAGMENT = 256 * 1024


@functools.cache
def weights(seed: int) -> bytes:
    return (hashlib.shake_128(bytes((seed,))).digest(2**20) * 64)[:LARGE]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


class Exchanging(OperatorCoordinator):
    """Sends each attempt a large event, and notes the digests of those that come."""

    def __init__(self) -> None:
        self.came: list[tuple[int, int, str]] = []
        self.failed: list[int] = []
        self.ready = threading.Event()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await gateway.send_event(weights(subtask))
        self.ready.set()

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.failed.append(attempt)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came.append((subtask, attempt, digest(event)))


class Exchanger(SubtaskOperator):
    """Sends a large event. The first attempt of subtask 0 is killed when some of its bytes have left."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills
        self.received: list[str] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        self.received.append(digest(event))

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        if self.kills and self.context.subtask == 0 and self.context.attempt == 0:
            threading.Thread(target=self.die_in_the_middle, daemon=True).start()
        self.context.send_event(weights(10 + self.context.subtask))
        yield self.context.subtask, self.context.attempt, self.received

    def die_in_the_middle(self) -> None:
        channel: Any = self.context._channel
        left = 0
        while not 0 < left < LARGE - 8 * FRAGMENT:
            with channel._changed:
                left = channel._wire._outbox.waiting_bytes
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_large_events_come_once_although_a_task_is_killed_in_the_middle(spark: SparkSession, tls: bool) -> None:
    """H24, H26, H112, H115: what the killed attempt had begun to send is not delivered; the next attempt's is."""
    coordinator = Exchanging()
    with coordinated(spark, coordinator, 2, config=SidecarConfig(tls=tls)) as job:
        outputs = sorted(job.tasks(Exchanger, True).collect())

    assert coordinator.failed == [0]
    assert outputs == [(0, 1, [digest(weights(0))]), (1, 0, [digest(weights(1))])]
    assert sorted(coordinator.came) == [(0, 1, digest(weights(10))), (1, 0, digest(weights(11)))]


class Holding(Exchanger):
    """Sends a large event while a checkpoint holds it, and ends."""

    snapshot_anywhere = True
    sent = False

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if not self.sent:
            self.sent = True
            self.context.send_event(weights(10 + self.context.subtask))
        return b"state"

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while not self.received or self.context.request("done?") != "yes":
            self.context.wait_for_event(0.05)
        yield self.context.subtask, self.received


def test_a_checkpoint_holds_a_large_event(spark: SparkSession, tmp_path: Any) -> None:
    """H31, H112: a large event that is sent inside a snapshot is part of the checkpoint, and arrives after it."""

    class Checkpointed(Exchanging):
        async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
            return b""

        async def handle_request(self, subtask: int, attempt: int, request: Any) -> str:
            return "yes" if self.came else "no"

    coordinator = Checkpointed()
    with coordinated(spark, coordinator, config=SidecarConfig(storage=tmp_path), mode="streaming") as job:
        outputs: list[Any] = []
        thread = threading.Thread(target=lambda: outputs.extend(job.tasks(Holding, False).collect()))
        thread.start()
        assert coordinator.ready.wait(120)
        job.sidecar.checkpoint("op")
        stored = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        thread.join(120)

    assert outputs == [(0, [digest(weights(0))])]
    assert coordinator.came == [(0, 0, digest(weights(10)))]
    assert max(stored) > LARGE
