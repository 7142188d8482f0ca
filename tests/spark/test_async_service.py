# SPDX-License-Identifier: Apache-2.0

"""``async with Sidecar(spark)``: actions in threads, concurrent ones, cancelled ones, and the two usual mistakes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from examples import async_service
from headgate import Sidecar, SidecarConfig, SidecarLimits
from tests.spark.actions import one_task_each, what_the_user_reads
from tests.spark.leftovers import nothing_left
from tests.spark.operators import Listening
from tests.spark.program import Program, wait_until_nobody_is_left
from tests.spark.script import Script

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if "spark" not in request.fixturenames:  # it starts separate processes
        yield
        return
    request.getfixturevalue("spark")
    with nothing_left():
        yield


async def test_requests_are_answered_concurrently(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    await async_service.serve(spark)
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "  large: 4999950000", "  medium: 499500", "  small: 45"]


async def test_a_cancelled_run_fails_its_job_and_leaves_the_others(spark: SparkSession) -> None:  # H122
    stopping, waiting = Script({}, ["hello"]), Script({}, ["hello"])
    async with Sidecar(spark) as sidecar, asyncio.TaskGroup() as requests:
        first = await sidecar.coordinate("first", waiting, parallelism=1)
        second = await sidecar.coordinate("second", stopping, parallelism=1)

        def action(handle: Any) -> Any:
            return one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect()

        cancelled = requests.create_task(sidecar.run(lambda: action(first)))
        other = requests.create_task(sidecar.run(lambda: action(second)))
        for script in (waiting, stopping):
            await anyio.to_thread.run_sync(script.wait_for, lambda story: any(call[0] == "event" for call in story))
        cancelled.cancel()
        await anyio.to_thread.run_sync(waiting.wait_for, lambda story: ("run_ended", False) in story)
        stopping.say(["stop"])
        assert await other == [(0, 0, ["hello"])]
    assert cancelled.cancelled()
    assert waiting.story[-2:] == [("run_ended", False), ("close",)]
    assert ("run_ended", True) in stopping.story


async def test_an_action_on_the_loop_is_named_with_its_line_and_the_fix(spark: SparkSession) -> None:  # H122
    config = SidecarConfig(limits=SidecarLimits(connect_timeout_s=3.0))
    with capture_logs() as logs:
        async with Sidecar(spark, config) as sidecar:
            handle = await sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
            rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Listening))
            text = what_the_user_reads(rdd.collect)
            assert await sidecar.run(rdd.collect) == [(0, 0, [])]
    assert "that its log does not say `event loop blocked`" in text
    line = next(line for line in logs if line["event"] == "event loop blocked")
    assert "tests/spark/actions.py" in line["at"]
    assert "what_the_user_reads" in line["at"]
    assert "in test_an_action_on_the_loop_is_named_with_its_line_and_the_fix" in line["stack"]
    assert "`await sidecar.run(action)`" in line["hint"]


async def test_a_forgotten_await_is_refused_with_its_line(spark: SparkSession) -> None:  # H122
    async with Sidecar(spark) as sidecar:
        handle: Any = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
        with pytest.raises(
            AttributeError, match=r"without await.*`await sidecar.coordinate\(...\)` at .*test_async_ser"
        ):
            handle.subtask(Listening)
        assert sidecar.handles == {}


TOO_MUCH = """
import sys
from examples import async_service
async_service.REQUESTS = {"small": 10, "endless": 10**15}
sys.exit(async_service.main([]))
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service(number: signal.Signals) -> None:
    with Program("-c", TOO_MUCH) as program:
        program.read_until("small:")
        program.process.send_signal(number)
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert "Traceback" not in program.said
