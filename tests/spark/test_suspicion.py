# SPDX-License-Identifier: Apache-2.0

"""Hints about real tasks: of killed processes before Spark's word, and of a network that breaks (H87)."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import SubtaskGateway
from tests.spark.actions import Action, coordinated
from tests.spark.conftest import SparkOn
from tests.spark.faults.network import Line
from tests.spark.operators import Listening
from tests.spark.recorder import Recorder

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Suspecting(Recorder):
    """Records hints too. ``first_words``: what each subtask's first attempt is sent, and later ones are sent "stop"."""

    def __init__(self, *first_words: Any) -> None:
        super().__init__()
        self.first_words = first_words

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await super().subtask_ready(subtask, gateway)
        for word in self.first_words if gateway.attempt.attempt == 0 else ["stop"]:
            await gateway.send_event(word)

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        self.record("suspected", subtask, attempt, reason)

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        self.record("responsive", subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self.record("finished", subtask, attempt)


LIFE = ("ready", "suspected", "responsive", "failed", "finished")


def test_a_killed_process_is_suspected_before_spark_reports_it(spark_on: SparkOn) -> None:
    coordinator = Suspecting("die")
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


def test_a_network_that_breaks_is_a_suspicion_until_it_heals(spark: SparkSession) -> None:
    coordinator = Suspecting()
    with (
        Line() as line,
        coordinated(spark, coordinator, 1, config=line.config()) as job,
    ):
        action = Action(job.tasks(Listening).collect)
        coordinator.wait_for(lambda story: any(call[0] == "ready" for call in story))
        line.break_off()
        coordinator.wait_for(lambda story: any(call[0] == "suspected" for call in story))

        async def stop() -> None:
            await coordinator.context.gateways.broadcast("stop")

        coordinator.context.call_soon_threadsafe(stop)  # a suspected attempt still takes events
        line.heal()
        assert action.result() == [(0, 0, [])]
    life = [call[0] for call in coordinator.of_subtask(0, *LIFE)]
    assert life == ["ready", "suspected", "responsive", "finished"]
