# SPDX-License-Identifier: Apache-2.0

"""An attacker's end of one connection."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from protocol.wire.codec import decode_message, encode_message
from protocol.wire.framing import FrameDecoder
from protocol.wire.handshake import NONCE_BYTES, PROTOCOL_VERSION, ClientHandshake
from protocol.wire.keys import Key
from protocol.wire.messages import Message

PATIENCE_S = 120.0
HELLO_BYTES = 54
CHALLENGE_BYTES = 38


class Line:
    """A socket and the bytes received. A connection that the server ends is not the attacker's error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        host, port = writer.get_extra_info("sockname")[:2]
        self.name = f"{host}:{port}"
        """The name of the connection in the server's log."""

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Line:
        async with asyncio.timeout(PATIENCE_S):
            return cls(*await asyncio.open_connection(*address))

    async def send(self, data: bytes) -> None:
        if not self._writer.transport.is_closing():
            with suppress(ConnectionError):
                self._writer.write(data)
                await self._writer.drain()

    async def read(self) -> bytes:
        """Return received bytes; empty at the end."""
        async with asyncio.timeout(PATIENCE_S):
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
        return b""

    async def say(self, *messages: Message) -> None:
        await self.send(b"".join(map(encode_message, messages)))

    async def messages(self) -> list[Message]:
        """Return at least one message; none at the end."""
        received: list[Message] = []
        while not received and (data := await self.read()):
            received = [decode_message(body) for body in self._decoder.feed(data)]
        return received

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def half_close(self) -> None:
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
