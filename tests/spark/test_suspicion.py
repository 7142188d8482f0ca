# SPDX-License-Identifier: Apache-2.0

"""Hints about real tasks: of killed processes before Spark's word (H87)."""

from __future__ import annotations

import pytest

from headgate import SubtaskGateway
from tests.spark.actions import coordinated
from tests.spark.conftest import SparkOn
from tests.spark.recorder import Recorder

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Suspecting(Recorder):
    """Records hints too. Has the first attempt of each subtask die."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await super().subtask_ready(subtask, gateway)
        await gateway.send_event("stop" if gateway.attempt.attempt else "die")

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        self.record("suspected", subtask, attempt, reason)

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        self.record("responsive", subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self.record("finished", subtask, attempt)


LIFE = ("ready", "suspected", "responsive", "failed", "finished")


def test_a_killed_process_is_suspected_before_spark_reports_it(spark_on: SparkOn) -> None:
    coordinator = Suspecting()
    with coordinated(spark_on("local[4,3]"), coordinator, 4) as job:
        outputs = sorted(job.tasks().collect())
    assert [output[:2] for output in outputs] == [(subtask, 1) for subtask in range(4)]
    suspected = 0
    for subtask in range(4):
        life = [(call[0], call[2]) for call in coordinator.of_subtask(subtask, *LIFE)]
        without = [call for call in life if call[0] != "suspected"]
        assert without == [("ready", 0), ("failed", 0), ("ready", 1), ("finished", 1)]
        if ("suspected", 0) in life:  # a hint, which may not come
            suspected += 1
            assert life.index(("suspected", 0)) == 1
        assert ("suspected", 1) not in life
    assert suspected > 0, coordinator.story
    assert {call[3] for call in coordinator.named("suspected")} == {"its connection is gone"}
