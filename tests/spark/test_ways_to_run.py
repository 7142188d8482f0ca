# SPDX-License-Identifier: Apache-2.0

"""Every way in which Spark runs a subtask: RDDs, DataFrames, barrier stages, both relays, both kinds of sidecar."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import uvloop
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from actors.coordination import OperatorCoordinator, SourceCoordinator, StaticSplitEnumerator
from protocol.restart import NO_RESTART
from spark_bridge.common.errors import RestartsExhausted
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SplitReader, SubtaskContext
from tests.spark.actions import coordinated
from tests.spark.conftest import SparkOn
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark

SPLITS = list(range(100))


class Squares(SplitReader):
    """Yields the square of each split."""

    def read_split(self, split: int) -> Iterator[int]:
        yield split * split


class PandasSquares(SplitReader):
    def read_split(self, split: int) -> Iterator[Any]:
        import pandas as pd

        yield pd.DataFrame({"square": [split * split]})


class ArrowSquares(SplitReader):
    def read_split(self, split: int) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"square": [split * split]})


def source() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(SPLITS, state, batch_size=3))


@pytest.mark.parametrize("relay", ["jvm", "py4j"])
def test_splits_are_read_once_each_whichever_relay_brings_the_facts(spark: SparkSession, relay: Any) -> None:
    with coordinated(spark, source(), 2, config=SidecarConfig(relay=relay)) as job:
        rdd = job.tasks(Squares)
        assert sorted(rdd.collect()) == [n * n for n in SPLITS]
        assert rdd.count() == len(SPLITS)  # H55: a second action starts from the beginning


@pytest.mark.parametrize(
    ("method", "operator"),
    [("mapInArrow", ArrowSquares), pytest.param("mapInPandas", PandasSquares, marks=pytest.mark.long)],
)
def test_a_dataframe_takes_a_subtask(spark: SparkSession, method: str, operator: Any) -> None:
    with coordinated(spark, source(), 2) as job:
        frame = spark.range(2, numPartitions=2)
        rows = getattr(frame, method)(job.handle.subtask(operator), "square long").collect()
    assert sorted(row.square for row in rows) == [n * n for n in SPLITS]


class Reporting(SplitReader):
    """Reports what it read to the coordinator, because there is no output."""

    def read_split(self, split: int) -> None:
        self.context.send_event(split)


@pytest.mark.parametrize("of", ["rdd", pytest.param("dataframe", marks=pytest.mark.long)])
def test_foreach_partition_takes_a_subtask(spark: SparkSession, of: str) -> None:
    """The task ends only after the coordinator has received all that it sent."""
    seen: list[int] = []

    class Listens(StaticSplitEnumerator):
        async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
            seen.append(event)

    with coordinated(spark, SourceCoordinator(lambda state: Listens(SPLITS)), 2) as job:
        frame = spark.range(2, numPartitions=2)
        (frame.rdd if of == "rdd" else frame).foreachPartition(job.handle.subtask(Reporting))
    assert sorted(seen) == SPLITS


def test_a_barrier_stage_takes_a_subtask(spark: SparkSession) -> None:
    script = Script({}, ["hello", "stop"])
    with coordinated(spark, script, 2) as job:
        rdd = spark.sparkContext.parallelize(range(2), 2).barrier()
        results = sorted(rdd.mapPartitions(job.handle.subtask(Listening)).collect())
    assert [received for _, _, received in results] == [["hello"], ["hello"]]


def test_the_sidecar_runs_on_a_loop_of_uvloop_too(spark: SparkSession) -> None:
    """Its transports have asyncio's methods, but not its class."""

    async def squares_of() -> tuple[str, list[int]]:
        async with Sidecar(spark) as sidecar:
            squares = await sidecar.coordinate("squares", source(), parallelism=2)
            rdd = spark.sparkContext.parallelize(range(2), 2).mapPartitions(squares.subtask(Squares))
            return sidecar.relay_kind, await anyio.to_thread.run_sync(rdd.collect)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        relay_kind, rows = runner.run(squares_of())
    assert relay_kind == "jvm"
    assert sorted(rows) == [n * n for n in SPLITS]


def die(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from records


def test_who_allows_no_failure_and_loses_a_worker_reads_why_and_what_allows_some(spark_on: SparkOn) -> None:
    spark = spark_on("local[1]")
    with capture_logs() as logs, coordinated(spark, OperatorCoordinator) as job:
        with pytest.raises(RestartsExhausted, match=r"process of a task has died: .*memory.* local\[2,4\]") as own:
            job.handle.run(die, restart=NO_RESTART)
        (line,) = (line for line in logs if line["event"] == "worker process died")
        with pytest.raises(Exception, match="Python worker exited unexpectedly"):
            job.tasks(die).collect()
    assert line["why"] in str(own.value)
    assert [one["log_level"] for one in logs if one["event"] == "worker process died"] == ["warning", "warning"]
