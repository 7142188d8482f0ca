# SPDX-License-Identifier: Apache-2.0

"""Stores the states of one attempt of a task: only contents that it has not stored before (H190, H191)."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from protocol.file_retention import FileOrigin, UploadedFiles, file_name
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.files import PIECE_BYTES
from spark_bridge.storage.state_files.folder import Progress, StateFolder, check_wanted
from spark_bridge.storage.state_files.manifest import StoredFile, encode_manifest
from spark_bridge.storage.state_files.restoring import RestoredState
from spark_bridge.storage.state_files.snapshot import FileStatus, FrozenFile, Snapshot, freeze
from spark_bridge.storage.state_files.values import StateFiles


class KnownFiles:
    """What an attempt may name again, by status and by digest. For any thread.

    A file that is known by its status has a link in ``folder``. So no other file gets its inode while it is known,
    although the store deletes it; it takes space on the disk until then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._uploaded = UploadedFiles()
        self._links: dict[FileStatus, tuple[str, bytes]] = {}  # with the digest
        self._contents: set[tuple[int, bytes]] = set()
        self._sizes: set[int] = set()
        self._count = 0

    def by_status(self, status: FileStatus) -> tuple[bytes, str] | None:
        """Digest and name of a file."""
        with self._lock:
            link, name = self._links.get(status), self._uploaded.find(status)
            return None if link is None or name is None else (link[1], name)

    def has_size(self, size: int) -> bool:
        """Whether a content of this size is known. Otherwise it is not worth reading a file before its upload."""
        with self._lock:
            return size in self._sizes

    def by_content(self, size: int, digest: bytes) -> str | None:
        """The name of a content."""
        with self._lock:
            return self._uploaded.find((size, digest))

    def restored(self, files: Iterable[tuple[StoredFile, str, FileStatus]]) -> None:
        """Files of the folder of states have been restored: where, and with which status they were written."""
        with self._lock:
            known: list[tuple[Hashable, str]] = []
            for file, place, status in files:
                known.append(((file.size, file.sha256), file.name))
                self._know(file.size, file.sha256)
                if self._link(place, status, file.sha256, os.link):
                    known.append((status, file.name))
            self._uploaded.restored(known)

    def stored(self, frozen: FrozenFile, file: StoredFile, checkpoint_id: int) -> None:
        """A file of a snapshot has been uploaded. The snapshot's link is taken."""
        with self._lock:
            self._know(file.size, file.sha256)
            self._uploaded.stored((file.size, file.sha256), file.name, checkpoint_id)
            if frozen.status is not None and self._link(frozen.place, frozen.status, file.sha256, os.rename):
                self._uploaded.stored(frozen.status, file.name, checkpoint_id)

    def manifest_stored(self, checkpoint_id: int, names: Iterable[str]) -> None:
        with self._lock:
            self._uploaded.manifest_stored(checkpoint_id, names)

    def completed(self, checkpoint_id: int) -> None:
        with self._lock:
            self._uploaded.completed(checkpoint_id)
            for status in [one for one in self._links if self._uploaded.find(one) is None]:
                _unlink(self._links.pop(status)[0])
            self._contents = {one for one in self._contents if self._uploaded.find(one) is not None}
            self._sizes = {size for size, _ in self._contents}

    def aborted(self, checkpoint_id: int) -> None:
        with self._lock:
            self._uploaded.aborted(checkpoint_id)

    def _know(self, size: int, digest: bytes) -> None:
        self._contents.add((size, digest))
        self._sizes.add(size)

    def _link(self, place: str, status: FileStatus, digest: bytes, act: Callable[[str, str], object]) -> bool:
        """Keep the inode of a file. False if that is not possible; then the file is not known by its status."""
        self._count += 1
        link = str(self._folder / str(self._count))
        try:
            act(place, link)
            kept = FileStatus.of(os.lstat(link)) == status
        except OSError:
            return False
        if not kept:
            _unlink(link)
            return False
        before = self._links.get(status)
        if before is not None:
            _unlink(before[0])
        self._links[status] = link, digest
        return True


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


class StateUploader:
    """Freezes and stores the states of one attempt.

    ``folder``: the operator's folder of states. ``private``: a folder of this attempt alone, on the filesystem of its
    state; it is made here, and must not exist. ``epoch`` and ``token``: of the application, as in the storage's claims.

    ``freeze`` is called in the thread of the task, and the rest in any thread. Of several calls of ``upload`` at the
    same time, all but one must have been stopped.
    """

    def __init__(
        self, folder: StateFolder, private: Path, *, epoch: int, token: str, subtask: int, task_attempt_id: int
    ) -> None:
        self._folder = folder
        self._private = private
        self._epoch = epoch
        self._token = token
        self._subtask = subtask
        self._task_attempt_id = task_attempt_id
        self._nonce = secrets.token_hex(8)
        self._names = itertools.count(1)
        self._cuts = 0
        links = private / "known"
        try:
            os.makedirs(private, mode=0o700)
            os.mkdir(links)
        except OSError as error:
            raise StorageError(f"cannot make the folder {private} for states of this task: {error}") from error
        self._known = KnownFiles(links)
        self.uploaded_bytes = 0
        """How much has been written into the storage, by all uploads, as far as is counted: some may hang."""

    def freeze(self, state: StateFiles, checkpoint_id: int, *, owned: bool = False) -> Snapshot:
        """Freeze a state, in milliseconds; ``owned`` as in ``snapshot.freeze``. Raises ``StorageError``.

        ``checkpoint_id``: ``LAST_STATE`` for the last state of a subtask that has finished.
        """
        self._cuts += 1
        return freeze(state, checkpoint_id, self._private / f"cut-{self._cuts}", owned=owned)

    def upload(
        self,
        snapshot: Snapshot,
        savepoint: StateFolder | None = None,
        *,
        progress: Progress = lambda done, total: None,
        stopped: Callable[[], bool] = bool,
    ) -> StateHandle:
        """Store a state, and remove the snapshot; returns the handle, by which it can be restored.

        ``savepoint``: the folder of the savepoint that this is for, which gets all files. ``progress`` is called after
        each piece, and ``stopped`` asked before it.

        The handle is the only proof of a complete upload. After ``UploadStopped``, ``StorageError`` or the death of the
        process, no handle names what was written, and the next upload names what of it is complete.
        """
        try:
            return self._upload(snapshot, savepoint, progress, stopped)
        finally:
            snapshot.remove()

    def _upload(
        self,
        snapshot: Snapshot,
        savepoint: StateFolder | None,
        progress: Progress,
        stopped: Callable[[], bool],
    ) -> StateHandle:
        folder = self._folder if savepoint is None else savepoint
        total, done = snapshot.total_bytes, 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            progress(done, total)

        files = []
        for frozen in snapshot.files:
            check_wanted(stopped)
            known = self._find(frozen, stopped) if savepoint is None else None
            if known is not None:
                files.append(known)
                advance(known.size)
                continue
            file = self._store(folder, frozen, self._name(snapshot), advance, stopped)
            files.append(file)
            if savepoint is None:
                self._known.stored(frozen, file, snapshot.checkpoint_id)
        try:
            manifest = encode_manifest(files, snapshot.key_groups)
        except ValueError as error:
            raise StorageError(f"a state in files {error}") from error
        check_wanted(stopped)
        name = self._name(snapshot, "m")
        folder.write(name, [manifest], len(manifest))
        self.uploaded_bytes += len(manifest)
        if savepoint is None:
            self._known.manifest_stored(snapshot.checkpoint_id, {name, *(file.name for file in files)})
        return StateHandle(name, len(manifest), sha256(manifest).digest(), total, len(files), snapshot.key_groups)

    def _find(self, frozen: FrozenFile, stopped: Callable[[], bool]) -> StoredFile | None:
        """What has been stored of a file before.

        One that is recognized by its content is not remembered by its status too: the checkpoint for which the content
        was uploaded decides how long it may be named, and is not known here.
        """
        if frozen.status is not None:
            known = self._known.by_status(frozen.status)
            if known is not None:
                return StoredFile(frozen.path, frozen.size, *known)
        if not self._known.has_size(frozen.size):
            return None
        digest = sha256()
        for piece in _content(frozen):
            check_wanted(stopped)
            digest.update(piece)
        name = self._known.by_content(frozen.size, digest.digest())
        return None if name is None else StoredFile(frozen.path, frozen.size, digest.digest(), name)

    def _store(
        self,
        folder: StateFolder,
        frozen: FrozenFile,
        name: str,
        advance: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> StoredFile:
        digest = sha256()

        def pieces() -> Iterator[bytes]:
            for piece in _content(frozen):
                check_wanted(stopped)
                digest.update(piece)
                yield piece
                self.uploaded_bytes += len(piece)
                advance(len(piece))

        folder.write(name, pieces(), frozen.size)
        return StoredFile(frozen.path, frozen.size, digest.digest(), name)

    def _name(self, snapshot: Snapshot, kind: str = "") -> str:
        origin = FileOrigin(snapshot.checkpoint_id, self._epoch)
        number = f"{kind}{next(self._names)}"
        return file_name(origin, self._token, self._subtask, self._task_attempt_id, self._nonce, number)

    def restored(self, state: RestoredState) -> None:
        """The attempt begins with this state, from the operator's folder; call it before the user has the folder.

        Not for a state from a savepoint, whose files are never named again.
        """
        self._known.restored(state.stored)

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint is complete: call it before the barrier of a checkpoint that was triggered after that."""
        self._known.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        """The checkpoint is over."""
        self._known.aborted(checkpoint_id)

    def close(self) -> None:
        """Delete the private folder. No upload may run."""
        shutil.rmtree(self._private, ignore_errors=True)


def _content(frozen: FrozenFile) -> Iterator[bytes]:
    """The content of a frozen file. Raises ``StorageError`` if it is not what it was at the cut."""
    try:
        with open(frozen.place, "rb", buffering=0) as file:
            size = 0
            while piece := file.read(PIECE_BYTES):
                size += len(piece)
                yield piece
            changed = size != frozen.size or frozen.status not in (None, FileStatus.of(os.fstat(file.fileno())))
    except OSError as error:
        raise StorageError(f"cannot read {frozen.path!r} of a state: {error}") from error
    if changed:
        raise StorageError(
            f"{frozen.path!r} was changed after it was frozen, although it is declared immutable: leave it out of "
            "StateFiles(immutable=...), and it is copied"
        )
