# SPDX-License-Identifier: Apache-2.0

"""H71: leaving a sidecar raises if the last output is not committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from protocol.restart import NO_RESTART
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import OutputNotCommitted, RestartsExhausted
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskOperator
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import NewProgram
from tests.spark.counting import Counting
from tests.spark.faults.own_process import OPERATOR, attach, callbacks
from tests.spark.faults.waiting import wait_until

pytestmark = pytest.mark.spark


class Copying(SubtaskOperator):
    def process(self, records: Any) -> Any:
        yield from records


class Committing(OperatorCoordinator):
    """Loses the storage when its run has ended, or fails to commit a completed checkpoint."""

    def __init__(self, fault: str, storage: Path) -> None:
        self._fault = fault
        self._storage = storage

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        if self._fault == "storage":
            self._storage.rename(self._storage.with_name("gone"))
            self._storage.write_text("no directory any more")

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self._fault == "commit":
            raise OSError("cannot publish")

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass


FAULTS = pytest.mark.parametrize(("fault", "why"), [("storage", "checkpoint 1"), ("commit", "cannot publish")])


class Job:
    """A streaming operator whose last output cannot be committed."""

    def __init__(self, spark: SparkSession, tmp_path: Path, fault: str) -> None:
        self._spark = spark
        self._rdd = spark.sparkContext.parallelize([7], 1)
        storage = tmp_path / "checkpoints"
        storage.mkdir()
        self.config = SidecarConfig(storage=str(storage))
        self.coordinator = Committing(fault, storage)
        self.options: Any = {"parallelism": 1, "mode": RestoreMode.STREAMING}

    def run(self, handle: Any) -> list[Any]:
        return self._rdd.mapPartitions(handle.subtask(Copying)).collect()

    def whole(self, error: BaseException | None = None) -> list[Any]:
        """Run it in a separate sidecar, whose block ``error`` leaves."""
        with Sidecar(self._spark, self.config) as sidecar:
            result = self.run(sidecar.coordinate("op", self.coordinator, **self.options))
            if error is not None:
                raise error
        return result


@FAULTS
def test_leaving_raises_if_the_last_output_is_not_committed(
    spark: SparkSession, tmp_path: Path, fault: str, why: str
) -> None:  # H71
    job = Job(spark, tmp_path, fault)
    with pytest.raises(OutputNotCommitted, match=why):
        job.whole()


@FAULTS
def test_an_exception_that_leaves_the_block_gets_a_note(
    spark: SparkSession, tmp_path: Path, fault: str, why: str
) -> None:  # H71
    with pytest.raises(KeyError, match="mine") as raised:
        Job(spark, tmp_path, fault).whole(KeyError("mine"))
    (note,) = raised.value.__notes__
    assert note.startswith("OutputNotCommitted: ")
    assert why in note


@FAULTS
def test_what_run_has_raised_is_not_raised_again(spark: SparkSession, tmp_path: Path, fault: str, why: str) -> None:
    # H71
    job = Job(spark, tmp_path, fault)
    with Sidecar(spark, job.config) as sidecar:
        handle = sidecar.coordinate("op", job.coordinator, **job.options)
        with pytest.raises(RestartsExhausted, match=why):
            sidecar.run(lambda: job.run(handle), restart=NO_RESTART)


def test_leaving_an_attached_sidecar_raises_and_does_not_end_it(
    spark: SparkSession, program: NewProgram
) -> None:  # H71
    here = program("not_committing")

    def whole() -> None:
        with attach(spark, here) as sidecar:
            operator = sidecar.operator(OPERATOR)
            action = Action(one_task_each(spark, 2).mapPartitions(operator.subtask(Counting)).collect)
            wait_until(lambda: len(callbacks(sidecar, "ready")) == 2, "every subtask ready")
            sidecar.request(OPERATOR, "stop")
            action.result()

    with pytest.raises(OutputNotCommitted, match="cannot publish"):
        whole()
    assert here.terminate() == 0


def test_leaving_after_a_commit_that_went_well_raises_nothing(spark: SparkSession, tmp_path: Path) -> None:  # H71
    assert Job(spark, tmp_path, "none").whole() == [7]
