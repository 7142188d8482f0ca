# SPDX-License-Identifier: Apache-2.0

"""Wait for unannounced events: a process that ends, an executor that Spark brings back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import SparkSession


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until it is true; ``what`` names it in the error if it does not come true."""
    deadline = time.monotonic() + timeout_s
    between_looks = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        between_looks.wait(0.05)


def scheduler(spark: SparkSession) -> Any:
    """Spark's own ``TaskScheduler``, in the driver's JVM."""
    java_context: Any = spark.sparkContext._jsc
    return java_context.sc().taskScheduler()


def wait_for_executors(spark: SparkSession, hosts: Iterable[str]) -> None:
    """Wait until the scheduler has an executor on each of these hosts, original or replacement."""
    known = scheduler(spark)
    for host in hosts:
        wait_until(lambda host=host: bool(known.hasExecutorsAliveOnHost(host)), f"an executor on {host}")  # type: ignore[misc]
