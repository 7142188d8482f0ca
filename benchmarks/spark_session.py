# SPDX-License-Identifier: Apache-2.0

"""A Spark session for a benchmark: local, silent, over loopback, and removed afterwards, including its JVM."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from benchmarks import harness
from spark_bridge.driver.interrupts import interrupts_held_back

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parent.parent),
}
JVM_EXIT_S = 30.0


@contextmanager
def spark_session(master: str = "local[2]", **conf: str) -> Iterator[SparkSession]:
    """A session in a new JVM, so that no figure depends on earlier measurements in this process.

    In a quick run the JVM stays until the process ends. ``conf`` adds to Spark's settings; names with dots come as
    ``**{"spark.x.y": "1"}``. Python workers have started once when this is entered. A failed launcher's output goes to
    standard error.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    builder = SparkSession.Builder().master(master).appName("headgate-benchmarks")
    for key, value in {**SETTINGS, **conf}.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryFile() as said:
        try:
            # PySpark leaves a JVM behind that is interrupted while it starts, and it would run forever.
            with interrupts_held_back(), _stderr_goes_to(said.fileno()):
                session = builder.getOrCreate()
        except (PySparkException, Py4JError, OSError):
            said.seek(0)
            sys.stderr.write(said.read().decode(errors="replace"))
            _end_jvm()
            raise
    try:
        session.sparkContext.setLogLevel("OFF")
        session.sparkContext.parallelize(range(8), 8).map(str).count()
        yield session
    finally:
        with interrupts_held_back():
            session.stop()
            if harness.one_jvm:
                atexit.register(_end_jvm)
            else:
                _end_jvm()


def _end_jvm() -> None:
    """PySpark keeps its JVM, with this session's settings, for the next session; closing its input ends it."""
    active: Any = SparkContext
    gateway = active._gateway
    if gateway is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_EXIT_S)
    active._gateway = active._jvm = None


@contextmanager
def _stderr_goes_to(descriptor: int) -> Iterator[None]:
    """Processes that are started meanwhile write their errors there, for their whole life."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
