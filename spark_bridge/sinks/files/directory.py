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
from typing import Any, BinaryIO
from urllib.parse import quote

from spark_bridge.sinks.files.moves import move_on
from spark_bridge.sinks.folder import SinkFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused

UNFINISHED = ".tmp"
"""The ending of a small file's name while it is written."""


class Published(Enum):
    """The result of publishing a file."""

    MOVED = "moved"
    BEFORE = "before"  # already published, and no longer in the staging directory
    GONE = "gone"  # in neither place


class SinkDirectory(SinkFolder):
    """The files of one sink. ``name`` distinguishes the sinks of one directory.

    Raises ``SinkMisused`` also for an empty name, or a filesystem on which readers could see half a file.
    """

    def __init__(self, url: str, name: str, options: dict[str, Any] | None = None) -> None:
        if not name:
            raise SinkMisused("the name of a sink must not be empty")
        super().__init__(url, f".headgate-{quote(name, safe='')}", options)
        self._move = self._secrets.guarding(move_on(self._unguarded))

    def create(self, name: str) -> BinaryIO:
        """Open a new part in the staging directory."""
        self.prepare()
        file: BinaryIO = self._filesystem.open(f"{self._hidden}/{name}", "wb")
        return file

    def sync_staging(self) -> None:
        """Make the names of all finished parts durable too."""
        self._sync(self._hidden)

    def publish(self, name: str) -> Published:
        """Move a sealed part to the readers' directory. Doing it again is harmless."""
        source = f"{self._hidden}/{name}"
        if not self._local:
            self._filesystem.invalidate_cache()
        if self._info(source) is not None:
            with suppress(FileNotFoundError):  # another driver was faster
                self._move(source, f"{self._root}/{name}")
                return Published.MOVED
        return Published.BEFORE if self.is_published(name) else Published.GONE

    def sync_published(self) -> None:
        """Make published files durable: a power cut neither loses them nor moves them back."""
        self._sync(self._root)
        self._sync(self._hidden)

    def read(self, name: str) -> bytes:
        """Read a small file in the staging directory."""
        return bytes(self._filesystem.cat_file(f"{self._hidden}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file into the staging directory, durably, and atomically if the filesystem can."""
        path = f"{self._hidden}/{name}"
        self.prepare()
        if not self._local:
            self._filesystem.pipe_file(path, data)
            return
        with open(f"{path}{UNFINISHED}", "wb") as file:
            file.write(data)
            self.finish(file)
        os.replace(f"{path}{UNFINISHED}", path)
        self._sync(self._hidden)

    def is_published(self, name: str) -> bool:
        """Whether readers can see the file now."""
        return self._info(f"{self._root}/{name}") is not None

    def delete(self, name: str) -> None:
        """Delete a part from the staging directory, if it exists."""
        self._remove(f"{self._hidden}/{name}")

    def remove_if_empty(self) -> None:
        """Delete the staging directory if it is empty, on filesystems with real directories."""
        if self._local:
            with suppress(OSError):
                os.rmdir(self._hidden)
                self._made = False
