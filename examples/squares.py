# SPDX-License-Identifier: Apache-2.0

"""Tasks that fetch their work from the driver, one number at a time: any free task takes the next.

It needs ``headgate[pyspark]``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import SparkSession

from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator


class Squares(SplitReader):
    def read_split(self, number: int) -> Iterator[int]:
        yield number * number


spark = SparkSession.builder.master("local[2,4]").getOrCreate()
with Sidecar(spark) as sidecar:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(10), state))
    job = sidecar.coordinate("squares", source, parallelism=2)
    print(sorted(job.run(Squares)))
spark.stop()
