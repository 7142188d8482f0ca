# SPDX-License-Identifier: Apache-2.0

"""A hostile task of the operator: it has the key, and claims to be the task of another subtask (H75).

Spark has never given out the task id that it claims. It leaves when it is answered, or after a while.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.wire.messages import Register, Registered
from tests.simulation.network import Connection
from tests.simulation.shared import Totals

FIRST_ID = 10**9
"""The claimed ids begin here, or at 1: a task that claims to be newer than all others, or older."""


class Forger:
    """One claim, on a separate connection. It ends by ``until``, on the world's clock."""

    def __init__(self, connection: Connection, claim: Register, until: float, figures: Totals) -> None:
        self.until = until
        self.gone = False
        self._connection = connection
        self._figures = figures
        connection.send_up(claim)

    def actions(self, now: float) -> list[Callable[[], None]]:
        """Return what it could do next."""
        connection = self._connection
        if self.gone:
            return []
        if connection.down or connection.server_gone:
            return [self.read]
        return [self.leave] if now >= self.until else []

    def read(self) -> None:
        """Take the answer, and leave."""
        if any(isinstance(message, Registered) for message in self._connection.down):
            self._figures.happen("a claim is accepted where no attempt lives")
        self.leave()

    def leave(self) -> None:
        """Close the connection without a word."""
        self.gone = True
        self._connection.close_by_task(flush=False)
