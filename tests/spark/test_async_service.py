# SPDX-License-Identifier: Apache-2.0

"""``async with Sidecar(spark)``: actions in threads, concurrent ones, cancelled ones, and the two usual mistakes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

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


TOO_MUCH = """
import sys
from examples import async_service
async_service.REQUESTS = {"small": 10, "endless": 10**15}
async_service.main()
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
