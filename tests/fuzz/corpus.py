# SPDX-License-Identifier: Apache-2.0

"""Inputs worth keeping, because they once broke something or are unusual in a way that no other test covers.

Each is a file ``corpus/<target>/<what it is>.hex`` with lines of hexadecimal digits. A line that begins with ``#`` is a
description.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def inputs(target_name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of a target's inputs, in the order of the names."""
    for file in sorted((FOLDER / target_name).glob("*.hex")):
        lines = [line for line in file.read_text("ascii").splitlines() if not line.startswith("#")]
        yield file.stem, bytes.fromhex("".join(lines))
