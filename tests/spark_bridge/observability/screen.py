# SPDX-License-Identifier: Apache-2.0

"""What a terminal shows after what was written to it: enough of one for progress bars."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")


def screen_of(written: str) -> list[str]:
    """The lines that are not empty, without blanks at their ends. A newline goes to the beginning of the next line."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for count, command, move, text in TOKEN.findall(written):
        if command == "A":
            row = max(0, row - int(count or 1))
        elif command == "K":
            del rows[row][column:]
        elif move:
            column = 0
            row += "\n" in move
        for character in text:
            line = rows[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = character
            column += 1
        rows.extend([] for _ in range(row + 1 - len(rows)))
    lines = ["".join(line).rstrip() for line in rows]
    return [line for line in lines if line]
