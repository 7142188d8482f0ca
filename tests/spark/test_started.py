# SPDX-License-Identifier: Apache-2.0

"""``headgate.start`` and ``headgate.stop``: a sidecar without a ``with`` block, and cells that are run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

import headgate
from headgate import Sidecar, SidecarConfig, SidecarLimits
from headgate.errors import SidecarError
from spark_bridge.bridge.relay import RelayStopped
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.driver import started
from spark_bridge.driver.sidecar import Leaver
from tests.spark.actions import Action, one_task_each, what_the_user_reads
from tests.spark.cluster import ROOT
from tests.spark.conftest import LOCAL, SparkOn
from tests.spark.leftovers import nothing_left
from tests.spark.operators import Listening
from tests.spark.recorder import Recorder
from tests.spark.script import Script
from tests.spark.test_last_output import Copying

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark")  # start Spark's own threads before the count
    with nothing_left():
        try:
            yield
        finally:
            for name in ("default", "another"):
                headgate.stop(name)


def collect(spark: SparkSession, handle: headgate.OperatorHandle, operator: Any = Listening) -> list[Any]:
    return one_task_each(spark, handle.parallelism).mapPartitions(handle.subtask(operator)).collect()


def replaced(logs: Any) -> list[Any]:
    return [line["why"] for line in logs if line["event"] == "started sidecar replaced"]


# --- start ------------------------------------------------------------------------------------------------------------


def test_threads_that_start_the_same_name_get_the_same_sidecar(spark: SparkSession) -> None:  # H120
    actions = [Action(lambda: headgate.start(spark)) for _ in range(4)]
    assert len({id(action.result()) for action in actions}) == 1


def test_changed_settings_replace_the_sidecar_and_fail_its_jobs(spark: SparkSession) -> None:  # H120
    coordinator = Script({}, ["hello"])
    sidecar = headgate.start(spark)
    handle = sidecar.coordinate("op", coordinator, parallelism=1)
    action = Action(lambda: collect(spark, handle))
    coordinator.wait_for(lambda story: any(call[0] == "ready" for call in story))
    with capture_logs() as logs:
        other = headgate.start(spark, SidecarConfig(limits=SidecarLimits(shutdown_timeout_s=5.0)))
    assert replaced(logs) == ["its settings have changed"]
    assert other is not sidecar
    assert coordinator.story[-1] == ("close",)
    assert "the sidecar was closed while this job was running" in what_the_user_reads(action.result)
    assert collect(spark, other.coordinate("op", Script({}, ["stop"]), parallelism=1)) == [(0, 0, [])]


def test_another_spark_context_replaces_the_sidecar_of_one_that_has_stopped(spark_on: SparkOn) -> None:  # H120
    spark = spark_on(LOCAL)
    recorder = Recorder()
    sidecar = headgate.start(spark)
    sidecar.coordinate("op", recorder, parallelism=1)
    spark.stop()
    with pytest.raises(RelayStopped, match="has stopped: build a new session first"):
        headgate.start(spark)
    spark = spark_on(LOCAL)
    with capture_logs() as logs:
        other = headgate.start(spark)
    assert replaced(logs) == ["its SparkContext is not the one that was given"]
    assert recorder.story == [("start",), ("close",)]
    assert collect(spark, other.coordinate("op", Script({}, ["stop"]), parallelism=1)) == [(0, 0, [])]
    headgate.stop()


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_does_what_leaving_the_block_does_and_twice_is_fine(spark: SparkSession) -> None:  # H120
    recorder = Recorder()
    sidecar = headgate.start(spark)
    sidecar.coordinate("op", recorder, parallelism=1)
    for _ in range(2):
        sidecar.stop()
        headgate.stop()
    assert recorder.story == [("start",), ("close",)]
    with pytest.raises(SidecarNotRunning, match=r"start one with `sidecar = headgate.start\(spark\)`"):
        sidecar.coordinate("op", Recorder(), parallelism=1)
    assert headgate.start(spark) is not sidecar


def test_one_ctrl_c_at_the_end_of_the_interpreter_is_for_all_sidecars(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:  # H120
    class WaitsAtTheEnd(Recorder):
        async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
            await super().run_ended(run_id, succeeded, reason)
            await anyio.sleep_forever()

    call = Leaver.call
    interrupted: list[Leaver] = []

    def call_and_interrupt(leaver: Leaver, close: Any) -> Any:
        outcome = call(leaver, close)
        if not interrupted:
            interrupted.append(leaver)
            os.kill(os.getpid(), signal.SIGINT)
        return outcome

    monkeypatch.setattr(started, "_started", started._Started())
    config = SidecarConfig(limits=SidecarLimits(shutdown_timeout_s=1000.0, settle_timeout_s=1000.0))
    recorders = [WaitsAtTheEnd(), WaitsAtTheEnd()]
    for name, recorder in zip(("default", "another"), recorders, strict=True):
        handle = headgate.start(spark, config, name=name).coordinate("op", recorder, parallelism=1)
        assert collect(spark, handle, Copying) == [0]
        while recorder.story[-1] != ("run_ended", True):  # which comes after the action has returned
            time.sleep(0.02)
    monkeypatch.setattr(Leaver, "call", call_and_interrupt)
    started._stop_all()
    assert len(interrupted) == 1
    for recorder in recorders:
        assert recorder.story[-2:] == [("run_ended", True), ("close",)]
    with pytest.raises(SidecarError, match="cannot be started while the interpreter is ending"):
        headgate.start(spark)


def test_a_with_block_may_be_stopped_before_its_end(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        assert sidecar.is_running
        sidecar.stop()
        assert not sidecar.is_running


async def test_stop_refuses_a_sidecar_of_async_with(spark: SparkSession) -> None:
    sidecar = Sidecar(spark)
    async with sidecar:
        assert sidecar.is_running
        with pytest.raises(SidecarError, match="entered with `async with`: leave that block"):
            sidecar.stop()
    sidecar.stop()


def test_a_coordinator_cannot_stop_its_sidecar(spark: SparkSession) -> None:
    class Stopping(Recorder):
        async def handle_client_request(self, payload: Any) -> Any:
            sidecar.stop()

    sidecar = headgate.start(spark)
    sidecar.coordinate("op", Stopping(), parallelism=1)
    with pytest.raises(SidecarError, match="a coordinator cannot stop its own sidecar"):
        sidecar.request("op", "stop")
    assert sidecar.is_running


# --- coordinate(..., replace=True) ------------------------------------------------------------------------------------


def test_a_cell_that_coordinates_again_replaces_its_operator(spark: SparkSession) -> None:  # H121
    sidecar = headgate.start(spark)
    coordinators = [Script({}, ["stop"]) for _ in range(3)]
    for coordinator in coordinators:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, replace=True)
        assert collect(spark, handle) == [(0, 0, [])]
    assert [coordinator.story[-1] for coordinator in coordinators[:2]] == [("close",)] * 2
    assert coordinators[2].named("close") == []
    with pytest.raises(SidecarError, match=r"already coordinated: .* release the operator first \(replace=True does\)"):
        sidecar.coordinate("op", Recorder(), parallelism=1)


def test_an_operator_is_not_replaced_while_its_run_is_on(spark: SparkSession) -> None:  # H121
    sidecar = headgate.start(spark)
    coordinator = Script({}, ["hello"])
    handle = sidecar.coordinate("op", coordinator, parallelism=1)
    sidecar.coordinate("idle", Recorder(), parallelism=1)
    action = Action(lambda: collect(spark, handle))
    coordinator.wait_for(lambda story: any(call[0] == "event" for call in story))
    with pytest.raises(SidecarError, match="'op' cannot be replaced during a run: wait until the action has"):
        sidecar.coordinate("op", Recorder(), parallelism=1, replace=True)
    sidecar.coordinate("idle", Recorder(), parallelism=1, replace=True)  # the run of another one does not matter
    coordinator.say(["stop"])
    assert action.result() == [(0, 0, ["hello"])]


@pytest.mark.parametrize("raised", ["the interrupt", "an error of Py4J"])
def test_an_interrupted_run_fails_its_job_so_that_the_cell_can_be_run_again(
    spark: SparkSession, raised: str
) -> None:  # H121
    class Interrupting(Script):
        async def subtask_ready(self, subtask: int, gateway: Any) -> None:
            await super().subtask_ready(subtask, gateway)
            os.kill(os.getpid(), signal.SIGINT)

    sidecar = headgate.start(spark)
    coordinator = Interrupting({}, ["hello"])
    handle = sidecar.coordinate("op", coordinator, parallelism=1)

    def action() -> list[Any]:
        try:
            return collect(spark, handle)
        except KeyboardInterrupt:
            if raised == "the interrupt":
                raise
            raise Py4JNetworkError("Answer from Java side is empty")  # noqa: B904 - as Py4J does when it cleans up

    sparks_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the kernel of a notebook
    try:
        with pytest.raises(KeyboardInterrupt):
            sidecar.run(action)
    finally:
        signal.signal(signal.SIGINT, sparks_handler)
    coordinator.wait_for(lambda story: ("run_ended", False) in story)
    assert "the action was interrupted" in coordinator.reasons[0].text
    again = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1, replace=True)
    assert sidecar.run(lambda: collect(spark, again)) == [(0, 0, [])]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"coordinator": object()}, TypeError),
        ({"parallelism": 0}, ValueError),
        ({"mode": "both"}, ValueError),
    ],
)
def test_wrong_arguments_replace_nothing(spark: SparkSession, wrong: Any, error: type[Exception]) -> None:  # H121
    sidecar = headgate.start(spark)
    recorder = Recorder()
    sidecar.coordinate("op", recorder, parallelism=1)
    arguments = {"coordinator": Recorder(), "parallelism": 1} | wrong
    with pytest.raises(error):
        sidecar.coordinate("op", **arguments, replace=True)
    assert recorder.story == [("start",)]


def test_loading_the_functions_starts_nothing() -> None:
    program = "import headgate, threading; headgate.start, headgate.stop; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
