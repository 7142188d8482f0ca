# SPDX-License-Identifier: Apache-2.0

"""The two-phase sink on real Spark: what Spark reads from the directory after each kind of failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from protocol.barrier_tracker import CheckpointConfig
from protocol.restart import FixedDelay
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import CoordinatorStartError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

pytestmark = pytest.mark.spark

OFTEN = CheckpointConfig(interval_s=0.05, tolerated_failures=1000)
RECORDS = 12
PARTITIONS = 2
ROWS = sorted(f"row {number}" for number in range(RECORDS))


class Troubled(TwoPhaseSinkOperator):
    """In its first attempt it waits halfway for a completed checkpoint, writes on, and then dies."""

    def __init__(self, url: str, folder: str, trouble: str) -> None:
        super().__init__(FileSink(url, suffix=".txt"))
        self._folder = folder
        self._trouble = trouble
        self._completed = False
        self._rows_here = 0

    def encode(self, record: Any) -> str:
        return f"row {record}"

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._completed = True

    def process(self, records: Iterator[Any]) -> None:
        def watched() -> Iterator[Any]:
            for record in records:
                yield record
                self._in_the_middle()

        super().process(watched())

    def _in_the_middle(self) -> None:
        self._rows_here += 1
        while self._rows_here == 2 and not self._completed:
            self.context.wait_for_event()
        if self._rows_here == 4:
            self._meet_trouble()

    def _meet_trouble(self) -> None:
        done = Path(self._folder, f"trouble {self.context.subtask}")
        if done.exists():
            return
        done.touch()
        match self._trouble:
            case "raise":
                raise ValueError("as it was told")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)


def write_all(
    spark: SparkSession, tmp_path: Path, trouble: str, coordinator: OperatorCoordinator, **config: Any
) -> Any:
    url = str(tmp_path / "out")
    with Sidecar(spark, SidecarConfig(**config)) as sidecar:
        handle = sidecar.coordinate(
            "out", coordinator, parallelism=PARTITIONS, mode=RestoreMode.STREAMING, checkpoint=OFTEN
        )
        rdd = spark.sparkContext.parallelize(range(RECORDS), PARTITIONS)
        task = handle.subtask(Troubled, url, str(tmp_path), trouble)
        assert (
            sidecar.run(lambda: rdd.mapPartitions(task).count(), restart=FixedDelay(3, delay_s=0.0), input_id="all")
            == 0
        )
        return handle.statistics()


def rows_that_spark_reads(spark: SparkSession, tmp_path: Path) -> list[str]:
    return sorted(row.value for row in spark.read.text(str(tmp_path / "out")).collect())


@pytest.mark.parametrize(
    "trouble", [pytest.param("none", marks=pytest.mark.long), pytest.param("raise", marks=pytest.mark.long), "die"]
)
def test_spark_reads_every_row_once_whatever_happens_to_the_tasks(
    spark: SparkSession, tmp_path: Path, trouble: str
) -> None:
    """H18, H31, H40, H47: rows after the restored checkpoint are written again; the final one commits the rest."""
    coordinator = TwoPhaseSinkCoordinator(FileSink(str(tmp_path / "out")))
    write_all(spark, tmp_path, trouble, coordinator)
    assert rows_that_spark_reads(spark, tmp_path) == ROWS
    assert all(path.name.startswith("published-") for path in (tmp_path / "out" / ".headgate-out").iterdir())
    assert coordinator.commits.pending == 0


def test_a_coordinator_that_fails_the_job_neither_loses_nor_repeats_a_row(spark: SparkSession, tmp_path: Path) -> None:
    """H7, H15: the whole job goes back to the last completed checkpoint, and the user's action runs again."""

    class FailsOnce(TwoPhaseSinkCoordinator):
        failed = False

        async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
            if self.commits.pending and not self.failed:
                self.failed = True
                raise LookupError("in the middle of publishing")
            await super().notify_checkpoint_complete(checkpoint_id)

    coordinator = FailsOnce(FileSink(str(tmp_path / "out")))
    write_all(spark, tmp_path, "none", coordinator)
    assert coordinator.failed
    assert rows_that_spark_reads(spark, tmp_path) == ROWS


def test_a_second_application_has_nothing_left_to_write(spark: SparkSession, tmp_path: Path) -> None:
    """H52, H174: it restores the final checkpoint, where every record of this input was written."""
    for _ in range(2):
        write_all(
            spark,
            tmp_path,
            "raise",
            TwoPhaseSinkCoordinator(FileSink(str(tmp_path / "out"))),
            storage=str(tmp_path / "kept"),
        )
        assert rows_that_spark_reads(spark, tmp_path) == ROWS


def test_batch_mode_is_refused_when_the_operator_is_coordinated(spark: SparkSession, tmp_path: Path) -> None:
    """H6."""
    with Sidecar(spark) as sidecar, pytest.raises(CoordinatorStartError, match="batch mode"):
        sidecar.coordinate("out", TwoPhaseSinkCoordinator(FileSink(str(tmp_path / "out"))), parallelism=2)
