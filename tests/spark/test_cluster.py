# SPDX-License-Identifier: Apache-2.0

"""The cluster that other tests use: two hosts, one of which can be lost and come back."""

from __future__ import annotations

import pytest

from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn

pytestmark = [pytest.mark.spark, pytest.mark.long]


def test_a_job_runs_on_both_hosts_and_a_killed_node_comes_back(
    standalone: StandaloneCluster, spark_on: SparkOn
) -> None:
    spark = spark_on(standalone.master_url, spark_executor_memory="512m")
    assert spark.sparkContext.parallelize(range(100), 8).sum() == 4950
    assert all(standalone.executor_pids(host) for host in standalone.hosts)
    standalone.kill_worker("127.0.0.3")
    assert spark.sparkContext.parallelize(range(100), 8).sum() == 4950
    standalone.start_worker("127.0.0.3")
    assert spark.sparkContext.parallelize(range(100), 8).sum() == 4950
