# SPDX-License-Identifier: Apache-2.0

"""A Spark for a program that a soak test starts and kills: it writes nothing, and nobody looks at it."""

from __future__ import annotations

from pyspark.sql import SparkSession

_SETTINGS = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1"}


def quiet_session(master: str, name: str) -> SparkSession:
    builder = SparkSession.Builder().master(master).appName(name)
    for key, value in _SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark
