# SPDX-License-Identifier: Apache-2.0

"""An attacker's end of one connection."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import struct
from contextlib import suppress

from protocol.wire.fragments import FragmentDecoder, encode_whole
from protocol.wire.framing import DEFAULT_LIMITS, FrameDecoder, frame
from protocol.wire.handshake import NONCE_BYTES, PROTOCOL_VERSION, ClientHandshake
from protocol.wire.keys import Key
from protocol.wire.messages import Message
from spark_bridge.common.tls import TlsStream, client_context
from tests.fuzz.records import APPLICATION_DATA, NotedSecrets, RecordLayer

PATIENCE_S = 120.0
RECORD_BYTES = 16_384
HELLO_BYTES = 54
CHALLENGE_BYTES = 38


class Line:
    """A socket and the bytes received. A connection that the server ends is not the attacker's error."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: TlsStream | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._tls = tls
        self._decoder = FrameDecoder()
        self._fragments = FragmentDecoder(DEFAULT_LIMITS)
        self._early: list[bytes] = []
        self._half_closed = False
        self.records: RecordLayer | None = None
        """What encrypts instead of TLS, for an attacker below the plaintext."""
        self.authenticated = False
        """Whether ``greet`` has succeeded."""
        host, port = writer.get_extra_info("sockname")[:2]
        self.name = f"{host}:{port}"
        """The name of the connection in the server's log."""

    @classmethod
    async def open(cls, address: tuple[str, int], pin: bytes = b"", *, below: bool = False) -> Line:
        """Connect; with ``pin``, the digest of the server's certificate, over TLS (H77).

        ``below``: make the ``records`` oneself once the handshake of TLS is done.
        """
        async with asyncio.timeout(PATIENCE_S):
            noted = NotedSecrets() if below else None
            tls = TlsStream(_tls_context() if noted is None else noted.context, pin=pin) if pin else None
            line = cls(*await asyncio.open_connection(*address), tls)
            if tls is not None:
                try:
                    await line._shake_hands(tls)
                except BaseException:
                    await line.close()
                    raise
                if noted is not None and tls.established:
                    line.records = noted.records(tls)
            return line

    async def _shake_hands(self, tls: TlsStream) -> None:
        await self.send_raw(tls.start())
        while not tls.established and (data := await self._read_raw()):
            _, reply = tls.receive(data)
            await self.send_raw(reply)

    async def send(self, data: bytes) -> None:
        if self.records is not None:
            parts = range(0, len(data), RECORD_BYTES)
            data = b"".join(self.records.record(APPLICATION_DATA, data[at : at + RECORD_BYTES]) for at in parts)
        elif self._tls is not None:
            data = self._tls.encrypt(data)
        await self.send_raw(data)

    async def send_raw(self, data: bytes) -> None:
        """Send bytes as they are, also where TLS records are expected."""
        if not self._half_closed and not self._writer.transport.is_closing():
            with suppress(ConnectionError):
                self._writer.write(data)
                await self._writer.drain()

    async def read(self) -> bytes:
        """Return received bytes; empty at the end."""
        plain = b""
        async with asyncio.timeout(PATIENCE_S):
            while not plain and (data := await self._read_raw()):
                plain = data
                if self._tls is not None:
                    plain, reply = self._tls.receive(data)
                    await self.send_raw(reply)
        return plain

    async def _read_raw(self) -> bytes:
        try:
            return await self._reader.read(65_536)
        except ConnectionError:
            return b""

    async def until_closed(self) -> bytes:
        """Return everything that arrives before the server ends the connection, as it must."""
        heard = b""
        while data := await self.read():
            heard += data
        return heard

    async def greet(self, key: Key, nonce: bytes, version: int = PROTOCOL_VERSION) -> bytes:
        """Do a whole handshake; return the server's bytes if it fails, and nothing if it succeeds."""
        assert len(nonce) == NONCE_BYTES
        handshake = ClientHandshake(key, nonce, version)
        heard, answer = b"", handshake.initial_bytes()
        while not handshake.done:
            await self.send(answer)
            data = await self.read()
            if not data:
                return heard
            heard += data
            answer = handshake.receive(data)
        self.authenticated = True
        self._early = self._decoder.feed(handshake.trailing_data)
        return b""

    async def say(self, *messages: Message) -> None:
        await self.send(b"".join(encode_whole(message, DEFAULT_LIMITS) for message in messages))

    async def messages(self) -> list[Message]:
        """Return at least one message; none at the end."""
        messages: list[Message] = []
        while not messages and (bodies := await self.frames()):
            messages = self._fragments.messages(b"".join(map(frame, bodies)))
        return messages

    async def frames(self) -> list[bytes]:
        """Return the bodies of at least one frame; none at the end."""
        bodies, self._early = self._early, []
        while not bodies and (data := await self.read()):
            bodies = self._decoder.feed(data)
        return bodies

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def half_close(self) -> None:
        self._half_closed = True
        with suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        """Leave without a closing handshake: the server sees a connection reset by its peer."""
        sock = self._writer.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return client_context()
