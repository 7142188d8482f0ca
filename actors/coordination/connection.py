"""What a gateway needs of a connection; the engine's server provides it."""

from __future__ import annotations

from typing import Protocol

from protocol.wire.messages import Downward


class AttemptConnection(Protocol):
    """One authenticated connection to one execution attempt. Loop only."""

    @property
    def connection_id(self) -> int: ...

    def send(self, message: Downward, *, at_once: bool = False) -> None:
        """Queue a message; after close it is dropped (what is unconfirmed is sent again on the next connection).

        What is queued leaves at the end of this turn of the loop; ``at_once``: with this message, for nothing follows.
        """
        ...

    def close(self, *, flush: bool = True) -> None:
        """Close after what is queued has left (``flush``), or at once. Idempotent."""
        ...
