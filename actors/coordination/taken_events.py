# SPDX-License-Identifier: Apache-2.0

"""How many upward events of each attempt's history the coordinator has taken (H32), and what it records (H79)."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.wire.messages import HeldEvent


@dataclass(slots=True)
class Recording:
    """What was taken since the cut of one checkpoint, by task attempt id. ``attempts``: those known at the cut."""

    attempts: frozenset[int]
    events: dict[int, list[HeldEvent]] = field(default_factory=dict)


class TakenEvents:
    """The coordinator's count of events and requests, which a checkpoint compares with the subtasks' own at the cut.

    An attempt's count continues from what its restored checkpoint covers. It is kept when the attempt has finished,
    until that success is revoked or everything is reset.

    From ``record`` until ``collect`` or ``drop``, a checkpoint records what is taken. Each event names the last
    checkpoint whose snapshot its subtask had taken when it sent it: it belongs to the recordings of later ones only, so
    a subtask that has its snapshot makes none of them grow. The gateways bound the rest. Loop only.
    """

    def __init__(self) -> None:
        self._recordings: dict[int, Recording] = {}  # by checkpoint, ascending
        self._counts: dict[int, int] = {}  # by task attempt id
        self._latest: dict[int, int] = {}  # by subtask: the attempt that last became ready or sent something
        self._handling: tuple[int, int] | None = None  # the sender and position of the current event
        self.handles_restored = False
        """Whether the current event or request was held in the checkpoint that was restored."""

    def begin(self, attempt: ExecutionAttempt, events_sent: int) -> None:
        """The attempt is ready; its history has ``events_sent`` events so far."""
        self._counts[attempt.task_attempt_id] = events_sent
        self._latest[attempt.subtask] = attempt.task_attempt_id

    def take(
        self,
        attempt: ExecutionAttempt,
        sender: int | None,
        payload: bytes = b"",
        *,
        is_request: bool = False,
        after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT,
    ) -> None:
        """The coordinator takes one more event. ``sender``: the subtask that first sent it, if it was restored."""
        task = attempt.task_attempt_id
        count = self._counts[task] = self._counts[task] + 1
        self._latest[attempt.subtask] = task
        first_sender = attempt.subtask if sender is None else sender
        self._handling = (first_sender, count)
        self.handles_restored = sender is not None
        for checkpoint_id, recording in self._recordings.items():
            if checkpoint_id > after_snapshot and task in recording.attempts:
                recording.events.setdefault(task, []).append(HeldEvent(first_sender, payload, is_request))

    def record(self, checkpoint_id: int) -> None:
        """The cut of a checkpoint that holds no events: record what is taken from here on (H79)."""
        self._recordings[checkpoint_id] = Recording(frozenset(self._counts))

    def collect(self, checkpoint_id: int) -> dict[int, tuple[HeldEvent, ...]]:
        """End the recording, and return what was taken, in order, by task attempt id."""
        recording = self._recordings.pop(checkpoint_id, None)
        return {} if recording is None else {task: tuple(events) for task, events in recording.events.items()}

    def drop(self, checkpoint_id: int) -> None:
        """The checkpoint is over; ignored if nothing is recorded for it."""
        self._recordings.pop(checkpoint_id, None)

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
        self._recordings.clear()

    def position(self, subtask: int) -> int:
        """The position of the event of ``subtask`` that is being handled; otherwise of the last one taken."""
        if self._handling is not None and self._handling[0] == subtask:
            return self._handling[1]
        return self._counts.get(self._latest.get(subtask, -1), 0)

    def at_this_moment(self) -> dict[int, int]:
        """The counts by task attempt id."""
        return dict(self._counts)


__all__ = ["TakenEvents"]
