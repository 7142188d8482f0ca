# SPDX-License-Identifier: Apache-2.0

"""Sends and receives the bytes of one attempt over its current connection. Never waits."""

from __future__ import annotations

import socket
from contextlib import suppress

from protocol.wire.fragments import Outbox, encode_frames
from protocol.wire.framing import WireLimits
from protocol.wire.messages import Downward, UpMessage
from spark_bridge.subtask.connection import READ_BYTES, Connection

__all__ = ["CurrentConnection"]

WRITE_BYTES = 256 * 1024


class CurrentConnection:
    """At most one connection, and the bytes that it has not taken yet. Not thread-safe: the channel locks it.

    The task's own thread and the I/O thread both use it; the first one to arrive reads. Bytes that were not sent when
    the connection breaks are discarded: the machine has the messages, and sends them again (H24).
    """

    __slots__ = ("_limits", "_outbox", "_outgoing", "connection")

    def __init__(self, limits: WireLimits) -> None:
        self.connection: Connection | None = None
        self._limits = limits
        self._outgoing = bytearray()
        self._outbox = Outbox(limits)

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        return bool(self._outgoing) or self._outbox.busy

    def attach(self, connection: Connection) -> None:
        """Replace the connection, closing the previous one."""
        self.drop()
        self.connection = connection

    def drop(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._outgoing.clear()
        self._outbox.clear()

    def break_off(self) -> None:
        """Shut the connection down, so that the I/O thread notices and drops it."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def encode(self, message: UpMessage) -> bytes:
        """Return what ``send`` has to be given for the message: nothing if it leaves later, by itself.

        Raises ``LocalProtocolError`` for a message that cannot be encoded.
        """
        if self.connection is None:
            encode_frames(message, self._limits)
            return b""
        return self._outbox.put(message)

    def send(self, data: bytes) -> bool:
        """Write what the socket takes now and keep the rest. False if the I/O thread has to finish it.

        Of a large message, this writes the beginning.
        """
        if self.connection is None:
            return True
        if not data and not self._outgoing:
            data = self._outbox.next()
        return self._write(data, self.connection) and not self._outbox.busy

    def _write(self, data: bytes, connection: Connection) -> bool:
        if not data:
            return not self._outgoing
        data = connection.encode(data)
        if not self._outgoing:
            try:
                sent = connection.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return False  # the I/O thread reads the same error
            if sent == len(data):
                return True
            data = data[sent:]
        self._outgoing += data
        return False

    def flush(self) -> None:
        """Write what was kept, as far as the socket takes it. Raises ``OSError`` if the connection is broken."""
        if self.connection is None:
            return
        if not self._outgoing and self._outbox.busy:
            self._outgoing += self.connection.encode(self._outbox.next())
        if self._outgoing:
            with suppress(BlockingIOError, InterruptedError):
                sent = self.connection.sock.send(memoryview(self._outgoing)[:WRITE_BYTES])
                del self._outgoing[:sent]

    def receive(self) -> list[Downward]:
        """Return the messages that have arrived, often none.

        Raises ``OSError`` at the end of the connection, ``RemoteProtocolError`` for a bad frame.
        """
        if self.connection is None:
            return []
        try:
            data = self.connection.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError("the sidecar closed the connection")
        return self.connection.decode(data)
