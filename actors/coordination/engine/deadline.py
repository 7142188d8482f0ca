# SPDX-License-Identifier: Apache-2.0

"""Keeps one timer for a machine's ``next_deadline``."""

from __future__ import annotations

from typing import Any

from actors import ActorContext
from protocol.machine import TimePassed


class DeadlineTimer:
    """Sends the actor a ``TimePassed`` when its machine's deadline has come.

    If a deadline moves later, the timer stays as it is: it fires early once and is armed again. So a machine whose
    deadline moves with every message does not need a timer per message.
    """

    __slots__ = ("_armed_for",)

    def __init__(self) -> None:
        self._armed_for: float | None = None

    def fired(self) -> None:
        """The actor has received the ``TimePassed``."""
        self._armed_for = None

    def arm(self, context: ActorContext[Any], deadline: float | None, now: float) -> None:
        """Call after each step of the machine. ``now`` and ``deadline`` are readings of ``context.clock``."""
        if deadline is None or (self._armed_for is not None and self._armed_for <= deadline):
            return
        self._armed_for = deadline
        context.timers.start("deadline", TimePassed(), delay_s=max(0.0, deadline - now))
