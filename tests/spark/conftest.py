# SPDX-License-Identifier: Apache-2.0

"""Real Spark sessions for the tests, one at a time and as few as possible."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.conftest import SHORT_LIVED_JVM
from tests.spark.cluster import StandaloneCluster
from tests.spark.faults.own_process import SidecarProgram
from tests.spark.releases import LEAVES_SOCKETS

LOCAL = "local[2,3]"  # two cores, and a task may fail twice

SparkOn = Callable[..., SparkSession]
NewProgram = Callable[..., SidecarProgram]


SPARKS_OWN_SOCKET = "Exception ignored in. <socket.socket"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn warnings into errors; an unclosed-socket warning only if this PySpark closes its own sockets."""
    if LEAVES_SOCKETS:
        forgiven = pytest.mark.filterwarnings(f"ignore:{SPARKS_OWN_SOCKET}:pytest.PytestUnraisableExceptionWarning")
        for item in (item for item in items if item.get_closest_marker("spark")):
            item.add_marker(forgiven)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Find the last warnings after all tests, when no test's marks apply any more."""
    if LEAVES_SOCKETS:
        warnings.filterwarnings("ignore", SPARKS_OWN_SOCKET, pytest.PytestUnraisableExceptionWarning)


def start_spark(master: str, **more: str) -> SparkSession:
    """Make a session that uses only loopback and runs this Python on its executors.

    ``more``: settings of Spark, ``spark_speculation="true"`` for ``spark.speculation=true``.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    SparkContext._ensure_initialized()  # a JVM that starts with a session keeps its settings for all later ones
    builder = SparkSession.Builder().master(master).appName("headgate-tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.extraJavaOptions": SHORT_LIVED_JVM,
        "spark.python.daemon.module": "tests.spark.daemon",
        "spark.sql.shuffle.partitions": "2",
        **{key.replace("_", "."): value for key, value in more.items()},
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


@pytest.fixture(scope="session")
def spark_on() -> Iterator[SparkOn]:
    """Give the session for a master and settings; replace one with other settings or one that a test has stopped."""
    current: list[tuple[str, dict[str, str], SparkSession]] = []

    def stop() -> None:
        while current:
            current.pop()[2].stop()

    def session_for(master: str, **more: str) -> SparkSession:
        if current and current[0][:2] == (master, more) and current[0][2].sparkContext._jsc is not None:
            return current[0][2]
        stop()
        current.append((master, more, start_spark(master, **more)))
        return current[0][2]

    yield session_for
    stop()


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    """A local session, shared by the tests that do not depend on what ran before."""
    return spark_on(LOCAL)


@pytest.fixture(scope="session")
def standalone() -> Iterator[StandaloneCluster]:
    """A cluster of real processes, two hosts; a test that kills one of them starts it again."""
    cluster = StandaloneCluster()
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[NewProgram]:
    """Start sidecars, and stop each of them by the end of its test."""
    made: list[SidecarProgram] = []

    def make(*arguments: str) -> SidecarProgram:
        made.append(SidecarProgram(tmp_path, *arguments))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.kill()
