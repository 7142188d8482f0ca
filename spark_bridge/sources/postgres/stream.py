# SPDX-License-Identifier: Apache-2.0

"""A replication connection, on which the server sends the changes in its log as it decodes them.

It decodes each byte of its log once in a connection, no matter how often somebody looks for changes, and keeps what
does not fit into its memory on its disk. What is not received yet waits there. So neither side keeps a transaction in
memory.
"""

from __future__ import annotations

import select
from struct import Struct

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

_MESSAGE = b"w"
_HEADER_BYTES = 25  # the kind, two places in the log, and the time
_KEEPALIVE = Struct(">cqqb")
_STATUS = Struct(">cqqqqb")
SILENCE_MS = 1000
"""How long a message is waited for before others have their turn."""


class ChangeStream:
    """The messages of a slot from a place in the log on. Not thread-safe.

    Args:
        connection: a replication connection, which the stream closes.
        slot: the replication slot.
        publication: says which tables.
        start: where to begin. A transaction comes if its commit begins there or later.

    Attributes:
        sent_to: everything that was committed before this place has been received.

    Raises:
        psycopg.errors.ObjectInUse: another session reads from the slot.
    """

    def __init__(self, connection: psycopg.Connection, slot: str, publication: str, start: int) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.pgconn.socket, select.POLLIN)
        self._confirmed = 0  # nothing
        self.sent_to = start
        names = sql.Identifier(publication).as_string(connection)
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})").format(
            sql.Identifier(slot), sql.SQL(lsn_text(start)), sql.Literal(names)
        )
        result = connection.pgconn.exec_(command.as_bytes(connection))
        if result.status != ExecStatus.COPY_BOTH:
            raise psycopg.errors.error_from_result(result)

    def receive(self, *, waits: bool) -> bytes | None:
        """Return the next message; an empty one if there may be one now, or the server said how far it is; or None.

        ``waits``: wait up to ``SILENCE_MS`` for it. Raises ``psycopg.OperationalError`` if the connection is lost.
        """
        pgconn = self._connection.pgconn
        size, data = pgconn.get_copy_data(1)
        if size == 0:
            pgconn.consume_input()
            size, data = pgconn.get_copy_data(1)
        if size == 0:
            return b"" if waits and self._poll.poll(SILENCE_MS) else None
        if size < 0:
            result = pgconn.get_result()
            if result is not None and result.status == ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)
            raise psycopg.OperationalError("the server has ended the stream of changes")
        if data[:1] == _MESSAGE:
            return bytes(data[_HEADER_BYTES:])
        _, sent_to, _, wants_answer = _KEEPALIVE.unpack(data)
        self.sent_to = max(self.sent_to, sent_to)
        if wants_answer:
            self.report()
        return b""

    def report(self, *, asks: bool = False) -> None:
        """Say that this end is there. ``asks``: ask how far the server is."""
        pgconn = self._connection.pgconn
        pgconn.put_copy_data(_STATUS.pack(b"r", *[self._confirmed] * 3, 0, asks))
        pgconn.flush()

    def confirm(self, position: int) -> None:
        """Let the server forget what was committed before ``position``: the slot advances."""
        self._confirmed = position
        self.report()

    def close(self) -> None:
        """Free the slot."""
        self._connection.close()


def lsn_text(position: int) -> str:
    """A place in the log as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
