# SPDX-License-Identifier: Apache-2.0

"""Faults that end an attempt from inside or below: its code, process, executor or node. docs/spark-faults.md."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from protocol.facts import ExecutorLost, TaskOutcome
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action, one_task_each
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn
from tests.spark.faults.bench import Bench
from tests.spark.faults.heard import Heard, listening_to
from tests.spark.faults.talking import FIRST_ATTEMPTS_WAIT, both_talk
from tests.spark.faults.waiting import scheduler, wait_for_executors, wait_until
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark


def hosts_of(script: Script, heard: Heard) -> dict[int, str]:
    return {
        subtask: heard.start_of(gateway.attempt.task_attempt_id).host for subtask, gateway in script.gateways.items()
    }


# --- its own code, its own process ----------------------------------------------------------------------------------


def test_an_exception_in_user_code(bench: Bench) -> None:
    """H10, H12, H18."""
    script = Script({(1, 0): ["raise"]}, ["hello", "stop"])

    results = bench.collect(script, Listening)

    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    assert [callback[0] for callback in script.of_subtask(1)] == ["ready", "failed", "reset", "ready"]
    assert [callback[0] for callback in script.of_subtask(0)] == ["ready"]


def test_a_python_worker_dies_by_sigkill(bench: Bench) -> None:
    """H10, H12: SIGKILL, like the kernel's out-of-memory kill; the task reports nothing, its socket just closes."""
    script = Script({(1, 0): ["die"]}, ["hello", "stop"])

    with bench.listening() as heard:
        results = bench.collect(script, Listening)

    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    assert heard.outcomes(1) == [TaskOutcome.FAILED, TaskOutcome.SUCCESS]
    assert script.of_subtask(1) == [("ready", 1, 0), ("failed", 1, 0, "FAILED"), ("reset", 1, -1), ("ready", 1, 1)]
    assert script.of_subtask(0) == [("ready", 0, 0)]
    assert "Python worker exited unexpectedly (crashed)" in script.reasons[0].text


# --- its executor, its node -----------------------------------------------------------------------------------------


def collect_while_a_host_loses_its_executor(
    bench: Bench, lose: Callable[[str], None]
) -> tuple[Script, Heard, set[int]]:
    """While both subtasks run, ``lose`` takes the executor from the host of subtask 0. Returns the subtasks on it.

    The one executor of each host has two slots, so Spark may or may not place subtask 1 there, too.
    """
    script = Script(FIRST_ATTEMPTS_WAIT, ["hello", "stop"])
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(script) as handle:
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        script.wait_for(both_talk)
        hosts = hosts_of(script, heard)
        lost = {subtask for subtask, host in hosts.items() if host == hosts[0]}
        lose(hosts[0])
        for subtask in lost:
            script.wait_for(lambda story, subtask=subtask: ("ready", subtask, 1) in story)  # type: ignore[misc]
        script.say(["stop"])
        results = sorted(action.result())
    assert [(subtask, received) for subtask, _, received in results] == [(0, ["hello"]), (1, ["hello"])]
    return script, heard, lost


def check_an_executor_was_lost(script: Script, heard: Heard, lost: set[int]) -> None:
    for subtask in (0, 1):
        if subtask in lost:
            assert heard.outcomes(subtask) == [TaskOutcome.EXECUTOR_LOST, TaskOutcome.SUCCESS]
            ready, failed, reset, again = script.of_subtask(subtask)
            assert (ready, failed) == (("ready", subtask, 0), ("failed", subtask, 0, "EXECUTOR_LOST"))
            assert (reset, again) == (("reset", subtask, -1), ("ready", subtask, 1))
        else:
            assert script.of_subtask(subtask) == [("ready", subtask, 0)]
    assert len(heard.of(ExecutorLost)) == 1


def test_an_executor_dies_by_sigkill(bench: Bench) -> None:
    """H10, H12: its subtasks fail together; the other subtasks are not affected."""

    def kill_the_executor(host: str) -> None:
        for pid in bench.cluster.executor_pids(host):
            os.kill(pid, signal.SIGKILL)

    check_an_executor_was_lost(*collect_while_a_host_loses_its_executor(bench, kill_the_executor))
    bench.wait_for_executors()


def test_a_node_dies(bench: Bench) -> None:
    """H10, H12: worker, executor and Python processes die together, so nothing on the node can report it."""
    killed: list[str] = []

    def kill_the_node(host: str) -> None:
        killed.append(host)
        bench.cluster.kill_worker(host)

    try:
        check_an_executor_was_lost(*collect_while_a_host_loses_its_executor(bench, kill_the_node))
    finally:
        for host in killed:
            bench.cluster.start_worker(host)
    bench.wait_for_executors()


# --- separate sessions ----------------------------------------------------------------------------------------------


def a_session(spark_on: SparkOn, cluster: StandaloneCluster) -> SparkSession:
    """Executors may be decommissioned, and each Python worker may have half a gigabyte of address space."""
    spark = spark_on(
        cluster.master_url,
        spark_executor_memory="512m",
        spark_decommission_enabled="true",
        spark_executor_decommission_forceKillTimeout="8s",
        spark_executor_pyspark_memory="1g",
    )
    wait_for_executors(spark, cluster.hosts)
    return spark


class Hoarding(Listening):
    """Allocates all available memory, in ever smaller pieces, and keeps it when the last piece is refused."""

    hoard: list[bytes]

    def handle_event(self, event: Any) -> None:
        if event != "hoard":
            super().handle_event(event)
            return
        self.hoard = []
        for size in (1 << 24, 1 << 16, 1 << 8):
            try:
                while True:
                    self.hoard.append(bytes(size))
            except MemoryError:
                if size == 1 << 8:
                    raise


def test_a_python_worker_has_no_memory_left(spark_on: SparkOn, standalone: StandaloneCluster) -> None:
    """H10, H12: a MemoryError, with no memory left to report it."""
    spark = a_session(spark_on, standalone)
    script = Script({(0, 0): ["hoard"]}, ["hello", "stop"])

    with listening_to(spark) as heard, Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        results = sorted(one_task_each(spark, 2).mapPartitions(handle.subtask(Hoarding)).collect())

    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    assert heard.outcomes(0) == [TaskOutcome.FAILED, TaskOutcome.SUCCESS]
    assert script.of_subtask(0) == [("ready", 0, 0), ("failed", 0, 0, "FAILED"), ("reset", 0, -1), ("ready", 0, 1)]
    assert script.of_subtask(1) == [("ready", 1, 0)]
    assert "MemoryError" in script.reasons[0].text


def decommission(spark: SparkSession, cluster: StandaloneCluster, host: str, executor_id: str) -> None:
    """Decommission a node with a signal, as a cloud does. Return when the driver no longer counts on it."""
    [pid] = cluster.executor_pids(host)
    os.kill(pid, signal.SIGPWR)
    wait_until(lambda: bool(scheduler(spark).isExecutorDecommissioned(executor_id)), "the driver knows")


@pytest.mark.parametrize("in_time", [True, False])
def test_an_executor_is_decommissioned(spark_on: SparkOn, standalone: StandaloneCluster, in_time: bool) -> None:
    """H10, H12: an attempt that ends in time is unaffected; one that does not dies with the executor."""
    spark = a_session(spark_on, standalone)
    script = Script(FIRST_ATTEMPTS_WAIT, ["hello", "stop"])
    with listening_to(spark) as heard, Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        script.wait_for(both_talk)
        hosts = hosts_of(script, heard)
        there = {subtask for subtask, host in hosts.items() if host == hosts[0]}
        start = heard.start_of(script.gateways[0].attempt.task_attempt_id)
        decommission(spark, standalone, start.host, start.executor_id)
        if not in_time:
            for subtask in there:
                script.wait_for(lambda story, subtask=subtask: ("ready", subtask, 1) in story)  # type: ignore[misc]
        script.say(["stop"])
        results = sorted(action.result())
        lost = heard.wait_for(ExecutorLost)

    assert lost.executor_id == start.executor_id
    if not in_time:
        assert [(subtask, received) for subtask, _, received in results] == [(0, ["hello"]), (1, ["hello"])]
        check_an_executor_was_lost(script, heard, there)
        return
    assert results == [(0, 0, ["hello"]), (1, 0, ["hello"])]
    for subtask in (0, 1):
        assert script.of_subtask(subtask) == [("ready", subtask, 0)]
        assert heard.outcomes(subtask) == [TaskOutcome.SUCCESS]
