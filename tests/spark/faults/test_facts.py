# SPDX-License-Identifier: Apache-2.0

"""Facts of Spark that are lost, late or duplicated, and the relay that brings them: docs/spark-faults.md, row 9.

Each of these jobs loses an attempt while it runs, because facts matter only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from pyspark.sql import SparkSession

from protocol.attempts import FailureKind, LedgerConfig
from protocol.facts import EngineFact, JobEnded, TaskEnded, TaskOutcome, TaskStarted
from protocol.gateway.types import GatewayLimits
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge import jvm_classes
from spark_bridge.bridge.relay import jvm_relay
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import LOCAL, SparkOn
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.faults.bench import Bench, relays_by
from tests.spark.faults.bus_gate import shut_gate
from tests.spark.faults.network import Line
from tests.spark.faults.waiting import wait_until
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark

IMPATIENT = SidecarConfig(ledger=LedgerConfig(heal_after_s=0.3, query_every_s=0.3, audit_every_s=1.0))
OUTPUT_OF_A_PLAIN_JOB = [["hello"], ["hello"]]


def one_fails() -> Script:
    """In each run the first attempt of subtask 1 fails."""
    return Script({(1, 0): ["raise"]}, ["hello", "stop"])


def received(results: list[Any]) -> list[list[str]]:
    return [events for _, _, events in results]


def relay_of(sidecar: Sidecar) -> Any:
    assert sidecar._runtime is not None
    return sidecar._runtime._relay


def what_became_of(script: Script, subtask: int) -> list[str]:
    return [callback[0] for callback in script.of_subtask(subtask)]


# --- facts --------------------------------------------------------------------------------------------------------


def test_facts_that_arrive_after_the_job_change_nothing(bench: Bench) -> None:
    """H10, H19, H55: the ledger relies on the tasks' messages; the late facts of one run do not affect the next."""
    script = one_fails()
    with shut_gate(bench.spark) as gate, bench.listening() as heard, Sidecar(bench.spark, IMPATIENT) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        tasks = bench.numbers(2).through(handle, Listening)
        first = received(tasks.collect())
        gate.wait_until_it_holds()
        known_during_the_job = list[EngineFact](heard.facts)
        first_run = [what_became_of(script, subtask) for subtask in range(2)]
        gate.open()
        heard.wait_for(JobEnded)
        second = received(tasks.collect())

    assert first == second == OUTPUT_OF_A_PLAIN_JOB
    assert known_during_the_job == []
    assert first_run == [["ready"], ["ready", "failed", "reset", "ready"]]
    assert [what_became_of(script, subtask) for subtask in range(2)] == [2 * names for names in first_run]
    assert len(script.named("reset_to_checkpoint")) == 1
    assert script.named("run_ended") == [("run_ended", True)] * 2


def test_duplicate_facts_count_once(bench: Bench) -> None:
    """H10, H19: the listener is on the bus twice, so Spark reports everything twice."""
    script = one_fails()
    with bench.listening() as heard, Sidecar(bench.spark) as sidecar:
        relay = relay_of(sidecar)
        with on_the_bus_again(bench.spark, relay._relay._listener):
            handle = sidecar.coordinate("op", script, parallelism=2)
            results = bench.numbers(2).through(handle, Listening).collect()
            script.wait_for(lambda story: ("run_ended", True) in story)
            heard.wait_for(JobEnded)
            # The starts of tasks that wait in the JVM for their stage are kept once.
            expected = 2 * len(heard.facts) - sum(isinstance(fact, TaskStarted) for fact in heard.facts)
            wait_until(lambda: relay.statistics.records >= expected, "everything has come twice")

    assert received(results) == OUTPUT_OF_A_PLAIN_JOB
    assert what_became_of(script, 0) == ["ready"]
    assert what_became_of(script, 1) == ["ready", "failed", "reset", "ready"]
    assert [reason.kind for reason in script.reasons] == [FailureKind.FAILED]


@contextmanager
def on_the_bus_again(spark: SparkSession, java_listener: Any) -> Iterator[None]:
    java_listener.attach()
    try:
        yield
    finally:
        java_context: Any = spark.sparkContext._jsc
        java_context.sc().listenerBus().removeListener(java_listener)  # one of the two


# --- the relay ----------------------------------------------------------------------------------------------------


def test_a_kill_requested_while_the_relay_is_away_happens_when_it_is_back(bench: Bench) -> None:
    """H19, H24: meanwhile a task that is alive and waiting is given up; no facts or commands are lost."""
    script = Script({}, ["hello"])
    gateway = GatewayLimits(reconnect_timeout_s=1.0)
    with (
        bench.listening() as heard,
        Line() as relays_line,
        Line() as line,
        bench.behind_two_lines(line, relays_line) as sidecar,
    ):
        handle = sidecar.coordinate("op", script, parallelism=2, gateway=gateway)
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        script.wait_for(lambda story: len([callback for callback in story if callback[0] == "event"]) == 2)
        line.leave_half_open(line.connections[-1])
        relays_line.break_off()
        script.wait_for(lambda story: any(callback[0] == "reset" for callback in story))
        relays_line.wait_for(lambda line: line.turned_away > 0, "the JVM tries to come back")
        while_away = script.named("ready", "failed", "reset")
        ended_while_away = heard.of(TaskEnded)
        relays_line.heal()
        [(_, lost, _, _)] = script.named("failed")
        script.wait_for(lambda story: ("event", lost, 1, ["echo", "hello"]) in story)
        script.say(["stop"])
        results = sorted(action.result())
        heard.wait_for(JobEnded)
        reconnects = relay_of(sidecar).statistics.reconnects

    assert results == sorted([(lost, 1, ["hello"]), (1 - lost, 0, ["hello"])])
    assert while_away[2:] == [("failed", lost, 0, FailureKind.CONNECTION_LOST.name), ("reset", lost, -1)]
    assert ended_while_away == []
    assert what_became_of(script, lost) == ["ready", "failed", "reset", "ready"]
    assert what_became_of(script, 1 - lost) == ["ready"]
    assert heard.outcomes(lost) == [TaskOutcome.KILLED, TaskOutcome.SUCCESS]
    assert reconnects == 1


def test_a_permanently_lost_relay_is_replaced_by_the_other_one(bench: Bench) -> None:
    """H19, H24: the pending kill reaches Spark by Py4J, and the next job runs normally."""
    script = Script({}, ["hello"])
    gateway = GatewayLimits(reconnect_timeout_s=1.0)
    with (
        structlog.testing.capture_logs() as lines,
        Line() as relays_line,
        relays_by(relays_line, patience_s=5.0),
        Line() as line,
        bench.behind_a_line(line) as sidecar,
    ):
        handle = sidecar.coordinate("op", script, parallelism=2, gateway=gateway)
        tasks = bench.numbers(2).through(handle, Listening)
        action = bench.start_collecting(tasks)
        script.wait_for(lambda story: len([callback for callback in story if callback[0] == "event"]) == 2)
        line.leave_half_open(line.connections[0])
        relays_line.break_off()
        script.wait_for(lambda story: any(callback[0] == "failed" for callback in story))
        [(_, lost, _, _)] = script.named("failed")
        kind_before = sidecar.relay_kind
        script.wait_for(lambda story: ("event", lost, 1, ["echo", "hello"]) in story)
        kind_after = sidecar.relay_kind
        script.say(["stop"])
        first = sorted(action.result())
        script.wait_for(lambda story: ("run_ended", True) in story)
        action = bench.start_collecting(tasks)
        script.wait_for(lambda story: len([callback for callback in story if callback[0] == "event"]) == 5)
        script.say(["stop"])
        second = received(action.result())
        script.wait_for(lambda story: story.count(("run_ended", True)) == 2)

    assert first == sorted([(lost, 1, ["hello"]), (1 - lost, 0, ["hello"])])
    assert second == OUTPUT_OF_A_PLAIN_JOB
    assert (kind_before, kind_after) == ("jvm", "py4j")
    assert what_became_of(script, lost) == ["ready", "failed", "reset", "ready", "ready"]
    assert what_became_of(script, 1 - lost) == ["ready", "ready"]
    assert [reason.kind for reason in script.reasons] == [FailureKind.CONNECTION_LOST]
    assert [line["event"] for line in lines].count("relay replaced by py4j") == 1


def test_a_jvm_that_refuses_the_relay_gets_the_other_one_and_the_log_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """H19: the job runs the same by Py4J."""
    monkeypatch.setattr(jvm_relay, "jar", lambda: tmp_path / "no.jar")
    monkeypatch.setattr(jvm_classes, "_loaded", {})  # as in a JVM where no relay was ever opened
    script = one_fails()
    with structlog.testing.capture_logs() as lines:
        with Sidecar(bench.spark) as sidecar:
            kind = sidecar.relay_kind
            handle = sidecar.coordinate("op", script, parallelism=2)
            results = bench.numbers(2).through(handle, Listening).collect()
            script.wait_for(lambda story: ("run_ended", True) in story)

    assert received(results) == OUTPUT_OF_A_PLAIN_JOB
    assert kind == "py4j"
    [warning] = [line for line in lines if line["event"] == "relay replaced by py4j"]
    assert warning["log_level"] == "warning"
    assert "relay.jar" in warning["because"]
    assert what_became_of(script, 1) == ["ready", "failed", "reset", "ready"]


# --- a queue that is too small (separate sessions) ----------------------------------------------------------------


@pytest.fixture
def tiny_queue(spark_on: SparkOn) -> SparkSession:
    """Spark drops every event for Headgate that arrives while an earlier one is still queued."""
    return spark_on(LOCAL, spark_scheduler_listenerbus_eventqueue_headgate_capacity="1")


def test_a_job_ends_exactly_although_every_fact_is_lost(tiny_queue: SparkSession) -> None:
    """H11, H19: two jobs in a row, about which the ledger learns only from the tasks and from its own checks."""
    script = one_fails()
    with shut_gate(tiny_queue) as gate, Sidecar(tiny_queue, IMPATIENT) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        tasks = one_task_each(tiny_queue, 2).mapPartitions(handle.subtask(Listening))
        first = received(tasks.collect())
        gate.wait_until_it_holds()
        second = received(tasks.collect())
        heard_of = relay_of(sidecar).statistics

    assert first == second == OUTPUT_OF_A_PLAIN_JOB
    assert heard_of.dropped > 0
    assert [what_became_of(script, subtask) for subtask in range(2)] == [
        ["ready"] * 2,
        ["ready", "failed", "reset", "ready"] * 2,
    ]


def test_a_job_ends_exactly_although_some_facts_are_lost(tiny_queue: SparkSession) -> None:
    """H10, H19: it does not matter which events a slow third-party listener costs Headgate."""
    failing = (1, 4, 6)
    script = Script({(subtask, 0): ["raise"] for subtask in failing}, ["hello", "stop"])
    with shut_gate(tiny_queue) as gate, Sidecar(tiny_queue, IMPATIENT) as sidecar:
        gate.open(pause_ms=30)
        handle = sidecar.coordinate("op", script, parallelism=8)
        results = one_task_each(tiny_queue, 8).mapPartitions(handle.subtask(Listening)).collect()
        statistics = relay_of(sidecar).statistics
        assert any("facts from Spark were lost" in sentence for sentence in sidecar.explain())

    assert received(results) == [["hello"]] * 8
    assert statistics.dropped > 0
    assert statistics.records > 0
    for subtask in range(8):
        expected = ["ready", "failed", "reset", "ready"] if subtask in failing else ["ready"]
        assert what_became_of(script, subtask) == expected


def test_a_streaming_job_whose_start_is_lost_is_found_by_a_query(tiny_queue: SparkSession) -> None:
    """H19, H47: otherwise the end of its run would go unreported, and its last output would not be committed."""
    coordinator = CountingCoordinator()
    with shut_gate(tiny_queue), Sidecar(tiny_queue, IMPATIENT) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2, mode=RestoreMode.STREAMING)
        tasks = one_task_each(tiny_queue, 2).mapPartitions(handle.subtask(Counting))
        action = Action(lambda: sidecar.run(tasks.collect))
        coordinator.wait_for(lambda story: {("ready", 0, 0), ("ready", 1, 0)} <= set(story))
        coordinator.send_numbers(0, 3)
        assert sidecar._runtime is not None
        jobs = sidecar._runtime._running_jobs
        wait_until(lambda: bool(jobs.job_ids), "Spark's records have the job")
        coordinator.stop_all()
        results = action.result()

    assert results == [(0, 3), (1, 0)]
    assert coordinator.wrong == []
    ended = coordinator.story.index(("run_ended", True))
    assert [callback[0] for callback in coordinator.story[ended + 1 :]] == ["checkpoint", "complete", "close"]
