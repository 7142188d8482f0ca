# SPDX-License-Identifier: Apache-2.0

"""The sink's directory on any filesystem: where parts are written, and where readers find them.

``<url>/.headgate-<name>/`` is the staging directory; Spark, Hive and ``glob`` ignore names with a leading dot.
Published files are in ``<url>`` itself. Publishing is a move within one filesystem, and readers see all of a file or
nothing (``moves``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from typing import Any, Protocol
from urllib.parse import quote

from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.common.urls import check_absolute, filesystem_of
from spark_bridge.sinks.files.moves import move_on
from spark_bridge.sinks.two_phase.errors import SinkMisused

ensure_importable("fsspec")

from fsspec.implementations.local import LocalFileSystem  # noqa: E402 - fsspec must be importable first

UNFINISHED = ".tmp"
"""The ending of a small file's name while it is written."""


class Published(Enum):
    """The result of publishing a file."""

    MOVED = "moved"
    BEFORE = "before"  # already published, and no longer in the staging directory
    GONE = "gone"  # in neither place


class PartFile(Protocol):
    """The methods of an open part that are used here."""

    def write(self, data: bytes, /) -> Any: ...
    def flush(self) -> Any: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class SinkDirectory:
    """The files of one sink. Every method blocks, and may be called from any thread.

    ``url`` is an absolute path, or a URL that fsspec knows. ``name`` distinguishes the sinks of one directory.
    ``options`` are the arguments for the filesystem, such as credentials.

    Raises:
        SinkMisused: a relative path, which would mean another directory in each process, an empty name, or a filesystem
            on which readers could see half a file.
        ValueError, ImportError: no such filesystem, or its package is not installed.
    """

    def __init__(self, url: str, name: str, options: dict[str, Any] | None = None) -> None:
        check_absolute(url, error=SinkMisused)
        if not name:
            raise SinkMisused("the name of a sink must not be empty")
        filesystem, root, secrets = filesystem_of(url, options)
        self._filesystem = secrets.guarding(filesystem)
        self._root = root.rstrip("/")
        self._staging = f"{self._root}/.headgate-{quote(name, safe='')}"
        self._local = isinstance(filesystem, LocalFileSystem)
        self._move = secrets.guarding(move_on(filesystem))
        self._made = False
        self.address = str(self._filesystem.unstrip_protocol(self._root or "/"))
        """The full address of the directory, which is the same in every process."""

    def prepare(self) -> None:
        """Create the directories. Raises ``OSError`` if that is not allowed, or if there is a file of that name."""
        try:
            self._filesystem.makedirs(self._staging, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotADirectoryError(
                f"a sink needs a directory, but {self.address}, or what is above it, is a file: name another path, or "
                "move the file away"
            ) from error
        self._made = True

    # --- parts being written ------------------------------------------------------------------------------

    def create(self, name: str) -> PartFile:
        """Open a new part in the staging directory."""
        if not self._made:
            self.prepare()
        file: PartFile = self._filesystem.open(f"{self._staging}/{name}", "wb")
        return file

    def finish(self, file: PartFile) -> None:
        """Close a part. Its content survives a crash of this process and, on a local disk, of the machine."""
        if self._local:
            file.flush()
            os.fsync(file.fileno())
        file.close()

    def sync_staging(self) -> None:
        """Make the names of all finished parts durable too."""
        self._sync(self._staging)

    # --- sealed parts -------------------------------------------------------------------------------------

    def publish(self, name: str) -> Published:
        """Move a sealed part to the readers' directory. Doing it again is harmless."""
        source, target = f"{self._staging}/{name}", f"{self._root}/{name}"
        if not self._local:
            self._filesystem.invalidate_cache()
        if self._exists(source):
            with suppress(FileNotFoundError):  # another driver was faster
                self._move(source, target)
                return Published.MOVED
        return Published.BEFORE if self._exists(target) else Published.GONE

    def sync_published(self) -> None:
        """Make published files durable: a power cut neither loses them nor moves them back."""
        self._sync(self._root)
        self._sync(self._staging)

    def staged(self) -> list[str]:
        """The names in the staging directory."""
        self._filesystem.invalidate_cache()
        try:
            paths = self._filesystem.ls(self._staging, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str) -> bytes:
        """Read a small file in the staging directory."""
        return bytes(self._filesystem.cat_file(f"{self._staging}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file into the staging directory, durably, and atomically if the filesystem can."""
        path = f"{self._staging}/{name}"
        if not self._made:
            self.prepare()
        if not self._local:
            self._filesystem.pipe_file(path, data)
            return
        with open(f"{path}{UNFINISHED}", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}{UNFINISHED}", path)
        self._sync(self._staging)

    def is_published(self, name: str) -> bool:
        """Whether readers can see the file now."""
        return self._exists(f"{self._root}/{name}")

    def delete(self, name: str) -> None:
        """Delete a part from the staging directory, if it exists."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._staging}/{name}")

    def remove_if_empty(self) -> None:
        """Delete the staging directory if it is empty, on filesystems with real directories."""
        if self._local:
            with suppress(OSError):
                os.rmdir(self._staging)

    def _exists(self, path: str) -> bool:
        """Whether a file exists. The library's own ``exists`` returns False for any error."""
        try:
            self._filesystem.info(path)
        except FileNotFoundError:
            return False
        return True

    def _sync(self, path: str) -> None:
        if not self._local:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
