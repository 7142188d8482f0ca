# SPDX-License-Identifier: Apache-2.0

"""One cut for all parts of a chain, although their snapshots are taken one after the other (H80).

The cut is where the last part's snapshot is taken. Meanwhile, code of an earlier part may run on the loop, outside of
its coordinator's methods, and send an event or give an answer that the snapshot of that part does not have. It would be
before the cut, so a restore would send it again. So it is held until the cut, and leaves right behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.wire.extension_types import PartEvent

__all__ = ["PartsCut", "inner_of", "part_of"]


def part_of(event: Any) -> str:
    """The named part that an event or request belongs to; empty for the main part."""
    return event.name if type(event) is PartEvent else ""


def inner_of(event: Any) -> Any:
    """The event itself."""
    return event.event if type(event) is PartEvent else event


class PartsCut:
    """What the parts of one chain have sent behind their own snapshots. Loop only."""

    __slots__ = ("_held", "_taken")

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._held: list[Callable[[], None]] = []

    def snapshot_taken(self, part: str) -> None:
        """The state of ``part`` is taken, and that of another one is not."""
        self._taken.add(part)

    def hold(self, part: str, send: Callable[[], None]) -> bool:
        """Keep ``send`` until the cut if the state of ``part`` is taken. If this returns False, send now."""
        if part not in self._taken:
            return False
        self._held.append(send)
        return True

    def reached(self) -> None:
        """The gateways know the cut, or the snapshot has failed: send what was held, in its order."""
        self._taken.clear()
        held, self._held = self._held, []
        for send in held:
            send()
