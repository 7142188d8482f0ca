# SPDX-License-Identifier: Apache-2.0

"""The states in files of one attempt: its folders on this host, what it stores, and what it restores.

A task that has none does not import this, nor what it needs.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from protocol.describing import describe
from protocol.file_retention import FileOrigin, file_name
from protocol.key_groups import KeyGroups
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from spark_bridge.common.endpoint import StateStorage, TaskEndpoint, TaskIdentity
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.files import Files
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.restoring import restore
from spark_bridge.storage.state_files.snapshot import Snapshot
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles, check_holds_files
from spark_bridge.subtask.local_folder import LocalFolder
from spark_bridge.subtask.uploads import Stopped, Upload

__all__ = ["TaskFiles"]

_STATE = "state-"
_BESIDE = "beside-"


class TaskFiles:
    """See the module. On the task's own thread, except for what an ``Upload`` does and ``close``.

    ``written`` is told how much has been written into the storage by all uploads so far.

    Raises ``StorageError`` if the storage cannot have files, if this process cannot write and read there, or if the
    folders cannot be made on this host. Otherwise the task would learn it at its first checkpoint, or at a restore.
    """

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity, written: Callable[[int], None]) -> None:
        storage = endpoint.state_storage
        check_holds_files(None if storage is None else storage.url)
        assert storage is not None
        self._storage = storage
        self._folder = StateFolder.of_operator(Files(storage.url, storage.options), endpoint.operator_id)
        self._probe(storage, identity)
        whose = endpoint.operator_id, identity.subtask, storage.token
        try:
            self._left = LocalFolder.left_of(*whose)
            self._local = LocalFolder.make(*whose)
        except OSError as error:
            raise StorageError(f"a state in files needs a folder on this host: {describe(error)}") from error
        self._uploader = StateUploader(
            self._folder,
            self._local.path / "uploads",
            epoch=storage.epoch,
            token=storage.token,
            subtask=identity.subtask,
            task_attempt_id=identity.task_attempt_id,
        )
        self._subtask, self._parallelism = identity.subtask, endpoint.parallelism
        self._key_groups: int | None = None  # how many the restored state has
        self._snapshots = 0
        self._unused: set[Path] = set()  # folders for snapshots that were given out
        self._written = written

    def _probe(self, storage: StateStorage, identity: TaskIdentity) -> None:
        origin = FileOrigin(1, storage.epoch)  # older than any checkpoint that names files of this attempt
        nonce = secrets.token_hex(8)
        self._folder.probe(file_name(origin, storage.token, identity.subtask, identity.task_attempt_id, nonce, "probe"))

    # --- the folders of this host ---------------------------------------------------------------------------------

    def state_folder(self, part: int) -> Path:
        """The folder of one part."""
        self._remove_left()
        return self._made(f"{_STATE}{part}")

    def snapshot_folder(self, checkpoint_id: int) -> Path:
        """An empty folder for one snapshot of one part."""
        self._remove_left()
        self._snapshots += 1
        folder = self._made(f"snapshot-{checkpoint_id}-{self._snapshots}")
        self._unused.add(folder)
        return folder

    def _made(self, name: str) -> Path:
        folder = self._local.path / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the folder {folder} for a state in files: {describe(error)}") from error
        return folder

    def _remove_left(self) -> None:
        """What is left of earlier attempts is used before a part has its folder, or not at all."""
        while self._left:
            self._left.pop().remove()

    def close(self, *, succeeded: bool) -> None:
        """Remove the folders, or leave those of an attempt that did not succeed to the next one. No upload may run."""
        self._remove_left()
        if succeeded:
            self._local.remove()
            return
        with suppress(OSError):
            for folder in self._local.path.iterdir():
                if not folder.name.startswith(_STATE):
                    shutil.rmtree(folder, ignore_errors=True)
        self._local.leave()

    def forget_after_fork(self) -> None:
        """In a forked process: the folders are the task's."""
        for folder in (*self._left, self._local):
            folder.forget()

    # --- the restore ----------------------------------------------------------------------------------------------

    def restore_pieces(
        self, part: int, pieces: Iterable[SubtaskState], files_from: str, stopped: Stopped
    ) -> list[RestoredFiles]:
        """Restore several states, or pieces of them, for ``merge_files``: first the one with the most that counts."""
        largest_first = sorted(pieces, key=_bytes_that_count, reverse=True)
        return [self.restore(part, one, files_from, stopped, number) for number, one in enumerate(largest_first)]

    def restore(
        self, part: int, piece: SubtaskState, files_from: str, stopped: Stopped, beside: int = 0
    ) -> RestoredFiles:
        """Restore a state, or a piece of one, into the folder of its part, before that has it; or into one ``beside``
        it, which has a number above 0."""
        folder = self._savepoint(self._storage, files_from) if files_from else self._folder
        name = f"{_BESIDE}{part}-{beside}" if beside else f"{_STATE}{part}"
        left = self._left[0].path / name if self._left else None
        handle, groups = piece.files, piece.groups
        assert handle is not None
        restored = restore(folder, handle, self._local.path / name, data=piece.state, local=left, stopped=stopped)
        if not files_from and not beside:
            self._uploader.restored(restored)
        if handle.key_groups is not None:
            self._key_groups = handle.key_groups.total
        return restored.files if groups is None else replace(restored.files, key_groups=range(*groups))

    def merged(self, first: RestoredFiles, data: bytes) -> RestoredFiles:
        """The state that is in the first of several folders now; the others are removed."""
        for folder in self._local.path.glob(f"{_BESIDE}*"):
            shutil.rmtree(folder, ignore_errors=True)
        own = None
        if self._key_groups is not None:
            own = KeyGroups(self._key_groups).range_of(self._subtask, self._parallelism)
        return RestoredFiles(first.folder, data, own)

    def _savepoint(self, storage: StateStorage, url: str) -> StateFolder:
        return StateFolder.at(url, storage.options)

    # --- snapshots and uploads ------------------------------------------------------------------------------------

    def freeze(self, state: StateFiles, checkpoint_id: int) -> Snapshot:
        """Freeze a state at the cut. What it did not use of the folders for snapshots is removed.

        Raises ``StorageError``, or ``ValueError`` if the state cannot have these key groups.
        """
        key_groups = self._own_groups(state)
        folder = Path(os.path.abspath(state.folder))
        owned = next((one for one in self._unused if folder.is_relative_to(one)), None)
        try:
            snapshot = self._uploader.freeze(state, checkpoint_id, owned=owned is not None)
            snapshot = snapshot._replace(key_groups=key_groups)
            if owned is None:
                return snapshot
            self._unused.discard(owned)
            return snapshot._replace(folder=owned)  # all of it is removed after the upload
        finally:
            self.remove_unused()

    def _own_groups(self, state: StateFiles) -> KeyGroupRange | None:
        """The key groups of a state of this subtask."""
        groups = state.key_groups
        if groups is None:
            return None
        self.check_key_groups(groups)
        own = groups.range_of(self._subtask, self._parallelism)
        return KeyGroupRange(own.start, own.stop, groups.count)

    def check_key_groups(self, groups: KeyGroups) -> None:
        """Raise ``ValueError`` if the restored state has another number of key groups."""
        if self._key_groups not in (None, groups.count):
            raise ValueError(
                f"the restored state has {self._key_groups} key groups, and key_groups now says {groups.count}: their "
                f"number cannot change, so use KeyGroups({self._key_groups})"
            )

    def remove_unused(self) -> None:
        """Remove the folders for snapshots that no state has."""
        while self._unused:
            shutil.rmtree(self._unused.pop(), ignore_errors=True)

    def upload(self, snapshot: Snapshot, target: str = "") -> Upload:
        """What stores a snapshot, in the folder of a savepoint if there is a ``target``."""

        def progress(done: int, total: int) -> None:
            self._written(self._uploader.uploaded_bytes)

        def store(stopped: Stopped) -> StateHandle:
            try:
                savepoint = self._savepoint(self._storage, target) if target else None
            except BaseException:
                snapshot.remove()
                raise
            handle = self._uploader.upload(snapshot, savepoint, progress=progress, stopped=stopped)
            progress(handle.total_bytes, handle.total_bytes)  # with the manifest
            return handle

        return Upload(snapshot.checkpoint_id, store)

    def completed(self, checkpoint_id: int) -> None:
        """Before the barrier of a checkpoint that was triggered after this."""
        self._uploader.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        """The checkpoint is over."""
        self._uploader.aborted(checkpoint_id)


def _bytes_that_count(piece: SubtaskState) -> float:
    """About how large that is which counts here, of the files of a state."""
    files, groups = piece.files, piece.groups
    assert files is not None
    if groups is None or files.key_groups is None:
        return files.total_bytes
    first, end, _ = files.key_groups
    return files.total_bytes * (groups[1] - groups[0]) / (end - first)
