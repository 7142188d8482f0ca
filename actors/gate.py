# SPDX-License-Identifier: Apache-2.0

"""Whose turn it is: the seam through which a test kit delivers messages one by one."""

from __future__ import annotations

from typing import Any, Protocol


class Gate(Protocol):
    """Decides when an actor may take its next message. A system without a gate never waits for one.

    Each method receives the ``ActorCell`` of the actor concerned.
    """

    async def turn(self, cell: Any) -> None:
        """Return when ``cell`` may handle one signal or message."""

    def direct(self, cell: Any, message: object) -> bool:
        """``tell_direct`` to an idle actor: True if ``cell`` may handle the message now, False to queue it."""
        ...
