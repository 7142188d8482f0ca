# SPDX-License-Identifier: Apache-2.0

"""The relay on a real Spark: what it reports about a job, and which commands Spark carries out for it."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog.testing
from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession

from protocol.facts import (
    ApplicationEnded,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
    TaskState,
)
from spark_bridge.bridge import jvm_classes
from spark_bridge.bridge.relay import Relay, RelayStopped, jvm_relay, open_relay
from spark_bridge.bridge.relay_jar import DRIVER_CLASS, jar_bytes
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.conftest import SparkOn
from tests.spark.facts_log import FactsLog
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark

T = TypeVar("T")

LOCAL_CLUSTER = "local-cluster[2,1,1024]"


@asynccontextmanager
async def a_relay(spark: SparkSession, **options: Any) -> AsyncIterator[tuple[Relay, FactsLog]]:
    log = FactsLog()
    relay = open_relay(spark, log.receive, **options)
    await relay.start()
    try:
        yield relay, log
    finally:
        await relay.close()


def our_listeners(spark: SparkSession) -> list[str]:
    """The class names of our listeners on Spark's bus; a Python one is a proxy there."""
    listeners = spark.sparkContext._jsc.sc().listenerBus().listeners()
    names = [str(listener.getClass().getName()) for listener in listeners]
    return [name for name in names if "headgate" in name or "Proxy" in name]


def fail_one_and_hang_one(rows: Iterable[int]) -> Iterable[int]:
    """The first attempt of partition 1 raises; that of partition 2 hangs until it is killed."""
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 1:
        raise ValueError("the first attempt of partition 1 fails")
    if context.attemptNumber() == 0 and context.partitionId() == 2:
        threading.Event().wait(300)
    yield sum(rows)


def fail_twice(rows: Iterable[int]) -> Iterable[int]:
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() < 2:
        raise ValueError("the first two attempts fail")
    return rows


def run_three_tasks(context: SparkContext) -> list[int]:
    return context.parallelize(range(9), 3).mapPartitions(fail_one_and_hang_one).collect()


def one_row_each(context: SparkContext, tasks: int) -> int:
    return context.parallelize(range(tasks), tasks).count()


def hang(rows: Iterable[int]) -> Iterable[int]:
    threading.Event().wait(300)
    yield from rows


def in_a_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Spark's actions block."""
    return asyncio.get_running_loop().run_in_executor(None, function, *arguments)


@pytest.mark.parametrize("kind", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
async def test_a_job_with_a_failure_and_a_kill_is_reported_attempt_by_attempt(spark: SparkSession, kind: str) -> None:
    # spark-facts 16: exactly the named attempt is killed, and another one takes its place.
    async with a_relay(spark, kind=kind) as (relay, log):
        job = in_a_thread(run_three_tasks, spark.sparkContext)
        hanging = await log.wait_for(TaskStarted, lambda fact: fact.partition == 2)
        await relay.kill_task(hanging.task_attempt_id, "unresponsive")
        assert await job == [3, 12, 21]
        ended = await log.wait_for(JobEnded)

        [started] = log.of(JobStarted)
        assert ended == JobEnded(started.job_id, succeeded=True)
        # Facts may include a worker that Spark itself has just lost; an earlier job may also end late.
        ends = [fact for fact in log.of(TaskEnded) if fact.stage_id in started.stage_ids]
        killed = [fact for fact in ends if fact.outcome is TaskOutcome.KILLED]
        assert [(fact.task_attempt_id, fact.reason) for fact in killed] == [(hanging.task_attempt_id, "unresponsive")]
        assert sorted(fact.partition for fact in ends if fact.outcome is TaskOutcome.SUCCESS) == [0, 1, 2], ends
        [raised] = [fact for fact in ends if "the first attempt of partition 1 fails" in fact.reason]
        assert (raised.partition, raised.attempt_number, raised.outcome) == (1, 0, TaskOutcome.FAILED)


async def hear_one_job_twice(spark: SparkSession) -> tuple[FactsLog, FactsLog]:
    """Both relays listen to the same job, with a failure and a kill in it."""
    async with a_relay(spark, kind="jvm") as (relay, by_jvm), a_relay(spark, kind="py4j") as (_, by_py4j):
        job = in_a_thread(run_three_tasks, spark.sparkContext)
        hanging = await by_jvm.wait_for(TaskStarted, lambda fact: fact.partition == 2)
        await relay.kill_task(hanging.task_attempt_id, "unresponsive")
        assert await job == [3, 12, 21]
        await by_jvm.wait_for(JobEnded)
        await by_py4j.wait_for(JobEnded)
        return by_jvm, by_py4j


@pytest.mark.parametrize("master", ["local[2,3]", pytest.param(LOCAL_CLUSTER, marks=pytest.mark.long)])
async def test_both_relays_report_the_same_facts_of_a_job(spark_on: SparkOn, master: str) -> None:
    by_jvm, by_py4j = await hear_one_job_twice(spark_on(master))
    assert by_jvm.facts == by_py4j.facts
    assert {type(fact) for fact in by_jvm.facts} >= {JobStarted, StageSubmitted, TaskStarted, TaskEnded}


@pytest.mark.parametrize("kind", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
async def test_a_query_of_spark_reports_what_runs_and_what_has_ended(spark: SparkSession, kind: str) -> None:
    # H19: the answer does not depend on the bus.
    async with a_relay(spark, kind=kind) as (relay, log):
        job = in_a_thread(lambda: spark.sparkContext.parallelize(range(1), 1).mapPartitions(hang).collect())
        task = await log.wait_for(TaskStarted)
        [job_id] = [fact.job_id for fact in log.of(JobStarted)]
        status = await relay.query_status(frozenset({task.task_attempt_id, 10**12}), frozenset({job_id, 10**6}))
        assert status.jobs == {job_id: True, 10**6: False}
        assert status.tasks == {task.task_attempt_id: TaskState.RUNNING, 10**12: TaskState.UNKNOWN}
        # The bus may have dropped the start of the job, so post it once more.
        await log.wait_until(lambda: len(log.of(JobStarted)) == 2)
        assert len(set(log.of(JobStarted))) == 1

        await relay.cancel_job(job_id, "the test has seen enough")
        with pytest.raises(Exception, match="the test has seen enough"):
            await job
        ended = await log.wait_for(JobEnded)
        assert not ended.succeeded
        assert "the test has seen enough" in ended.reason
        await log.wait_for(TaskEnded)
        status = await relay.query_status(frozenset({task.task_attempt_id}), frozenset({job_id}))
        assert status.jobs == {job_id: False}
        assert status.tasks[task.task_attempt_id] in (TaskState.ENDED, TaskState.UNKNOWN)


def told(log: FactsLog) -> int:
    return len(log.facts) - len(log.of(FactsDropped))


async def test_a_sidecar_that_does_not_read_costs_facts_and_they_are_counted(spark: SparkSession) -> None:
    # H19: the buffer in the JVM is bounded; it never makes Spark's bus wait.
    async with a_relay(spark, buffer_capacity=1) as (relay, log):
        tasks = 8
        await in_a_thread(one_row_each, spark.sparkContext, tasks)
        # Every event that the relay handles was relayed or counted: the job, its stage and its tasks, twice each.
        await log.wait_until(lambda: told(log) + relay.statistics.dropped == 2 * tasks + 4)
        assert relay.statistics.dropped == sum(fact.count for fact in log.of(FactsDropped))


async def test_the_jvm_comes_back_after_a_broken_connection(spark: SparkSession) -> None:
    async with a_relay(spark) as (relay, log):
        server = relay._relay._server  # type: ignore[attr-defined]
        server._link.abort("the test breaks it")
        await in_a_thread(one_row_each, spark.sparkContext, 4)
        ended = await log.wait_for(JobEnded)
        status = await relay.query_status(frozenset(), frozenset({ended.job_id}))
        assert status.jobs == {ended.job_id: False}
        assert relay.statistics.reconnects == 1
        assert len(log.of(TaskStarted)) + relay.statistics.dropped >= 4


UNKNOWN_STAGE = 10**6


def task_facts(log: FactsLog) -> list[TaskStarted | TaskEnded]:
    return [fact for fact in log.facts if isinstance(fact, TaskStarted | TaskEnded)]


def successes(log: FactsLog) -> set[int]:
    return {fact.task_attempt_id for fact in log.of(TaskEnded) if fact.outcome is TaskOutcome.SUCCESS}


async def test_the_facts_of_a_stage_wait_until_it_is_watched(spark: SparkSession) -> None:
    # H19: a task may register long after its start, and others may have failed before.
    async with a_relay(spark, watched_only=True) as (relay, log), a_relay(spark) as (_, everything):
        job = in_a_thread(run_three_tasks, spark.sparkContext)
        hanging = await everything.wait_for(TaskStarted, lambda fact: fact.partition == 2)
        await everything.wait_until(lambda: len(successes(everything)) == 2)
        succeeded = successes(everything)
        await relay.query_status(frozenset(), frozenset())
        assert task_facts(log) == [], "nobody watches the stage"

        await relay.watch(hanging.stage_id, hanging.task_attempt_id)
        await relay.kill_task(hanging.task_attempt_id, "unresponsive")
        assert await job == [3, 12, 21]
        await log.wait_for(JobEnded)
        await everything.wait_for(JobEnded)
    expected = [fact for fact in task_facts(everything) if fact.task_attempt_id not in succeeded]
    assert task_facts(log) == expected, "all but those of the tasks that had succeeded, in the order of the bus"
    assert {fact.outcome for fact in log.of(TaskEnded)} == {
        TaskOutcome.FAILED,
        TaskOutcome.KILLED,
        TaskOutcome.SUCCESS,
    }
    assert {type(fact) for fact in log.facts} >= {JobStarted, StageSubmitted, StageCompleted, JobEnded}


async def test_a_task_that_a_peer_has_named_is_found_in_a_stage_that_nobody_watches(spark: SparkSession) -> None:
    # H75: a claim to be this task in another stage is false.
    async with a_relay(spark, watched_only=True) as (relay, log), a_relay(spark) as (_, everything):
        job = in_a_thread(run_three_tasks, spark.sparkContext)
        hanging = await everything.wait_for(TaskStarted, lambda fact: fact.partition == 2)
        await everything.wait_for(TaskEnded, lambda fact: (fact.partition, fact.outcome) == (1, TaskOutcome.SUCCESS))
        following = max(fact.task_attempt_id for fact in everything.of(TaskStarted)) + 1
        await relay.watch(UNKNOWN_STAGE, hanging.task_attempt_id)
        await relay.watch(UNKNOWN_STAGE, following)
        await relay.kill_task(hanging.task_attempt_id, "unresponsive")
        assert await job == [3, 12, 21]
        await log.wait_for(JobEnded)
    assert [fact.task_attempt_id for fact in task_facts(log)] == [hanging.task_attempt_id, following]
    assert len(log.of(TaskStarted)) == 2


async def test_facts_that_wait_are_bounded_and_what_is_displaced_is_counted(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jvm_classes.java_source("spark_bridge.bridge.relay", "TaskEventRelay")
    for before, after in (("TaskEventRelay", "SmallRelay"), ("HELD_FACTS_MAX = 50000", "HELD_FACTS_MAX = 2")):
        assert before in source
        source = source.replace(before, after)

    def small_relay(context: Any) -> Any:
        return jvm_classes.new_compiled_object(context, "headgate.relay.SmallRelay", lambda: source)

    monkeypatch.setattr(jvm_relay, "new_listener", small_relay)
    async with a_relay(spark, watched_only=True) as (relay, log):
        job = in_a_thread(lambda: spark.sparkContext.parallelize(range(1), 1).mapPartitions(fail_twice).collect())
        assert await job == [0]
        await log.wait_for(JobEnded)
        # The start and the end of the first attempt, and the start of the second one, which displaces them.
        await log.wait_until(lambda: relay.statistics.dropped == 3)
    assert task_facts(log) == []


def test_tasks_without_an_operator_cost_a_sidecar_no_facts(spark: SparkSession) -> None:
    tasks = 40
    with Sidecar(spark) as sidecar:
        one_row_each(spark.sparkContext, tasks)
        job = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
        sidecar.run(spark.sparkContext.parallelize([0], 1).mapPartitions(job.subtask(Listening)).collect)
        facts = sidecar.status().relay.facts
    assert 8 <= facts < tasks


@pytest.mark.parametrize("kind", ["jvm", "py4j"])
async def test_a_closed_relay_has_left_the_bus(spark: SparkSession, kind: str) -> None:
    async with a_relay(spark, kind=kind) as (relay, log):
        assert len(our_listeners(spark)) == 1
    assert our_listeners(spark) == []
    one_row_each(spark.sparkContext, 2)
    assert log.facts == []
    await relay.close()
    with pytest.raises(RelayStopped):
        await relay.kill_task(1, "nobody hears this")


@pytest.mark.parametrize("trouble", ["no jar", "no class", "a broken class"])
async def test_without_a_class_that_the_jvm_can_load_the_py4j_listener_takes_over(
    trouble: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jvm_relay, "jar", lambda: a_broken_jar(trouble, tmp_path))
    monkeypatch.setattr(jvm_classes, "_loaded", {})  # as in a JVM where no relay was ever opened
    with structlog.testing.capture_logs() as lines:
        async with a_relay(spark) as (relay, log):
            assert relay.kind == "py4j"
            await in_a_thread(one_row_each, spark.sparkContext, 2)
            await log.wait_for(JobEnded)
    [warning] = [line for line in lines if line["log_level"] == "warning"]
    assert warning["event"] == "relay replaced by py4j"
    assert "could not load the relay" in warning["because"]


def a_broken_jar(trouble: str, folder: Path) -> Path:
    path = folder / "relay.jar"
    if trouble == "no jar":
        path.write_bytes(b"this is not a jar")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            name = "TaskEventRelay" if trouble == "a broken class" else "Other"
            archive.writestr(f"headgate/relay/{name}.class", b"this is not a class")
    return path


def test_the_jvm_loads_the_relay_from_a_package_in_a_zip_file(spark: SparkSession, tmp_path: Path) -> None:
    """The jar is gone from the disk when the relay's nested classes are first used."""
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
        archive.writestr("headgate/relay.jar", jar_bytes())
    packed = zipfile.Path(tmp_path / "packages.zip", "headgate/relay.jar")
    loaded = jvm_classes._load(spark.sparkContext._gateway, DRIVER_CLASS, packed)
    nested = loaded.getClassLoader().loadClass(f"{DRIVER_CLASS}$HeldFacts")
    assert len(nested.getDeclaredMethods()) > 1


@pytest.mark.parametrize("kind", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
async def test_the_context_may_stop_before_the_relay(spark_on: SparkOn, kind: str) -> None:
    spark = spark_on("local[1]")
    async with a_relay(spark, kind=kind) as (relay, log):
        await in_a_thread(one_row_each, spark.sparkContext, 2)
        await in_a_thread(spark.stop)
        await log.wait_for(ApplicationEnded)
        with pytest.raises(RelayStopped, match="has stopped"):
            await relay.kill_task(1, "too late")
    with pytest.raises(RelayStopped, match="has stopped"):
        open_relay(spark, log.receive)


async def test_a_kind_that_does_not_exist_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="expected 'jvm' or 'py4j'"):
        open_relay(spark, FactsLog().receive, kind="smoke signals")  # type: ignore[arg-type]


async def test_no_key_appears_in_the_log_of_py4j(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H61: at DEBUG, Py4J logs every call with its arguments."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.DEBUG, logger="py4j"):
        async with a_relay(spark) as (relay, _):
            key = relay._relay._key.secret  # type: ignore[attr-defined]
    assert "headgate-relay-" in caplog.text, "the name of the file with the key is there, so calls are logged"
    for text in (key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1]):
        assert text not in caplog.text
    assert os.listdir(tmp_path) == [], "the file with the key is gone"
