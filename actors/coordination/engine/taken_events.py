# SPDX-License-Identifier: Apache-2.0

"""How many upward events of each attempt's history each part has taken (H32, H150), and what is recorded (H79)."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.parts import ONE_PART, OWN_PART, PartTable
from protocol.wire.messages import HeldEvent, Positions


@dataclass(slots=True)
class Recording:
    """What was taken since the cut of one checkpoint, by task attempt id. ``attempts``: those known at the cut."""

    attempts: frozenset[int]
    events: dict[int, list[HeldEvent]] = field(default_factory=dict)


class TakenEvents:
    """The counts of events and requests, by part, which a checkpoint compares with the subtasks' own at the cut.

    An attempt's counts continue from what its restored checkpoint covers. It is kept when the attempt has finished,
    until that success is revoked or everything is reset.

    From ``record`` until ``collect`` or ``drop``, a checkpoint records what is taken. Each event names the last
    checkpoint whose snapshot its subtask had taken when it sent it: it belongs to the recordings of later ones only, so
    a subtask that has its snapshot makes none of them grow. The gateways bound the rest. What a part outside of
    checkpoints takes is counted, and is in no checkpoint (H152). Loop only.
    """

    def __init__(self, table: PartTable = ONE_PART) -> None:
        self._table = table
        self._recordings: dict[int, Recording] = {}  # by checkpoint, ascending
        self._counts: dict[int, list[int]] = {}  # by task attempt id, then by part
        # By subtask: the attempt that last became ready or, for this part, sent something.
        self._latest: list[dict[int, int]] = [{} for _ in table.parts]
        self._handling: tuple[int, int, int] | None = None  # part, sender and position of the current event
        self.is_restored = False
        """Whether that was held in the checkpoint that was restored."""

    def begin(self, attempt: ExecutionAttempt, events_sent: Positions) -> None:
        """The attempt is ready; its history has ``events_sent`` so far."""
        self._counts[attempt.task_attempt_id] = [*events_sent, *(0,) * (self._table.count - len(events_sent))]
        for latest in self._latest:
            latest[attempt.subtask] = attempt.task_attempt_id

    def take(
        self,
        attempt: ExecutionAttempt,
        sender: int | None,
        payload: bytes = b"",
        part: int = OWN_PART,
        *,
        is_request: bool = False,
        after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT,
    ) -> None:
        """The part takes one more event. ``sender``: the subtask that first sent it, if it was restored."""
        task = attempt.task_attempt_id
        counts = self._counts[task]
        counts[part] += 1
        self._latest[part][attempt.subtask] = task
        first_sender = attempt.subtask if sender is None else sender
        self._handling = (part, first_sender, counts[part])
        self.is_restored = sender is not None
        if self._recordings and not self._table.outside[part]:
            for checkpoint_id, recording in self._recordings.items():
                if checkpoint_id > after_snapshot and task in recording.attempts:
                    recording.events.setdefault(task, []).append(HeldEvent(first_sender, payload, is_request, part))

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
        """The part has handled the event."""
        self._handling, self.is_restored = None, False

    def handles_restored(self, part: int) -> bool:
        """Whether the part handles an event or request that was held in the checkpoint that was restored."""
        return self.is_restored and self._handling is not None and self._handling[0] == part

    def forget(self, attempt: ExecutionAttempt) -> None:
        """The attempt has failed, or its success was revoked."""
        self._counts.pop(attempt.task_attempt_id, None)

    def clear(self) -> None:
        """The whole operator is reset: forget all counts."""
        self._counts.clear()
        for latest in self._latest:
            latest.clear()
        self._recordings.clear()

    def position(self, subtask: int, part: int = OWN_PART) -> int:
        """The position of the part's event of ``subtask`` that is being handled; otherwise of the last one taken."""
        if self._handling is not None and self._handling[:2] == (part, subtask):
            return self._handling[2]
        counts = self._counts.get(self._latest[part].get(subtask, -1))
        return 0 if counts is None else counts[part]

    def at_this_moment(self) -> dict[int, Positions]:
        """The counts by task attempt id, as a checkpoint has them."""
        inside = self._table.inside
        return {task: inside(counts) for task, counts in self._counts.items()}


__all__ = ["TakenEvents"]
