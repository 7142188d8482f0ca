# SPDX-License-Identifier: Apache-2.0

"""Work that an actor starts and does not wait for; its outcome comes back as a message."""

from __future__ import annotations

from typing import Any

import anyio

from actors.mailbox import Envelope
from actors.stepping import Steps


class Background:
    """One piece of background work. It is cancelled when its actor stops or restarts. Loop-only."""

    __slots__ = ("done", "name", "scope", "steps")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        """Whether it has ended, in whatever way."""
        self.scope = anyio.CancelScope()
        self.steps: Steps[Any] | None = None  # runs the work

    def cancel(self) -> None:
        """Cancel the work. No message comes back from it, even if one is already in the mailbox.

        Does nothing if the work has ended and its message was handled.
        """
        self.scope.cancel()

    def abandon(self, log: Any) -> None:
        """Runtime only: log the work that has ignored its cancellation, and run it no further."""
        if self.steps is not None and not self.steps.abandoned:
            log.error("background work ignored its cancellation", what=self.name, waiting_at=self.steps.place)
            self.steps.abandon()

    @property
    def cancelled(self) -> bool:
        """Whether it has been cancelled."""
        return self.scope.cancel_called


class ResultEnvelope(Envelope):
    """The outcome of background work; void if the work was cancelled since."""

    __slots__ = ("_work",)

    def __init__(self, message: object, work: Background) -> None:
        self.message = message
        self._work = work

    def open(self) -> bool:
        return not self._work.cancelled

    def undeliverable(self, error: Exception) -> bool:
        return not self._work.cancelled
