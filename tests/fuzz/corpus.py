"""Inputs worth keeping: what once broke something, or is odd in a way that no other test is.

One file for each, ``corpus/<target>/<what it is>.hex``: lines of hexadecimal digits; a line that begins with ``#`` says
what it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def inputs(target_name: str) -> Iterator[tuple[str, bytes]]:
    """The names and the bytes of what is kept for a target, in the order of their names."""
    for file in sorted((FOLDER / target_name).glob("*.hex")):
        lines = [line for line in file.read_text("ascii").splitlines() if not line.startswith("#")]
        yield file.stem, bytes.fromhex("".join(lines))
