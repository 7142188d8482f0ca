# SPDX-License-Identifier: Apache-2.0

"""The connection interface that a gateway uses; the engine's server implements it."""

from __future__ import annotations

from typing import Protocol

from protocol.wire.messages import Downward


class AttemptConnection(Protocol):
    """One authenticated connection to one execution attempt. Loop only."""

    @property
    def connection_id(self) -> int: ...

    def heard(self) -> bool:
        """Whether bytes came from the peer since the last call, or were not read because others come first."""
        ...

    def progressed(self) -> bool:
        """Whether a part of a large message has left since the last call, after the peer has read earlier ones."""
        ...

    def send(self, message: Downward, *, immediately: bool = False) -> None:
        """Queue a message. After close it is dropped; unconfirmed items are sent again on the next connection.

        Queued messages leave at the end of this turn of the loop. ``immediately``: write it now, because no further
        message follows in this turn.
        """
        ...

    def close(self, *, flush: bool = True) -> None:
        """Close: immediately, or with ``flush`` after the queued messages have left. Idempotent."""
        ...
