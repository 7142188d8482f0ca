# SPDX-License-Identifier: Apache-2.0

"""What the commands print: no text makes a terminal do anything, and none is an error."""

from __future__ import annotations

from typing import TextIO

from protocol.describing import line

__all__ = ["cell", "tell"]

CELL_CHARS_MAX = 100


def cell(text: str) -> str:
    """A text for a cell of a table: one long name must not widen all rows."""
    return line(text, CELL_CHARS_MAX)


def tell(stream: TextIO, text: str) -> None:
    """Write one line. What the terminal would obey, or the stream cannot encode, is escaped."""
    encoding = stream.encoding or "utf-8"
    stream.write(line(text, len(text)).encode(encoding, "backslashreplace").decode(encoding) + "\n")
