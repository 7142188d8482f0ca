# SPDX-License-Identifier: Apache-2.0

"""Divides the turns of the loop among the connections of a server (H65).

What one read delivers may be a thousand messages of a task that floods. Handled in one go, they would delay every
other connection by milliseconds. So a read of more than ``LIGHT`` messages is handled in shares of ``SHARE``, and all
connections together get one share in a turn of the loop, each in its turn. A connection that still has messages is not
read meanwhile, so its peer waits at its own socket. A read of few messages is handled immediately: a peer that sends
little waits for at most one share of the others.

What a turn sends leaves at its end, for all connections together, but at most ``FLUSHED_TOGETHER`` of them in one turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

__all__ = ["LIGHT", "READ_BYTES_MAX", "SHARE", "Turns", "WithBacklog"]

FLUSHED_TOGETHER = 64
"""So many connections write in one turn: together they take less than a millisecond."""

SHARE = 16
"""The number of messages that one turn of the loop takes from the connections that have many."""
LIGHT = 4
"""A read of up to this many messages does not wait for a share."""
READ_BYTES_MAX = 64 * 1024
"""The largest read of a connection. It bounds what a backlog holds, and the time to divide it into frames."""


class WithBacklog(Protocol):
    """A connection, as far as it takes its turn."""

    def flush(self) -> None:
        """Write what waits for the end of the turn. Must not raise."""
        ...

    def take_share(self) -> bool:
        """Handle the next share. Returns whether more is left."""
        ...


class Turns:
    """The connections of one server that have a backlog, in the order of their turns. Loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[WithBacklog] = deque()
        self._unsent: deque[WithBacklog] = deque()
        self._taken = False  # this turn's share; the next turn begins with ``_next``

    def wait(self, connection: WithBacklog) -> None:
        """Give the connection its turns until it has no backlog; the first one now if this turn's share is left."""
        self._waiting.append(connection)
        if not self._taken:
            self._taken = True
            self._loop.call_soon(self._next)
            self._serve()

    def forget(self, connection: WithBacklog) -> None:
        """The connection has no backlog any more. Idempotent."""
        if connection in self._waiting:
            self._waiting.remove(connection)

    def flush_at_end(self, connection: WithBacklog) -> None:
        """Have the connection write when this turn has ended, after those that have asked before."""
        if not self._unsent:
            self._loop.call_soon(self._flush_some)
        self._unsent.append(connection)

    def _flush_some(self) -> None:
        unsent = self._unsent
        for _ in range(min(FLUSHED_TOGETHER, len(unsent))):
            unsent.popleft().flush()
        if unsent:
            self._loop.call_soon(self._flush_some)

    def _next(self) -> None:
        if self._waiting:
            self._loop.call_soon(self._next)
            self._serve()
        else:
            self._taken = False

    def _serve(self) -> None:
        connection = self._waiting.popleft()
        if connection.take_share():
            self._waiting.append(connection)
