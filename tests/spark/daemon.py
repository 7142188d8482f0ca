# SPDX-License-Identifier: Apache-2.0

"""Spark's daemon of Python workers, which has loaded what a test module needs before it forks the first worker.

A worker that gets an operator of a test module imports the whole module, with pytest and the driver's half. That takes
a second, and every failed attempt gets a new worker. What an installed task imports, and how fast, is tested elsewhere.
"""

from __future__ import annotations

import pyspark.daemon
import pyspark.worker
import pytest  # noqa: F401
import structlog.testing  # noqa: F401
from pyspark.sql import SparkSession  # noqa: F401

import headgate.testing  # noqa: F401
from spark_bridge.driver.sidecar import Sidecar  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
