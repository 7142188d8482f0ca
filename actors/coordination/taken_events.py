# SPDX-License-Identifier: Apache-2.0

"""How many upward events of each attempt's history the coordinator has taken (H32)."""

from __future__ import annotations

from protocol.ids import ExecutionAttempt


class TakenEvents:
    """The coordinator's count of events and requests, which a checkpoint compares with the subtasks' own at the cut.

    An attempt's count goes on from what its restored checkpoint covers. It is kept when the attempt has finished,
    until that success is revoked or everything is reset. Loop only.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by task attempt id
        self._latest: dict[int, int] = {}  # by subtask: the attempt that last became ready or sent something
        self._handling: tuple[int, int] | None = None  # the sender and position of the current event
        self.handles_restored = False
        """Whether the current event or request was held in the checkpoint that was restored."""

    def begin(self, attempt: ExecutionAttempt, events_sent: int) -> None:
        """The attempt is ready; its history has ``events_sent`` events so far."""
        self._counts[attempt.task_attempt_id] = events_sent
        self._latest[attempt.subtask] = attempt.task_attempt_id

    def take(self, attempt: ExecutionAttempt, sender: int | None) -> None:
        """The coordinator takes one more event. ``sender``: the subtask that first sent it, if it was restored."""
        count = self._counts[attempt.task_attempt_id] = self._counts[attempt.task_attempt_id] + 1
        self._latest[attempt.subtask] = attempt.task_attempt_id
        self._handling = (attempt.subtask if sender is None else sender, count)
        self.handles_restored = sender is not None

    def taken(self) -> None:
        """The coordinator has handled the event."""
        self._handling, self.handles_restored = None, False

    def forget(self, attempt: ExecutionAttempt) -> None:
        """The attempt has failed, or its success was revoked."""
        self._counts.pop(attempt.task_attempt_id, None)

    def clear(self) -> None:
        """The whole operator is reset: forget all counts."""
        self._counts.clear()
        self._latest.clear()

    def position(self, subtask: int) -> int:
        """The position of the event of ``subtask`` that is being handled; otherwise of the last one taken."""
        if self._handling is not None and self._handling[0] == subtask:
            return self._handling[1]
        return self._counts.get(self._latest.get(subtask, -1), 0)

    def at_this_moment(self) -> dict[int, int]:
        """The counts by task attempt id."""
        return dict(self._counts)


__all__ = ["TakenEvents"]
