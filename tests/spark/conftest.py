"""Real Spark sessions for the tests, one at a time, as few as possible."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

LOCAL = "local[2,3]"  # two cores, and a task may fail twice

SparkOn = Callable[[str], SparkSession]


def start_spark(master: str) -> SparkSession:
    """A session that touches nothing but loopback, with this Python on its executors."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.Builder().master(master).appName("headgate-tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


@pytest.fixture(scope="session")
def spark_on() -> Iterator[SparkOn]:
    """Gives the session for a master; one of another master, or one that a test has stopped, is replaced."""
    current: list[SparkSession] = []

    def session_for(master: str) -> SparkSession:
        if current and current[0].sparkContext._jsc is not None and current[0].sparkContext.master == master:
            return current[0]
        while current:
            current.pop().stop()
        current.append(start_spark(master))
        return current[0]

    yield session_for
    while current:
        current.pop().stop()


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    """A local session, shared by the tests that do not mind what ran before."""
    return spark_on(LOCAL)
