# SPDX-License-Identifier: Apache-2.0

"""The folder into which a sink writes, on any filesystem, and the hidden folder in it that is the sink's alone."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, BinaryIO

from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.common.urls import check_absolute, filesystem_of
from spark_bridge.sinks.two_phase.errors import SinkMisused

ensure_importable("fsspec")

from fsspec.implementations.local import LocalFileSystem  # noqa: E402 - fsspec must be importable first


class SinkFolder:
    """The files of one sink. Every method blocks, and may be called from any thread.

    ``url`` is an absolute path, or a URL that fsspec knows, and ``hidden`` the path of the hidden folder in it.
    ``options`` are the arguments for the filesystem, such as credentials.

    Raises:
        SinkMisused: a relative path, which would mean another folder in each process.
        ValueError, ImportError: no such filesystem, or its package is not installed.
    """

    def __init__(self, url: str, hidden: str, options: dict[str, Any] | None) -> None:
        check_absolute(url, error=SinkMisused)
        self._unguarded, root, self._secrets = filesystem_of(url, options)
        self._filesystem = self._secrets.guarding(self._unguarded)
        self._root = root.rstrip("/")
        self._hidden = f"{self._root}/{hidden}"
        self._local = isinstance(self._unguarded, LocalFileSystem)
        self._made = False
        self.address = str(self._filesystem.unstrip_protocol(self._root or "/"))
        """The full address of the folder, which is the same in every process."""

    def path(self, name: str) -> str:
        """The full address of a file."""
        return str(self._filesystem.unstrip_protocol(f"{self._root}/{name}"))

    def prepare(self) -> None:
        """Create the folders. Raises ``OSError`` if that is not allowed, or if there is a file of that name."""
        if self._made:
            return
        try:
            self._filesystem.makedirs(self._hidden, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotADirectoryError(
                f"a sink needs a directory, but {self.address}, or what is above it, is a file: name another path, or "
                "move the file away"
            ) from error
        self._made = True

    def finish(self, file: BinaryIO) -> int:
        """Close a file, and return its size. It survives a crash of this process; on a local disk, of the machine."""
        size = int(file.tell())
        if self._local:
            file.flush()
            os.fsync(file.fileno())
        file.close()
        return size

    def staged(self) -> list[str]:
        """The names in the hidden folder: of what is not committed yet."""
        self._filesystem.invalidate_cache()
        try:
            paths = self._filesystem.ls(self._hidden, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def _info(self, path: str) -> dict[str, Any] | None:
        """What is known of a file; None if there is none. The library's own ``exists`` is False for any error."""
        try:
            return dict(self._filesystem.info(path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(path)

    def _sync(self, path: str) -> None:
        """Make the names in a local folder durable."""
        if not self._local:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
