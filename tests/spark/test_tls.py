# SPDX-License-Identifier: Apache-2.0

"""Encrypted connections on real Spark (H77): tasks, the driver's JVM, and a sidecar in another process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from spark_bridge.common.certificates import Encryption, encryption
from spark_bridge.driver import runtime
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.standalone.control_client import SidecarUnreachable
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import NewProgram
from tests.spark.counting import Counting
from tests.spark.faults.own_process import OPERATOR, attach, callbacks
from tests.spark.faults.waiting import wait_until
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark


def run(spark: SparkSession, script: Script) -> tuple[str, list[Any]]:
    with Sidecar(spark, SidecarConfig(tls=True)) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        rdd = spark.sparkContext.parallelize(range(2), 2)
        return sidecar.relay_kind, sorted(rdd.mapPartitions(handle.subtask(Listening)).collect())


def test_events_go_both_ways_and_facts_come_from_the_jvm(spark: SparkSession) -> None:
    """H77. The relay would be replaced by the other kind if the JVM could not connect."""
    script = Script({(1, 0): ["raise"]}, ["hello", "stop"])
    with capture_logs() as log:
        relay_kind, results = run(spark, script)
    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    assert relay_kind == "jvm"
    assert {entry["purpose"]: entry["encrypted"] for entry in log if entry["event"] == "listening"} == {
        "tasks": True,
        "relay": True,
    }


def test_the_jvm_refuses_another_certificate(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """H77. Without the JVM's connection the sidecar uses the other relay, and says why."""

    def with_wrong_pin(*arguments: Any) -> Encryption:
        right = encryption(*arguments)
        return replace(right, certificate_sha256=bytes(32))

    monkeypatch.setattr(runtime, "encryption", with_wrong_pin)
    monkeypatch.setattr("spark_bridge.bridge.relay.jvm_relay.CONNECT_TIMEOUT_S", 3.0)
    with capture_logs() as log, Sidecar(spark, SidecarConfig(tls=True)) as sidecar:
        assert sidecar.relay_kind == "py4j"
    assert "could not connect" in next(entry["because"] for entry in log if entry["event"] == "relay replaced by py4j")


@pytest.mark.long
def test_a_sidecar_in_another_process_encrypts_all_three_ports(spark: SparkSession, program: NewProgram) -> None:
    """H77, H51: a restarted sidecar has the same certificate, so the driver's JVM and its tasks find it again."""
    here = program("streaming", "--tls")
    with pytest.raises(SidecarUnreachable, match="tls"):
        attach(spark, here, tls=False).__enter__()
    with attach(spark, here, tls=True) as sidecar:
        for restarted in (False, True):
            if restarted:
                here.kill()
                here.start()
            rdd = one_task_each(spark, 2).mapPartitions(sidecar.operator(OPERATOR).subtask(Counting))
            action = Action(lambda: sidecar.run(rdd.collect))  # noqa: B023 - it is awaited below
            wait_until(lambda: len({subtask for _, subtask, _ in callbacks(sidecar, "ready")}) == 2, "both ready")
            sidecar.request(OPERATOR, "stop")
            assert len(action.result()) == 2
    assert here.log().count("encrypted=True") >= 6, "three ports, twice"
    assert "encrypted=False" not in here.log()
