# SPDX-License-Identifier: Apache-2.0

"""The shapes that jobs have: operators, stages, jobs and partitions in every combination. docs/spark-faults.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from protocol.facts import ExecutorLost, TaskStarted
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.subtask import SplitReader
from tests.spark.actions import what_the_user_reads
from tests.spark.faults.bench import Bench
from tests.spark.faults.directing import Director, Gathering
from tests.spark.faults.executors import kill_the_executor
from tests.spark.faults.file_gates import open_gates
from tests.spark.faults.noting import GatedReader, NotingSource, rows_of
from tests.spark.script import Script

pytestmark = pytest.mark.spark

SLOTS = 4  # two hosts with two cores each


def failed_over(subtask: int) -> list[tuple[Any, ...]]:
    return [("ready", subtask, 0), ("failed", subtask, 0, "FAILED"), ("reset", subtask, -1), ("ready", subtask, 1)]


# --- operators, stages and jobs (row 7) -----------------------------------------------------------------------------


@pytest.mark.parametrize("who_raises", ["first", "second"])
def test_two_operators_in_one_stage_fail_as_one(bench: Bench, who_raises: str) -> None:
    """H10, H12: the task is an attempt of both, so both are told, whichever of them raises."""
    scripts = [
        Script({(1, 0): ["raise"]} if name == who_raises else {}, ["hello", "stop"]) for name in ("first", "second")
    ]
    with bench.coordinated(scripts[0]) as first, bench.coordinated(scripts[1]) as second:
        rdd = bench.numbers(2).through(first, Gathering).through(second, Gathering)
        outputs = sorted(rdd.collect())
    assert [(subtask, len(rows)) for subtask, _, _, rows in outputs] == [(0, 1), (1, 1)]
    assert [rows[0][3] for _, _, _, rows in outputs] == [[0], [1]]
    raising = scripts[0] if who_raises == "first" else scripts[1]
    assert raising.of_subtask(1) == failed_over(1)
    for script in scripts:
        assert script.of_subtask(0) == [("ready", 0, 0)]
        assert script.of_subtask(1) in (failed_over(1), [("failed", 1, 0, "FAILED"), ("reset", 1, -1), ("ready", 1, 1)])


def test_an_operator_in_each_of_two_stages(bench: Bench, tmp_path: Path) -> None:
    """H10: a failure in the later stage does not affect the earlier one, whose output stands."""
    splits = range(6)
    source = NotingSource(splits)
    script = Script({(1, 0): ["raise"]}, ["hello", "stop"])
    open_gates(tmp_path, range(2))
    with bench.coordinated(source) as earlier, bench.coordinated(script) as later:
        read = bench.numbers(2).through(earlier, GatedReader, tmp_path)
        shuffled = read.shuffled(2, lambda row: row[0])
        outputs = sorted(shuffled.through(later, Gathering).collect())
    assert [rows for _, _, _, rows in outputs] == [rows_of(splits[p::2]) for p in range(2)]
    assert script.of_subtask(0) == [("ready", 0, 0)]
    assert script.of_subtask(1) == failed_over(1)
    for subtask in range(2):
        assert source.notes.of_subtask(subtask) == [("ready", subtask, 0)]


def test_two_concurrent_jobs_with_one_operator_each(bench: Bench) -> None:
    """H10: all four run at the same time, and a failure in one job does not affect another."""
    directors = [Director(), Director()]
    with bench.coordinated(directors[0]) as first, bench.coordinated(directors[1]) as second:
        actions = [bench.start_collecting(bench.numbers(2).through(handle, Gathering)) for handle in (first, second)]
        for director in directors:
            director.wait_until_ready([(0, 0), (1, 0)])
        for director in directors:
            director.hear((0, 0), "both run")
        directors[0].greet([1], "again")
        directors[0].tell((1, 0), "raise")
        directors[0].wait_until_ready([(1, 1)])
        for director, newest in zip(directors, (1, 0), strict=True):
            director.tell((0, 0), "stop")
            director.tell((1, newest), "stop")
        outputs = [sorted(action.result()) for action in actions]
    assert outputs[0] == [(0, 0, ["both run"], [0]), (1, 1, ["again"], [1])]
    assert outputs[1] == [(0, 0, ["both run"], [0]), (1, 0, [], [1])]
    assert directors[0].of_subtask(1) == failed_over(1)
    assert directors[1].of_subtask(1) == [("ready", 1, 0)]


def test_an_operator_is_used_again_in_a_second_job(bench: Bench) -> None:
    """H2, H55, H57: the run ends, the coordinator is reset globally, and attempt numbers go on."""
    director = Director("hello", "stop")
    with bench.coordinated(director) as handle:
        for attempt in range(2):
            outputs = sorted(bench.numbers(2).through(handle, Gathering).collect())
            assert outputs == [(subtask, attempt, ["hello"], [subtask]) for subtask in range(2)]
            director.wait_for(lambda story, runs=attempt + 1: story.count(("run_ended", True)) == runs)  # type: ignore[misc]
    story = director.named("ready", "failed", "reset", "reset_to_checkpoint", "run_ended")
    assert sorted(story[:2]) == [("ready", 0, 0), ("ready", 1, 0)]
    assert story[2:4] == [("run_ended", True), ("reset_to_checkpoint", -1, None)]
    assert sorted(story[4:6]) == [("ready", 0, 1), ("ready", 1, 1)]
    assert story[6:] == [("run_ended", True)]


def test_two_concurrent_jobs_over_one_operator(bench: Bench) -> None:
    """H55: every task of the second job is refused with advice on what to do; the first job is not affected."""
    director = Director()
    with bench.coordinated(director) as handle:
        first = bench.start_collecting(bench.numbers(2).through(handle, Gathering))
        director.wait_until_ready([(0, 0), (1, 0)])
        text = what_the_user_reads(bench.numbers(2).through(handle, Gathering).collect)
        director.hear((0, 0), "unharmed")
        director.tell((0, 0), "stop")
        director.tell((1, 0), "stop")
        outputs = sorted(first.result())
    assert "CONCURRENT_RUN" in text
    assert f"operator '{handle.operator_id}' is in use by stage" in text
    assert "run the two actions one after the other, or coordinate two operators" in text
    assert outputs == [(0, 0, ["unharmed"], [0]), (1, 0, [], [1])], director.reasons
    assert director.named("failed", "reset", "reset_to_checkpoint") == [], director.reasons


def test_more_subtasks_than_slots(bench: Bench, tmp_path: Path) -> None:
    """H10: they come in waves; a subtask that comes after all splits are read is told that none are left."""
    splits, subtasks = range(12), 9
    source = NotingSource(splits)
    bench.wait_for_executors()
    with bench.coordinated(source, subtasks) as handle:
        rdd = bench.numbers(subtasks).through(handle, GatedReader, tmp_path)
        action = bench.start_collecting(rdd)
        source.wait_until_read((subtask, 0) for subtask in range(SLOTS))
        assert sorted(source.notes.named("ready")) == [("ready", subtask, 0) for subtask in range(SLOTS)]
        open_gates(tmp_path, range(subtasks))
        outputs = sorted(action.result())
    assert outputs == rows_of(splits)
    assert sorted(source.notes.named("ready")) == [("ready", subtask, 0) for subtask in range(subtasks)]
    assert source.notes.named("failed", "reset", "reset_to_checkpoint") == []


def test_a_subtask_without_records(bench: Bench) -> None:
    """H10: it is a subtask like any other, and may receive events."""
    director = Director("hello", "stop")
    with bench.coordinated(director) as handle:
        outputs = sorted(bench.numbers(2, range(7, 8)).through(handle, Gathering).collect())
    assert outputs == [(0, 0, ["hello"], []), (1, 0, ["hello"], [7])]
    assert sorted(director.named("ready", "failed", "reset")) == [("ready", 0, 0), ("ready", 1, 0)]


# --- partitions that come and go (row 10) ---------------------------------------------------------------------------


def test_an_iterator_abandoned_early(bench: Bench, tmp_path: Path) -> None:
    """H57: Spark counts what ``take(1)`` abandons as a success, and so does the coordinator; no subtask failed."""
    splits = range(6)
    source = NotingSource(splits)
    open_gates(tmp_path, range(2))
    with bench.coordinated(source) as handle:
        rdd = bench.numbers(2).through(handle, GatedReader, tmp_path)
        assert len(rdd.take(1)) == 1
        source.notes.wait_for(lambda story: ("run_ended", True) in story)
        assert sorted(rdd.collect()) == rows_of(splits)
    assert source.read_by((0, 0)) == [0]
    story = source.notes.named("ready", "failed", "reset", "reset_to_checkpoint", "run_ended")
    assert story[:3] == [("ready", 0, 0), ("run_ended", True), ("reset_to_checkpoint", -1, None)]
    assert sorted(story[3:5]) == [("ready", 0, 1), ("ready", 1, 0)]
    assert story[5:] == [("run_ended", True)]


def test_coalesced_partitions(bench: Bench) -> None:
    """H10: before the subtask they are partitions like any others; after it they are refused (test_wrong_use)."""
    director = Director("hello", "stop")
    with bench.coordinated(director) as handle:
        outputs = sorted(bench.numbers(6).coalesced(2).through(handle, Gathering).collect())
    assert [(subtask, received) for subtask, _, received, _ in outputs] == [(0, ["hello"]), (1, ["hello"])]
    assert sorted(row for *_, rows in outputs for row in rows) == list(range(6))
    assert sorted(director.named("ready", "failed", "reset")) == [("ready", 0, 0), ("ready", 1, 0)]


def test_cached_partitions_are_lost_and_recomputed(bench: Bench) -> None:
    """H55: no run while everything is cached; then only the subtasks whose partitions were lost."""
    director = Director("hello", "stop")
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(director, SLOTS) as handle:
        cached = bench.numbers(SLOTS).through(handle, Gathering).cached()
        before = sorted(cached.collect())
        first = {s: heard.start_of(director.task_of((s, 0))) for s in range(SLOTS)}
        assert sorted(cached.collect()) == before
        assert ("reset_to_checkpoint", -1, None) not in director.story
        lost = [s for s, start in first.items() if start.host == first[0].host]
        kill_the_executor(bench, first[0].host)
        heard.wait_for(ExecutorLost)
        after = sorted(cached.collect())
        cached.uncache()
    bench.wait_for_executors()
    assert before == [(s, 0, ["hello"], [s]) for s in range(SLOTS)]
    assert after == [(s, 1 if s in lost else 0, ["hello"], [s]) for s in range(SLOTS)]
    story = director.named("ready", "failed", "reset", "reset_to_checkpoint", "run_ended")
    at = story.index(("reset_to_checkpoint", -1, None))
    assert sorted(story[:at]) == [*(("ready", s, 0) for s in range(SLOTS)), ("run_ended", True)]
    assert sorted(story[at + 1 :]) == [*(("ready", s, 1) for s in lost), ("run_ended", True)]


@pytest.mark.parametrize("kept_in", ["the cache", "shuffle files"])
def test_splits_of_kept_partitions_are_not_handed_out_again(bench: Bench, tmp_path: Path, kept_in: str) -> None:
    """H55, H56: Spark recomputes the lost half in a separate run, next to the half that it has kept."""
    splits = range(12)
    source = NotingSource(splits)
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(source, SLOTS) as handle:
        rows = bench.numbers(SLOTS).through(handle, GatedReader, tmp_path)
        kept = rows.cached() if kept_in == "the cache" else rows.shuffled(2, lambda row: row[0])
        action = bench.start_collecting(kept)
        source.wait_until_read((subtask, 0) for subtask in range(SLOTS))
        open_gates(tmp_path, range(SLOTS))
        before = sorted(action.result())
        kill_the_executor(bench, heard.start_of(source.tasks[0, 0]).host)
        heard.wait_for(ExecutorLost)
        after = sorted(kept.collect())
        kept.uncache()
    bench.wait_for_executors()
    assert len({life for life in source.tasks if life[1] == 1}) == 2, "only the lost half ran again"
    assert after == before == rows_of(splits)


# --- adaptive execution (row 10) ------------------------------------------------------------------------------------


class ArrowSquares(SplitReader):
    """Yields the square of each split as an Arrow batch."""

    def read_split(self, split: int) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"square": [split * split]})


class Squares(SourceCoordinator):
    """Records every subtask that it has met."""

    def __init__(self) -> None:
        super().__init__(lambda state: StaticSplitEnumerator(range(10), state))
        self.ready: set[int] = set()

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        self.ready.add(subtask)
        await super().subtask_ready(subtask, gateway)


@contextmanager
def settings(spark: SparkSession, **values: str) -> Iterator[None]:
    """Apply settings of Spark SQL within the block, ``_`` for ``.`` in their names."""
    before = {key: spark.conf.get(key.replace("_", ".")) for key in values}
    for key, value in values.items():
        spark.conf.set(key.replace("_", "."), value)
    try:
        yield
    finally:
        for key, old in before.items():
            spark.conf.set(key.replace("_", "."), str(old))


def shuffled_frame(bench: Bench) -> DataFrame:
    """Ten small groups: adaptive execution combines them into one partition, whatever the shuffle has."""
    return bench.spark.range(100).selectExpr("id % 10 as key").groupBy("key").count()


def squares_over(frame: DataFrame, handle: OperatorHandle) -> Callable[[], list[int]]:
    """An action over the operator's tasks that returns what they have read, in order."""
    rows = frame.mapInArrow(handle.subtask(ArrowSquares), "square long")
    return lambda: sorted(row.square for row in rows.collect())


ALL_SQUARES = [n * n for n in range(10)]


@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_adaptive_execution_chooses_the_number_of_partitions(bench: Bench, adaptive: str) -> None:
    """H10: only that many of a split reader's subtasks begin, and they read all splits, where that is allowed."""
    squares = Squares()
    with settings(bench.spark, spark_sql_adaptive_enabled=adaptive, spark_sql_shuffle_partitions="4"):
        with bench.coordinated(squares, 4, allow_fewer=True) as handle:
            assert squares_over(shuffled_frame(bench), handle)() == ALL_SQUARES
    assert squares.ready == ({0} if adaptive == "true" else {0, 1, 2, 3})


def test_fewer_partitions_that_adaptive_execution_makes_are_refused_with_every_way_out(bench: Bench) -> None:
    """H58: ``repartition`` before the subtask fixes the number."""
    squares = Squares()
    with settings(bench.spark, spark_sql_adaptive_enabled="true", spark_sql_shuffle_partitions="4"):
        with bench.coordinated(squares, 4) as handle:
            frame = shuffled_frame(bench)
            text = what_the_user_reads(squares_over(frame, handle))
            assert squares_over(frame.repartition(4), handle)() == ALL_SQUARES
    assert "only 1 partition" in text
    assert "repartition(4)" in text
    assert "allow_fewer=True" in text


def test_more_partitions_than_adaptive_execution_had_are_refused_with_the_fix(bench: Bench) -> None:
    """H10: one while the data is small, four later; ``repartition`` before the subtask fixes the number."""
    squares = Squares()
    with settings(bench.spark, spark_sql_adaptive_enabled="false", spark_sql_shuffle_partitions="4"):
        with bench.coordinated(squares, 1) as handle:
            frame = shuffled_frame(bench)
            text = what_the_user_reads(squares_over(frame, handle))
            assert squares_over(frame.repartition(1), handle)() == ALL_SQUARES
    assert "SUBTASK_OUT_OF_RANGE" in text
    assert "needs parallelism=4" in text
    assert "repartition(1)" in text
    assert squares.ready == {0}


def test_adaptive_execution_leaves_repartition_alone(bench: Bench) -> None:
    """H10: also if partitions are empty: each has its subtask."""
    squares = Squares()
    with settings(bench.spark, spark_sql_adaptive_enabled="true"):
        with bench.listening() as heard, bench.coordinated(squares, 3) as handle:
            frame = shuffled_frame(bench).filter("key < 1").repartition(3)
            assert squares_over(frame, handle)() == ALL_SQUARES
            stages = {start.stage_id for start in heard.of(TaskStarted)}
    assert len(stages) > 1
    assert squares.ready == {0, 1, 2}
