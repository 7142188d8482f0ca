# SPDX-License-Identifier: Apache-2.0

"""The bench, made once and made again if another test has taken the session away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_bridge.driver.sidecar import Sidecar
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn
from tests.spark.faults.bench import Bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test's time limit excludes the start of cluster and session, which may take longer on a busy machine."""
    for item in items:
        if item.path.parent.name == "faults":
            item.add_marker(pytest.mark.timeout(600, func_only=True))
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def bench(standalone: StandaloneCluster, spark_on: SparkOn) -> Iterator[Bench]:
    spark = spark_on(standalone.master_url, spark_executor_memory="512m")
    with Sidecar(spark) as sidecar:
        yield Bench(spark, sidecar, standalone)
