# SPDX-License-Identifier: Apache-2.0

"""Leave the sidecar in every possible state: nothing stays, nothing hangs, and the original exception is raised."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

from actors.coordination import CoordinatorContext
from examples.word_count import JobFailed, was_interrupted
from spark_bridge.bridge.relay import RelayStopped
from spark_bridge.common.errors import SidecarError, SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig, SidecarLimits
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action, coordinated, one_task_each, what_the_user_reads
from tests.spark.conftest import LOCAL, SparkOn
from tests.spark.leftovers import nothing_left
from tests.spark.operators import Listening
from tests.spark.program import Program, wait_until_nobody_is_left
from tests.spark.recorder import Recorder
from tests.spark.releases import RAISED_BY_CTRL_C
from tests.spark.script import Script

pytestmark = pytest.mark.spark

CLOSED = "the sidecar was closed while this job was running"


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark")  # start Spark's own threads before the count
    with nothing_left():
        yield


def is_ready(story: list[Any]) -> bool:
    return any(callback[0] == "ready" for callback in story)


# --- used once, twice, side by side ---------------------------------------------------------------------------------


def test_a_sidecar_can_be_entered_again_after_it_was_left(spark: SparkSession) -> None:
    sidecar = Sidecar(spark)
    for _ in range(2):
        with sidecar:
            handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
            assert one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).count() == 1


def test_a_running_sidecar_cannot_be_entered_again(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        with pytest.raises(SidecarError, match="already running: exit its `with` block or create another Sidecar"):
            sidecar.__enter__()
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
        assert one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).count() == 1


async def test_a_sidecar_cannot_be_entered_with_and_async_with_together(spark: SparkSession) -> None:
    sidecar = Sidecar(spark)
    async with sidecar:
        with pytest.raises(SidecarError, match="already running"):
            sidecar.__enter__()
        with pytest.raises(SidecarNotRunning, match=r"entered with `async with ... as sidecar`: await the methods"):
            sidecar.coordinate("op", Recorder(), parallelism=1)


def test_the_methods_of_a_sidecar_that_is_not_entered_say_so(spark: SparkSession) -> None:
    sidecar = Sidecar(spark)
    with sidecar:
        handle = sidecar.coordinate("op", Recorder(), parallelism=1)
    calls: list[Callable[[], object]] = [
        lambda: sidecar.coordinate("op", Recorder(), parallelism=1),
        lambda: sidecar.release("op"),
        lambda: sidecar.checkpoint("op"),
        lambda: sidecar.address,
    ]
    for call in calls:
        with pytest.raises(SidecarNotRunning, match="enter it with `with Sidecar"):
            call()
    assert handle.statistics()["attempts"] == 0  # statistics may be read afterwards


def test_an_action_after_the_sidecar_has_closed_fails_with_a_clear_error(spark: SparkSession) -> None:
    with coordinated(spark, Recorder(), config=SidecarConfig(limits=SidecarLimits(connect_timeout_s=0.5))) as job:
        rdd = job.tasks()
    text = what_the_user_reads(rdd.collect)
    assert "cannot reach the sidecar" in text
    assert "Check that the sidecar is still running" in text


# --- while a job runs, after one has failed -------------------------------------------------------------------------


@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_a_sidecar_that_is_left_while_a_job_runs_fails_the_job_and_says_why(spark: SparkSession, relay: Any) -> None:
    # H57: and the coordinator is told before it is closed
    coordinator = Script({}, ["hello"])
    with coordinated(spark, coordinator, 2, config=SidecarConfig(relay=relay)) as job:
        action = Action(job.tasks().collect)
        coordinator.wait_for(lambda story: len([c for c in story if c[0] == "event"]) == 2)
    assert coordinator.story[-2:] == [("run_ended", False), ("close",)]
    assert CLOSED in what_the_user_reads(action.result)


async def test_a_cancelled_sidecar_ends_its_job_too(spark: SparkSession) -> None:
    # An outer scope cancels the actors immediately, so the sidecar itself must cancel the job.
    coordinator = Script({}, ["hello"])
    with anyio.CancelScope() as scope:
        async with Sidecar(spark) as sidecar:
            handle = await sidecar.coordinate("op", coordinator, parallelism=1)
            action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect)
            await anyio.to_thread.run_sync(coordinator.wait_for, is_ready)
            scope.cancel()
            await anyio.sleep_forever()
    assert coordinator.story[-1] == ("close",)
    assert CLOSED in what_the_user_reads(action.result)


def test_an_operator_that_is_released_while_its_job_runs_fails_the_job(spark: SparkSession) -> None:
    coordinator = Script({}, ["hello"])
    with coordinated(spark, coordinator) as job:
        action = Action(job.tasks().collect)
        coordinator.wait_for(is_ready)
        job.sidecar.release("op")
        assert coordinator.story[-1] == ("close",)
        text = what_the_user_reads(action.result)
        assert "no coordinator for operator 'op'" in text
        again = Script({}, ["stop"])
        job.handle = job.sidecar.coordinate("op", again, parallelism=1)
        assert job.tasks().count() == 1


def collect_with_a_sidecar(spark: SparkSession, coordinator: Script) -> None:
    with coordinated(spark, coordinator) as job:
        job.tasks().collect()


# --- Spark has stopped already --------------------------------------------------------------------------------------


@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_spark_may_stop_under_the_sidecar(spark_on: SparkOn, relay: Any) -> None:
    spark = spark_on(LOCAL)
    recorder = Recorder()
    with Sidecar(spark, SidecarConfig(relay=relay)) as sidecar:
        sidecar.coordinate("op", recorder, parallelism=1)
        spark.stop()
        for name in ("op", "another"):  # and the first one stays
            with pytest.raises(SidecarError, match=r"has stopped, so no operator can be coordinated: .* new sidecar"):
                sidecar.coordinate(name, Recorder(), parallelism=1, replace=True)
        assert recorder.story == [("start",)]
    assert recorder.story == [("start",), ("close",)]
    with pytest.raises(RelayStopped, match="has stopped: build a new session first"):
        Sidecar(spark).__enter__()


def test_spark_may_stop_under_a_running_job(spark_on: SparkOn) -> None:
    spark = spark_on(LOCAL)
    coordinator = Script({}, ["hello"])
    with coordinated(spark, coordinator) as job:
        action = Action(job.tasks().collect)
        coordinator.wait_for(is_ready)
        spark.stop()
        coordinator.wait_for(lambda story: ("run_ended", False) in story)
    assert coordinator.story[-1] == ("close",)
    what_the_user_reads(action.result)


# --- Ctrl-C, inside this process ------------------------------------------------------------------------------------


class Interrupts(Recorder):
    """Raises Ctrl-C from within one of its methods, and then hangs."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    async def interrupt_in(self, method: str) -> None:
        if self.method == method:
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep_forever()

    async def start(self, context: CoordinatorContext) -> None:
        await super().start(context)
        await self.interrupt_in("start")

    async def close(self) -> None:
        await super().close()
        await self.interrupt_in("close")


@pytest.mark.parametrize("method", [pytest.param("start", marks=pytest.mark.long), "close"])
def test_ctrl_c_while_a_coordinator_is_slow(spark: SparkSession, method: str) -> None:
    recorder = Interrupts(method)

    def body() -> None:
        with Sidecar(spark, SidecarConfig(limits=SidecarLimits(shutdown_timeout_s=1.0))) as sidecar:
            sidecar.coordinate("op", recorder, parallelism=1)

    with pytest.raises(KeyboardInterrupt):
        body()
    assert recorder.story == [("start",), ("close",)]


def test_ctrl_c_in_an_action_ends_the_job_and_comes_out(spark: SparkSession) -> None:
    class InterruptsWhenReady(Script):
        async def subtask_ready(self, subtask: int, gateway: Any) -> None:
            await super().subtask_ready(subtask, gateway)
            os.kill(os.getpid(), signal.SIGINT)

    coordinator = InterruptsWhenReady({}, ["hello"])
    with pytest.raises(RAISED_BY_CTRL_C):
        collect_with_a_sidecar(spark, coordinator)
    assert coordinator.story[-2:] == [("run_ended", False), ("close",)]


# --- Ctrl-C, and worse, on the main program -------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("whom", ["the process", "the group, as a terminal does", "the group, three times"])
def test_ctrl_c_ends_the_main_program_and_all_that_it_started(whom: str) -> None:
    with Program(
        "-m", "headgate", "example", "word_count", "--run", "--faults", "none", "--parallelism", "2"
    ) as program:
        program.read_until("/")  # the first line of progress
        program.read_until("splits\n")
        if whom == "the process":
            program.process.send_signal(signal.SIGINT)
        for _ in range({"the process": 0, "the group, three times": 3}.get(whom, 1)):
            os.killpg(program.process.pid, signal.SIGINT)
        program.ends_with(130)
        assert "interrupted" in program.said
        assert "Traceback" not in program.said
        wait_until_nobody_is_left(program)


@pytest.mark.long
def test_ctrl_c_while_the_jvm_starts_leaves_no_jvm_behind() -> None:
    with Program(
        "-m", "headgate", "example", "word_count", "--run", "--faults", "none", "--parallelism", "2"
    ) as program:
        pause = threading.Event()
        while not any(process.startswith("java ") for process in program.left_behind()):
            assert program.process.poll() is None, "it has ended without a JVM"
            pause.wait(0.01)
        os.killpg(program.process.pid, signal.SIGINT)
        program.ends_with(130)
        assert "interrupted" in program.said
        wait_until_nobody_is_left(program)


def test_an_error_of_py4j_after_ctrl_c_becomes_a_keyboard_interrupt() -> None:
    # Py4J cleans up in its KeyboardInterrupt handler, and sometimes fails.
    job_failed = JobFailed(Py4JNetworkError("Answer from Java side is empty"))
    assert not was_interrupted(job_failed)
    job_failed.__cause__ = Py4JNetworkError("Answer from Java side is empty")
    job_failed.__cause__.__context__ = KeyboardInterrupt()
    assert was_interrupted(job_failed)
