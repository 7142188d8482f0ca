"""The bytes of one attempt, over whichever connection it has at the moment. Never waits."""

from __future__ import annotations

import socket
from contextlib import suppress

from protocol.wire.messages import Downward
from spark_bridge.subtask.connection import READ_BYTES, Connection

__all__ = ["Wire"]

WRITE_BYTES = 256 * 1024


class Wire:
    """At most one connection, and what it has not taken yet. Not thread-safe: the valve locks it.

    Two threads use it, the task's own and the I/O thread; whoever is there first reads. What a connection has not
    taken when it breaks is forgotten: the machine has it, and sends it again (H24).
    """

    __slots__ = ("_outgoing", "connection")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._outgoing = bytearray()

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits until the socket takes it."""
        return bool(self._outgoing)

    def attach(self, connection: Connection) -> None:
        """From now on this is the connection."""
        self.drop()
        self.connection = connection

    def drop(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._outgoing.clear()

    def break_off(self) -> None:
        """Make the connection end for whoever waits for it; the I/O thread then does the rest."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> bool:
        """Write what the socket takes at once and keep the rest; False if the I/O thread has to look after it."""
        if self.connection is None:
            return True
        if not self._outgoing:
            try:
                sent = self.connection.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return False  # it reads the same error
            if sent == len(data):
                return True
            data = data[sent:]
        self._outgoing += data
        return False

    def flush(self) -> None:
        """Write what the socket takes of what was kept. Raises ``OSError`` when the connection is broken."""
        if self._outgoing and self.connection is not None:
            with suppress(BlockingIOError, InterruptedError):
                sent = self.connection.sock.send(memoryview(self._outgoing)[:WRITE_BYTES])
                del self._outgoing[:sent]

    def receive(self) -> list[Downward]:
        """What has come, often nothing. Raises ``OSError`` at the end, ``RemoteProtocolError`` for a bad frame."""
        if self.connection is None:
            return []
        try:
            data = self.connection.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError("the sidecar closed the connection")
        return self.connection.decode(data)
