# SPDX-License-Identifier: Apache-2.0

"""The raw baseline: a length and ``[kind, seq, payload]`` as msgpack, between a bare protocol and a bare socket.

``RawProtocol`` is the end on an event loop, ``RawSocket`` the one in a task. They have no resending, limits or logic.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from contextlib import suppress
from struct import Struct
from typing import Any, cast

import msgpack

LENGTH = Struct(">I")
EVENT = 1
"""An event to confirm."""
ECHO = 2
"""An event to answer with its payload."""
CONFIRM = 3
ANSWER = 4
FLOOD = 5
"""A request for ``count`` answers ``[ANSWER, place, payload]``; the last place is 0.

As a raw frame it is ``[FLOOD, 0, [count, payload]]``, as an event ``[FLOOD, 0, payload, count]``.
"""
READ_BYTES = 65536


def frame(kind: int, seq: int, payload: Any) -> bytes:
    body: bytes = msgpack.packb([kind, seq, payload])
    return LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> list[list[Any]]:
    """Remove and return the complete frames."""
    frames = []
    place = 0
    while len(buffer) - place >= 4 and len(buffer) - place >= 4 + (size := LENGTH.unpack_from(buffer, place)[0]):
        frames.append(msgpack.unpackb(buffer[place + 4 : place + 4 + size]))
        place += 4 + size
    del buffer[:place]
    return frames


class RawProtocol(asyncio.Protocol):
    """``send`` returns a future that the answer resolves."""

    def __init__(self) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for _, seq, _ in take_frames(self._buffer):
            answer = self._waiting.pop(seq, None)  # of a flood, only the last answer is awaited
            if answer is not None:
                answer.set_result(None)

    def send(self, kind: int, payload: Any) -> asyncio.Future[None]:
        """Send immediately, in a separate write."""
        answer, data = self._next(kind, payload)
        self._write(data)
        return answer

    def send_joined(self, kind: int, payload: Any) -> asyncio.Future[None]:
        """Send in one write with all others of this turn of the loop."""
        answer, data = self._next(kind, payload)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        return answer

    def send_flood(self, count: int, payload: bytes) -> asyncio.Future[None]:
        """Send a flood; the last of ``count`` answers resolves the future."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self._waiting[0] = answer
        self._write(frame(FLOOD, 0, [count, payload]))
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _next(self, kind: int, payload: Any) -> tuple[asyncio.Future[None], bytes]:
        self._seq += 1
        answer: asyncio.Future[None] = self._loop.create_future()
        self._waiting[self._seq] = answer
        return answer, frame(kind, self._seq, payload)

    def _flush(self) -> None:
        self._write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


class RawSocket:
    """Answers frames: all frames of one read in one write, a flood with one write for each answer."""

    def __init__(self, port: int) -> None:
        self._buffer = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Read until the connection ends."""
        with suppress(OSError):
            while data := self._socket.recv(READ_BYTES):
                self._answer(data)

    def serve_awake(self, spin_s: float) -> None:
        """Like ``serve``, but after each read ask the socket again and again for ``spin_s`` seconds before sleeping."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        with suppress(OSError):
            while data := self._socket.recv(READ_BYTES):
                self._answer(data)
                until = time.monotonic() + spin_s
                while not poller.poll(0) and time.monotonic() < until:
                    pass

    def poll(self) -> None:
        """Read what has come, without waiting."""
        with suppress(BlockingIOError):
            self._answer(self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT))

    def close(self) -> None:
        """Also ends ``serve`` in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self, data: bytes) -> None:
        self._buffer += data
        answers = []
        for kind, seq, payload in take_frames(self._buffer):
            if kind == FLOOD:
                self._flood(*payload)
            else:
                answers.append(frame(ANSWER, seq, payload) if kind == ECHO else frame(CONFIRM, seq, None))
        if answers:
            self._socket.sendall(b"".join(answers))

    def _flood(self, count: int, payload: bytes) -> None:
        """One write for each, as ``send_event`` does, which does not know that another one follows."""
        for place in range(count - 1, -1, -1):
            self._socket.sendall(frame(ANSWER, place, payload))
