# SPDX-License-Identifier: Apache-2.0

"""The data files of a table, and a note for each that is not committed yet.

A data file gets its final name and place when it is begun, because a table format refers to it there. Readers do not
see it, because nothing refers to it. It stays where it is after its commit, and even after the table has dropped it, as
long as older versions of the table need it. So the files themselves do not show which of them are orphans.

Therefore an empty file of the same name, the *note*, is written to ``_headgate/SINK`` before the data file is begun,
and deleted after the commit. Orphans are looked for among the notes only: what has none is never deleted.
"""

from __future__ import annotations

from typing import Any, BinaryIO
from urllib.parse import quote

from spark_bridge.sinks.folder import SinkFolder


class DataFolder(SinkFolder):
    """The data files of one sink, and their notes in the hidden folder."""

    def __init__(self, url: str, sink: str, options: dict[str, Any] | None = None) -> None:
        super().__init__(url, f"_headgate/{quote(sink, safe='')}", options)

    def create(self, name: str) -> BinaryIO:
        """Write the note, and open a new data file."""
        self.prepare()
        self._filesystem.pipe_file(f"{self._hidden}/{name}", b"")
        self._sync(self._hidden)
        return self.open(name, "wb")

    def finish(self, file: BinaryIO) -> int:
        size = super().finish(file)
        self._sync(self._root)
        return size

    def open(self, name: str, mode: str = "rb") -> BinaryIO:
        """Open a data file."""
        file: BinaryIO = self._filesystem.open(f"{self._root}/{name}", mode)
        return file

    def size(self, name: str) -> int | None:
        """The size of a data file in bytes; None if there is none."""
        self._filesystem.invalidate_cache()
        info = self._info(f"{self._root}/{name}")
        return None if info is None else int(info["size"])

    def forget(self, name: str) -> None:
        """Delete the note, if there is one: the file is committed."""
        self._remove(f"{self._hidden}/{name}")

    def delete(self, name: str) -> None:
        """Delete the data file, and then the note, if they exist."""
        self._remove(f"{self._root}/{name}")
        self.forget(name)
