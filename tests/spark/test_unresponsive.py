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

pytestmark = [pytest.mark.spark, pytest.mark.long]  # Spark has to kill each attempt

FAILURES_MAX = 3  # set by the master of the fixture
ENDLESS = 10**18
IMPATIENT = GatewayLimits(confirm_timeout_s=1.0)


class Pressing(Script):
    """Has each attempt compute without end, and sends it events meanwhile."""

    def __init__(self) -> None:
        super().__init__({}, [["compute", ENDLESS]])

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await super().subtask_ready(subtask, gateway)
        self.press(gateway)

    def press(self, gateway: Any) -> None:
        if gateway is self.gateways[gateway.attempt.subtask]:
            self.context.call_later(0.2, lambda: self.send(gateway))

    async def send(self, gateway: Any) -> None:
        await gateway.send_event("are you there")
        self.press(gateway)


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
    script = Pressing()
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
