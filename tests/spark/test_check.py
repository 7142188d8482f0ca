# SPDX-License-Identifier: Apache-2.0

"""``headgate.check`` on clusters: each executor is looked at, and nothing stays.

tests/spark/connect/test_connect_ways_in.py has a session of Spark Connect.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headgate
from headgate import Addresses, SidecarConfig
from spark_bridge.driver.environment import executor_ids
from tests.spark.actions import Action
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn
from tests.spark.faults.namespaces import HostOfItsOwn, cluster_on_both, host_apart
from tests.spark.faults.waiting import wait_for_executors, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.long]

TWO_EXECUTORS = "local-cluster[2,1,1024]"


@pytest.fixture
def two(spark_on: SparkOn) -> SparkSession:
    spark = spark_on(TWO_EXECUTORS)
    wait_until(lambda: len(executor_ids(spark.sparkContext)) == 2, "two executors")
    return spark


def of_executors(said: str) -> list[str]:
    return [line.strip() for line in said.splitlines() if line.strip().startswith("executor ")]


def test_each_executor_of_a_cluster_is_looked_at_and_nothing_stays(
    two: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    assert headgate.check(two) is True
    said = capsys.readouterr().out
    pattern = r"executor [01] at \S+: Python 3\.\d+\.\d+\S*, Java \d[\d.]*, reaches 127\.0\.0\.1:\d+"
    assert [bool(re.fullmatch(pattern, line)) for line in of_executors(said)] == [True, True], said
    assert said.splitlines()[-1] == "Headgate works here."
    assert {thread.name for thread in set(threading.enumerate()) - before if "headgate" in thread.name} == set()
    assert two.range(3).count() == 3, "the session stays"


def test_a_context_is_checked_as_its_session_is(two: SparkSession) -> None:
    assert headgate.check(two.sparkContext) is True


def test_executors_that_are_refused_are_named_with_the_address_and_what_to_do(
    two: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert headgate.check(two, SidecarConfig(addresses=Addresses(advertised_port=port))) is False
    said = capsys.readouterr().out
    assert [f"does not reach 127.0.0.1:{port} (" in line for line in of_executors(said)] == [True, True]
    last = said.splitlines()[-1]
    assert f"FAILED: 2 of 2 executors cannot reach the sidecar at 127.0.0.1:{port}: something refuses" in last
    assert f"Open TCP port {port} of the driver to the executors" in last


def test_tasks_for_which_there_is_no_slot_are_cancelled(
    two: SparkSession, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def occupy(numbers: Iterable[int]) -> Iterator[int]:
        (gate.parent / f"runs-{next(iter(numbers))}").touch()
        while not gate.exists():
            threading.Event().wait(0.05)
        yield 0

    occupied = Action(two.sparkContext.parallelize(range(2), 2).mapPartitions(occupy).collect)
    tracker = two.sparkContext.statusTracker()
    try:
        wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 2, "both slots are taken")
        assert headgate.check(two, timeout_s=2.0) is False
        last = capsys.readouterr().out.splitlines()[-1]
        assert "FAILED: waiting for tasks took longer than 2 s, and was given up: find out whether the cluster" in last
        assert re.search(r"reach the driver at 127\.0\.0\.1:\d+: without that", last)
        wait_until(lambda: len(tracker.getActiveJobsIds()) == 1, "only the other job is left")
    finally:
        gate.touch()
    assert occupied.result() == [0, 0]


@pytest.fixture
def far_host() -> Iterator[HostOfItsOwn]:
    with host_apart() as host:
        yield host


@pytest.fixture
def cluster(far_host: HostOfItsOwn) -> Iterator[StandaloneCluster]:
    with cluster_on_both(far_host) as cluster:
        yield cluster


def test_the_one_executor_that_cannot_reach_the_driver_is_named(
    cluster: StandaloneCluster, far_host: HostOfItsOwn, spark_on: SparkOn, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its network is another one, in which the address that the sidecar advertises is not the driver's."""
    near = far_host.our_address
    spark = spark_on(
        cluster.master_url, spark_driver_host=near, spark_driver_bindAddress=near, spark_executor_memory="512m"
    )
    wait_for_executors(spark, cluster.hosts)
    config = SidecarConfig(host="127.0.0.1", addresses=Addresses(advertised_host="127.0.0.1"))
    try:
        assert headgate.check(spark, config) is False
        said = capsys.readouterr().out
        apart = {line.split(" at ")[1].split(":")[0]: "does not reach" in line for line in of_executors(said)}
        assert apart == {near: False, far_host.address: True}, said
        assert "FAILED: 1 of 2 executors cannot reach the sidecar at 127.0.0.1:" in said.splitlines()[-1]
        assert "set spark.driver.host, or SidecarConfig(addresses=" in said.splitlines()[-1]
        assert headgate.check(spark) is True
    finally:
        spark.stop()


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize("answer", ["drops", "refuses"])
def test_a_firewall_before_the_port_of_the_sidecar_is_named_with_the_executor_behind_it(
    answer: str,
    cluster: StandaloneCluster,
    far_host: HostOfItsOwn,
    spark_on: SparkOn,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Spark itself works on that executor, because its own ports are open."""
    near = far_host.our_address
    spark = spark_on(
        cluster.master_url, spark_driver_host=near, spark_driver_bindAddress=near, spark_executor_memory="512m"
    )
    wait_for_executors(spark, cluster.hosts)
    port = free_port(near)
    (far_host.drop if answer == "drops" else far_host.refuse)(port)
    try:
        assert headgate.check(spark, SidecarConfig(port=port)) is False
        said = capsys.readouterr().out
        apart = {line.split(" at ")[1].split(":")[0]: line for line in of_executors(said)}
        assert f"reaches {near}:{port}" in apart[near], said
        why = "timed out" if answer == "drops" else "Network is unreachable"
        assert f"does not reach {near}:{port}" in apart[far_host.address], said
        assert why in apart[far_host.address], said
        last = said.splitlines()[-1]
        assert f"FAILED: 1 of 2 executors cannot reach the sidecar at {near}:{port}: a firewall" in last
        assert f"Open TCP port {port} of the driver to the executors" in last
    finally:
        spark.stop()


def test_nobody_has_to_connect_to_an_executor(
    cluster: StandaloneCluster, far_host: HostOfItsOwn, spark_on: SparkOn, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network policy may let executors connect to the driver, and nothing to them."""
    near, port = far_host.our_address, free_port(far_host.our_address)
    far_host.drop(port, of_host=True)
    spark = spark_on(
        cluster.master_url,
        spark_driver_host=near,
        spark_driver_bindAddress=near,
        spark_executor_memory="512m",
        spark_blockManager_port=str(port),
        spark_driver_blockManager_port=str(port + 1),
    )
    wait_for_executors(spark, cluster.hosts)
    try:
        assert headgate.check(spark) is True
        said = capsys.readouterr().out
        assert [line.count("reaches") for line in of_executors(said)] == [1, 1], said
    finally:
        spark.stop()
