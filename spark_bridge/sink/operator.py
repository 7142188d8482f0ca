# SPDX-License-Identifier: Apache-2.0

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
    """Writes each record as one line of a file. Needs a ``FileSinkCoordinator`` with the same ``url`` and ``name``.

    ``url`` is an absolute path or a URL. ``settings`` are those of ``SinkWriter``: ``prefix``, ``suffix``,
    ``roll_bytes`` and ``options``. The operator must be in streaming mode. It yields no outputs. In a streaming query,
    each micro-batch starts with its first record: pass ``batch_id``, so that positions count within that batch.

    Override ``encode`` for records that are not lines. A retried attempt continues from the position in the restored
    checkpoint. By default, the position is the number of records written, and that many are skipped. This is correct
    as long as Spark computes the same records in the same order again. For another kind of position, override
    ``snapshot_position`` and ``restore_position`` together, and ``process`` if it does not read Spark's records.
    """

    def __init__(self, url: str, *, name: str | None = None, batch_id: int | None = None, **settings: Any) -> None:
        self._url = url
        self._name = name
        self._batch_id = batch_id
        self._settings = settings
        self.context: SubtaskContext
        self.writer: SinkWriter | None = None
        self.records_written = 0
        """The number of records written, including those before the restored position."""

    def encode(self, record: Any) -> bytes | str:
        """Return the row for a record: text, to which a line feed is added, or bytes, which are written unchanged."""
        if isinstance(record, str):
            return record
        if isinstance(record, bytes) and b"\n" not in record:
            return record + b"\n"
        raise TypeError(
            f"a {type(record).__name__} is not a line of text: override {type(self).__name__}.encode(self, record)"
        )

    def snapshot_position(self) -> bytes:
        """Return what ``restore_position`` needs to continue after the last record that was written."""
        position = {"records": self.records_written, "parallelism": self.context.parallelism, "batch": self._batch_id}
        return json.dumps(position).encode()

    def restore_position(self, position: bytes | None) -> None:
        """Return to ``position``; None is the beginning. ``self.context`` is already set.

        Raises:
            ValueError: the parallelism has changed since the position was taken.
        """
        restored = json.loads(position) if position is not None else None
        if restored is None or restored.get("batch") != self._batch_id:
            return
        if restored["parallelism"] != self.context.parallelism:
            raise ValueError(
                f"the checkpoint was taken with {restored['parallelism']} partitions, and now there are "
                f"{self.context.parallelism}, so the number of records written says nothing: keep the parallelism, or "
                "override snapshot_position and restore_position"
            )
        self.records_written = restored["records"]

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.writer = SinkWriter.for_subtask(context, self._url, name=self._name, **self._settings)
        self.restore_position(state)

    def process(self, records: Iterator[Any]) -> None:
        for _ in islice(records, self.records_written):
            pass  # written before; a checkpoint in the meantime has the restored position
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
