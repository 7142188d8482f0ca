# SPDX-License-Identifier: Apache-2.0

"""A process that is stopped is found by its silence; one that computes is left alone (H94)."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import SubtaskGateway
from protocol.gateway.types import GatewayLimits
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = [pytest.mark.spark, pytest.mark.long]

LIMIT_S = 2.0
HEARTBEATS = GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=LIMIT_S)


class Freezing(Script):
    """Has the first attempt of subtask 0 stop its own process, and sends nothing after that."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await super().subtask_ready(subtask, gateway)
        first = (subtask, gateway.attempt.attempt) == (0, 0)
        await gateway.send_event("freeze" if first else "stop", loss_tolerant=True)


def test_stopped_process_is_found_and_its_task_runs_again(spark: SparkSession) -> None:  # H94
    script = Freezing({}, [])
    with coordinated(spark, script, 2, gateway=HEARTBEATS) as job:
        results = job.action(Listening)()

    assert [(subtask, attempt) for subtask, attempt, _ in results] == [(0, 1), (1, 0)]
    lives = script.of_subtask(0, "ready", "failed", "reset")
    assert [callback[0] for callback in lives] == ["ready", "failed", "reset", "ready"]
    assert lives[1][3] == "HEARTBEAT_TIMEOUT"


class Computing(SubtaskOperator):
    """Computes in pure Python, in C and in sleep for three times the limit, without a look at its coordinator."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[tuple[int, int]]:
        for busy in (self.in_python, self.in_c, time.sleep):
            busy(LIMIT_S)
        yield self.context.subtask, self.context.attempt

    def in_python(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            re.sub("a", "b", "ab" * 100)

    def in_c(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)


def test_tasks_that_compute_are_left_alone(spark: SparkSession) -> None:  # H94
    script = Script({}, [])
    with coordinated(spark, script, 2, gateway=HEARTBEATS) as job:
        results = job.action(Computing)()

    assert results == [(0, 0), (1, 0)]
    assert not script.named("failed")
