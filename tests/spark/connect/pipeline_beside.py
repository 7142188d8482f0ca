# SPDX-License-Identifier: Apache-2.0

"""The definitions of a pipeline whose sidecar is a process beside the server; see ``pipeline_definitions.py``.

``BESIDE`` is its address.
"""

import os
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from headgate import AttachedSidecar, SubtaskContext

spark = SparkSession.active()
sidecar = AttachedSidecar(
    spark, os.environ["BESIDE"], secret_file=os.environ["RELAY_SECRET"], relay_installed=True
).__enter__()  # and never left: a `with` block would end before the pipeline runs
crawl = sidecar.operator("crawl")
queue = crawl.part("pages")


def visit(context: SubtaskContext, records: Iterator[Any]) -> Iterator[pyarrow.RecordBatch]:
    for page in queue:
        if page < 8:
            queue.add([2 * page, 2 * page + 1], key=lambda one: one)
        yield pyarrow.RecordBatch.from_pydict({"page": [page]})


visited = spark.range(0, 2, 1, 2).mapInArrow(crawl.subtask(visit), "page long")


@dp.materialized_view
def pages() -> DataFrame:
    return visited
