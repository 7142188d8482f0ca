# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in the driver's memory, for a sidecar without a directory: they end with the application.

The parts of the subtasks are kept in one flat tuple of numbers and bytes. As three objects for each subtask, thousands
of subtasks would make Python's garbage collector stop the event loop for milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.checkpoint_format import StoredCheckpoint
from protocol.wire.messages import HeldEvent, Positions, RestoreMode, SubtaskState
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage import single_files
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.interface import (
    DEFAULT_WRITE,
    CheckpointInfo,
    Permit,
    WriteOptions,
    always_permitted,
    describe,
)
from spark_bridge.storage.layout import Owner, RestoreRecord
from spark_bridge.storage.validity import NOTHING, Validity, base_is_elsewhere, no_longer_kept, why_not_recorded

_OWNER = Owner(1, "")
_Value = int | bytes | Positions | StateHandle | tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A checkpoint without the parts of the subtasks, and these parts as ``_flattened`` gives them."""

    without_parts: StoredCheckpoint
    parts: tuple[_Value, ...]

    @classmethod
    def of(cls, stored: StoredCheckpoint) -> _Kept:
        without_parts = replace(stored, checkpoint=replace(stored.checkpoint, subtask_states={}))
        return cls(without_parts, _flattened(stored.checkpoint.subtask_states))

    def stored(self) -> StoredCheckpoint:
        """The whole checkpoint, equal to the one that was given."""
        whole = replace(self.without_parts.checkpoint, subtask_states=_unflattened(self.parts))
        return replace(self.without_parts, checkpoint=whole)


def _flattened(parts: Mapping[int, SubtaskSnapshot]) -> tuple[_Value, ...]:
    """For each subtask: its number, its plain fields, how many states and held events it has, and their fields."""
    values: list[_Value] = []
    for subtask, part in parts.items():
        values += (subtask, part.events_sent, part.earlier_input, len(part.states), len(part.held))
        for one in (*part.states, *part.held):
            values += one
    return tuple(values)


def _unflattened(parts: tuple[_Value, ...]) -> dict[int, SubtaskSnapshot]:
    snapshots: dict[int, SubtaskSnapshot] = {}
    values: Iterator[Any] = iter(parts)
    for subtask in values:
        events_sent, earlier_input, states, held = islice(values, 4)
        snapshots[subtask] = SubtaskSnapshot(
            tuple(SubtaskState(*islice(values, len(SubtaskState._fields))) for _ in range(states)),
            tuple(HeldEvent(*islice(values, len(HeldEvent._fields))) for _ in range(held)),
            events_sent,
            earlier_input,
        )
    return snapshots


class MemoryStorage:
    """Like ``CheckpointStorage``, with ids from 1; nothing can be damaged, fenced or out of space."""

    def __init__(self, *, retained: int = 3) -> None:
        if retained < 1:
            raise ValueError(
                f"retained must be an int of at least 1, not {retained}: the last checkpoint is always kept"
            )
        self._retained = retained
        self._lock = Lock()
        self._last_id = 0
        self._stored: dict[str, dict[int, _Kept]] = {}
        self._void: dict[str, set[int]] = {}
        self._records: dict[str, list[RestoreRecord]] = {}

    def prepare(self) -> None:
        """Nothing to prepare."""

    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        if count < 1:
            raise ValueError(f"count must be at least 1, is {count}")
        with self._lock:
            first = max(self._last_id, above) + 1
            self._last_id = first + count - 1
            return range(first, self._last_id + 1)

    def store(self, operator_id: str, checkpoint: CompletedCheckpoint, options: WriteOptions = DEFAULT_WRITE) -> str:
        options.permit()
        created_ms = time.time_ns() // 1_000_000
        kept = _Kept.of(StoredCheckpoint(operator_id, options.mode, created_ms, "memory", checkpoint))
        with self._lock:
            mine = self._stored.setdefault(operator_id, {})
            mine[checkpoint.checkpoint_id] = kept
            completed_id, validity = options.completed_before(checkpoint), self._validity(operator_id)
            for stale in no_longer_kept(mine, validity, self._retained, completed_id, options.given_up):
                del mine[stale]
        return self._file(operator_id, checkpoint.checkpoint_id)

    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        with self._lock:
            self._void.setdefault(operator_id, set()).add(checkpoint_id)
            if self._validity(operator_id).may_restore(checkpoint_id):
                raise StorageError(
                    f"checkpoint {checkpoint_id} of {operator_id!r} cannot be discarded, because the operator was "
                    "started from it again"
                )
            self._stored.get(operator_id, {}).pop(checkpoint_id, None)

    def restore_latest(self, operator_id: str, *, first: int, allow_older: bool = False) -> CompletedCheckpoint | None:
        with self._lock:
            found = self._latest(operator_id, allow_older)
            self._start_from(operator_id, NOTHING if found is None else found.checkpoint_id, first)
            return found

    def start_from(self, operator_id: str, checkpoint_id: int | None, *, first: int) -> None:
        with self._lock:
            self._start_from(operator_id, checkpoint_id or NOTHING, first)

    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        with self._lock:
            return self._latest(operator_id, allow_older)

    def _latest(self, operator_id: str, allow_older: bool) -> CompletedCheckpoint | None:
        mine, validity = self._stored.get(operator_id, {}), self._validity(operator_id)
        newest = max(filter(validity.may_restore, mine), default=NOTHING)
        if newest < validity.base and not allow_older:
            raise StorageError(base_is_elsewhere(operator_id, validity.base))
        return mine[newest].stored().checkpoint if newest else None

    def _start_from(self, operator_id: str, base: int, first: int) -> None:
        problem = why_not_recorded(operator_id, base, first)
        if problem:
            raise StorageError(problem)
        records = self._records.setdefault(operator_id, [])
        records.append(RestoreRecord(_OWNER, len(records) + 1, base, first))

    def _validity(self, operator_id: str) -> Validity:
        voids = [(id_, _OWNER) for id_ in self._void.get(operator_id, ())]
        return Validity.of(voids, self._records.get(operator_id, ()))

    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        with self._lock:
            kept = self._stored.get(operator_id, {}).get(checkpoint_id)
        if kept is None:
            raise StorageError(
                f"there is no checkpoint {checkpoint_id} of {operator_id!r} in memory: restore one of those that "
                "status() shows"
            )
        return kept.stored().checkpoint

    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """List the checkpoints. ``size_bytes`` counts states and held events."""
        with self._lock:
            mine = sorted(self._stored) if operator_id is None else [operator_id]
            found = [
                (kept, not self._validity(name).may_restore(checkpoint_id))
                for name in mine
                for checkpoint_id, kept in sorted(self._stored.get(name, {}).items())
            ]
        return [
            replace(describe(stored, self._file(stored.operator_id, id_), _size(stored.checkpoint)), void=void)
            for kept, void in found
            for stored in (kept.stored(),)
            for id_ in (stored.checkpoint.checkpoint_id,)
        ]

    def store_savepoint(
        self,
        directory: str | os.PathLike[str],
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
        permit: Permit = always_permitted,
        name: str = "",
    ) -> str:
        """Like ``single_files.store_savepoint``: a savepoint always outlives the application."""
        return single_files.store_savepoint(directory, operator_id, checkpoint, mode=mode, permit=permit, name=name)

    def delete_savepoint(self, file: str) -> None:
        single_files.delete_savepoint(file)

    @staticmethod
    def _file(operator_id: str, checkpoint_id: int) -> str:
        return f"checkpoint {checkpoint_id} of {operator_id!r} in memory"


def _size(checkpoint: CompletedCheckpoint) -> int:
    parts = checkpoint.subtask_states.values()
    states = sum(len(state.state) for part in parts for state in part.states)
    held = sum(len(event.payload) for part in parts for event in part.held)
    return len(checkpoint.coordinator_state) + states + held
