# SPDX-License-Identifier: Apache-2.0

"""The client's half of a tunnel, with calls that fail, and a server that is only its machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from struct import Struct
from typing import Any

import anyio
import pytest

from protocol.tunnel import ChannelEnded, ChannelReset, DataReceived, TunnelEnd
from spark_bridge.connect.tunnel import Tunnel
from spark_bridge.connect.tunnel_calls import TunnelCalls, TunnelClosed

WAIT_S = 15.0


class FakeServer(TunnelCalls):
    """The other half: its machine, and what it has received. ``fails``: every so many-th call does."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(None, "function")
        self.machine = TunnelEnd()
        self.changed = threading.Condition()
        self.received: dict[int, bytes] = {}
        self.over: dict[int, str] = {}
        self.asked: list[int] = []
        self.calls = 0
        self.broken = self.closed = self.silent = False
        self._fails = fails

    def open(self, lease_s: float, doors: int) -> tuple[str, list[int]]:
        return "driver", list(range(1000, 1000 + doors))

    def up(self, packet: bytes) -> None:
        with self.changed:
            self.calls += 1
            if self.silent or (self._fails and self.calls % self._fails == 0):
                raise ConnectionError("it did not arrive")
            for event in self.machine.receive(packet):
                if isinstance(event, DataReceived):
                    self.received[event.channel] = self.received.get(event.channel, b"") + event.data
                    self.machine.consumed(event.channel, len(event.data))
                elif isinstance(event, ChannelEnded | ChannelReset):
                    self.over[event.channel] = type(event).__name__
            self.changed.notify_all()
            if self._fails and self.calls % self._fails == 1:
                raise ConnectionError("its result did not arrive")

    def down(self, pause_s: float, acknowledged: int, take: Callable[[bytes], None]) -> None:
        with self.changed:
            self.asked.append(acknowledged)
            self.machine.acknowledge(acknowledged)
            self.machine.send_all_again()
            while not self.stopped:
                if self.closed:
                    raise TunnelClosed("the server has closed it")
                if self.broken:
                    self.broken = False
                    raise ConnectionError("the responses ended")
                while (packet := self.machine.next_packet()) is not None:
                    take(packet.data)
                self.changed.notify_all()  # what waits for a state of the machine
                self.changed.wait()

    def interrupt(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        self.stopped = True
        self.interrupt()

    def _execute(self, argument: bytes) -> bytes:
        raise NotImplementedError

    # --- for tests, on the loop ---

    def say(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.changed:
            result = function(*arguments)
            self.changed.notify_all()
        return result

    async def until(self, condition: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self.changed:
                return self.changed.wait_for(condition, WAIT_S)

        assert await asyncio.to_thread(wait)


class Peer(asyncio.Protocol):
    """What listens here: it keeps what it reads."""

    def __init__(self, peers: list[Peer]) -> None:
        self.read = bytearray()
        self.ended = asyncio.Event()
        self.lost = asyncio.Event()
        self.transport: asyncio.Transport
        self.peers = peers

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.peers.append(self)

    def data_received(self, data: bytes) -> None:
        self.read += data

    def eof_received(self) -> bool:
        self.ended.set()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


async def heard(peers: list[Peer], count: int) -> None:
    """So many peers have read something."""
    while sum(bool(peer.read) for peer in peers) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@asynccontextmanager
async def a_tunnel(
    server: FakeServer, lease_s: float = 600.0, why_gone: str | None = None
) -> AsyncIterator[tuple[list[Peer], asyncio.Queue[str]]]:
    """The peers that listen behind door 0, and why the tunnel was lost. Nothing listens behind door 1."""
    peers, lost = list[Peer](), asyncio.Queue[str]()
    listener = await asyncio.get_running_loop().create_server(lambda: Peer(peers), "127.0.0.1", 0)
    tunnel = Tunnel(server, 3, lease_s, lambda: why_gone, lost.put_nowait)
    with anyio.fail_after(WAIT_S):
        await tunnel.open()
        assert tunnel.lead(0, listener.sockets[0].getsockname()[:2]) == ("driver", 1000)
        assert tunnel.lead(1, ("127.0.0.1", 9)) == ("driver", 1001)
        try:
            yield peers, lost
        finally:
            await tunnel.close()
            listener.close()
            for peer in peers:
                peer.transport.abort()
                await peer.lost.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "headgate-tunnel"]


async def test_bytes_and_ends_pass_in_both_directions_although_calls_fail() -> None:
    server = FakeServer(fails=5)
    async with a_tunnel(server) as (peers, lost):
        channel = server.say(server.machine.open, 0)
        sent = b"".join(Struct(">I").pack(number) for number in range(100_000))
        for at in range(0, len(sent), 40_000):
            server.say(server.machine.write, channel, sent[at : at + 40_000])
            if at % 120_000 == 0:
                server.broken = True
                server.interrupt()
        server.say(server.machine.end, channel)
        await heard(peers, 1)
        await peers[0].ended.wait()
        assert peers[0].read == sent
        peers[0].transport.write(sent)
        peers[0].transport.write_eof()
        await server.until(lambda: channel in server.over)
        assert server.received[channel] == sent
        assert server.over == {channel: "ChannelEnded"}
        assert lost.empty()
    assert len(server.asked) > 1, "the responses have ended at least once"


async def test_a_connection_that_breaks_here_is_reset_there_and_the_other_way_round() -> None:
    server = FakeServer()
    async with a_tunnel(server) as (peers, _):
        first, second = (server.say(server.machine.open, 0) for _ in range(2))
        for channel in (first, second):
            server.say(server.machine.write, channel, bytes([channel]))
        await heard(peers, 2)
        by_channel = {peer.read[0]: peer for peer in peers}
        by_channel[first].transport.abort()
        await server.until(lambda: first in server.over)
        server.say(server.machine.reset, second)
        await by_channel[second].lost.wait()


@pytest.mark.parametrize("door", [1, 2])
async def test_a_door_behind_which_nobody_listens_resets_its_connections(door: int) -> None:
    server = FakeServer()
    async with a_tunnel(server):
        channel = server.say(server.machine.open, door)
        await server.until(lambda: server.over.get(channel) == "ChannelReset")


async def test_a_peer_that_does_not_read_takes_only_what_a_channel_may_have() -> None:
    server = FakeServer()
    async with a_tunnel(server) as (peers, _):
        channel = server.say(server.machine.open, 0)
        server.say(server.machine.write, channel, b"x")
        await heard(peers, 1)
        peers[0].transport.pause_reading()
        for _ in range(80):
            server.say(server.machine.write, channel, bytes(2**20))
        await server.until(lambda: channel in server.machine._blocked)
        peers[0].transport.resume_reading()
        await server.until(lambda: not (server.machine._blocked or server.machine._ready))


@pytest.mark.parametrize("how", ["closed", "gone", "silent", "liar"])
async def test_a_tunnel_that_breaks_permanently_ends_its_connections_and_says_why_once(how: str) -> None:
    server = FakeServer()
    why_gone = "nothing listens there any more" if how == "gone" else None
    async with a_tunnel(server, 0.3 if how == "silent" else 600.0, why_gone) as (peers, lost):
        channel = server.say(server.machine.open, 0)
        server.say(server.machine.write, channel, b"x")
        await heard(peers, 1)
        if how == "closed":
            server.closed = True
        elif how == "gone":
            server.broken = True
        elif how == "silent":
            server.silent = True
        else:
            server.machine._control.append(Struct(">IBI").pack(channel, 9, 0))
        server.interrupt()
        why = await lost.get()
        await peers[0].lost.wait()
        assert lost.empty()
    said = {"closed": "has closed it", "gone": "nothing listens", "silent": "has not answered", "liar": "unknown kind"}
    assert said[how] in why
