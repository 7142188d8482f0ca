# SPDX-License-Identifier: Apache-2.0

"""The whole system on real Spark: what coordinators are told when tasks start, fail, die and are retried."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from protocol.gateway.types import GatewayLimits
from spark_bridge.driver.config import SidecarConfig
from tests.spark.actions import coordinated
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark


def run(spark: SparkSession, script: Script, parallelism: int = 2, **config: Any) -> list[Any]:
    with coordinated(spark, script, parallelism, config=SidecarConfig(**config)) as job:
        rdd = spark.sparkContext.parallelize(range(parallelism), parallelism)
        return sorted(rdd.mapPartitions(job.handle.subtask(Listening)).collect())


def test_events_reach_their_subtask_and_its_echoes_come_back(spark: SparkSession) -> None:
    """H10, H22, H30: ready first, then each event once and in order, both ways."""
    script = Script({}, [1, "two", {"three": [3]}, "stop"])

    results = run(spark, script)

    assert [(subtask, received) for subtask, _, received in results] == [
        (0, [1, "two", {"three": [3]}]),
        (1, [1, "two", {"three": [3]}]),
    ]
    assert all(confirmation.confirmed() for confirmation in script.confirmations)
    for subtask in (0, 1):
        lifecycle = script.of_subtask(subtask, "ready", "event", "failed", "reset")
        assert [callback[0] for callback in lifecycle] == ["ready", "event", "event", "event"]
        assert [callback[3] for callback in lifecycle[1:]] == [["echo", 1], ["echo", "two"], ["echo", {"three": [3]}]]
    assert script.story[0] == ("start",)
    assert script.story[-2:] == [("run_ended", True), ("close",)]


def test_only_the_unresponsive_attempt_is_killed(spark: SparkSession) -> None:
    """H25: the process is stopped, an event goes unconfirmed, and exactly that attempt is failed through Spark."""

    class Unresponsive(Script):
        async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
            await super().handle_event_from_operator(subtask, attempt, event)
            if event == ["echo", "last words"]:
                gateway = self.gateways[subtask]
                await gateway.send_event("freeze")
                self.context.call_later(0.3, lambda: self.poke(gateway))

        async def poke(self, gateway: Any) -> None:
            if gateway is self.gateways[gateway.attempt.subtask]:
                await gateway.send_event("are you there")
                self.context.call_later(0.2, lambda: self.poke(gateway))

    script = Unresponsive({(0, 0): ["last words"]}, ["hello", "stop"])

    results = run(spark, script, gateway=GatewayLimits(confirm_timeout_s=1.0))

    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    lifecycle = script.of_subtask(0)
    assert [callback[0] for callback in lifecycle] == ["ready", "failed", "reset", "ready"]
    assert lifecycle[1][3] == "CONFIRMATION_TIMEOUT"
    assert [callback[0] for callback in script.of_subtask(1)] == ["ready"]
