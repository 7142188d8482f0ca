# SPDX-License-Identifier: Apache-2.0

"""A driver that dies in the second batch of its query: ``python -m tests.spark.faults.streaming_program FOLDER WHEN``.

The folder is that of a ``Stream`` with its input. The moments are those of ``MOMENTS``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pyspark.sql import DataFrame

from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.conftest import start_spark
from tests.spark.faults.batches import ROWS, LinesCoordinator, Stream
from tests.spark.faults.waiting import wait_until

BEFORE_ANY = "before any checkpoint of it"
AFTER_ONE_IN_THE_MIDDLE = "after a checkpoint in the middle of it"
BEFORE_ITS_END_IS_TOLD = "after its final checkpoint, of which nobody is told"
BEFORE_SPARK_NOTES_IT = "after its final checkpoint, before Spark notes its end"
MOMENTS = (BEFORE_ANY, AFTER_ONE_IN_THE_MIDDLE, BEFORE_ITS_END_IS_TOLD, BEFORE_SPARK_NOTES_IT)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingCoordinator(LinesCoordinator):
    """Dies, if told so, when it is notified that the checkpoint after the second batch is complete."""

    def __init__(self, folder: Path, moment: str) -> None:
        super().__init__(folder)
        self._moment = moment

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self._moment == BEFORE_ITS_END_IS_TOLD and self.rows == 2 * ROWS:
            die()
        await super().notify_checkpoint_complete(checkpoint_id)


def main(folder: Path, moment: str) -> None:
    spark = start_spark("local[2]", spark_sql_codegen_wholeStage="false")  # compilation takes longer than the work
    stream = Stream(folder)
    if moment in (BEFORE_ANY, AFTER_ONE_IN_THE_MIDDLE):
        stream.tell("wait", 1, 0)
    with Sidecar(spark, SidecarConfig(storage=folder / "storage")) as sidecar:
        coordinator = DyingCoordinator(folder, moment)
        commit = sidecar.for_each_batch("lines", stream.lines_of(stream.coordinate(sidecar, coordinator)))

        def batch(frame: DataFrame, batch_id: int) -> None:
            commit(frame, batch_id)
            if batch_id == 1 and moment == BEFORE_SPARK_NOTES_IT:
                die()

        query = stream.start(spark, batch)
        if moment in (BEFORE_ANY, AFTER_ONE_IN_THE_MIDDLE):
            wait_until((folder / "waiting-1-0").exists, "the middle of the second batch")
            coordinator.wait_for(lambda story: len([callback for callback in story if callback[0] == "ready"]) == 4)
            if moment == AFTER_ONE_IN_THE_MIDDLE:
                sidecar.checkpoint()
            die()
        query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
