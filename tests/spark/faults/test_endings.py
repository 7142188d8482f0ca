# SPDX-License-Identifier: Apache-2.0

"""Nothing remains when the driver, or its Spark, ends without closing anything. docs/spark-faults.md."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from pyspark import SparkContext

from protocol.facts import ApplicationEnded
from tests.spark.actions import Action, coordinated, what_the_user_reads
from tests.spark.cluster import StandaloneCluster, command_line, descendants
from tests.spark.conftest import SparkOn
from tests.spark.faults.heard import listening_to
from tests.spark.faults.talking import FIRST_ATTEMPTS_WAIT, both_talk
from tests.spark.faults.waiting import wait_until
from tests.spark.leftovers import nothing_left
from tests.spark.program import Program, wait_until_nobody_is_left
from tests.spark.script import Script

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _the_cluster_is_free() -> None:
    """Stop the session of an earlier test: it would keep all of its slots."""
    context = SparkContext._active_spark_context
    if context is not None:
        context.stop()


def processes_of(cluster: StandaloneCluster, application_id: str) -> list[int]:
    """Its executors, with the Python daemons and workers that run the tasks."""
    executors = [
        pid
        for host in cluster.hosts
        for pid in cluster.executor_pids(host)
        if f"--app-id {application_id}" in command_line(pid)
    ]
    workers = [pid for executor in executors for pid in descendants(executor)]
    assert len(executors) == len(cluster.hosts)
    assert len(workers) >= 2, "two tasks run in two Python workers"
    return [*executors, *workers]


def check_that_they_end(pids: list[int]) -> None:
    """The worker ends the executors of a lost application, and they end their Python processes."""
    wait_until(lambda: not any(map(command_line, pids)), "nothing of the application runs on the cluster")


# --- the driver's Python ends without closing anything --------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "status"),
    [("return", 0), ("forgotten", 0), ("raise", 1), ("SIGKILL", -signal.SIGKILL)],
)
def test_the_driver_ends_while_its_job_runs(
    standalone: StandaloneCluster, tmp_path: Path, how: str, status: int
) -> None:
    """H48, H57: it ends immediately, as it was told to, and leaves nothing behind, neither here nor on the cluster."""
    go_on = tmp_path / "go on"
    arguments = ("-m", "tests.spark.faults.driver_program", standalone.master_url, how, str(go_on))
    with Program(*arguments) as program:
        program.read_until("they talk")
        application = re.search(r"application (\S+)", program.said)
        assert application is not None
        pids = processes_of(standalone, application.group(1))
        go_on.touch()
        program.ends_with(status)
        wait_until_nobody_is_left(program)
        check_that_they_end(pids)
        if how == "raise":
            assert "LookupError: nobody catches this" in program.said


# --- the action ends, and the driver goes on -------------------------------------------------------------------------


def test_an_action_is_interrupted(standalone: StandaloneCluster) -> None:
    """H15, H55, H57: Ctrl-C ends the action and, in PySpark, not its job: a second action is refused until it ends."""
    with Program("-m", "tests.spark.faults.driver_program", standalone.master_url, "SIGINT", "") as program:
        program.read_until("they talk")
        program.process.send_signal(signal.SIGINT)
        program.ends_with(0)
    interrupted, refused, cancelled = map(
        program.said.index, ("\ninterrupted\n", "a second action: ", "told ('failed'")
    )
    assert interrupted < refused < cancelled
    assert "operator 'op' is in use by stage 0 of job 0" in program.said[refused:cancelled]
    told = re.findall(r"^told (.*)$", program.said, re.MULTILINE)
    assert sorted(told[:2]) == ["('ready', 0, 0)", "('ready', 1, 0)"]
    assert sorted(told[2:4]) == ["('failed', 0, 0, 'RUN_ENDED')", "('failed', 1, 0, 'RUN_ENDED')"]
    assert told[4:6] == ["('run_ended', False)", "('reset_to_checkpoint', -1, None)"]
    assert sorted(told[6:8]) == ["('ready', 0, 1)", "('ready', 1, 1)"]
    assert told[8:] == ["('run_ended', True)", "('close',)"]
    assert "collected [(0, 1, ['hello']), (1, 1, ['hello'])]" in program.said


# --- Spark is stopped under it --------------------------------------------------------------------------------------


def test_spark_is_stopped_while_its_job_runs(standalone: StandaloneCluster, spark_on: SparkOn) -> None:
    """H12, H57: the coordinator learns of each attempt's end, then of the run's; the sidecar still exits normally."""
    spark = spark_on(standalone.master_url, spark_executor_memory="512m")
    script = Script(FIRST_ATTEMPTS_WAIT, [])
    application_id = spark.sparkContext.applicationId
    with nothing_left(), listening_to(spark) as heard, coordinated(spark, script, 2) as job:
        action = Action(job.tasks().collect)
        script.wait_for(both_talk)
        pids = processes_of(standalone, application_id)
        spark.stop()
        script.wait_for(lambda story: ("run_ended", False) in story)
        heard.wait_for(ApplicationEnded)
    what_the_user_reads(action.result)  # the text is from Py4J, whose gateway has gone
    for subtask in (0, 1):
        assert script.of_subtask(subtask) == [("ready", subtask, 0), ("failed", subtask, 0, "RUN_ENDED")]
    # Spark posts the end of the job and of the application together, and either is enough.
    assert all(re.search("SparkContext was shut down|the application has ended", why.text) for why in script.reasons)
    assert script.story[-2:] == [("run_ended", False), ("close",)]
    check_that_they_end(pids)
