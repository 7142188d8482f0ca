# SPDX-License-Identifier: Apache-2.0

"""The gateways that the context keeps, with real tasks of which one is killed (H88)."""

from __future__ import annotations

import pytest

from headgate import CoordinatorContext, FailureReason, OperatorCoordinator
from tests.spark.actions import coordinated
from tests.spark.conftest import SparkOn

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Conductor(OperatorCoordinator):
    """Greets all tasks when the last one is there, lets one die, and greets them again when all are there again."""

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        self.seen: list[tuple[int, ...]] = []
        context.gateways.when_all_ready(self.all_there)

    async def all_there(self) -> None:
        gateways = self.context.gateways
        self.seen.append(gateways.ready)
        await gateways.broadcast("one")
        await gateways.send(0, "die")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.seen.append(self.context.gateways.ready)
        self.context.gateways.when_all_ready(self.all_there_again)

    async def all_there_again(self) -> None:
        gateways = self.context.gateways
        self.seen.append(gateways.ready)
        await gateways.broadcast("two")
        gateways.broadcast_nowait("stop")

    async def handle_client_request(self, request: object) -> list[tuple[int, ...]]:
        return [*self.seen, self.context.gateways.ready]


def test_all_tasks_are_greeted_when_all_are_there_and_again_after_a_kill(spark_on: SparkOn) -> None:
    spark = spark_on("local[4,3]")
    with coordinated(spark, Conductor, 4) as job:
        outputs = sorted(job.tasks().collect())
        assert job.sidecar.request("op", "seen") == [(0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3), ()]
    assert [received for _, _, received in outputs[1:]] == [["one", "two"]] * 3
    assert outputs[0][:2] == (0, 1)
    assert outputs[0][2] == ["two"]
