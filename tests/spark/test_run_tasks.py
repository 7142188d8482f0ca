# SPDX-License-Identifier: Apache-2.0

"""``handle.run`` runs the tasks and returns what they yield. ``tests/spark/connect`` has the same for Spark Connect."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import NO_RESTART, FixedDelay, Sidecar
from headgate.errors import RestartsExhausted
from tests.spark.yielding import (
    SUBTASKS,
    VALUES,
    FailsFirst,
    Squares,
    asking,
    check_values,
    echo,
    squares,
    typed,
)

pytestmark = pytest.mark.spark


def test_values_arrive_in_order_with_their_types(spark: SparkSession) -> None:  # H166
    with Sidecar(spark) as sidecar:
        check_values(sidecar.coordinate("values", parallelism=SUBTASKS))
        job = sidecar.coordinate("squares", squares, parallelism=2)
        assert sorted(job.run(Squares)) == [number * number for number in range(10)]
        assert job.statistics()["splits_done"] == 10


async def test_values_are_awaited_on_the_users_loop(spark: SparkSession) -> None:
    async with Sidecar(spark.sparkContext) as sidecar:
        job = await sidecar.coordinate("values", parallelism=SUBTASKS)
        assert sidecar.handles["values"] is job
        assert typed(await job.run(echo, VALUES)) == typed(VALUES)


def test_a_failed_run_is_repeated_and_returns_the_values_of_the_last_one(spark: SparkSession) -> None:
    FailsFirst.runs = 0
    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("asking", FailsFirst, parallelism=2)
        assert job.run(asking, ["abcd"], restart=FixedDelay(1, 0.0)) == ["abcd"]
        assert FailsFirst.runs == 2
        FailsFirst.runs = 0
        with pytest.raises(RestartsExhausted, match="the first run"):
            job.run(asking, ["a"], restart=NO_RESTART)


def yields_an_object(records: Any) -> list[object]:
    return [object()]


def test_a_value_that_no_event_can_have_fails_its_task(spark: SparkSession) -> None:  # H171
    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("values", parallelism=1)
        with pytest.raises(RestartsExhausted, match=r"what a task yields to run\(\) is of type builtins.object"):
            job.run(yields_an_object, restart=NO_RESTART)
