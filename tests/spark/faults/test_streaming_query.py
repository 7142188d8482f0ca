# SPDX-License-Identifier: Apache-2.0

"""A Structured Streaming query with coordinated tasks in its micro-batches. docs/spark-faults.md, row 11."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.storage import CheckpointFile, Restore
from tests.spark.faults.batches import ROWS, LinesCoordinator, Stream
from tests.spark.faults.streaming_program import (
    AFTER_ONE_IN_THE_MIDDLE,
    BEFORE_ANY,
    BEFORE_ITS_END_IS_TOLD,
    BEFORE_SPARK_NOTES_IT,
    MOMENTS,
)
from tests.spark.faults.waiting import wait_until
from tests.spark.program import Program, wait_until_nobody_is_left

pytestmark = pytest.mark.spark

BATCH = ["ready", "ready", "run_ended", "checkpoint", "complete"]
NEXT_BATCH = ["reset_to_checkpoint", *BATCH]


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(tmp_path)


class Application:
    """One life of the operator, with a new coordinator."""

    def __init__(self, spark: SparkSession, stream: Stream, sidecar: Sidecar, coordinator: LinesCoordinator) -> None:
        self.spark = spark
        self.stream = stream
        self.sidecar = sidecar
        self.coordinator = coordinator
        self.handle: OperatorHandle

    def for_each_batch(
        self, function: Callable[[DataFrame, int], object] | None = None, *, adopt: bool = False
    ) -> Callable[[DataFrame, int], None]:
        function = function or self.stream.lines_of(self.handle)
        return self.sidecar.for_each_batch(self.handle, function, adopt=adopt)

    def run(self, function: Callable[[DataFrame, int], object] | None = None, *, adopt: bool = False) -> None:
        self.stream.run(self.spark, self.for_each_batch(function, adopt=adopt))


@contextmanager
def application(spark: SparkSession, stream: Stream, restore: Restore = "latest") -> Iterator[Application]:
    with Sidecar(spark, SidecarConfig(storage=stream.folder / "storage")) as sidecar:
        it = Application(spark, stream, sidecar, LinesCoordinator(stream.folder))
        it.handle = stream.coordinate(sidecar, it.coordinator, restore=restore)
        yield it


def test_each_batch_is_one_run_with_one_checkpoint_that_names_it(spark: SparkSession, stream: Stream) -> None:
    """H55: a batch begins at the checkpoint of the one before; a restarted query continues with the next."""
    stream.feed(3)
    with application(spark, stream) as first:
        first.run()
        stream.feed()
        first.run()
    assert first.coordinator.lifecycle == ["start", *BATCH, *NEXT_BATCH * 3, "close"]
    assert first.coordinator.totals == [ROWS, 2 * ROWS, 3 * ROWS]

    stream.feed()
    with application(spark, stream) as second:
        second.run()
    # The batch has other input than the restored checkpoint, which the coordinator learns by another reset (H174).
    assert second.coordinator.lifecycle == ["reset_to_checkpoint", "start", "reset_to_checkpoint", *BATCH, "close"]
    assert second.coordinator.totals == [4 * ROWS, 4 * ROWS]
    assert stream.written() == stream.expected()
    assert stream.labels() == ["batch 1 done", "batch 2 done", "batch 3 done", "batch 4 done"]
    assert stream.noted_by_spark() == [0, 1, 2, 3, 4]


def test_a_batch_whose_task_fails_too_often(spark: SparkSession, stream: Stream) -> None:
    """The task's exception reaches the code that waits for the query; the next query begins where the batch before
    ended, on both sides (H55).
    """
    stream.feed(2)
    trouble = stream.tell("raise", 1, 0)
    with application(spark, stream) as it:
        with pytest.raises(StreamingQueryException, match="as it was told, in batch 1"):
            it.run()
        assert stream.noted_by_spark() == [0]
        assert stream.written() == sorted(f"row {row}" for row in stream.rows_of(0))
        failed = len(it.coordinator.story)
        trouble.unlink()
        it.run()
    lives = [callback[0] for callback in it.coordinator.of_subtask(0)[1:]]
    assert lives == ["ready", *["failed", "reset", "ready"] * 3]
    again = [callback for callback in it.coordinator.story[failed:] if callback[0] == "reset_to_checkpoint"]
    done = it.coordinator.named("complete")[0][1]
    assert again == [("reset_to_checkpoint", done)]
    assert it.coordinator.totals == [ROWS, ROWS]
    assert stream.written() == stream.expected()


def test_a_coordinator_that_raises_in_a_batch(spark: SparkSession, stream: Stream) -> None:
    """H7: the query fails; a new application begins at the checkpoint of the batch before (H52)."""
    stream.feed(3)
    with application(spark, stream) as first:
        first.coordinator.fail_at_row = "row 1.4"
        with pytest.raises(StreamingQueryException, match=r"the coordinator does not like row 1\.4"):
            first.run()
    with application(spark, stream) as second:
        second.run()
    assert second.coordinator.story[:2] == [
        ("reset_to_checkpoint", first.coordinator.named("complete")[-1][1]),
        ("start",),
    ]
    assert second.coordinator.totals == [ROWS, ROWS, 2 * ROWS]
    assert stream.written() == stream.expected()


def test_a_committed_batch_whose_end_spark_has_not_recorded(spark: SparkSession, stream: Stream) -> None:
    """It is skipped: none of its tasks runs again."""
    stream.feed(2)
    with application(spark, stream) as it:
        commit = it.for_each_batch()

        def fail_behind_it(frame: DataFrame, batch_id: int) -> None:
            commit(frame, batch_id)
            if batch_id == 1:
                raise OSError("on the way back to Spark")

        with pytest.raises(StreamingQueryException, match="on the way back to Spark"):
            stream.run(spark, fail_behind_it)
        assert stream.noted_by_spark() == [0]
        assert stream.labels() == ["batch 0 done", "batch 1 done"]
        stream.feed()
        it.run()
    assert it.coordinator.lifecycle == ["start", *BATCH, *NEXT_BATCH * 2, "close"]
    assert stream.noted_by_spark() == [0, 1, 2]
    assert stream.written() == stream.expected()


def test_a_query_that_is_stopped_in_the_middle_of_a_batch(spark: SparkSession, stream: Stream) -> None:
    """The next one waits until the run has ended, and continues from the checkpoint in the middle: no duplicates."""
    stream.feed(2)
    gate = stream.tell("wait", 1, 0)
    with application(spark, stream) as it:
        query = stream.start(spark, it.for_each_batch())
        wait_until((stream.folder / "waiting-1-0").exists, "the middle of batch 1")
        it.coordinator.wait_for(lambda story: len([callback for callback in story if callback[0] == "ready"]) == 4)
        middle = it.sidecar.checkpoint()
        query.stop()
        gate.unlink()
        it.run()
    resets = it.coordinator.named("reset_to_checkpoint")
    assert resets[-1] == ("reset_to_checkpoint", middle)
    assert "batch 1 begun" in stream.labels()
    assert stream.written() == stream.expected()
    assert it.coordinator.rows == 2 * ROWS


def test_a_batch_with_nothing_for_the_operator(spark: SparkSession, stream: Stream) -> None:
    """It is still committed, by a checkpoint without a run, so that none is missing."""
    stream.feed(3)
    with application(spark, stream) as it:
        lines = stream.lines_of(it.handle)
        it.run(lambda frame, batch_id: None if batch_id == 1 else lines(frame, batch_id))
    assert it.coordinator.lifecycle == ["start", *BATCH, "checkpoint", "complete", *NEXT_BATCH, "close"]
    assert stream.labels() == ["batch 0 done", "batch 1 done", "batch 2 done"]


def test_two_runs_in_one_batch(spark: SparkSession, stream: Stream) -> None:
    """The first has committed the batch, so the second is failed before it can output anything."""
    stream.feed()
    with application(spark, stream) as it:
        lines = stream.lines_of(it.handle)

        def twice(frame: DataFrame, batch_id: int) -> None:
            lines(frame, batch_id)
            wait_until(lambda: stream.labels() == ["batch 0 done"], "the first run's commit")
            lines(frame, batch_id)

        with pytest.raises(StreamingQueryException, match=r"a second run.*batch 0 of"):
            it.run(twice)
    assert stream.written() == stream.expected()


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_driver_is_killed_in_a_batch(spark: SparkSession, stream: Stream, moment: str) -> None:
    """H50, H52: a new driver with both checkpoints continues; a committed batch is not run again."""
    stream.feed(3)
    with Program("-m", "tests.spark.faults.streaming_program", str(stream.folder), moment) as driver:
        driver.ends_with(-signal.SIGKILL)
        wait_until_nobody_is_left(driver)
    assert stream.noted_by_spark() == [0]
    newest = stream.labels()[-1]
    rows_before = len(stream.written())
    (stream.folder / "wait-1-0").unlink(missing_ok=True)
    with application(spark, stream) as it:
        restored = it.coordinator.rows
        rows_restored = len(stream.written())
        it.run()
    found = {
        BEFORE_ANY: ("batch 0 done", 1),
        AFTER_ONE_IN_THE_MIDDLE: ("batch 1 begun", 1),
        BEFORE_ITS_END_IS_TOLD: ("batch 1 done", 2),
        BEFORE_SPARK_NOTES_IT: ("batch 1 done", 2),
    }
    assert (newest, restored // ROWS) == found[moment]
    assert rows_before <= rows_restored <= restored, "what the checkpoint covers may be published, and nothing else"
    batches_run = it.coordinator.lifecycle.count("run_ended")
    if newest == "batch 1 done":
        assert (rows_restored, batches_run) == (restored, 1)
    else:  # the files that a snapshot lists come with its task
        assert batches_run == 2
    assert it.coordinator.rows == 3 * ROWS
    assert stream.noted_by_spark() == [0, 1, 2]
    assert stream.written() == stream.expected()


# --- checkpoints that do not fit together -------------------------------------------------------------------------


def test_the_checkpoint_location_is_older_than_the_storage(spark: SparkSession, stream: Stream) -> None:
    """Refused, because the later output is committed. Once that is removed, the named checkpoint may be used."""
    stream.feed()
    with application(spark, stream) as it:
        it.run()
        copytree(stream.spark_checkpoint, stream.folder / "backup")
        done = it.coordinator.named("complete")[-1][1]
        stream.feed(2)
        it.run()
    rmtree(stream.spark_checkpoint)
    (stream.folder / "backup").rename(stream.spark_checkpoint)

    with application(spark, stream) as it, pytest.raises(StreamingQueryException) as refused:
        it.run()
    matching = next((stream.folder / "storage").rglob(f"checkpoint-{done}.hgc"))
    text = str(refused.value)
    assert "Spark asks for batch 1 of query" in text
    assert "the last checkpoint is after batch 2" in text
    assert f"restore=CheckpointFile('{matching}')" in text
    assert stream.written() == stream.expected()

    for path in (stream.folder / "out").glob("*.txt"):
        if "row 0." not in path.read_text():
            path.unlink()
    with application(spark, stream, restore=CheckpointFile(matching)) as it:
        it.run()
    assert it.coordinator.totals == [ROWS, ROWS, 2 * ROWS]
    assert stream.written() == stream.expected()


def test_the_storage_is_older_than_the_checkpoint_location(spark: SparkSession, stream: Stream) -> None:
    """Refused, unless it is adopted: then the query continues without the missing part."""
    stream.feed(2)
    with application(spark, stream) as it:
        it.run()
    rmtree(stream.folder / "storage")
    stream.feed(2)
    with application(spark, stream) as it:
        with pytest.raises(StreamingQueryException, match=r"Spark asks for batch 2 .* no checkpoint of any query"):
            it.run()
        it.run(adopt=True)
        assert it.coordinator.rows == 2 * ROWS
        stream.feed()
        it.run()
    assert stream.written() == stream.expected()


def test_a_second_query_with_the_same_operator(spark: SparkSession, stream: Stream) -> None:
    """A query that lost its directory begins again at batch 0: refused, and the error names both queries."""
    stream.feed()
    ids = []
    with application(spark, stream) as it:
        query = stream.start(spark, it.for_each_batch())
        ids.append(query.id)
        query.awaitTermination()
        rmtree(stream.spark_checkpoint)
        query = stream.start(spark, it.for_each_batch())
        ids.append(query.id)
        with pytest.raises(StreamingQueryException) as refused:
            query.awaitTermination()
    assert len(set(ids)) == 2
    assert [query_id for query_id in ids if query_id not in str(refused.value)] == []
    assert "use one operator" in str(refused.value)
    assert stream.written() == stream.expected()
