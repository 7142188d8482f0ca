# SPDX-License-Identifier: Apache-2.0

"""The folder in a storage that has the files of states, and what the driver does there.

```
ROOT/OPERATOR/state/ID-EPOCH-TOKEN/SUBTASK-TASKATTEMPT-NONCE-NUMBER     what a file of a state contains
ROOT/OPERATOR/state/ID-EPOCH-TOKEN/SUBTASK-TASKATTEMPT-NONCE-mNUMBER    a manifest
ROOT/OPERATOR/state/1-EPOCH-TOKEN/SUBTASK-TASKATTEMPT-NONCE-probe       whether this task can write
DIRECTORY/savepoint-NAME.state/...                                      the same of a savepoint, and all that it needs
```

Tasks write, and delete nothing. The driver deletes what ``FileRetention`` says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from protocol.errors import HeadgateError
from protocol.file_retention import origin_of
from protocol.wire.state_handles import MANIFEST_BYTES_MAX, StateHandle
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import STATES_FOLDER, is_savepoint, operator_folder, savepoint_folder
from spark_bridge.storage.state_files.manifest import StoredFile, decode_manifest, encode_manifest

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and those in all."""

_PROBE = b"a task of Headgate can write here\n"
_LOST = (
    "the checkpoint that names it cannot be restored: restore an older one, or copy the file from a backup; if the "
    "storage is a local path, all executors and the driver must share it"
)


class UploadStopped(HeadgateError):
    """What was being written is not wanted any more. Nothing is lost: the next checkpoint may name what is complete."""


class StateFolder:
    """The files of the states of one operator, or of one savepoint. All methods block; for any thread.

    Raises ``StorageError``, and ``CheckpointUnreadable`` for a file that is damaged or gone.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path

    @classmethod
    def of_operator(cls, files: Files, operator_id: str) -> StateFolder:
        """The folder in a storage, whose root ``files`` are."""
        return cls(files, f"{operator_folder(operator_id)}/{STATES_FOLDER}")

    @classmethod
    def of_savepoint(cls, files: Files, savepoint: str) -> StateFolder:
        """The folder beside a savepoint, of which ``savepoint`` is the file's name in the directory ``files``."""
        return cls(files, savepoint_folder(savepoint))

    @classmethod
    def beside(cls, checkpoint: str, options: Mapping[str, Any] | None) -> StateFolder:
        """The folder with the files of the states in this file: a savepoint, or a checkpoint in a storage."""
        parent, slash, name = checkpoint.rpartition("/")
        files = Files(parent + slash or ".", options)
        return cls.of_savepoint(files, name) if is_savepoint(name) else cls(files, STATES_FOLDER)

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any] | None) -> StateFolder:
        """The folder of a savepoint, by its own path or URL."""
        above, _, name = url.rpartition("/")
        return cls(Files(above, options), name)

    @property
    def url(self) -> str:
        """Its full name."""
        return self._files.name_of(self._path)

    def name_of(self, name: str) -> str:
        """The full name of a file, for messages."""
        return self._files.name_of(f"{self._path}/{name}")

    # --- what tasks do too ---

    def write(self, name: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write a file whose name nobody else uses; see ``Files.write_pieces``."""
        self._files.write_pieces(f"{self._path}/{name}", pieces, size_bytes)

    def verified(self, file: StoredFile, stopped: Callable[[], bool]) -> Iterator[bytes]:
        """The content of a file in pieces.

        Raises ``CheckpointUnreadable`` after the last one if it is not what was stored.
        """
        try:
            yield from verified(self._files.pieces(f"{self._path}/{file.name}", file.size), file, stopped)
        except FileNotFoundError:
            raise CheckpointUnreadable(self.name_of(file.name), "there is no such file", _LOST) from None
        except CheckpointUnreadable as error:
            raise CheckpointUnreadable(error.file, error.problem, _LOST) from error
        except ValueError as error:
            raise CheckpointUnreadable(self.name_of(file.name), f"it {error}", _LOST) from None

    def probe(self, name: str) -> None:
        """Write a small file whose name nobody else uses, and read it. No state names it, so a sweep deletes it.

        Raises ``StorageError`` if either fails.
        """
        try:
            self.write(name, [_PROBE], len(_PROBE))
            for _ in self.verified(StoredFile("", len(_PROBE), sha256(_PROBE).digest(), name), bool):
                pass
        except StorageError as error:
            raise StorageError(
                f"a task cannot write and read states in files: {error}. Correct what its machine has: the credentials "
                "there, or those in StorageDetails(task_options=...), must allow both; a directory must be writable"
            ) from error

    def read_manifest(self, handle: StateHandle) -> tuple[StoredFile, ...]:
        """The files of a state, verified as far as the handle vouches for them. Their contents are not read."""
        name = self.name_of(handle.manifest)
        if handle.size > MANIFEST_BYTES_MAX:
            raise CheckpointUnreadable(
                name, f"a handle says that it has {handle.size} bytes, and the limit is {MANIFEST_BYTES_MAX}", _LOST
            )

        def check_head(head: bytes, size: int) -> None:
            if size != handle.size:
                raise CheckpointUnreadable(name, f"it has {size} bytes, and {handle.size} were stored")

        try:
            data = self._files.read(f"{self._path}/{handle.manifest}", head_bytes=1, check_head=check_head)
            return decode_manifest(data, handle)
        except FileNotFoundError:
            raise CheckpointUnreadable(name, "there is no such file", _LOST) from None
        except CheckpointUnreadable as error:
            raise CheckpointUnreadable(name, error.problem, _LOST) from error
        except ValueError as error:
            raise CheckpointUnreadable(name, f"the manifest {error}", _LOST) from error

    # --- what only the driver does ---

    def names_of(self, handle: StateHandle) -> frozenset[str]:
        """Everything that a state names: its manifest, which is read and verified, and what that names."""
        return frozenset({handle.manifest, *(file.name for file in self.read_manifest(handle))})

    def verify(self, handle: StateHandle, stopped: Callable[[], bool] = bool) -> None:
        """Read all files of a state, and raise ``CheckpointUnreadable`` if one is not what was stored."""
        for file in _contents(self.read_manifest(handle)):
            for _ in self.verified(file, stopped):
                pass

    def copy(
        self,
        handle: StateHandle,
        target: StateFolder,
        *,
        progress: Progress = lambda done, total: None,
        stopped: Callable[[], bool] = bool,
    ) -> None:
        """Copy a state into the folder of a savepoint, where the same handle names it, and verify what is copied.

        What is in that folder already is verified and stays. After an error, some files may have been copied.
        """
        contents = _contents(self.read_manifest(handle))
        total, done = sum(file.size for file in contents) + handle.size, 0
        for file in (*contents, StoredFile("", handle.size, handle.sha256, handle.manifest)):
            if not target._has(file, stopped):
                target.write(file.name, self.verified(file, stopped), file.size)
            done += file.size
            progress(done, total)

    def take_over(
        self,
        handle: StateHandle,
        source: StateFolder,
        new_name: Callable[[str], str],
        copies: dict[tuple[int, bytes], str],
        stopped: Callable[[], bool] = bool,
    ) -> StateHandle:
        """Copy a state of another folder into this one, under names of this application; return the copy's handle.

        ``new_name``: makes a name that nothing has, of a file or, with "m", of a manifest. ``copies``: the names of the
        contents that have been copied, by size and digest; what is among them is not copied again. Verifies what it
        copies. After an error, some files may have been copied.
        """
        files = []
        for file in source.read_manifest(handle):
            content = file.size, file.sha256
            if content not in copies:
                name = new_name("")
                self.write(name, source.verified(file, stopped), file.size)
                copies[content] = name
            files.append(file._replace(name=copies[content]))
        try:
            manifest = encode_manifest(files, handle.key_groups)
        except ValueError as error:
            raise StorageError(f"a state in files {error}") from error
        name = new_name("m")
        self.write(name, [manifest], len(manifest))
        return handle._replace(manifest=name, size=len(manifest), sha256=sha256(manifest).digest())

    def _has(self, file: StoredFile, stopped: Callable[[], bool]) -> bool:
        """Whether a file is here already, because another state of the savepoint names it too."""
        if not self._files.exists(f"{self._path}/{file.name}"):
            return False
        for _ in self.verified(file, stopped):
            pass
        return True

    def names(self) -> tuple[str, ...]:
        """The names of all files here that are ours, in order. Others are left alone."""
        folders = sorted(name for name in self._files.names(self._path) if origin_of(f"{name}/0-0-0-0"))
        found = (f"{folder}/{name}" for folder in folders for name in self._files.names(f"{self._path}/{folder}"))
        return tuple(sorted(name for name in found if origin_of(name)))

    def orphans(self, named: Collection[str]) -> tuple[str, ...]:
        """The names of the files here that are ours and not among these.

        While an application runs, files that it is storing are among them: show them, and let it delete them.
        """
        return tuple(name for name in self.names() if name not in named)

    def delete_all(self) -> None:
        """Delete the folder and all files in it that are ours: the folder of a savepoint that nobody wants."""
        self.delete(self.names())
        self._files.remove_folder(self._path)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, and folders that are empty then; harmless if they are gone.

        Raises ``ValueError``, and deletes nothing, if a name is not one of ours. Raises ``StorageError`` after all
        others have been deleted if some could not be.
        """
        wanted = tuple(names)
        for name in wanted:
            if origin_of(name) is None:
                raise ValueError(f"{name!r:.300} is not the name of a file of a state")
        failures = []
        for name in wanted:
            try:
                self._files.remove(f"{self._path}/{name}")
            except StorageError as error:
                failures.append(error)
        for folder in {name.partition("/")[0] for name in wanted}:
            self._files.remove_folder(f"{self._path}/{folder}")
        if failures:
            raise StorageError(
                f"{len(failures)} of {len(wanted)} files of states could not be deleted, and will be tried again: "
                f"{failures[0]}"
            ) from failures[0]


def check_wanted(stopped: Callable[[], bool]) -> None:
    """Raise ``UploadStopped`` if what is being done is not wanted any more."""
    if stopped():
        raise UploadStopped("the files of a state are not wanted any more: the attempt or the checkpoint is over")


def verified(pieces: Iterable[bytes], file: StoredFile, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """These pieces.

    Raises ``ValueError`` with the rest of a sentence, after the last one or at the first too many, if they are not the
    content of the file.
    """
    digest, size = sha256(), 0
    for piece in pieces:
        check_wanted(stopped)
        digest.update(piece)
        size += len(piece)
        if size > file.size:
            break
        yield piece
    if size != file.size or digest.digest() != file.sha256:
        raise ValueError("is damaged: size or SHA-256 are not those that were stored")


def _contents(files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    """One file for each name."""
    return tuple({file.name: file for file in files}.values())
