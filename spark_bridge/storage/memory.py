"""Checkpoints in the driver's memory, for a sidecar without a directory: they end with the application."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from threading import Lock

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.checkpoint_format import StoredCheckpoint
from protocol.messages import RestoreMode
from spark_bridge.storage import single_files
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.interface import CheckpointInfo, Permit, always_permitted, describe


class MemoryStorage:
    """As ``CheckpointStorage``, with ids from 1 and nothing that could be damaged, fenced or without room."""

    def __init__(self, *, retained: int = 3) -> None:
        if retained < 1:
            raise ValueError(f"retained must be at least 1, is {retained}")
        self._retained = retained
        self._lock = Lock()
        self._last_id = 0
        self._stored: dict[str, dict[int, StoredCheckpoint]] = {}

    def prepare(self) -> None:
        """Nothing to prepare."""

    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        if count < 1:
            raise ValueError(f"count must be at least 1, is {count}")
        with self._lock:
            first = max(self._last_id, above) + 1
            self._last_id = first + count - 1
            return range(first, self._last_id + 1)

    def store(
        self,
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
        in_doubt_max: int = 1,
        permit: Permit = always_permitted,
    ) -> str:
        permit()
        with self._lock:
            mine = self._stored.setdefault(operator_id, {})
            created_ms = time.time_ns() // 1_000_000
            mine[checkpoint.checkpoint_id] = StoredCheckpoint(operator_id, mode, created_ms, "memory", checkpoint)
            for checkpoint_id in sorted(mine)[: -(self._retained + in_doubt_max)]:
                del mine[checkpoint_id]
        return self._file(operator_id, checkpoint.checkpoint_id)

    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        with self._lock:
            self._stored.get(operator_id, {}).pop(checkpoint_id, None)

    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        with self._lock:
            mine = self._stored.get(operator_id)
            return mine[max(mine)].checkpoint if mine else None

    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        with self._lock:
            stored = self._stored.get(operator_id, {}).get(checkpoint_id)
        if stored is None:
            raise StorageError(f"there is no checkpoint {checkpoint_id} of {operator_id!r} in memory")
        return stored.checkpoint

    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """``size_bytes`` counts states and held events."""
        with self._lock:
            mine = sorted(self._stored) if operator_id is None else [operator_id]
            found = [stored for name in mine for _, stored in sorted(self._stored.get(name, {}).items())]
        return [
            describe(stored, self._file(stored.operator_id, stored.checkpoint.checkpoint_id), _size(stored.checkpoint))
            for stored in found
        ]

    def store_savepoint(
        self,
        directory: str | os.PathLike[str],
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
    ) -> str:
        """As ``single_files.store_savepoint``: savepoints outlive the application in any case."""
        return single_files.store_savepoint(directory, operator_id, checkpoint, mode=mode)

    @staticmethod
    def _file(operator_id: str, checkpoint_id: int) -> str:
        return f"checkpoint {checkpoint_id} of {operator_id!r} in memory"


def _size(checkpoint: CompletedCheckpoint) -> int:
    parts = checkpoint.subtask_states.values()
    states = sum(len(state.state) for part in parts for state in part.states)
    held = sum(len(event.payload) for part in parts for event in part.held)
    return len(checkpoint.coordinator_state) + states + held
