# SPDX-License-Identifier: Apache-2.0

"""A streaming query whose micro-batches write lines through the sink, and the controls that tests use on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from actors.coordination import CoordinatorContext
from protocol.attempts import FailureReason
from protocol.barrier_tracker import CheckpointConfig
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import SinkCommits
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from spark_bridge.storage import CheckpointStorage
from tests.spark.recorder import Recorder

OPERATOR_ID = "lines"
ROWS = 6
TOLERANT = CheckpointConfig(tolerated_failures=100)


class Lines(TwoPhaseSinkOperator):
    """Writes each record and tells the coordinator. Files control what it does partway through a batch.

    ``raise-BATCH-SUBTASK``: raise in the middle of the batch. ``wait-BATCH-SUBTASK``: create the file ``waiting-...``
    to report the position, and continue when the first file has been removed.
    """

    def __init__(self, folder: str, batch_id: int) -> None:
        super().__init__(FileSink(f"{folder}/out", suffix=".txt"))
        self._folder = Path(folder)
        self._batch = batch_id

    def process(self, records: Iterator[Any]) -> None:
        def watched() -> Iterator[Any]:
            for place, record in enumerate(records):
                if place == ROWS // 4:
                    self._in_the_middle()
                yield record

        super().process(watched())

    def _in_the_middle(self) -> None:
        place = f"{self._batch}-{self.context.subtask}"
        if (self._folder / f"raise-{place}").exists():
            raise ValueError(f"as it was told, in batch {self._batch}")
        while (self._folder / f"wait-{place}").exists():
            (self._folder / f"waiting-{place}").touch()
            self.context.handle_pending()

    def write(self, record: Any) -> None:
        super().write(record)
        self.context.send_event(["row", record])


class LinesCoordinator(Recorder):
    """Publishes the files and counts the rows; ``totals`` holds the count at each reset."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.totals: list[int] = []
        self.fail_at_row = ""
        self._cuts: dict[int, dict[int, int]] = {-1: {}}
        self._sink = SinkCommits(FileSink(str(folder / "out")))

    @property
    def rows(self) -> int:
        return sum(self.counts.values())

    @property
    def lifecycle(self) -> list[Any]:
        """The story without events, ids and attempts: subtasks become ready in no fixed order."""
        return [callback[0] for callback in self.story if callback[0] != "event"]

    async def start(self, context: CoordinatorContext) -> None:
        await super().start(context)
        await self._sink.start(context)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if not await self._sink.prepared(subtask, attempt, event):
            self.counts[subtask] = self.counts.get(subtask, 0) + 1
            if event[1] == self.fail_at_row:
                raise LookupError(f"the coordinator does not like {event[1]}")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await super().subtask_failed(subtask, attempt, reason)
        self._sink.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await super().subtask_reset(subtask, checkpoint_id)
        self.counts[subtask] = self._cuts[checkpoint_id].get(subtask, 0)
        await self._sink.subtask_reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        await super().checkpoint_coordinator(checkpoint_id)
        self._cuts[checkpoint_id] = dict(self.counts)
        return encode_event([self.counts, self._sink.snapshot(checkpoint_id)])

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await super().notify_checkpoint_complete(checkpoint_id)
        await self._sink.complete(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        counts, sink_state = ({}, None) if state is None else decode_event(state)
        self.counts, self._cuts[checkpoint_id] = dict(counts), dict(counts)
        self.totals.append(self.rows)
        self.record("reset_to_checkpoint", checkpoint_id)
        await self._sink.restore(checkpoint_id, sink_state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        self._sink.run_ended(succeeded)

    async def close(self) -> None:
        await super().close()
        await self._sink.close()


class Stream:
    """The query's input, its Spark checkpoint and its output, in one folder. Each file of the input is a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spark_checkpoint = folder / "spark"
        self._files = 0
        (folder / "in").mkdir(exist_ok=True)

    def feed(self, batches: int = 1) -> None:
        """Add more input, ``ROWS`` rows for each batch; the file source takes the oldest file first."""
        for batch_id in range(self._files, self._files + batches):
            whole = self.folder / f"{batch_id}.tmp"
            whole.write_text("".join(f"row {row}\n" for row in self.rows_of(batch_id)))
            os.utime(whole, (1_700_000_000 + batch_id,) * 2)
            whole.rename(self.folder / "in" / f"{batch_id}.txt")
        self._files += batches

    @staticmethod
    def rows_of(batch_id: int) -> list[str]:
        return [f"{batch_id}.{place}" for place in range(ROWS)]

    def expected(self) -> list[str]:
        """What a plain job over the whole input writes: the expected output."""
        return sorted(f"row {row}" for batch_id in range(self._files) for row in self.rows_of(batch_id))

    def written(self) -> list[str]:
        """What a reader of the output sees; a duplicated row appears twice."""
        files = [path for path in (self.folder / "out").glob("*.txt") if not path.name.startswith(".")]
        return sorted(line for path in files for line in path.read_text().splitlines())

    def noted_by_spark(self) -> list[int]:
        """The batches that Spark has recorded as ended."""
        return sorted(int(path.name) for path in (self.spark_checkpoint / "commits").glob("[0-9]*"))

    def tell(self, what: str, batch_id: int, subtask: int) -> Path:
        """Leave an instruction for the operator; return the path, to withdraw it."""
        path = self.folder / f"{what}-{batch_id}-{subtask}"
        path.touch()
        return path

    def labels(self) -> list[str]:
        """The names of the checkpoints in the storage, without the query's id."""
        infos = CheckpointStorage(self.folder / "storage").list(OPERATOR_ID)
        return [f"{(info.label or '').split(' of ')[0]} {(info.label or '').split(': ')[-1]}" for info in infos]

    def coordinate(self, sidecar: Sidecar, coordinator: LinesCoordinator, **options: Any) -> OperatorHandle:
        return sidecar.coordinate(
            OPERATOR_ID, coordinator, parallelism=2, mode=RestoreMode.STREAMING, checkpoint=TOLERANT, **options
        )

    def lines_of(self, handle: OperatorHandle) -> Callable[[DataFrame, int], None]:
        """The function of a batch: one action over the operator's tasks."""
        folder = str(self.folder)

        def write_lines(frame: DataFrame, batch_id: int) -> None:
            rows = frame.repartition(2).rdd.map(lambda row: row.value)
            rows.mapPartitions(handle.subtask(Lines, folder, batch_id)).count()

        return write_lines

    def start(self, spark: SparkSession, function: Callable[[DataFrame, int], object]) -> StreamingQuery:
        """Run the query from Spark's checkpoint to the end of the available input."""
        source = spark.readStream.option("maxFilesPerTrigger", 1).text(str(self.folder / "in"))
        writer = source.writeStream.foreachBatch(function)  # type: ignore[arg-type]
        return writer.option("checkpointLocation", str(self.spark_checkpoint)).trigger(availableNow=True).start()

    def run(self, spark: SparkSession, function: Callable[[DataFrame, int], object]) -> None:
        """Run it to its end; raise the error that fails it."""
        self.start(spark, function).awaitTermination()
