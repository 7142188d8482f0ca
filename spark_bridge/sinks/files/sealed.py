# SPDX-License-Identifier: Apache-2.0

"""A part of the file sink that is complete, and how parts may be called."""

from __future__ import annotations

from typing import NamedTuple

from protocol.arguments import given
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable, PartName

__all__ = ["SealedFile", "check_affixes"]


class SealedFile(NamedTuple):
    """A complete part file. ``checkpoint_id`` is the snapshot that sealed it, -1 for the end of the operator."""

    name: str
    rows: int
    size_bytes: int
    checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT

    @property
    def part(self) -> PartName:
        """The parsed name."""
        return self.committable.part

    @property
    def committable(self) -> Committable:
        """What the committer gets."""
        return Committable(self.name, [self.rows, self.size_bytes], self.checkpoint_id)


def check_affixes(prefix: str, suffix: str) -> None:
    """Raise ``SinkMisused`` for an affix that would hide the published files, or make their names ambiguous."""
    if not prefix or "/" in prefix or prefix[0] in "._":
        raise SinkMisused(
            f"prefix must be a str without slashes that begins with neither a dot nor an underscore, not "
            f"{given('prefix', prefix)}"
        )
    if "/" in suffix or (suffix and suffix[0] != "."):
        shown = given("suffix", suffix)
        raise SinkMisused(f"suffix must be empty, or begin with a dot and have no slashes, not {shown}")
