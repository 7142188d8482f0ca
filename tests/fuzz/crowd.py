# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.fuzz.crowd``: strangers at several ports, in their own process, until its standard input ends.

It reads one line of JSON: the ports, whether they are encrypted, and how many connections to open at each in a second
(null: as many as possible). They are peers that say nothing, that send a byte now and then, or that are broken. A
connection is kept until the server ends it. Several times a second it prints a line of JSON with the number of
connections of each port.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, cast

from protocol.wire.handshake import PROTOCOL_VERSION
from spark_bridge.common.tls import TlsStream, client_context

IN_A_ROW = 32
"""The number of connections to a port that are being opened at the same time."""
HELD_MAX = 4000
"""The number of open connections to a port: the other ends are files of the server, and these are files here."""
TOLD_EVERY_S = 0.2
DRIP_S = 0.05
_HELLO = b"HDGT" + PROTOCOL_VERSION.to_bytes(2, "big") + bytes(16) + b"n" * 32
_RESET = struct.pack("ii", 1, 0)


class _Crowd:
    """The strangers at one port."""

    def __init__(self, address: tuple[str, int], *, tls: bool, per_s: float | None) -> None:
        self.address = address
        self._pause_s = 0.0 if per_s is None else IN_A_ROW / per_s
        self.opened = 0
        self.held: dict[_Stranger, None] = {}
        hello = TlsStream(client_context(), pin=bytes(32)).start() if tls else _HELLO
        wrong = b"\x16\x03\x01\x02\x00" + bytes(512) if tls else b"HDGT\x00\x63" + bytes(48)
        self._kinds: list[Callable[[_Stranger], None]] = [
            lambda stranger: None,
            _Stranger.drip,
            lambda stranger: stranger.say(hello[:20]),
            lambda stranger: stranger.say(hello),
            lambda stranger: stranger.say(wrong),
            lambda stranger: stranger.say(b"GET / HTTP/1.1\r\n\r\n"),
            _Stranger.leave,
        ]
        self.hello = hello

    async def come(self) -> None:
        """Open one connection after the other. The port may be closed in between."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_connection(lambda: _Stranger(self), *self.address)
            except OSError:
                await asyncio.sleep(DRIP_S)
            await asyncio.sleep(self._pause_s)
            while len(self.held) > HELD_MAX:  # noqa: ASYNC110 - the server ends them
                await asyncio.sleep(DRIP_S)

    def next_kind(self) -> Callable[[_Stranger], None]:
        self.opened += 1
        return self._kinds[self.opened % len(self._kinds)]


class _Stranger(asyncio.Protocol):
    """One connection. It leaves by a reset, so that its port is free again."""

    def __init__(self, crowd: _Crowd) -> None:
        self._crowd = crowd
        self._transport: asyncio.Transport
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._crowd.held[self] = None
        self._crowd.next_kind()(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._gone = True
        del self._crowd.held[self]

    def say(self, data: bytes) -> None:
        self._transport.write(data)

    def leave(self) -> None:
        self._transport.abort()

    def drip(self, sent: int = 0) -> None:
        if not self._gone and sent < len(self._crowd.hello):
            self.say(self._crowd.hello[sent : sent + 1])
            asyncio.get_running_loop().call_later(DRIP_S, self.drip, sent + 1)


async def _main(settings: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    end = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(end), sys.stdin)
    crowds = {
        name: _Crowd((host, port), tls=settings["tls"], per_s=settings["per_s"])
        for name, (host, port) in settings["ports"].items()
    }
    coming = [loop.create_task(crowd.come()) for crowd in crowds.values() for _ in range(IN_A_ROW)]
    ended = loop.create_task(end.read())
    while not ended.done():
        sys.stdout.write(json.dumps({name: crowd.opened for name, crowd in crowds.items()}) + "\n")
        sys.stdout.flush()
        await asyncio.wait([ended], timeout=TOLD_EVERY_S)
    for task in coming:
        task.cancel()
    await asyncio.gather(*coming, return_exceptions=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(json.loads(sys.stdin.readline())))
