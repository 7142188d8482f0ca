# SPDX-License-Identifier: Apache-2.0

"""``async with Sidecar(spark)`` in ordinary fixtures, whose two halves run in different tasks (H163)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SidecarRuntime, SubtaskOperator
from tests.spark.conftest import LOCAL, SparkOn

pytestmark = pytest.mark.spark


class Doubling(OperatorCoordinator):
    """Answers each record with its double."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return 2 * request


class Asking(SubtaskOperator):
    """Asks for the double of each record."""

    def process(self, records: Iterator[int]) -> Iterator[int]:
        return (self.context.request(record) for record in records)

    def open(self, context: Any, state: bytes | None) -> None:
        self.context = context


async def doubled(sidecar: SidecarRuntime, spark: SparkSession, name: str) -> list[int]:
    job = await sidecar.coordinate(name, Doubling, parallelism=2)
    rdd = spark.sparkContext.parallelize(range(4), 2).mapPartitions(job.subtask(Asking))
    return sorted(await sidecar.run(rdd.collect))


@pytest_asyncio.fixture
async def sidecar(spark: SparkSession) -> AsyncIterator[SidecarRuntime]:
    async with Sidecar(spark) as sidecar:
        yield sidecar


@pytest.mark.parametrize("time", [1, 2])
async def test_each_test_has_a_sidecar(sidecar: SidecarRuntime, spark: SparkSession, time: int) -> None:
    assert await doubled(sidecar, spark, "words") == [0, 2, 4, 6]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_sidecar(spark_on: SparkOn) -> AsyncIterator[SidecarRuntime]:
    async with Sidecar(spark_on(LOCAL)) as sidecar:
        yield sidecar


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.asyncio(loop_scope="module")
async def test_all_tests_of_a_module_have_one_sidecar(
    shared_sidecar: SidecarRuntime, spark: SparkSession, name: str
) -> None:
    assert await doubled(shared_sidecar, spark, name) == [0, 2, 4, 6]
    assert name in shared_sidecar.handles
