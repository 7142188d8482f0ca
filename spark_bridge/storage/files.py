# SPDX-License-Identifier: Apache-2.0

"""The files of one directory on any filesystem that fsspec knows, whose errors become ``StorageError`` here.

On a local filesystem, data is on the disk when a method returns (fsync of the file and of its directory). On others it
is as durable as the filesystem makes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from spark_bridge.storage.errors import CheckpointUnreadable, StorageError


class Files:
    """The files of one directory. Paths are relative to it.

    The methods block, and may be called from several threads at once. Whatever the filesystem raises, they raise
    ``StorageError`` with the name of the file.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.url = str(url)
        try:
            filesystem, root = url_to_fs(str(url), **(options or {}))
        except Exception as error:  # each filesystem has its own, a missing package among them
            raise StorageError(f"cannot use {self.url}: {_described(error)}") from error
        self._filesystem: Any = filesystem
        self._root: str = root.rstrip("/")
        self._local = type(filesystem) is LocalFileSystem  # a subclass may do anything
        if self._local:
            self.url = root  # absolute, whatever the working directory is

    def name_of(self, path: str) -> str:
        """The file's full name, for messages."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    def make_folder(self, path: str = "") -> None:
        """Create the folder and its missing parents."""
        with self._refusals("make the directory", path, missing_too=True):
            if self._local:
                _make_local_folder(Path(self._full(path)))
            else:
                self._filesystem.makedirs(self._full(path), exist_ok=True)

    def names(self, path: str = "") -> list[str]:
        """The names in a folder, in no particular order; none if there is no such folder."""
        with self._refusals("list", path):
            full = self._full(path)
            self._filesystem.invalidate_cache(full)  # another application may have written in the meantime
            try:
                listed = self._filesystem.ls(full, detail=False)
            except FileNotFoundError:
                return []
            if [name.rstrip("/") for name in listed] == [full]:
                raise NotADirectoryError(f"{self.name_of(path)} is a file")
            return [name.rstrip("/").rpartition("/")[2] for name in listed]

    def folders(self) -> list[str]:
        """The names of the folders in the directory, in no particular order; none if there is no such directory."""
        with self._refusals("list", ""):
            self._filesystem.invalidate_cache(self._full(""))
            try:
                listed = self._filesystem.ls(self._full(""), detail=True)
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in listed if entry["type"] == "directory"]

    def size(self, path: str) -> int:
        """The size of a file in bytes. Raises ``FileNotFoundError`` if there is no such file."""
        with self._refusals("read", path):
            return int(self._filesystem.info(self._full(path))["size"])

    def read(self, path: str, *, bytes_max: int) -> bytes:
        """Read a whole file. Raises ``FileNotFoundError``, or ``CheckpointUnreadable`` if it exceeds ``bytes_max``."""
        size = self.size(path)
        if size > bytes_max:
            raise CheckpointUnreadable(self.name_of(path), f"{size} bytes exceed the limit of {bytes_max}")
        with self._refusals("read", path):
            return bytes(self._filesystem.cat_file(self._full(path)))

    def create_empty(self, path: str) -> None:
        """Create an empty file."""
        with self._refusals("create", path, missing_too=True):
            full = self._full(path)
            if self._local:
                os.close(os.open(full, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
                _sync_folder(os.path.dirname(full))
            else:
                self._filesystem.pipe_file(full, b"")

    def write(self, path: str, data: bytes, *, temporary: str, before_move: Callable[[], None]) -> None:
        """Write a file so that a reader sees all of it or nothing: under ``temporary`` first, then move it.

        ``before_move`` is called in between. If it raises, the file does not appear. After an error of the filesystem,
        the file may have appeared. The caller knows whether it may be deleted, and must do so.
        """
        try:
            with self._refusals("write", temporary, missing_too=True):
                self._put(self._full(temporary), data)
            before_move()
            with self._refusals("write", path, missing_too=True):
                self._move(self._full(temporary), self._full(path))
                written = int(self._filesystem.info(self._full(path))["size"])
                if written != len(data):
                    raise OSError(f"{len(data)} bytes were written, but the file has {written}")
        except BaseException:
            self.sweep(temporary)
            raise

    def sweep(self, path: str) -> None:
        """Delete what a failure may have left, ignoring errors, because that failure is the one to report."""
        with suppress(StorageError):
            self.remove(path)

    def remove(self, path: str) -> None:
        """Delete a file; harmless if there is none."""
        with self._refusals("delete", path), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._full(path))

    def _put(self, full: str, data: bytes) -> None:
        if not self._local:
            self._filesystem.pipe_file(full, data)
            return
        with open(full, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _move(self, source: str, target: str) -> None:
        if not self._local:
            self._filesystem.mv(source, target)
            self._filesystem.invalidate_cache(os.path.dirname(target))
            return
        os.replace(source, target)
        _sync_folder(os.path.dirname(target))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    @contextmanager
    def _refusals(self, action: str, path: str, *, missing_too: bool = False) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # each filesystem raises its own; only a missing file is distinguished
            if isinstance(error, FileNotFoundError) and not missing_too:
                raise
            raise StorageError(f"cannot {action} {self.name_of(path)}: {_described(error)}") from error


def _described(error: Exception) -> str:
    """The first line of the error: some filesystems raise pages of text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _make_local_folder(folder: Path) -> None:
    missing = [ancestor for ancestor in (folder, *folder.parents) if not ancestor.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        _sync_folder(str(made.parent))


def _sync_folder(path: str) -> None:
    """Make names in the folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
