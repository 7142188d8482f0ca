# SPDX-License-Identifier: Apache-2.0

"""A program that starts a sidecar and does not stop it: the end of the interpreter does, and closes the coordinator."""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

import headgate
from headgate import OperatorCoordinator


class Closing(OperatorCoordinator):
    async def close(self) -> None:
        print("closed", flush=True)


def main() -> None:
    logging.basicConfig()
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    sidecar = headgate.start(spark)
    operator = sidecar.coordinate("closing", Closing, parallelism=2)
    numbers = spark.sparkContext.parallelize(range(4), 2)
    print(sidecar.run(numbers.mapPartitions(operator.subtask(lambda context, records: records)).count))


if __name__ == "__main__":
    main()
