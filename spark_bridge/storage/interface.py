"""What a storage of checkpoints is, whatever keeps them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.checkpoint_format import StoredCheckpoint
from protocol.wire.messages import RestoreMode

Permit = Callable[[], None]


def always_permitted() -> None:
    """Stops no write."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint file, as a list shows it.

    ``problem`` is empty for a whole one; else it says what is wrong, and what follows is None: the time of creation (ms
    since 1970, UTC), the operator's parallelism and mode, how many subtasks have a part, how many events are held,
    the release that wrote it, and its label, which may be empty. ``void``: it was discarded, so no restart restores it
    by itself; if such a file is damaged, it has no ``problem``.
    """

    operator_id: str
    checkpoint_id: int
    file: str
    size_bytes: int
    problem: str = ""
    created_ms: int | None = None
    parallelism: int | None = None
    mode: str | None = None
    subtasks: int | None = None
    held_events: int | None = None
    release: str | None = None
    label: str | None = None
    void: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How one checkpoint is stored, and what may be deleted after it.

    ``completed_id`` is the operator's last completed checkpoint; None stands for the one before this. The storage keeps
    the newest checkpoints up to it, and those in ``given_up`` do not count. ``permit`` is called just before the
    checkpoint appears; an exception from it prevents that.
    """

    mode: RestoreMode = RestoreMode.STREAMING
    completed_id: int | None = None
    given_up: Collection[int] = ()
    permit: Permit = always_permitted

    def completed_before(self, checkpoint: CompletedCheckpoint) -> int:
        """The last completed checkpoint when this one is stored."""
        return checkpoint.checkpoint_id - 1 if self.completed_id is None else self.completed_id


DEFAULT_WRITE = WriteOptions()


def describe(stored: StoredCheckpoint, file: str, size_bytes: int) -> CheckpointInfo:
    """The line of a list for a whole checkpoint."""
    parts = stored.checkpoint.subtask_states.values()
    return CheckpointInfo(
        stored.operator_id,
        stored.checkpoint.checkpoint_id,
        file,
        size_bytes,
        created_ms=stored.created_ms,
        parallelism=stored.checkpoint.parallelism,
        mode=stored.mode.name.lower(),
        subtasks=len(parts),
        held_events=sum(len(part.held) for part in parts),
        release=stored.release,
        label=stored.checkpoint.label,
    )


class Storage(Protocol):
    """Keeps the checkpoints of any number of operators. Blocking: for worker threads, any of them, several at once.

    In this order: ``prepare``, ``reserve_ids``, then, for each operator, ``restore_latest`` or ``start_from`` first.
    """

    def prepare(self) -> None:
        """Take the storage over: from now on it is this application's. Once; again it does nothing."""

    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        """The next ``count`` checkpoint ids above ``above``; they rise for the life of the storage (H4)."""

    def store(self, operator_id: str, checkpoint: CompletedCheckpoint, options: WriteOptions = DEFAULT_WRITE) -> str:
        """Make it durable, all of it or nothing (H50), then delete old ones (H51); returns its file.

        After an error the checkpoint may be there, now or later, unless ``discard`` succeeds.
        """

    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        """Make sure that no restart restores it, durably, even if a write of it that hangs succeeds later (H64).

        Harmless where there is none. Raises ``StorageFenced`` where a later application may have restored it.
        """

    def restore_latest(self, operator_id: str, *, first: int, allow_older: bool = False) -> CompletedCheckpoint | None:
        """``latest``, and ``start_from`` what it returns; between the two no discard of this operator is begun."""

    def start_from(self, operator_id: str, checkpoint_id: int | None, *, first: int) -> None:
        """Record durably that the operator goes on from this checkpoint, or None for nothing, with ids from ``first``.

        From here on every other checkpoint with an id between the two is void, also one that appears later (H64). Call
        it before anything that such a one may refer to is destroyed. Raises ``StorageFenced``.
        """

    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        """The newest one that a restart may restore, None where there is none. Changes nothing.

        Raises ``CheckpointUnreadable`` for a damaged one, and ``StorageError`` where the one that the operator was last
        started from lies elsewhere and none has completed since, unless an older whole one may stand in.
        """

    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        """One of them. Raises ``StorageError`` where there is none, ``CheckpointUnreadable`` for a damaged one."""

    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """All of them, or an operator's, each read and verified; by operator and id."""

    def store_savepoint(
        self,
        directory: str | os.PathLike[str],
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
    ) -> str:
        """Write one into a directory of the user's (H49); nothing is dropped for it. Returns its file."""
