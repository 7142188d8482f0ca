# SPDX-License-Identifier: Apache-2.0

"""The task's half of the counters: adds up what the operator counts, and reports it now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex

from protocol.errors import GatewayFull, LocalProtocolError
from spark_bridge.primitives.counters.book import Book, added_up
from spark_bridge.subtask.operator import SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

REPORT_S = 0.5
"""How old a count may become on the driver while the task counts."""


class CountersPart(SubtaskOperator):
    """The counts of one attempt, which continue from those of the checkpoint that it restored."""

    waits_for_subtask_ready = False

    def __init__(self) -> None:
        self._book = Book()
        self._changed: set[str] = set()
        self._lock = threading.Lock()
        self._now: Callable[[], float]
        self._report_at = 0.0
        self._context: SubtaskContext | None = None
        self._is_filed = False
        """Whether nothing has changed since a report that belongs to a snapshot."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context
        self._now = context.now
        if state:
            self._book = Book.from_bytes(state)
            self._changed.update(self._book.counts, self._book.observed)
            self._report()

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return added_up(map(Book.from_bytes, states.values())).to_bytes()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """The report leaves after the snapshot and is part of it; the driver files it under the checkpoint.

        If nothing has changed, the one before it still holds. So what waits does not grow with overlapping checkpoints.
        """
        with self._lock:
            if self._book and not self._is_filed:
                self._is_filed = True
                self._changed.update(self._book.counts, self._book.observed)
                self._send(checkpoint_id)
            return self._book.to_bytes()

    def final_state(self) -> bytes:
        with self._lock:
            if self._changed:
                self._send(None)
            return self._book.to_bytes()

    # --- for the operator, on any thread of the task ---------------------------------------------------------------

    def count(self, name: str, by: SupportsIndex | SupportsFloat) -> None:
        with self._lock:
            self._book.count(name, by)
            self._is_filed = False
            self._changed.add(name)
            self._report_if_due()

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None:
        with self._lock:
            self._book.observe(name, value)
            self._is_filed = False
            self._changed.add(name)
            self._report_if_due()

    def _report_if_due(self) -> None:
        now = self._now()
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report()

    def _report(self) -> None:
        """Report what has changed, if there is capacity. Otherwise a later report will."""
        assert self._context is not None
        try:
            self._context.send_event_nowait(self._event(None))
        except (GatewayFull, LocalProtocolError):
            return
        self._changed.clear()

    def _send(self, checkpoint_id: int | None) -> None:
        assert self._context is not None
        self._context.send_event(self._event(checkpoint_id))
        self._changed.clear()

    def _event(self, checkpoint_id: int | None) -> list[object]:
        changed = Book()
        changed.counts = {name: count for name, count in self._book.counts.items() if name in self._changed}
        changed.observed = {name: seen for name, seen in self._book.observed.items() if name in self._changed}
        return [checkpoint_id, changed.as_value()]
