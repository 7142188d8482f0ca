# SPDX-License-Identifier: Apache-2.0

"""The data files of a table, and a note for each that is not committed yet.

A data file gets its final name and place when it is begun, because a table format refers to it there. Readers do not
see it, because nothing refers to it. It stays where it is after its commit, and even after the table has dropped it, as
long as older versions of the table need it. So the files themselves do not show which of them are orphans.

Therefore an empty file of the same name, the *note*, is written to ``_headgate/SINK`` before the data file is begun,
and deleted after the commit. Orphans are looked for among the notes only: what has none is never deleted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.common.urls import check_absolute, filesystem_of
from spark_bridge.sinks.two_phase.errors import SinkMisused

ensure_importable("fsspec")

from fsspec.implementations.local import LocalFileSystem  # noqa: E402 - fsspec must be importable first


class DataFolder:
    """The data files of one sink. Every method blocks.

    ``url`` is an absolute path, or a URL that fsspec knows. ``options`` are the arguments for the filesystem.
    """

    def __init__(self, url: str, sink: str, options: dict[str, Any] | None = None) -> None:
        check_absolute(url, error=SinkMisused)
        filesystem, root, secrets = filesystem_of(url, options)
        self._filesystem = secrets.guarding(filesystem)
        self._root = root.rstrip("/")
        self._notes = f"{self._root}/_headgate/{quote(sink, safe='')}"
        self._local = isinstance(filesystem, LocalFileSystem)
        self._made = False

    def create(self, name: str) -> Any:
        """Write the note, and open a new data file."""
        if not self._made:
            self._filesystem.makedirs(self._notes, exist_ok=True)
            self._made = True
        self._filesystem.pipe_file(f"{self._notes}/{name}", b"")
        self._sync(self._notes)
        return self._filesystem.open(f"{self._root}/{name}", "wb")

    def finish(self, file: Any) -> int:
        """Close a data file, and return its size. It survives a crash of this process and, on a local disk, of the
        machine."""
        size = int(file.tell())
        if self._local:
            file.flush()
            os.fsync(file.fileno())
        file.close()
        self._sync(self._root)
        return size

    def open(self, name: str) -> Any:
        """Open a data file for reading."""
        return self._filesystem.open(f"{self._root}/{name}", "rb")

    def path(self, name: str) -> str:
        """The full address of a data file."""
        return str(self._filesystem.unstrip_protocol(f"{self._root}/{name}"))

    def size(self, name: str) -> int | None:
        """The size of a data file in bytes; None if there is none."""
        self._filesystem.invalidate_cache()
        try:
            return int(self._filesystem.info(f"{self._root}/{name}")["size"])
        except FileNotFoundError:
            return None

    def noted(self) -> list[str]:
        """The names of the data files that have a note."""
        self._filesystem.invalidate_cache()
        try:
            paths = self._filesystem.ls(self._notes, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def forget(self, name: str) -> None:
        """Delete the note, if there is one: the file is committed."""
        self._remove(f"{self._notes}/{name}")

    def delete(self, name: str) -> None:
        """Delete the data file, and then the note, if they exist."""
        self._remove(f"{self._root}/{name}")
        self.forget(name)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(path)

    def _sync(self, path: str) -> None:
        if not self._local:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
