# SPDX-License-Identifier: Apache-2.0

"""Tracks which splits a subtask must give back when it is reset (H56; R120 of Flink's contract).

The tracker answers one question: if a subtask is reset to checkpoint X, which splits were assigned to it since X?
Splits that X covers are in the subtask's own state, and must not be assigned again.

    record        an assignment joins ``open``: it is in no checkpoint yet
    checkpoint X  the coordinator's cut: what is open now is filed under X
    completed X   no reset goes further back than X: entries of X and of earlier ones are dropped
    reset to X    what is filed above X, ascending, and then what is open, is taken out and given back

An aborted checkpoint needs no call: its entry is above the checkpoint that a reset names, or the next completion drops
it (R121). Record an assignment before sending it (R118). Otherwise, a crash between the two would lose the split.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Generic, TypeVar

from protocol.errors import LocalProtocolError
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT

SplitT = TypeVar("SplitT", bound=Hashable)

# A dict without values is an ordered set: a split that is recorded twice counts once, where it came first.
_Assignments = dict[int, dict[SplitT, None]]


class SplitAssignmentTracker(Generic[SplitT]):
    """The open and the checkpointed assignments of one source. Splits are opaque, hashable values.

    One thread at a time. Nothing to close.
    """

    __slots__ = ("_by_checkpoint", "_newest_checkpoint_id", "_open")

    def __init__(self) -> None:
        self._open: _Assignments[SplitT] = {}
        self._by_checkpoint: dict[int, _Assignments[SplitT]] = {}  # ascending ids
        self._newest_checkpoint_id = VIRTUAL_EMPTY_CHECKPOINT

    def record(self, subtask: int, splits: Iterable[SplitT]) -> None:
        """``splits`` are about to be sent to ``subtask``, in this order. Nothing happens for an empty list."""
        new = dict.fromkeys(splits)
        if new:
            self._open.setdefault(subtask, {}).update(new)

    def on_checkpoint(self, checkpoint_id: int) -> None:
        """The cut of ``checkpoint_id``: what is open belongs to it from here on.

        Raises ``LocalProtocolError``, and changes nothing, unless ids increase.
        """
        if checkpoint_id <= self._newest_checkpoint_id:
            raise LocalProtocolError(
                f"checkpoint {checkpoint_id} comes after checkpoint {self._newest_checkpoint_id}: ids must increase"
            )
        self._newest_checkpoint_id = checkpoint_id
        self._by_checkpoint[checkpoint_id] = self._open
        self._open = {}

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """No subtask will fall back before ``checkpoint_id``: drop its entry and all earlier ones."""
        for known in [known for known in self._by_checkpoint if known <= checkpoint_id]:
            del self._by_checkpoint[known]

    def get_and_remove(self, subtask: int, checkpoint_id: int) -> list[SplitT]:
        """Take out what ``subtask`` was assigned after ``checkpoint_id``, oldest first.

        For ``checkpoint_id`` -1, the virtual empty checkpoint, everything that is still known comes back. For an
        unknown subtask the list is empty.
        """
        later = [assignments for known, assignments in self._by_checkpoint.items() if known > checkpoint_id]
        return _merged(assignments.pop(subtask, {}) for assignments in (*later, self._open))

    def take_back(self, subtask: int, count: int, chosen: Callable[[SplitT], bool]) -> list[SplitT]:
        """Take out at most ``count`` splits that no checkpoint holds yet and ``chosen`` accepts, the newest first."""
        open_splits = self._open.get(subtask, {})
        taken: list[SplitT] = []
        for split in reversed(open_splits):
            if len(taken) == count:
                break
            if chosen(split):
                taken.append(split)
        for split in taken:
            del open_splits[split]
        if not open_splits:
            self._open.pop(subtask, None)
        return taken

    def assigned(self, subtask: int) -> list[SplitT]:
        """What ``subtask`` was assigned and may still have to give back, oldest first. Nothing is removed."""
        return _merged(assignments.get(subtask, {}) for assignments in (*self._by_checkpoint.values(), self._open))

    def check_invariants(self) -> None:
        """Ids ascend, none is above the newest, and no subtask has an empty entry among the open ones."""
        ids = list(self._by_checkpoint)
        assert ids == sorted(ids), f"checkpoints out of order: {ids}"
        assert all(known <= self._newest_checkpoint_id for known in ids), f"{ids} above {self._newest_checkpoint_id}"
        assert all(self._open.values()), "an empty open assignment"


def _merged(assignments: Iterable[dict[SplitT, None]]) -> list[SplitT]:
    """All splits, each where it comes first. Of a single dict they are taken as they are: there may be a million."""
    some = [splits for splits in assignments if splits]
    if len(some) == 1:
        return list(some[0])
    return list(dict.fromkeys(chain.from_iterable(some)))
