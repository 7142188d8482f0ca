"""The sink's directory on any filesystem: where parts are written, and where readers find them.

``<url>/.headgate-<name>/`` is the staging directory; Spark, Hive and ``glob`` pass over names with a leading dot.
A published file lies in ``<url>`` itself. Publishing is a move within one filesystem: an atomic rename on a local
directory (and on HDFS), a copy that becomes visible whole, and then a deletion, on an object store.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from typing import Any, Protocol
from urllib.parse import quote

from spark_bridge.sink.errors import SinkMisused
from spark_bridge.subtask.bootstrap import ensure_importable

ensure_importable("fsspec")

from fsspec.core import url_to_fs  # noqa: E402 - fsspec must be importable first
from fsspec.implementations.local import LocalFileSystem  # noqa: E402

__all__ = ["UNFINISHED", "PartFile", "Published", "SinkDirectory"]

UNFINISHED = ".tmp"
"""What the name of a small file ends with while it is written."""


class Published(Enum):
    """What publishing found."""

    MOVED = "moved"
    BEFORE = "before"  # it is there already, and no longer in the staging directory
    GONE = "gone"  # in neither place


class PartFile(Protocol):
    """An open part, as much of it as is used here."""

    def write(self, data: bytes, /) -> Any: ...
    def flush(self) -> Any: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class SinkDirectory:
    """One sink's files. Every method blocks; all of them may be called from any thread.

    ``url``: an absolute path, or a URL that fsspec knows. ``name`` tells the sinks of one directory apart.
    ``options`` go to the filesystem, such as credentials.

    Raises:
        SinkMisused: a relative path, which would mean another directory in each process, or an empty name.
        ValueError, ImportError: no such filesystem, or its package is not installed.
    """

    def __init__(self, url: str, name: str, options: dict[str, Any] | None = None) -> None:
        if "://" not in url and not os.path.isabs(url):
            raise SinkMisused(
                f"{url!r} is neither an absolute path nor a URL: executors have other working directories"
            )
        if not name:
            raise SinkMisused("a sink needs a name")
        self._filesystem, root = url_to_fs(url, **(options or {}))
        self._root = root.rstrip("/")
        self._staging = f"{self._root}/.headgate-{quote(name, safe='')}"
        self._local = isinstance(self._filesystem, LocalFileSystem)
        self._made = False
        self.address = str(self._filesystem.unstrip_protocol(self._root or "/"))
        """The directory in full, spelled alike in every process."""

    def prepare(self) -> None:
        """Make the directories. Raises ``OSError`` where that is not allowed, or where a file stands in the way."""
        self._filesystem.makedirs(self._staging, exist_ok=True)
        self._made = True

    # --- parts being written ------------------------------------------------------------------------------

    def create(self, name: str) -> PartFile:
        """Open a new part in the staging directory."""
        if not self._made:
            self.prepare()
        file: PartFile = self._filesystem.open(f"{self._staging}/{name}", "wb")
        return file

    def finish(self, file: PartFile) -> None:
        """Everything that was written is safe from a crash of this process, and on a local disk of the machine."""
        if self._local:
            file.flush()
            os.fsync(file.fileno())
        file.close()

    def sync_staging(self) -> None:
        """The names of all finished parts are safe too."""
        self._sync(self._staging)

    # --- sealed parts -------------------------------------------------------------------------------------

    def publish(self, name: str) -> Published:
        """Move a sealed part to where readers look. Doing it again is harmless."""
        source, target = f"{self._staging}/{name}", f"{self._root}/{name}"
        if self._local:
            try:
                os.replace(source, target)  # never copies, as a move of the library's might
            except FileNotFoundError:
                return Published.BEFORE if os.path.exists(target) else Published.GONE
            return Published.MOVED
        self._filesystem.invalidate_cache()
        if self._exists(source):
            self._filesystem.mv(source, target)
            return Published.MOVED
        return Published.BEFORE if self._exists(target) else Published.GONE

    def sync_published(self) -> None:
        """What was published stays so: no power cut brings it back to the staging directory, or loses it."""
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
        """All of a small file in the staging directory."""
        return bytes(self._filesystem.cat_file(f"{self._staging}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file into the staging directory; durable when this returns, whole if the filesystem can."""
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
        """Whether readers can see it at this moment."""
        return self._exists(f"{self._root}/{name}")

    def delete(self, name: str) -> None:
        """Delete a part from the staging directory, if it is there."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._staging}/{name}")

    def remove_if_empty(self) -> None:
        """Take an empty staging directory away, where directories are real."""
        if self._local:
            with suppress(OSError):
                os.rmdir(self._staging)

    def _exists(self, path: str) -> bool:
        """The library's own ``exists`` takes every trouble for absence."""
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
