# SPDX-License-Identifier: Apache-2.0

"""What a coordinator sends inside ``subtask_ready`` applies from the first record on (H66)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from protocol.wire.messages import RestoreMode
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated

pytestmark = pytest.mark.spark

RULES = 50
RECORDS = 2000


class RuleBook(OperatorCoordinator):
    """Works slowly, and waits for the confirmation of its last rule."""

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        for rule in range(RULES - 1):
            await anyio.lowlevel.checkpoint()
            await gateway.send_event(rule)
        await (await gateway.send_event("the last one"))


class Obeys(SubtaskOperator):
    """Yields how many rules it knows at each record, and one more line at the end."""

    def __init__(self) -> None:
        self.rules: list[Any] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        """Nothing is restored."""

    def handle_event(self, event: Any) -> None:
        self.rules.append(event)

    def process(self, records: Iterator[int]) -> Iterator[int]:
        for _ in records:
            yield len(self.rules)
        yield len(self.rules)


@pytest.mark.parametrize("mode", [RestoreMode.BATCH, RestoreMode.STREAMING])
@pytest.mark.parametrize("records", [RECORDS, 0])
def test_no_record_comes_before_the_initial_values(spark: SparkSession, records: int, mode: RestoreMode) -> None:
    with coordinated(spark, RuleBook(), 2, mode=mode) as job:
        known = spark.sparkContext.parallelize(range(records), 2).mapPartitions(job.handle.subtask(Obeys)).collect()
    assert known == [RULES] * (records + 2)
