# SPDX-License-Identifier: Apache-2.0

"""One driver is attached to two sidecars in their own processes, and neither notices the death of the other.

Both have an operator of the same name, so nothing can be told apart by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from protocol.restart import FixedDelay
from spark_bridge.standalone.attached import AttachedSidecar
from tests.spark.actions import Action
from tests.spark.conftest import SparkOn
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, attach, callbacks
from tests.spark.faults.test_own_process import exchange, tasks, wait_until_ready
from tests.spark.faults.waiting import wait_until

pytestmark = pytest.mark.spark

NO_RESTART = FixedDelay(restarts_max=0)
LIFE = ("start", "ready", "failed", "reset", "reset_to_checkpoint", "run_ended")


class Served(NamedTuple):
    """A sidecar's process and the driver's half of it."""

    program: SidecarProgram
    sidecar: AttachedSidecar


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    """Two subtasks of each operator run at the same time."""
    return spark_on("local[4,3]")


@pytest.fixture
def two(spark: SparkSession, tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(served(spark, tmp_path / "first")),
            stack.enter_context(served(spark, tmp_path / "second")),
        )


@contextmanager
def served(spark: SparkSession, folder: Path, *more: str) -> Iterator[Served]:
    folder.mkdir()
    program = SidecarProgram(folder, "streaming", *more)
    program.start()
    try:
        with attach(spark, program) as sidecar:
            yield Served(program, sidecar)
    finally:
        program.kill()


def shuffled(spark: SparkSession, sidecar: AttachedSidecar, name: str) -> RDD[Any]:
    """The operator's tasks as a separate stage."""
    return tasks(spark, sidecar).map(lambda output: (name, output)).partitionBy(1)


def union(spark: SparkSession, first: Served, second: Served) -> RDD[Any]:
    """A job with a stage of each, which run at the same time."""
    return shuffled(spark, first.sidecar, "first").union(shuffled(spark, second.sidecar, "second"))


def one_dies_and_returns(dying: Served, staying: Served) -> None:
    """Both have run to 5 and taken a checkpoint. The one that dies loses what follows; the other one goes on to 8."""
    for _, sidecar in (dying, staying):
        wait_until_ready(sidecar)
        exchange(sidecar, 5, seen=5)
        sidecar.checkpoint()
    exchange(dying.sidecar, 3, seen=8)  # none of this remains

    dying.program.kill()
    exchange(staying.sidecar, 3, seen=8)
    staying.sidecar.checkpoint()
    dying.program.start()
    wait_until_ready(dying.sidecar)


def finish(dead: Served, stayed: Served) -> None:
    """Continue, the one from 5 and the other from 8, and let the tasks end."""
    exchange(dead.sidecar, 2, seen=7)
    exchange(stayed.sidecar, 4, seen=12)
    for _, sidecar in (dead, stayed):
        sidecar.request(OPERATOR, "stop")


def both_run(spark: SparkSession, first: Served, second: Served, restart: FixedDelay) -> Action:
    """Collect a job with a stage of each; ``restart`` is that of the outer ``run``."""
    job = union(spark, first, second)

    def with_second() -> list[Any]:
        return second.sidecar.run(job.collect, restart=NO_RESTART)

    return Action(lambda: first.sidecar.run(with_second, restart=restart, operators=[OPERATOR]))


def check_lives(dead: Served, stayed: Served) -> None:
    """The coordinator of the one was restored once and saw the run's end; for the other, nothing has happened."""
    for _, sidecar in (dead, stayed):
        assert sidecar.request(OPERATOR, "wrong") == []
        assert callbacks(sidecar, "run_ended") == [["run_ended", True]]
    assert [name for name, *_ in callbacks(dead.sidecar, "reset_to_checkpoint", "start")] == [
        "reset_to_checkpoint",
        "start",
    ]
    life = callbacks(stayed.sidecar, *LIFE)
    assert life[0] == ["start"]
    assert sorted(life[1:-1]) == [["ready", 0, 0], ["ready", 1, 0]]


def test_two_jobs_of_two_sidecars_survive_the_death_of_one(spark: SparkSession, two: tuple[Served, Served]) -> None:
    """H15, H52, H65: a job of each, at the same time."""
    first, second = two
    actions = [
        Action(lambda sidecar=sidecar: sidecar.run(tasks(spark, sidecar).collect, restart=NO_RESTART))  # type: ignore[misc]
        for _, sidecar in two
    ]
    one_dies_and_returns(dying=second, staying=first)
    finish(dead=second, stayed=first)
    assert [sorted(action.result()) for action in actions] == [[(0, 12), (1, 12)], [(0, 7), (1, 7)]]
    check_lives(dead=second, stayed=first)


def test_one_job_with_a_stage_in_each_of_two_sidecars_survives_the_death_of_one(
    spark: SparkSession, two: tuple[Served, Served]
) -> None:
    """H15, H52, H65: both stages run at the same time, and both runs have ended when the action returns."""
    first, second = two
    action = both_run(spark, first, second, restart=NO_RESTART)
    one_dies_and_returns(dying=first, staying=second)
    finish(dead=first, stayed=second)
    assert sorted(action.result()) == [*results("first", 7), *results("second", 12)]
    check_lives(dead=first, stayed=second)


def test_the_outer_run_restarts_a_failed_job_of_two_sidecars(spark: SparkSession, tmp_path: Path) -> None:
    """H15, H55, H65: each continues from its own last checkpoint, although only the inner one's process has died."""
    with (
        served(spark, tmp_path / "first") as first,
        served(spark, tmp_path / "second", "--takeover", "fail") as second,
    ):
        action = both_run(spark, first, second, restart=FixedDelay(restarts_max=1, delay_s=0.1))
        one_dies_and_returns(dying=second, staying=first)
        wait_until(lambda: {(0, 1), (1, 1)} <= ready(first), "the second attempt of both subtasks")
        finish(dead=second, stayed=first)
        assert sorted(action.result()) == [*results("first", 12), *results("second", 7)]
        assert ready(first) == {(0, 0), (1, 0), (0, 1), (1, 1)}
        for _, sidecar in (first, second):
            assert sidecar.request(OPERATOR, "wrong") == []
        assert callbacks(first.sidecar, "run_ended") == [["run_ended", False], ["run_ended", True]]


def ready(of: Served) -> set[tuple[int, int]]:
    """The subtasks, with their attempts, that its coordinator has had ready."""
    return {(subtask, attempt) for _, subtask, attempt in callbacks(of.sidecar, "ready")}


def results(name: str, last: int) -> list[tuple[str, tuple[int, int]]]:
    """What the stage of this name gives if both subtasks have come so far."""
    return [(name, (0, last)), (name, (1, last))]
