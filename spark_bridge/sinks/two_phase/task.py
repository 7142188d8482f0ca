# SPDX-License-Identifier: Apache-2.0

"""An operator that writes every record of its partition to a sink, exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from protocol.arguments import checked
from spark_bridge.sinks.two_phase.parts import prepared_events
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseSink, TwoPhaseWriter
from spark_bridge.subtask.operator import SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext


class TwoPhaseSinkOperator(SubtaskOperator):
    """Writes each record to ``sink``. Needs a ``TwoPhaseSinkCoordinator`` with the same sink, in streaming mode.

    It yields no outputs. Override ``encode`` to change records before they are written.

    A retried attempt, and a run after an interrupted one, continue from the position in the restored checkpoint. By
    default, the position is the number of records written, and that many are skipped. This is correct as long as Spark
    computes the same records in the same order again. A run with other input, such as the next day's or the next
    micro-batch, begins at its first record, and so does a stage after a source in a ``chain``: nothing is skipped if
    ``context.input_begins_again`` is False. For another kind of position, override ``snapshot_position`` and
    ``restore_position`` together, and ``process`` if it does not read Spark's records.
    """

    @checked()
    def __init__(self, sink: TwoPhaseSink[Any]) -> None:
        self.sink = sink
        self.context: SubtaskContext
        self._names: SinkWriterContext
        self.writer: TwoPhaseWriter[Any] | None = None
        self.records_written = 0
        """The number of records of this input written, including those before the restored position."""

    def encode(self, record: Any) -> Any:
        """Return what the sink's writer gets for a record; by default the record itself."""
        return record

    def snapshot_position(self) -> bytes:
        """Return what ``restore_position`` needs to continue after the last record that was written."""
        # The parallelism is for earlier releases, which need it to restore the position.
        return json.dumps({"records": self.records_written, "parallelism": self.context.parallelism}).encode()

    @property
    def counts_records(self) -> bool:
        """See ``SubtaskOperator``: unless the position is of another kind."""
        return type(self).snapshot_position is TwoPhaseSinkOperator.snapshot_position

    def restore_position(self, position: bytes | None) -> None:
        """Return to ``position``; None is the beginning. ``self.context`` is already set.

        A position says nothing if ``self.context.input_begins_again`` is False: what comes is other input.
        """
        if position is not None and self.context.input_begins_again:
            self.records_written = json.loads(position)["records"]

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self._names = SinkWriterContext(
            self.sink.name or context.operator_id,
            context.subtask,
            context.attempt,
            context.checkpoint_id,
            context.parallelism,
        )
        self.writer = self.sink.writer(self._names)
        self.restore_position(state)

    def process(self, records: Iterator[Any]) -> None:
        for _ in islice(records, self.records_written):
            pass  # written before; a checkpoint in the meantime has the restored position
        for record in records:
            self.write(record)

    def write(self, record: Any) -> None:
        """Write one record; for your own ``process``."""
        assert self.writer is not None, "open comes first"
        self.writer.write(self.encode(record))
        self.records_written += 1

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        if type(self).snapshot_position is not TwoPhaseSinkOperator.snapshot_position:
            return super().merge_states(states)
        return next(iter(states.values()))  # only for other input: its position does not matter

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """Prepare, and send the list of what was prepared: inside the snapshot, so they are never separated (H31)."""
        assert self.writer is not None, "open comes first"
        committables = list(self.writer.prepare())
        self._names.prepared_for(checkpoint_id)
        for event in prepared_events(
            self._names.sink, self.sink.target, self._names.proof, checkpoint_id, committables, always=self.sink.atomic
        ):
            self.context.send_event(event)
        return self.snapshot_position()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
