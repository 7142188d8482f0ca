# SPDX-License-Identifier: Apache-2.0

"""A driver that starts a sidecar and never stops it: ``python -m tests.spark.exit_program JOB HOW``.

``JOB`` says what runs when the program ends, and ``HOW`` how it ends. It prints ``they talk`` once a task of the job
runs, what the coordinator is told after that, how the action ended, and, if the end of the run waits, ``it waits`` once
the interpreter waits for it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import anyio
import anyio.to_thread
from pyspark.sql import SparkSession

import headgate
from headgate import OperatorHandle, SidecarConfig, SidecarLimits
from spark_bridge.driver.sidecar import leave
from tests.spark.actions import one_task_each, what_the_user_reads
from tests.spark.conftest import LOCAL, start_spark
from tests.spark.operators import Listening
from tests.spark.script import Script


def say(text: str) -> None:
    """Print a line in one piece, no matter which threads and which JVM print at the same time."""
    os.write(1, f"{text}\n".encode())


class Announcing(Script):
    """Prints what it is told. ``run_ended`` or ``close`` may hang."""

    def __init__(self, job: str) -> None:
        super().__init__({}, ["stop"] if job == "the end of a run waits" else ["hello"])
        self.job = job
        self.talking = threading.Event()

    def record(self, *callback: Any) -> None:
        super().record(*callback)
        if callback[0] == "event":
            self.talking.set()
        elif callback[0] in ("run_ended", "close"):
            say(f"told {callback}")

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        if self.job == "the end of a run waits":
            await anyio.sleep_forever()

    async def close(self) -> None:
        await super().close()
        match self.job:
            case "close blocks the loop":
                time.sleep(3600.0)  # noqa: ASYNC251 - what a coordinator must not do
            case "close waits for a thread":
                await anyio.to_thread.run_sync(time.sleep, 3600.0)


def start_job(spark: SparkSession, handle: OperatorHandle, coordinator: Announcing, job: str) -> None:
    rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Listening))

    def action() -> None:
        say(f"the action raised: {what_the_user_reads(rdd.collect)}")

    match job:
        case "a job in a thread":
            threading.Thread(target=action).start()
        case "a job in a pool":
            concurrent.futures.ThreadPoolExecutor(1).submit(action)
        case "a job after the SparkContext":
            threading.Thread(target=action, daemon=True).start()
        case "the end of a run waits":
            rdd.collect()
            threading.Thread(target=say_when_it_waits, daemon=True).start()
            return
        case _:
            return
    coordinator.talking.wait()
    say("they talk")
    if job == "a job after the SparkContext":
        spark.stop()
        say(f"another one raised: {what_the_user_reads(lambda: handle.run(Listening))}")


def say_when_it_waits() -> None:
    """Print ``it waits`` once the main thread waits for the sidecar to stop: a Ctrl-C before that ends the program."""
    while True:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not leave.__code__:
            frame = frame.f_back
        if frame is not None:
            say("it waits")
            return
        time.sleep(0.01)


def child() -> None:
    """A forked process has nothing to stop, and can end as any other does: through the functions for its end."""


def end(how: str) -> None:
    match how:
        case "raise":
            raise LookupError("nobody catches this")
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGTERM":
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
            os.kill(os.getpid(), signal.SIGTERM)
        case "fork":
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            say(f"the forked process ended with {process.exitcode}")
        case "return":
            return
        case _:
            raise ValueError(how)


def main(job: str, how: str) -> None:
    spark = start_spark(LOCAL)
    patience_s = 1000.0 if job == "the end of a run waits" else 2.0
    sidecar = headgate.start(spark, SidecarConfig(limits=SidecarLimits(shutdown_timeout_s=patience_s)))
    coordinator = Announcing(job)
    handle = sidecar.coordinate("op", coordinator, parallelism=1)
    start_job(spark, handle, coordinator, job)
    end(how)
    if how == "fork":
        say(f"it runs: {sidecar.is_running}, {list(sidecar.status().operators)}")
    say("the program ends")


if __name__ == "__main__":
    main(*sys.argv[1:])
