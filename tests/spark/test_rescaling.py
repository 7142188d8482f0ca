# SPDX-License-Identifier: Apache-2.0

"""Another parallelism while the application runs, on real Spark: nothing lost or doubled, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import (
    NO_RESTART,
    Autoscale,
    CheckpointConfig,
    Sidecar,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    chain,
)
from headgate.errors import CheckpointFailed, SidecarError
from headgate.sinks import FileSink
from spark_bridge.driver.handle import OperatorHandle
from tests.spark.actions import Action
from tests.spark.conftest import SparkOn
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.operators import kill_once
from tests.spark.test_checkpoints import ready

pytestmark = pytest.mark.spark

SPLITS, ROWS = 10, 50
CHANGES = (4, 8, 3, 5)


class Gated(SplitReader):
    """Reads the numbers of a split, as far as the test has opened them, and kills its process once for each part."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        for number in range(position or 0, ROWS):
            part = number * len(CHANGES) // ROWS
            while not (self._folder / f"open {part}").exists():
                yield None
            if number * len(CHANGES) % ROWS >= ROWS // 2 and split == min(part, 2):
                kill_once(self._folder / f"died in part {part}")
            yield number + 1, str(split * ROWS + number)


class Uncounted(Counting):
    """Its state says nothing about Spark's records."""

    counts_records = False


class Coordinator(CountingCoordinator):
    def forget(self) -> None:
        """Between two runs, from any thread."""
        self.story.clear()
        self.gateways.clear()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rescale(sidecar: Sidecar, handle: OperatorHandle, parallelism: int) -> None:
    """A task that dies while the checkpoint is taken fails it, and nothing changes."""
    before = handle.parallelism
    for _ in range(20):
        try:
            sidecar.rescale(handle.operator_id, parallelism)
        except CheckpointFailed:
            assert handle.parallelism == before
        else:
            return
    raise AssertionError("no checkpoint was completed twenty times")


@pytest.mark.long
def test_every_record_is_written_once_over_four_parallelisms_while_tasks_are_killed(
    spark_on: SparkOn, tmp_path: Path
) -> None:
    spark = spark_on("local[8,4]")
    out = tmp_path / "out"
    source = (
        SourceCoordinator(lambda state: StaticSplitEnumerator(range(SPLITS), state)),
        lambda: Gated(str(tmp_path)),
    )
    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "checkpoints"))) as sidecar:
        handle = sidecar.coordinate(
            "pipeline",
            chain(source=source, sink=FileSink(str(out))),
            parallelism=CHANGES[0],
            mode="streaming",
            checkpoint=CheckpointConfig(interval_s=0.2, tolerated_failures=1000),
        )
        action = Action(lambda: handle.run(restart=NO_RESTART))
        for part, parallelism in enumerate(CHANGES):
            began = time.monotonic()
            if part:
                rescale(sidecar, handle, parallelism)
                print(f"{CHANGES[part - 1]} -> {parallelism}: {time.monotonic() - began:.2f} s")
            assert handle.parallelism == parallelism
            until(lambda: handle.statistics()["ready"] >= handle.parallelism)
            print(f"all ready after {time.monotonic() - began:.2f} s")
            (tmp_path / f"open {part}").touch()
        action.result()
        assert sidecar.status().operators["pipeline"].parallelism == CHANGES[-1]
    lines = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
    assert sorted(map(int, lines)) == list(range(SPLITS * ROWS))
    assert list(tmp_path.glob("died*")), "no task was killed"


def test_a_run_that_cannot_go_on_is_not_stopped_and_the_next_one_has_the_new_parallelism(spark: SparkSession) -> None:
    """H174: its state counts the records of one partition; and nobody calls a plain action again."""
    coordinator = Coordinator()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, mode="streaming")
        rows = spark.sparkContext.parallelize(range(2), 2)

        def action() -> list[Any]:
            return sorted(rows.repartition(handle.parallelism).mapPartitions(handle.subtask(Counting)).collect())

        for run, problem in (
            (action, "run the action with sidecar.run"),
            (lambda: sidecar.run(action, restart=NO_RESTART), "Counting counts the records of 1 partitions"),
        ):
            coordinator.forget()
            running = Action(run)
            coordinator.wait_for(ready(1))
            with pytest.raises(SidecarError, match=problem):
                sidecar.rescale("op", 2)
            assert handle.parallelism == 1
            coordinator.stop_all()
            assert len(running.result()) == 1
        assert handle.statistics()["operator_resets"] == 1, "the second run, and nothing else"
        sidecar.rescale("op", 2)
        coordinator.forget()
        running = Action(lambda: sidecar.run(action, restart=NO_RESTART))
        coordinator.wait_for(ready(2))
        coordinator.stop_all()
        assert len(running.result()) == 2


def test_an_action_of_the_users_is_called_again_and_reads_the_new_parallelism(spark: SparkSession) -> None:
    coordinator = Coordinator()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, mode="streaming")
        called: list[int] = []

        def action() -> list[Any]:
            called.append(handle.parallelism)
            rows = spark.sparkContext.parallelize(range(2), handle.parallelism)
            return sorted(rows.mapPartitions(handle.subtask(Uncounted)).collect())

        running = Action(lambda: sidecar.run(action, restart=NO_RESTART))
        coordinator.wait_for(ready(1))
        sidecar.rescale("op", 2)
        coordinator.wait_for(ready(3))
        with pytest.raises(SidecarError, match=r"Define Uncounted\.merge_states, or keep the parallelism"):
            sidecar.rescale("op", 1)
        assert handle.parallelism == 2
        coordinator.stop_all()
        assert len(running.result()) == 2
    assert called == [1, 2]


class Counted(Gated):
    """Says how many numbers of a split are left."""

    def backlog(self, split: Any, position: Any) -> int | None:
        return ROWS - (position or 0)


class Pending(StaticSplitEnumerator):
    @property
    def pending_backlog(self) -> int:
        return ROWS * self.pending_count


def test_an_operator_grows_with_its_backlog_by_itself_and_writes_each_record_once(
    spark_on: SparkOn, tmp_path: Path
) -> None:  # H199
    spark = spark_on("local[4,4]")
    out = tmp_path / "out"
    (tmp_path / "died in part 0").touch()
    source = (SourceCoordinator(lambda state: Pending(range(SPLITS), state)), lambda: Counted(str(tmp_path)))
    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "checkpoints"))) as sidecar:
        handle = sidecar.coordinate(
            "pipeline",
            chain(source=source, sink=FileSink(str(out))),
            parallelism=2,
            mode="streaming",
            # All that is left is enough for ten subtasks, and Spark has four cores.
            autoscale=Autoscale(2, 8, backlog_per_subtask=ROWS, up_after_s=1, down_after_s=3600, pause_s=3600),
        )
        action = Action(lambda: handle.run(restart=NO_RESTART))
        until(lambda: handle.parallelism == 4)
        until(lambda: handle.statistics()["ready"] >= 4)
        status = sidecar.status().operators["pipeline"].autoscale
        assert status is not None
        assert status.last_change is not None
        assert (status.last_change.before, status.last_change.parallelism) == (2, 4)
        assert f"{SPLITS * ROWS} left to read" in status.last_change.why
        for part in range(len(CHANGES)):
            (tmp_path / f"died in part {part}").touch()
            (tmp_path / f"open {part}").touch()
        action.result()
        assert handle.parallelism == 4
    lines = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
    assert sorted(map(int, lines)) == list(range(SPLITS * ROWS))
