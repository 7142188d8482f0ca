# SPDX-License-Identifier: Apache-2.0

"""A job of two tasks that fetch their work: run once with a timeline for Perfetto, then with a progress bar.

It writes ``job.json``. It needs ``headgate[pyspark,progress]``.
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
    with sidecar.trace("job.json"):
        result = job.run(Squares)
    with job.progress():
        result = job.run(Squares)
print(sorted(result))
spark.stop()
