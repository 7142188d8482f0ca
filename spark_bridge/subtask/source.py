# SPDX-License-Identifier: Apache-2.0

"""An operator that reads the splits which a ``SourceCoordinator`` on the driver assigns to it.

Its snapshot is the splits in hand, each with its position. What the coordinator has assigned later than a checkpoint is
in no snapshot of it, and comes back to the enumerator in a reset to that checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from protocol.errors import GatewayFull, LocalProtocolError
from protocol.source_events import (
    REPORTED_MAX,
    ForgetSplits,
    NoMoreSplits,
    SplitAt,
    SplitsAdded,
    backlog_event,
    parse_source_event,
    split_from_value,
    split_request_event,
    split_to_value,
)
from protocol.wire.state import decode_entry, decode_state, encode_state, is_state_of
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator
from spark_bridge.subtask.operator import PAUSE, SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["SplitReader"]

STATE = "a split reader"
OLD_STATE = b"\xc1headgate-splits-1"
"""How states began when all splits were one encoded event, which followed this."""
BACKLOG_EVERY_S = 1.0
_END: Any = object()


class SplitReader(SubtaskOperator[list[Any], list[Any]]):
    """Requests a split whenever it has none, reads it, and ends when the coordinator has no more.

    Override ``read_from``, which says its position with each output, or ``read_split``, which has none; and ``finish``,
    ``backlog`` and ``handle_source_event`` if needed. The records that Spark passes to the task are ignored. A subclass
    need not call ``super().__init__()``.

    A reader takes part in checkpoints automatically. With ``read_from``, a checkpoint is taken after any output, and a
    restored reader continues after the last one. With ``read_split``, a split is read either completely or not at all:
    a checkpoint waits for the end of the split that is being read, and is declined if ``read_split`` waits for an event
    meanwhile. Splits that a checkpoint holds for a reader stay with its subtask; what was assigned later goes back to
    the enumerator, from the position with which it was assigned.

    A subclass with further state overrides ``snapshot_state`` and ``open``, and includes what
    ``super().snapshot_state(checkpoint_id)`` returns, which ``super().open(context, state)`` restores. One that
    overrides ``snapshot_state`` without that keeps its splits itself.

    Attributes:
        context: the ``SubtaskContext``, kept by ``open``.
        splits: the splits that are assigned and not yet begun, in order. One that does not begin at its beginning is a
            ``SplitAt``, a split with its position.
        splits_open_max: how many splits are read at the same time, in turns, one output each. More than one is for
            unbounded splits, such as the partitions of a log. Only with ``read_from``.
        idle_wait_s: how long, in seconds, the reader waits for events before it looks again, if all its open splits
            have nothing.
        rate_limit_per_s: how much all tasks together may yield in a second, in units of ``weight``; each has an equal
            share. None for no limit.
    """

    goes_on_after_restore = True
    counts_records = False
    splits_open_max: int = 1
    idle_wait_s: float = 0.1
    rate_limit_per_s: float | None = None

    context: SubtaskContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set the fields here, so that they exist whatever ``__init__`` a subclass defines."""
        reader = super().__new__(cls)
        reader.splits = deque()
        reader.announced = None
        reader._open = []
        reader._no_more = False
        reader._requested = False
        reader._free_at = reader._backlog_due_at = 0.0
        reader._backlog_is_known = False
        reader._reports_backlog = cls.backlog is not SplitReader.backlog
        reader._has_positions = cls.read_from is not SplitReader.read_from
        if reader._has_positions:
            reader.snapshot_anywhere = True
        return reader

    def __init__(self) -> None:
        self.splits: deque[Any]
        self.announced: Any
        """An event to the split enumerator that precedes everything else; None for none."""
        self._open: list[_Reading]
        self._no_more: bool
        self._requested: bool
        self._free_at: float
        self._backlog_due_at: float
        self._backlog_is_known: bool  # to the coordinator, and not 0 splits
        self._reports_backlog: bool
        self._has_positions: bool

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        if not state:
            return
        if is_reader_state(state):
            self.splits.extend(map(split_from_value, _values_of(state)))
        elif type(self).snapshot_state is SplitReader.snapshot_state:
            raise LocalProtocolError(
                "the checkpoint has a state of this subtask that was not made by a SplitReader: restore it with the "
                f"operator that took it, or override snapshot_state() and open() in {type(self).__name__}"
            )

    # --- what a reader defines ------------------------------------------------------------------------------------

    def read_split(self, split: Any, /) -> Iterable[Any] | None:
        """Read one split and yield its outputs. None means that there are no outputs. Events are handled after each.

        A reader without positions overrides this.
        """
        raise TypeError(
            f"{type(self).__name__} must define read_from(self, split, position) or read_split(self, split)"
        )

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        """Read one split from ``position`` on; yield pairs ``(position, output)``, or None if there is nothing now.

        A position is any value that an event can have, and says where to continue after its output. ``position`` is
        None at the beginning of the split. The iterator ends with the split; that of an unbounded split never does. It
        is closed when the task ends.
        """
        raise TypeError(f"{type(self).__name__} must define read_from(self, split, position)")

    def finish(self) -> Iterable[Any] | None:
        """Return further outputs after the last split; None for none."""
        return None

    def weight(self, output: Any) -> float:
        """How much of ``rate_limit_per_s`` an output takes: 1 by default."""
        return 1.0

    def backlog(self, split: Any, position: Any) -> int | None:
        """Return how much is left to read in a split from ``position`` on, in your own units; None if unknown.

        Called about once a second, between outputs, for each open split and for each that the task has not begun,
        whose position is None or the one at which it is to begin. ``SourceCoordinator.backlogs`` has what was reported,
        and the status of the sidecar the sum over all tasks.
        """
        return None

    def _reported(self, split: Any) -> Any:
        """What the report of the backlog has for a split: the split itself, if it is not large."""
        return split

    def handle_source_event(self, event: Any) -> None:
        """Handle an event that the split enumerator sent with ``send_event``. The default drops it."""

    # --- reading --------------------------------------------------------------------------------------------------

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        if not hasattr(self, "context"):
            name = type(self).__name__
            raise TypeError(f"{name}.open() did not store its context: call super().open(context, state) in it")
        if self.announced is not None:
            self.context.send_event(self.announced)
        try:
            while self._begin_splits():
                yield from self._one_turn()
        finally:
            for reading in self._open:
                reading.close()
        yield from _all_of(self.finish())

    def _begin_splits(self) -> bool:
        """Begin as many splits as may be open, and wait while there is none. False after the last one has ended."""
        while True:
            while self.splits and len(self._open) < self.splits_open_max:
                self._open.append(self._begin(self.splits.popleft()))
            wants = len(self._open) < self.splits_open_max and not self._no_more
            if wants and not self._requested:
                self._requested = True
                self.context.send_event(split_request_event())
            if self._open or (self._no_more and not self.splits):
                return bool(self._open)
            if self._backlog_is_known:
                self._send_backlog()
            if self.context._fed_has_results is not None:
                return True  # the turn without a split is idle
            self.context.wait_for_event()

    def _begin(self, assigned: Any) -> _Reading:
        at = assigned if isinstance(assigned, SplitAt) else SplitAt(assigned, None)
        if self._has_positions:
            return _Reading(at.split, at.position, iter(self.read_from(at.split, at.position)))
        if at.position is not None:
            raise TypeError(
                f"{type(self).__name__} was assigned a split from a position on, but has no positions: define "
                "read_from(self, split, position)"
            )
        outputs = ((None, output) for output in _all_of(self.read_split(at.split)))
        return _Reading(at.split, None, outputs)

    def _one_turn(self) -> Iterator[Any]:
        """Yield an output of each open split that has one; wait for events if none has."""
        idle = True
        for reading in tuple(self._open):
            item: Any = next(reading.outputs, _END)
            if item is None:
                continue
            idle = False
            if item is _END:
                self._open.remove(reading)
                self.context.handle_pending()
                continue
            reading.position, output = item  # from here on, a snapshot has this output
            yield output
            if self.rate_limit_per_s is not None:
                yield from self._pace(self.rate_limit_per_s, self.weight(output))
        if self._reports_backlog:
            self._report_backlog()
        if idle:
            self.context.wait_for_event(timeout_s=self.idle_wait_s)
            if self.context._fed_has_results is not None:  # after the wait: events that come now begin the next turn
                yield PAUSE

    def _pace(self, limit_per_s: float, weight: float) -> Iterator[Any]:
        """Wait until this task's share of the rate allows the next output. An unused share is lost."""
        now = self.context.now()
        self._free_at = max(self._free_at, now) + weight * self.context.parallelism / limit_per_s
        while (left_s := self._free_at - self.context.now()) > 0:
            if self.context._fed_has_results is None:
                self.context.wait_for_event(timeout_s=left_s)
            else:
                self.context.wait_for_event(timeout_s=min(left_s, self.idle_wait_s))
                yield PAUSE

    def _report_backlog(self) -> None:
        now = self.context.now()
        if now < self._backlog_due_at:
            return
        self._backlog_due_at = now + BACKLOG_EVERY_S
        self._send_backlog()

    def _send_backlog(self) -> None:
        waiting = (one if isinstance(one, SplitAt) else SplitAt(one, None) for one in self.splits)
        in_hand = [*((one.split, one.position) for one in self._open), *((one.split, one.position) for one in waiting)]
        amounts = [(split, self.backlog(split, position)) for split, position in in_hand]
        known = [(self._reported(split), left) for split, left in amounts if left is not None]
        if len(known) > REPORTED_MAX:
            rest = known[REPORTED_MAX:]
            known[REPORTED_MAX:] = [(f"{len(rest)} more splits", sum(left for _, left in rest))]
        if not known and not self._backlog_is_known:
            return
        with suppress(GatewayFull):  # the next report replaces this one
            self.context.send_event_nowait(backlog_event(known))
            self._backlog_is_known = bool(known)

    # --- the framework's side -------------------------------------------------------------------------------------

    def handle_event(self, event: Any) -> None:
        match parse_source_event(event):
            case SplitsAdded(splits):
                self.splits.extend(splits)
                self._requested = False
            case NoMoreSplits():
                self._no_more = True
            case ForgetSplits():  # before anything is read
                if not self.context.input_begins_again:
                    self.splits.clear()
            case _:
                self.handle_source_event(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if self._open and not self._has_positions:
            raise CheckpointDeclinedByOperator(
                f"{type(self).__name__} waits for an event inside read_split(), and has no position there: define "
                "read_from(self, split, position) to take part in checkpoints inside a split"
            )
        in_hand = [SplitAt(one.split, one.position) for one in self._open]
        return encode_state(STATE, {"splits": [split_to_value(split) for split in (*in_hand, *self.splits)]})

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        if not all(not state or is_reader_state(state) for state in states.values()):
            return super().merge_states(states)
        splits: list[Any] = []
        for state in states.values():
            splits += _values_of(state) if state else []
        return encode_state(STATE, {"splits": splits})

    def final_state(self) -> bytes:
        return b""


def is_reader_state(state: bytes) -> bool:
    """Whether a ``SplitReader`` itself made the state, and not a subclass with another state."""
    return state.startswith(OLD_STATE) or is_state_of(STATE, state)


def _values_of(state: bytes) -> list[Any]:
    values: list[Any]
    if state.startswith(OLD_STATE):
        values = decode_entry(state[len(OLD_STATE) :])
    else:
        values = decode_state(STATE, state)["splits"]
    return values


def _all_of(outputs: Iterable[Any] | None) -> Iterable[Any]:
    """What there is to yield. Asks nothing of a user's value: an array of several rows is neither true nor false."""
    return () if outputs is None else outputs


class _Reading:
    """A split that is being read, and the position after its last output."""

    __slots__ = ("outputs", "position", "split")

    def __init__(self, split: Any, position: Any, outputs: Iterator[Any]) -> None:
        self.split = split
        self.position = position
        self.outputs = outputs

    def close(self) -> None:
        close = getattr(self.outputs, "close", None)
        if close is not None:
            close()
