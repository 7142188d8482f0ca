# SPDX-License-Identifier: Apache-2.0

"""Tasks whose native code holds Python's interpreter lock: their process lives, but cannot respond."""

from __future__ import annotations

import re
from typing import Any

import pytest
import structlog.testing
from pyspark.sql import SparkSession

from protocol.gateway.types import GatewayLimits
from protocol.restart import FixedDelay
from spark_bridge.common.errors import RestartsExhausted
from spark_bridge.driver.config import SidecarConfig
from tests.spark.actions import coordinated
from tests.spark.script import Script

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
]  # up to six attempts, each of which Spark has to kill

FAILURES_MAX = 3  # set by the master of the fixture
ENDLESS = 10**18
FOR_SECONDS = 3 * 10**8
IMPATIENT = GatewayLimits(confirm_timeout_s=1.0)


class Pressing(Script):
    """Has each attempt compute, and sends it events meanwhile. ``cured``: after the first reset none computes."""

    def __init__(self, count: int, *, cured: bool = False) -> None:
        super().__init__({}, [])
        self.count = count
        self.cured = cured

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await super().subtask_ready(subtask, gateway)
        if self.cured and self.named("reset_to_checkpoint"):
            await gateway.send_event("stop")
            return
        await gateway.send_event(["compute", self.count])
        self.press(gateway)

    def press(self, gateway: Any) -> None:
        if gateway is self.gateways[gateway.attempt.subtask] and not self.named("event"):
            self.context.call_later(0.2, lambda: self.send(gateway))

    async def send(self, gateway: Any) -> None:
        await gateway.send_event("are you there")
        self.press(gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        await super().handle_event_from_operator(subtask, attempt, event)
        if event == ["echo", "computed"]:
            await self.gateways[subtask].send_event("stop")


def check_text(text: str) -> None:
    assert re.search(rf"killed subtask 0 of operator 'op' {FAILURES_MAX} times.*attempts_max={FAILURES_MAX}", text), (
        text
    )
    assert re.search(r"was not confirmed within \d+\.\d+ s", text), text
    assert re.search(r"no sign of life for \d+\.\d s", text), text
    assert "native code holds Python's interpreter lock" in text
    assert "confirm_timeout_s" in text


def test_a_task_that_is_killed_again_and_again_fails_the_job_with_its_cause(spark: SparkSession) -> None:
    """H69: Spark does not count kills, so Headgate does; the limit is that of the master."""
    script = Pressing(ENDLESS)
    with (
        structlog.testing.capture_logs() as lines,
        coordinated(spark, script, config=SidecarConfig(gateway=IMPATIENT)) as job,
    ):
        rdd = job.tasks()
        with pytest.raises(RestartsExhausted) as failure:
            job.sidecar.run(rdd.collect, restart=FixedDelay(restarts_max=0, delay_s=0))

    check_text(str(failure.value.__cause__))
    check_text(str(failure.value))
    lives = script.of_subtask(0, "ready", "failed")
    assert [callback[0] for callback in lives] == ["ready", "failed"] * FAILURES_MAX
    assert {callback[3] for callback in lives if callback[0] == "failed"} == {"CONFIRMATION_TIMEOUT"}
    warnings = [line for line in lines if line["event"] == "task kill requested"]
    assert [(line["log_level"], line["kills"], line["kills_max"]) for line in warnings] == [
        ("warning", count, FAILURES_MAX) for count in range(1, FAILURES_MAX + 1)
    ]
    assert [(line["operator_id"], line["subtask"], line["attempt"]) for line in warnings] == [
        ("op", 0, attempt) for attempt in range(FAILURES_MAX)
    ]
    assert all("confirmation timeout: " in line["reason"] for line in warnings)


def test_a_run_that_fails_for_its_kills_is_restarted_with_a_new_count(spark: SparkSession) -> None:
    """H69, H15: for ``Sidecar.run`` it is a failed run like any other."""
    script = Pressing(ENDLESS, cured=True)
    with coordinated(spark, script, config=SidecarConfig(gateway=IMPATIENT)) as job:
        results = job.sidecar.run(job.tasks().collect, restart=FixedDelay(restarts_max=1, delay_s=0))

    assert [(subtask, attempt) for subtask, attempt, _ in results] == [(0, FAILURES_MAX)]
    assert len(script.named("reset_to_checkpoint")) == 1
    assert [callback[1] for callback in script.named("run_ended")] == [False, True]


def test_an_operator_with_a_longer_limit_computes_undisturbed(spark: SparkSession) -> None:
    """H69: the limit is set per operator; below it a native computation costs nothing but the wait."""
    script = Pressing(FOR_SECONDS)
    patient = GatewayLimits(confirm_timeout_s=300.0)
    with coordinated(spark, script, config=SidecarConfig(gateway=IMPATIENT), gateway=patient) as job:
        results = job.tasks().collect()

    assert [(subtask, attempt) for subtask, attempt, _ in results] == [(0, 0)]
    assert not script.named("failed", "reset")
