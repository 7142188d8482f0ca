# SPDX-License-Identifier: Apache-2.0

"""A host whose cable is pulled out, so that Spark loses it, too: docs/spark-faults.md, row 8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from protocol.attempts import FailureKind
from protocol.facts import ExecutorLost, JobEnded, TaskOutcome, TaskStarted
from protocol.gateway.types import GatewayLimits
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action, one_task_each
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.faults.heard import Heard, listening_to
from tests.spark.faults.namespaces import HostOfItsOwn, cluster_on_both, host_apart
from tests.spark.faults.waiting import wait_for_executors, wait_until

pytestmark = pytest.mark.spark

TRIES = 4  # the kernel's fourth try is about three seconds after the first


@pytest.fixture(scope="module")
def far_host() -> Iterator[HostOfItsOwn]:
    with host_apart() as host:
        yield host


@pytest.fixture(scope="module")
def cluster(far_host: HostOfItsOwn) -> Iterator[StandaloneCluster]:
    with cluster_on_both(far_host) as cluster:
        yield cluster


@pytest.fixture
def spark(cluster: StandaloneCluster, far_host: HostOfItsOwn, spark_on: SparkOn) -> SparkSession:
    """A session in which Spark gives an executor up after eight seconds without a heartbeat."""
    spark = spark_on(
        cluster.master_url,
        spark_driver_host=far_host.our_address,
        spark_driver_bindAddress=far_host.our_address,
        spark_executor_memory="512m",
        spark_executor_heartbeatInterval="1s",
        spark_network_timeout="8s",
        spark_network_timeoutInterval="1s",
    )
    wait_for_executors(spark, cluster.hosts)
    return spark


@contextmanager
def a_job(spark: SparkSession, sidecar: Sidecar, coordinator: CountingCoordinator, heard: Heard) -> Iterator[Action]:
    """Run a job with one subtask on each host; it has begun when both have answered."""
    patient = GatewayLimits(confirm_timeout_s=60.0)
    handle = sidecar.coordinate("op", coordinator, parallelism=2, gateway=patient)
    action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Counting)).collect)
    for subtask in range(2):
        wait_for_answer(coordinator, heard, subtask)
    yield action


def wait_for_answer(coordinator: CountingCoordinator, heard: Heard, subtask: int) -> None:
    coordinator.wait_for(lambda story: ("ready", subtask, 0) in story)
    coordinator.send_numbers(subtask, 1)
    coordinator.wait_until_seen(subtask, 1)
    heard.wait_for(TaskStarted, lambda fact: fact.partition == subtask)


def on_host(heard: Heard, host: str) -> int:
    """The subtask whose first attempt runs on that host."""
    [started] = heard.of(TaskStarted, lambda fact: fact.host == host and fact.attempt_number == 0)
    return started.partition


def test_a_short_network_cut_is_tolerated(spark: SparkSession, far_host: HostOfItsOwn) -> None:
    """H22, H24: events sent during the cut are confirmed after it, and no failure is reported."""
    coordinator = CountingCoordinator()
    with listening_to(spark) as heard, Sidecar(spark) as sidecar:
        with a_job(spark, sidecar, coordinator, heard) as action:
            far, near = on_host(heard, far_host.address), on_host(heard, far_host.our_address)
            far_host.cut()
            coordinator.send_numbers(far, 3)
            coordinator.send_numbers(near, 3)
            coordinator.wait_until_seen(near, 4)
            port = sidecar.address[1]
            wait_until(lambda: far_host.retransmissions(port) >= TRIES, "the kernel tries again and again")
            while_cut = [callback[3] for callback in coordinator.named("event") if callback[1] == far]
            far_host.heal()
            coordinator.wait_until_seen(far, 4)
            coordinator.stop_all()
            assert sorted(action.result()) == [(0, 4), (1, 4)]

    assert while_cut == [["seen", 1]]
    assert coordinator.wrong == []
    assert sorted(coordinator.named("ready", "failed", "reset")) == [("ready", 0, 0), ("ready", 1, 0)]
    assert heard.of(ExecutorLost) == []


def test_a_host_that_stays_away_is_given_up_and_its_subtask_goes_elsewhere(
    spark: SparkSession, far_host: HostOfItsOwn, cluster: StandaloneCluster
) -> None:
    """H12, H13, H14: Spark misses the heartbeats; the remote attempt lives, but its messages are ignored."""
    coordinator = CountingCoordinator()
    with listening_to(spark) as heard, Sidecar(spark) as sidecar:
        with a_job(spark, sidecar, coordinator, heard) as action:
            far, near = on_host(heard, far_host.address), on_host(heard, far_host.our_address)
            far_host.cut()
            coordinator.wait_for(lambda story: ("ready", far, 1) in story)
            executor_lived = bool(cluster.executor_pids(far_host.address))
            far_host.heal()
            coordinator.tell(far, "stop")
            coordinator.tell(near, "stop")
            assert sorted(action.result()) == sorted([(near, 1), (far, 0)])
        heard.wait_for(JobEnded)
        [lost] = heard.of(ExecutorLost)

    assert executor_lived
    assert "heartbeat" in lost.reason.lower()
    assert coordinator.of_subtask(far) == [
        ("ready", far, 0),
        ("failed", far, 0, FailureKind.EXECUTOR_LOST.name),
        ("reset", far, -1),
        ("ready", far, 1),
    ]
    assert coordinator.of_subtask(near) == [("ready", near, 0)]
    assert heard.outcomes(far) == [TaskOutcome.EXECUTOR_LOST, TaskOutcome.SUCCESS]
    hosts = [fact.host for fact in heard.of(TaskStarted, lambda fact: fact.partition == far)]
    assert hosts == [far_host.address, far_host.our_address]
