# SPDX-License-Identifier: Apache-2.0

"""One run after another on real Spark, in one sidecar and in several: whose records are taken for written (H174)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headgate import FixedDelay, Sidecar, SidecarConfig
from headgate.errors import InputRefused
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator
from headgate.sinks import TwoPhaseSinkOperator as Lines
from spark_bridge.driver.handle import OperatorHandle
from tests.spark.test_two_phase_sinks import OFTEN

if TYPE_CHECKING:
    pass
pytestmark = pytest.mark.spark

PARTITIONS = 2
ONCE = FixedDelay(restarts_max=0)


class Place:
    """A folder with the storage and the output of an operator that writes lines."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.out = str(folder / "out")
        self.sink = FileSink(self.out)

    def sidecar(self) -> Sidecar:
        return Sidecar(self.spark, SidecarConfig(storage=str(self.folder / "kept")))

    def coordinate(self, sidecar: Sidecar, coordinator: Any = None, **settings: Any) -> OperatorHandle:
        coordinator = coordinator or TwoPhaseSinkCoordinator(self.sink)
        handle: OperatorHandle = sidecar.coordinate(
            "lines", coordinator, parallelism=PARTITIONS, mode="streaming", **settings
        )
        return handle

    def action(
        self, handle: OperatorHandle, day: str, rows: int = 20, operator: Any = Lines, partitions: int = PARTITIONS
    ) -> Callable[[], int]:
        lines = self.spark.sparkContext.parallelize([f"{day}-{row}" for row in range(rows)], partitions)
        return lines.mapPartitions(handle.subtask(operator, self.sink)).count

    def written(self) -> Counter[str]:
        """How many lines of each day are there; a doubled line counts as one of the day "doubled"."""
        lines = Counter(line for file in Path(self.out).glob("part-*") for line in file.read_text().splitlines())
        doubled = sum(count - 1 for count in lines.values())
        days = Counter(line.rpartition("-")[0] for line in lines)
        return days + Counter({"doubled": doubled})


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Place:
    return Place(spark, tmp_path)


@pytest.mark.parametrize("named", [False, True])
def test_the_daily_job_writes_every_day(place: Place, named: bool) -> None:  # H174
    for day in ("monday", "tuesday", "wednesday"):
        with place.sidecar() as sidecar:
            action = place.action(place.coordinate(sidecar), day)
            sidecar.run(action, input_id=day if named else None)
    assert place.written() == {"monday": 20, "tuesday": 20, "wednesday": 20}


class _Half(Lines):
    """Waits for a checkpoint after half of its records, which its end brings; then fails. Spark gives up then."""

    def process(self, records: Iterator[Any]) -> None:
        self.covered = False
        for number, record in enumerate(records):
            if number >= self.records_written:
                self.write(record)
            if number == 4:
                while not self.covered:
                    self.context.wait_for_event()
                raise LookupError("by the test")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.covered = True


def test_an_interrupted_day_is_continued_and_another_one_is_refused_with_both_ways_out(place: Place) -> None:  # H174
    with place.sidecar() as sidecar:
        handle = place.coordinate(sidecar, checkpoint=OFTEN)
        with pytest.raises(Exception, match="by the test"):
            sidecar.run(place.action(handle, "monday", operator=_Half), restart=ONCE, input_id="monday")
    assert place.written()["monday"] < 20
    with place.sidecar() as sidecar:
        handle = place.coordinate(sidecar)
        with pytest.raises(InputRefused, match=r"input_id='monday'.*restored_input=\"other\""):
            sidecar.run(place.action(handle, "tuesday"), input_id="tuesday")
        assert place.written()["tuesday"] == 0
        sidecar.run(place.action(handle, "monday"), input_id="monday")
        sidecar.run(place.action(handle, "monday"), input_id="monday")
        sidecar.run(place.action(handle, "tuesday"), input_id="tuesday")
    assert place.written() == {"monday": 20, "tuesday": 20}


def test_an_interrupted_day_is_not_continued_in_another_number_of_partitions(place: Place) -> None:  # H174
    def coordinate(sidecar: Sidecar, parallelism: int = 3) -> OperatorHandle:
        coordinator = TwoPhaseSinkCoordinator(place.sink)
        settings: dict[str, Any] = {"mode": "streaming", "checkpoint": OFTEN, "allow_fewer": True}
        return sidecar.coordinate("lines", coordinator, parallelism=parallelism, **settings)

    def run(sidecar: Sidecar, handle: OperatorHandle, day: str, partitions: int, operator: Any = Lines) -> None:
        sidecar.run(place.action(handle, day, operator=operator, partitions=partitions), restart=ONCE, input_id=day)

    with place.sidecar() as sidecar:
        handle = coordinate(sidecar)
        with pytest.raises(Exception, match="by the test"):
            run(sidecar, handle, "monday", 2, _Half)
        with pytest.raises(Exception, match=r"in 3 partitions, but when .* it was in 2 partitions"):
            run(sidecar, handle, "monday", 3)
    for parallelism in (3, 4):
        with place.sidecar() as sidecar, pytest.raises(Exception, match="run it in 2 partitions"):
            run(sidecar, coordinate(sidecar, parallelism), "monday", parallelism)
    with place.sidecar() as sidecar:
        handle = coordinate(sidecar)
        run(sidecar, handle, "monday", 2)
        run(sidecar, handle, "tuesday", 3)
    assert place.written() == {"monday": 20, "tuesday": 20}


class CommitsLate(TwoPhaseSinkCoordinator):
    """Its first final checkpoint is durable, and it fails before it has committed it."""

    failed = False

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if not self.failed:
            self.failed = True
            raise LookupError("the commit failed")
        await super().notify_checkpoint_complete(checkpoint_id)


def test_a_restart_of_an_action_whose_job_had_ended_well_writes_nothing_twice(place: Place) -> None:  # H174
    calls = 0
    with place.sidecar() as sidecar:
        handle = place.coordinate(sidecar, CommitsLate(place.sink))
        counted = place.action(handle, "monday")

        def action() -> int:
            nonlocal calls
            calls += 1
            return counted()

        sidecar.run(action, restart=FixedDelay(restarts_max=2, delay_s=0.0))
        sidecar.run(place.action(handle, "tuesday"))
    assert calls == 2
    assert place.written() == {"monday": 20, "tuesday": 20}


def batches_of(place: Place, sidecar: Sidecar, days: list[str], name: str, **adopt: bool) -> OperatorHandle:
    """A query with one micro-batch for each day, which begins its own ``checkpointLocation``."""
    handle = place.coordinate(sidecar)
    source = place.folder / name
    source.mkdir(exist_ok=True)
    for number, day in enumerate(days):
        file = source / f"{number}.txt"
        file.write_text("".join(f"{day}-{row}\n" for row in range(20)))
        os.utime(file, (1_700_000_000 + number,) * 2)

    def write(frame: DataFrame, batch_id: int) -> None:
        rows = frame.rdd.map(lambda row: row.value).repartition(PARTITIONS)
        rows.mapPartitions(handle.subtask(Lines, place.sink)).count()

    query = (
        place.spark.readStream.option("maxFilesPerTrigger", 1)
        .text(str(source))
        .writeStream.foreachBatch(sidecar.for_each_batch(handle, write, **adopt))
        .option("checkpointLocation", str(place.folder / f"{name}-query"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return handle


def test_every_micro_batch_is_written_without_a_word_about_batches_in_the_operator(place: Place) -> None:  # H174 H175
    with place.sidecar() as sidecar:
        batches_of(place, sidecar, ["a", "b", "c"], "first")
    assert place.written() == {"a": 20, "b": 20, "c": 20}


def test_a_batch_that_spark_repeats_after_a_plain_run_is_still_skipped(place: Place) -> None:  # H174
    with place.sidecar() as sidecar:
        handle = batches_of(place, sidecar, ["a"], "first")
        sidecar.run(place.action(handle, "b"))
    for file in (place.folder / "first-query" / "commits").glob("*0*"):
        file.unlink()  # as if the driver had died before Spark recorded the end of the batch
    with place.sidecar() as sidecar:
        batches_of(place, sidecar, ["a", "c"], "first")
    assert place.written() == {"a": 20, "b": 20, "c": 20}


def test_a_streaming_operator_in_a_plain_foreach_batch_is_refused_with_the_way_out(place: Place) -> None:  # H175 H174
    def start(name: str, function: Callable[[DataFrame, int], None]) -> StreamingQuery:
        rows = place.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 4).load()
        writer = rows.writeStream.foreachBatch(function)
        return writer.option("checkpointLocation", str(place.folder / name)).start()

    with place.sidecar() as sidecar:
        handle, other = place.coordinate(sidecar), sidecar.coordinate("other", mode="streaming", parallelism=PARTITIONS)

        def write(frame: DataFrame, batch_id: int) -> None:
            rows = frame.repartition(PARTITIONS).rdd.map(lambda row: str(row.value))
            rows.mapPartitions(handle.subtask(Lines, place.sink)).count()

        for number, function in enumerate((write, sidecar.for_each_batch(other, write))):
            query = start(f"query{number}", function)
            with pytest.raises(Exception, match=r"Pass sidecar.for_each_batch\(handle, function\) of this operator"):
                query.awaitTermination()
    assert place.written() == {}
