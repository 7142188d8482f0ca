# SPDX-License-Identifier: Apache-2.0

"""A Spark session for the examples: local, silent, and with short error messages."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headgate import interrupts_held_back

SPARK_ERRORS = (PySparkException, Py4JError)
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.task.maxFailures": "4",
}


class SparkDidNotStart(Exception):
    """Spark could not start; the text is the last output of Spark's launcher."""


class JobFailed(Exception):
    """A Spark job has failed; the text is its cause without stacks."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause_of(cause))


def cause_of(error: BaseException) -> str:
    return readable(str(getattr(error, "java_exception", None) or f"{type(error).__name__}: {error}"))


def was_interrupted(error: BaseException) -> bool:
    """Whether ``error`` came up while a Ctrl-C was pending: Py4J's cleanup after one may fail."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return any(was_interrupted(before) for before in (error.__cause__, error.__context__) if before is not None)


def readable(text: str) -> str:
    """Spark's message, without the stacks of Java and of Python's workers."""
    before_the_stack, *_ = text.partition("Driver stacktrace:")
    noise = ("\tat ", "\t... ", "  ", "Traceback (most recent", "WARNING: Using incubator modules")
    return "\n  ".join(line for line in before_the_stack.splitlines() if line.strip() and not line.startswith(noise))


def set_log_level(level: int) -> None:
    """Log to standard error from ``level`` on; this quiets Py4J, too, which otherwise logs much about a Ctrl-C."""
    for name in ("headgate", "py4j"):
        logging.getLogger(name).setLevel(level)


def start_spark(master: str, name: str, *, verbose: bool = False) -> SparkSession:
    """A session whose Python workers run already, so that the first job is as fast as the second.

    It also silences Headgate's log, except with ``verbose``. Raises ``SparkDidNotStart`` if Java is missing or too
    old, or the master does not exist.
    """
    set_log_level(logging.INFO if verbose else logging.CRITICAL)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: SparkSession.Builder = SparkSession.builder
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryFile() as launcher_log:
        try:
            # PySpark leaves a JVM behind that is interrupted while it starts, and it would run forever.
            with interrupts_held_back(), stderr_goes_to(2 if verbose else launcher_log.fileno()):
                spark = builder.master(master).appName(name).getOrCreate()
        except (*SPARK_ERRORS, OSError) as error:
            launcher_log.seek(0)
            said = readable(launcher_log.read().decode(errors="replace"))
            if "SparkException" not in said:
                java_home = os.environ.get("JAVA_HOME") or "not set"
                said += f"\n  Spark needs Java 17 or later, and JAVA_HOME is {java_home}"
            raise SparkDidNotStart(f"{cause_of(error)}\n  {said}") from error
    if not verbose:
        interrupt_quietly()
    spark.sparkContext.setLogLevel("WARN" if verbose else "OFF")
    spark.sparkContext.parallelize(range(8), 8).map(str).count()
    return spark


def start_remote_spark(url: str, name: str, *, verbose: bool = False) -> SparkSession:
    """A session of Spark Connect. For a ``local`` master as the URL, PySpark starts a server.

    Raises ``SparkDidNotStart`` if there is no server, or Java is missing.
    """
    set_log_level(logging.INFO if verbose else logging.CRITICAL)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: SparkSession.Builder = SparkSession.builder.remote(url)
    if url.startswith("local"):
        for key, value in SETTINGS.items():
            builder = builder.config(key, value)
    with tempfile.TemporaryFile() as launcher_log:
        try:
            with interrupts_held_back(), stderr_goes_to(2 if verbose else launcher_log.fileno()):
                spark = builder.appName(name).getOrCreate()
                spark.range(0, 8, 1, 8).mapInArrow(lambda batches: batches, "id long").count()
        except (*SPARK_ERRORS, OSError, ImportError) as error:
            raise SparkDidNotStart(cause_of(error)) from error
    return spark


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def interrupt_quietly() -> None:
    """Turn the first Ctrl-C into a ``KeyboardInterrupt`` without stack traces on the way; further ones change nothing.

    Spark's own handler calls the JVM from within the very call that it interrupts, which cannot work; Py4J logs how
    that fails, and the interrupt, too. Leaving the sidecar, and stopping Spark, end the jobs anyway, each within its
    deadline. An interrupt in the middle of that would only cut off a message of Py4J to the JVM, and leave Py4J
    unusable.
    """

    def interrupt_once(*unused: object) -> None:
        signal.signal(signal.SIGINT, lambda *unused: None)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt_once)
    logging.getLogger().addFilter(lambda record: "while sending command" not in record.getMessage())


@contextmanager
def stderr_goes_to(descriptor: int) -> Iterator[None]:
    """Processes that are started meanwhile write their errors there, for their whole life."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
