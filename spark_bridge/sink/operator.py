"""An operator that writes every record of its partition as one line, exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from spark_bridge.sink.writer import SinkWriter
from spark_bridge.subtask.operator import SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["FileSinkOperator"]


class FileSinkOperator(SubtaskOperator):
    """Beside a ``FileSinkCoordinator`` with the same ``url`` and ``name``, in streaming mode.

    ``settings`` are those of ``SinkWriter``: ``prefix``, ``suffix``, ``roll_bytes``, ``options``; ``url`` is an
    absolute path or a URL. It yields no outputs.

    In a streaming query each micro-batch begins with its first record: pass ``batch_id``, so that the position is one
    in that batch.

    Override ``encode`` for records that are not lines already. A retried attempt goes on where the restored checkpoint
    was: by default the position is how many records were written, and so many are passed over, which is right as long
    as Spark computes the same records in the same order again. Override ``snapshot_position`` and ``restore_position``
    together, and ``process`` if it reads something else than Spark's records, for a position of your own.
    """

    def __init__(self, url: str, *, name: str | None = None, batch_id: int | None = None, **settings: Any) -> None:
        self._url = url
        self._name = name
        self._batch_id = batch_id
        self._settings = settings
        self.context: SubtaskContext
        self.writer: SinkWriter | None = None
        self.records_written = 0
        """Those of the restored checkpoint included, if it is of this micro-batch."""

    def encode(self, record: Any) -> bytes | str:
        """One row of the file for a record: text, which is ended with a line feed here, or bytes as they are to be."""
        if isinstance(record, str):
            return record
        if isinstance(record, bytes) and b"\n" not in record:
            return record + b"\n"
        raise TypeError(
            f"a {type(record).__name__} is no line of a file: override {type(self).__name__}.encode(self, record)"
        )

    def snapshot_position(self) -> bytes:
        """What ``restore_position`` needs to go on behind the last record that was written."""
        position = {"records": self.records_written, "parallelism": self.context.parallelism, "batch": self._batch_id}
        return json.dumps(position).encode()

    def restore_position(self, position: bytes | None) -> None:
        """Go back to ``position``; None is the beginning. ``self.context`` is there already.

        Raises:
            ValueError: Spark's partitions are others than when the position was taken (H52).
        """
        restored = json.loads(position) if position is not None else None
        if restored is None or restored.get("batch") != self._batch_id:
            return
        if restored["parallelism"] != self.context.parallelism:
            raise ValueError(
                f"the checkpoint was taken with {restored['parallelism']} partitions and there are "
                f"{self.context.parallelism} now: a number of records means nothing in another partition; override "
                "snapshot_position and restore_position with a position that does, or keep the parallelism"
            )
        self.records_written = restored["records"]

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.writer = SinkWriter.for_subtask(context, self._url, name=self._name, **self._settings)
        self.restore_position(state)

    def process(self, records: Iterator[Any]) -> None:
        for _ in islice(records, self.records_written):
            pass  # written before; a checkpoint that comes meanwhile has the restored position
        for record in records:
            self.write(record)

    def write(self, record: Any) -> None:
        """Write one record; for a ``process`` of your own."""
        assert self.writer is not None, "open comes first"
        self.writer.write(self.encode(record))
        self.records_written += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        assert self.writer is not None, "open comes first"
        self.writer.send_sealed(self.context, checkpoint_id)
        return self.snapshot_position()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.abandon()
