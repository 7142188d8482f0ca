# SPDX-License-Identifier: Apache-2.0

"""A driver that a test interrupts, kills, or watches as it ends: ``python -m tests.spark.faults.driver_program``.

Its arguments are the master, how to end, and a file to wait for before it ends. It prints ``application ID``, ``they
talk`` once both subtasks of a job run, and the calls that its coordinator received. It enters the sidecar without a
``with``, and leaves it only if it is interrupted and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import RDD

from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action, one_task_each, what_the_user_reads
from tests.spark.conftest import start_spark
from tests.spark.faults.talking import FIRST_ATTEMPTS_WAIT, both_talk
from tests.spark.faults.waiting import wait_until
from tests.spark.operators import Listening
from tests.spark.releases import RAISED_BY_CTRL_C
from tests.spark.script import Script

LEFT_OPEN: list[Sidecar] = []
"""The globals of a script or a notebook live until the interpreter shuts down."""


def say(text: str) -> None:
    print(text, flush=True)


class Announcing(Script):
    """Prints when both subtasks have answered, and what happens to them afterwards."""

    def record(self, *callback: Any) -> None:
        super().record(*callback)
        if callback[0] not in ("event", "start"):
            say(f"told {callback}")
        elif both_talk(self.story):
            say("they talk")


def be_interrupted(subtasks: Callable[[], RDD[Any]], sidecar: Sidecar, script: Script) -> None:
    """Ctrl-C ends the action, and the program goes on: it runs other actions, then leaves the sidecar properly."""
    try:
        subtasks().collect()
    except RAISED_BY_CTRL_C:
        say("interrupted")
    # Use another RDD: Spark fails all jobs over the RDD whose stage it gives up, the first one too.
    say(f"a second action: {what_the_user_reads(subtasks().collect)}")
    subtasks().context.cancelAllJobs()
    script.wait_for(lambda story: ("run_ended", False) in story)
    script._script = {}
    say(f"collected {sorted(subtasks().collect())}")
    sidecar.__exit__(None, None, None)


def end(how: str) -> None:
    """End the program without closing anything."""
    match how:
        case "raise":
            raise LookupError("nobody catches this")
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "return" | "forgotten":
            return
        case _:
            raise ValueError(how)


def main(master: str, how: str, go_on: str) -> None:
    spark = start_spark(master, spark_executor_memory="512m", spark_task_maxFailures="1")
    say(f"application {spark.sparkContext.applicationId}")
    script = Announcing(FIRST_ATTEMPTS_WAIT, ["hello", "stop"])
    sidecar = Sidecar(spark)
    sidecar.__enter__()
    if how != "forgotten":
        LEFT_OPEN.append(sidecar)
    handle = sidecar.coordinate("op", script, parallelism=2)

    def subtasks() -> RDD[Any]:
        return one_task_each(spark, 2).mapPartitions(handle.subtask(Listening))

    if how == "SIGINT":
        be_interrupted(subtasks, sidecar, script)
        spark.stop()
        return
    Action(subtasks().collect)
    wait_until(Path(go_on).exists, "the test lets it end")
    end(how)


if __name__ == "__main__":
    main(*sys.argv[1:])
