# SPDX-License-Identifier: Apache-2.0

"""Holds what may be committed until its checkpoint is whole, so that readers never see half a checkpoint (pure).

The list of what a subtask has prepared for a checkpoint arrives after the subtask's snapshot, and so perhaps after the
checkpoint's completion, or only when another application has restored it. A sink that commits atomically must not
commit one subtask's part and, a moment later, another's. So it waits for the lists of all subtasks that took part:
those that were live at the cut and had not ended. A subtask sends one list for each snapshot, empty or not, and one
when it ends.

What is held here is covered by a complete checkpoint: it will be committed, whatever becomes of its subtask. So a reset
of the subtask does not remove it, and the state of a later checkpoint includes it (H141).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_bridge.sinks.two_phase.parts import Committable, PreparedList


@dataclass(slots=True)
class _Group:
    """What is committed with one complete checkpoint. ``missing``: the subtasks whose lists have not arrived."""

    missing: set[int] = field(default_factory=set)
    parts: dict[str, Committable] = field(default_factory=dict)


class WholeCheckpoints:
    """See the module. Call the methods in the coordinator's order."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by complete checkpoint
        self._cuts: dict[int, set[int]] = {}  # by checkpoint that is not complete: whose lists are missing
        self._ended: set[int] = set()
        self._run_succeeded = False

    @property
    def held(self) -> list[Committable]:
        """What is to be committed and waits, in order."""
        return [part for _, group in sorted(self._groups.items()) for part in group.parts.values()]

    @property
    def missing(self) -> frozenset[int]:
        """The subtasks whose lists are waited for."""
        return frozenset(subtask for group in self._groups.values() for subtask in group.missing)

    def cut(self, checkpoint_id: int, live: Iterable[int]) -> list[int]:
        """The cut of ``checkpoint_id``; returns the subtasks that will send a list for it."""
        self._cuts[checkpoint_id] = set(live) - self._ended
        return sorted(self._cuts[checkpoint_id])

    def covering(self, subtask: int, prepared: PreparedList) -> Iterable[Committable]:
        """What is in the list, with the checkpoint that covers it.

        At the end of an operator, a list names no checkpoint. If it arrives after a cut and the subtask has not sent
        its list for that checkpoint, it was held, so the subtask's snapshot includes it.
        """
        missing = [id_ for id_, group in self._groups.items() if subtask in group.missing]
        missing += [id_ for id_, subtasks in self._cuts.items() if subtask in subtasks]
        if prepared.checkpoint_id >= 0 or not missing:
            return prepared.committables
        return [part._replace(checkpoint_id=min(missing)) for part in prepared.committables]

    def listed(self, subtask: int, prepared: PreparedList) -> None:
        """The subtask has sent this list. Its parts, if they may be committed, are given to ``add``."""
        if not prepared.last:
            return
        ended = prepared.checkpoint_id < 0
        if ended:
            self._ended.add(subtask)
        for checkpoint_id, group in self._groups.items():
            if ended or checkpoint_id <= prepared.checkpoint_id:
                group.missing.discard(subtask)
        for checkpoint_id, missing in self._cuts.items():
            if ended or checkpoint_id <= prepared.checkpoint_id:
                missing.discard(subtask)

    def add(self, parts: Iterable[Committable], completed_id: int) -> None:
        """These may be committed; the last complete checkpoint is ``completed_id``."""
        for part in parts:
            checkpoint_id = min((id_ for id_ in self._groups if id_ >= part.checkpoint_id), default=completed_id)
            self._groups.setdefault(checkpoint_id, _Group()).parts.setdefault(part.name, part)

    def completed(self, checkpoint_id: int, parts: Iterable[Committable]) -> None:
        """``checkpoint_id`` is durable, and with it these may be committed."""
        group = self._groups.setdefault(checkpoint_id, _Group())
        group.missing |= self._cuts.pop(checkpoint_id, set())
        group.parts |= {part.name: part for part in parts}
        self._cuts = {id_: missing for id_, missing in self._cuts.items() if id_ > checkpoint_id}

    def take(self) -> tuple[list[int], list[Committable]]:
        """Remove and return the checkpoints that are whole, and what to commit with them, in order."""
        checkpoints: list[int] = []
        parts: list[Committable] = []
        for checkpoint_id, group in sorted(self._groups.items()):
            if group.missing and not self._run_succeeded:
                break
            checkpoints.append(checkpoint_id)
            parts += group.parts.values()
        for checkpoint_id in checkpoints:
            del self._groups[checkpoint_id]
        return checkpoints, parts

    def subtask_failed(self, subtask: int) -> None:
        """An attempt has ended; if it had sent its last list, another one comes."""
        self._ended.discard(subtask)
        self._run_succeeded = False

    def restore(self, checkpoint_id: int, parts: Iterable[Committable], missing: Iterable[int]) -> None:
        """Return to ``checkpoint_id``: these are in its state, and these subtasks send again what they held."""
        self._groups = {checkpoint_id: _Group(set(missing), {part.name: part for part in parts})}
        self._cuts.clear()
        self._ended.clear()
        self._run_succeeded = False

    def run_ended(self, succeeded: bool) -> None:
        """The run has ended. After a successful run no list is on its way."""
        self._run_succeeded = succeeded
