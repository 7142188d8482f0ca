# SPDX-License-Identifier: Apache-2.0

"""A tunnel whose bytes tell whose they are, and what dials its door. H198.

``python -m tests.spark.connect.own_bytes URL SEED LEASE_S SHIPS`` serves one door, and says its address, until its
input ends.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from struct import Struct
from typing import Any

import anyio
from pyspark.sql import SparkSession

from actors.threads import DRIVER
from spark_bridge.connect.remote_session import RemoteSession
from spark_bridge.connect.tunnel import Tunnel
from spark_bridge.connect.tunnel_calls import StubCalls, TunnelCalls

__all__ = ["SIZES", "begin_visit", "bytes_of", "serving", "tunnel_to", "visit"]

SIZES = (0, 1, 300, 40_000, 50_000, 65_537, 4 * 2**20 + 1, 17 * 2**20)
"""In a setting and in a plan, in one reading and several, in one packet and several, and more than a channel holds."""
_HEAD = Struct(">II")


@asynccontextmanager
async def tunnel_to(
    session: Any,
    protocol: Callable[[], asyncio.Protocol],
    kind: type[TunnelCalls] = StubCalls,
    lease_s: float = 30.0,
    *,
    ships: bool = True,
) -> AsyncIterator[tuple[tuple[str, int], Tunnel, list[str]]]:
    """A door in the server that leads to a protocol in this process: its address, the tunnel, and why it was lost."""
    remote, lost = RemoteSession(session), list[str]()
    if ships:
        await DRIVER.run(remote.ship_relay)
    stub = await DRIVER.run(remote.tunnel_calls)
    calls = kind(session, stub._function)
    listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    tunnel = Tunnel(calls, 1, lease_s, remote.why_unreachable, lost.append)
    await tunnel.open()
    try:
        yield tunnel.lead(0, listener.sockets[0].getsockname()[:2]), tunnel, lost
    finally:
        await tunnel.close()
        listener.close()


def bytes_of(seed: int, direction: str, number: int, size: int) -> bytes:
    """What a client says, or is told, in one visit. No other one has them."""
    return random.Random(f"{seed} {direction} {number}").randbytes(size)


@asynccontextmanager
async def serving(
    session: Any, seed: int, lease_s: float, *, ships: bool
) -> AsyncIterator[tuple[tuple[str, int], Tunnel, list[str]]]:
    """``tunnel_to`` what says the bytes of this seed, and whether it is told those."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, writer, bytes_of(seed, "down", number, size))
            told = await reader.read()
        writer.write(b"right" if told == bytes_of(seed, "up", number, size) else b"wrong")
        writer.close()

    def protocol() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)

    async with tunnel_to(session, protocol, lease_s=lease_s, ships=ships) as tunnel:
        yield tunnel


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    for at in range(0, len(data), 65_536):
        writer.write(data[at : at + 65_536])
        await writer.drain()


async def begin_visit(
    address: tuple[str, int], number: int, size: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Dial a door, and say which bytes are expected, and will come."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(_HEAD.pack(number, size))
    return reader, writer


async def visit(address: tuple[str, int], seed: int, number: int, size: int) -> None:
    """Exchange the bytes of this seed, in both directions at the same time, and verify those of both."""
    reader, writer = await begin_visit(address, number, size)

    async def say() -> None:
        await _write(writer, bytes_of(seed, "up", number, size))
        writer.write_eof()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say)
            told = await reader.read()
    finally:
        writer.transport.abort()
    assert told[:size] == bytes_of(seed, "down", number, size), f"visit {number} was told other bytes"
    assert told[size:] == b"right", f"visit {number} said other bytes: {told[size:]!r}"


async def main(url: str, seed: str, lease_s: str, ships: str) -> None:
    session = SparkSession.builder.remote(url).create()
    async with serving(session, int(seed), float(lease_s), ships=ships == "ships") as (address, _, lost):
        print(*address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        assert lost == []
    session.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
