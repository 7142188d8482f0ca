# SPDX-License-Identifier: Apache-2.0

"""The interface of a checkpoint storage, whatever keeps the checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.arguments import Rule, check_fields
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.wire.checkpoint_format import StoredCheckpoint
from protocol.wire.messages import RestoreMode
from spark_bridge.common.secret_texts import check_no_password

Permit = Callable[[], None]


def always_permitted() -> None:
    """Permit every write."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint file in a listing.

    ``problem`` is empty for an intact file. Otherwise it says what is wrong, and the fields after it are None: the time
    of creation (ms since 1970, UTC), the operator's parallelism and mode, the number of subtasks with a part, the
    number of held events, the release that wrote it, and its label, which may be empty. A ``void`` checkpoint was
    discarded, so ``restore="latest"`` never restores it. A damaged void file has no ``problem``. ``files`` says how
    many files the states have that are in files, and ``file_bytes`` how large these are.
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
    files: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The file of a checkpoint or savepoint, to start from: ``coordinate(..., restore=CheckpointFile(url))``.

    ``url`` is its path or URL, as ``savepoint`` returns it and ``headgate checkpoints`` lists it. Raises
    ``TypeError`` or ``ValueError`` for what is neither, and for a URL with a password in it.
    """

    url: str | os.PathLike[str]

    def __post_init__(self) -> None:
        check_fields(self)
        check_no_password(str(self.url), "url", "give it in StorageDetails(options=...)")

    def __str__(self) -> str:
        return str(self.url)


Restore = Literal["latest", "none"] | os.PathLike[str] | CheckpointFile
"""What an operator starts from."""
RESTORE = Rule("'latest', 'none', a Path(...), or CheckpointFile(PATH_OR_URL) for one checkpoint", lambda value: True)


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
    """The entry of an intact checkpoint in a listing."""
    parts = stored.checkpoint.subtask_states.values()
    states = files_of(stored.checkpoint)
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
        files=sum(state.files for state in states),
        file_bytes=sum(state.total_bytes for state in states),
    )


class Storage(Protocol):
    """Keeps the checkpoints of any number of operators. The methods block and may run in several threads concurrently.

    Call ``prepare`` and ``reserve_ids`` first, then ``restore_latest`` or ``start_from`` once for each operator, and
    then the other methods.
    """

    def prepare(self) -> None:
        """Take over the storage for this application. Idempotent."""

    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        """The next ``count`` checkpoint ids above ``above``. Ids increase for the life of the storage (H4)."""

    def store(self, operator_id: str, checkpoint: CompletedCheckpoint, options: WriteOptions = DEFAULT_WRITE) -> str:
        """Make it durable, all of it or nothing (H50), then delete old ones (H51); returns its file.

        After an error the checkpoint may be there, now or later, unless ``discard`` succeeds.
        """

    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        """Make sure, durably, that no restart restores it, even if a hanging write of it succeeds later (H64).

        Harmless if there is none. Raises ``StorageFenced`` if a later application may have restored it.
        """

    def restore_latest(self, operator_id: str, *, first: int, allow_older: bool = False) -> CompletedCheckpoint | None:
        """``latest``, then ``start_from`` its result. No discard of this operator begins between the two."""

    def start_from(self, operator_id: str, checkpoint_id: int | None, *, first: int) -> None:
        """Record durably that the operator continues from this checkpoint (None: nothing), with ids from ``first``.

        From now on, every other checkpoint with an id between the two is void, even if it appears later (H64). Call
        this before destroying anything that such a checkpoint may refer to. Raises ``StorageFenced``.
        """

    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        """The newest checkpoint that a restart may restore, or None. Changes nothing.

        Raises ``CheckpointUnreadable`` if it is damaged. Raises ``StorageError`` if the operator was last started from
        a checkpoint outside this storage and none has completed since. With ``allow_older``, an older intact checkpoint
        is returned instead.
        """

    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        """Read one checkpoint. Raises ``StorageError`` if there is none, ``CheckpointUnreadable`` if it is damaged."""

    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """Read and verify all checkpoints, or those of one operator; sorted by operator and id."""

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
        """Write a savepoint into a directory of the user's (H49); returns its file, which is new (H162).

        ``name``: of the file, which no other savepoint has; if it is empty, the savepoint gets one.
        ``permit`` is called just before the file appears and once more after it; an exception from it takes the file
        back. After an error, nothing is deleted that this call has not written.
        """

    def delete_savepoint(self, file: str) -> None:
        """Delete what ``store_savepoint`` has returned, and the files of its states; harmless if it is gone."""
