# SPDX-License-Identifier: Apache-2.0

"""Deferred replies between real tasks, of which one is killed while the others wait (H84, H85)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from examples.rendezvous import ROUNDS, Meeting, Member
from tests.spark.actions import coordinated
from tests.spark.conftest import SparkOn

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Mortal(Member):
    """Its first attempt in subtask 2 dies as a process that is killed does, after the first round."""

    def process(self, records: Iterator[int]) -> Iterator[tuple[int, list[int]]]:
        if self.context.subtask == 2 and self.context.attempt == 0:
            self.context.request([0, sum(records)])
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().process(records)


@pytest.mark.parametrize("operator", [Member, Mortal])
def test_four_tasks_meet_also_when_one_of_them_is_killed(spark_on: SparkOn, operator: type[Member]) -> None:
    """H84, H85: nobody polls; those that wait for the killed task's retry go on with it."""
    spark = spark_on("local[4,3]")
    with coordinated(spark, Meeting, 4) as job:
        records = spark.sparkContext.parallelize(range(100), 4)
        outputs = records.mapPartitions(job.handle.subtask(operator)).collect()
        assert job.handle.statistics()["replies_open"] == 0
        assert job.handle.statistics()["requests_deferred"] >= 3 * ROUNDS  # the last to report is answered in its turn
    assert sorted(outputs) == [(subtask, [4950, 24750, 123750]) for subtask in range(4)]
