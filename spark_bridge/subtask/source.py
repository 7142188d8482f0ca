# SPDX-License-Identifier: Apache-2.0

"""An operator that reads the splits which a ``SourceCoordinator`` on the driver assigns to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from protocol.source_events import NoMoreSplits, SplitsAdded, parse_source_event, split_request_event
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator
from spark_bridge.subtask.operator import SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["SplitReader"]


class SplitReader(SubtaskOperator):
    """Requests a split whenever it has none, reads it, and ends when the coordinator has no more.

    Override ``read_split``, and ``finish`` and ``handle_source_event`` if needed. The records that Spark passes to the
    task are ignored. For streaming, also override ``snapshot_state`` and ``open``: only the reader knows its position
    inside a split, so by default it declines checkpoints. A subclass need not call ``super().__init__()``.

    Attributes:
        context: the ``SubtaskContext``, kept by ``open``.
        splits: the splits that are assigned and not yet begun, in order.
    """

    context: SubtaskContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set the fields here, so that they exist whatever ``__init__`` a subclass defines."""
        reader = super().__new__(cls)
        reader.splits = deque()
        reader._no_more = False
        reader._requested = False
        return reader

    def __init__(self) -> None:
        self.splits: deque[Any]
        self._no_more: bool
        self._requested: bool

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def read_split(self, split: Any, /) -> Iterable[Any] | None:
        """Read one split and yield its outputs. None means that there are no outputs. Events are handled after each."""
        raise TypeError(f"{type(self).__name__} must define read_split(self, split)")

    def finish(self) -> Iterable[Any] | None:
        """Return further outputs after the last split; None for none."""
        return None

    def handle_source_event(self, event: Any) -> None:
        """Handle an event that the split enumerator sent with ``send_event``. The default drops it."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        if not hasattr(self, "context"):
            name = type(self).__name__
            raise TypeError(f"{name}.open() has not kept its context: call super().open(context, state) in it")
        while True:
            while self.splits:
                yield from self.read_split(self.splits.popleft()) or ()
                self.context.handle_pending()
            if self._no_more:
                break
            if not self._requested:
                self._requested = True
                self.context.send_event(split_request_event())
            self.context.wait_for_event()
        yield from self.finish() or ()

    def handle_event(self, event: Any) -> None:
        match parse_source_event(event):
            case SplitsAdded(splits):
                self.splits.extend(splits)
                self._requested = False
            case NoMoreSplits():
                self._no_more = True
            case _:
                self.handle_source_event(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        raise CheckpointDeclinedByOperator(
            f"{type(self).__name__} keeps no state: override snapshot_state() and open() to take part in checkpoints"
        )

    def final_state(self) -> bytes:
        return b""
