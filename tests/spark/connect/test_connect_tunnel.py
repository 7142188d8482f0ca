# SPDX-License-Identifier: Apache-2.0

"""A client that can dial the server's port, and that nobody can dial: its tunnel, against real servers."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from struct import Struct
from typing import Any

import anyio
import pytest
import structlog.testing

from actors.threads import DRIVER
from headgate import Addresses, Sidecar, SidecarConfig
from spark_bridge.common.errors import ServerLost
from spark_bridge.connect.tunnel import Tunnel
from spark_bridge.connect.tunnel_calls import PublicCalls, StubCalls, TunnelCalls
from tests.spark.connect.jobs import DieOnce, Held, Numbers, read
from tests.spark.connect.own_bytes import tunnel_to
from tests.spark.connect.secrets_in_texts import found_in, texts_of
from tests.spark.connect.server import ConnectServer
from tests.spark.connect.test_connect_lifetimes import ours, wait_until
from tests.spark.faults.namespaces import HostOfItsOwn, host_apart

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 500.0
LEASE_S = 8.0
TUNNEL = SidecarConfig(addresses=Addresses(way="tunnel"))
REDACTED = base64.b64decode("tokentokentokentokensecretsecret")
"""In base 64, Spark takes this for a secret, and shows something else in its place."""


def tunnels(server: ConnectServer) -> int:
    return sum(name == "headgate-tunnel" for name in server.threads())


# --- a sidecar ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host_behind_nat() -> Iterator[HostOfItsOwn]:
    """A host that nothing leads to, and from which nothing leads away."""
    with host_apart() as host:
        host.cut()
        yield host


@pytest.mark.parametrize("way", ["auto", "tunnel"])
def test_a_client_that_nobody_can_dial_uses_everything(
    server: ConnectServer, host_behind_nat: HostOfItsOwn, tmp_path: Path, way: str
) -> None:
    """In a network where only the server's port answers: events, requests, a killed task, and a stream's batches."""
    with door_to(server, host_behind_nat) as port:
        program = [sys.executable, "-m", "tests.spark.connect.client_behind_nat", f"sc://127.0.0.1:{port}"]
        command = [*host_behind_nat.inside, *program, str(tmp_path), way]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"rows": list(range(20)), "lost": ["FAILED"], "way": "tunnel", "streamed": list(range(10))}
    wait_until(lambda: tunnels(server) == 0)


@contextmanager
def door_to(server: ConnectServer, host: HostOfItsOwn) -> Iterator[int]:
    """A port on the host's loopback that leads to the server's, as a router would; nothing leads to the host."""
    with listening_in(host) as listener:
        threading.Thread(target=lead, args=(listener, server.port), daemon=True).start()
        yield listener.getsockname()[1]


@contextmanager
def listening_in(host: HostOfItsOwn) -> Iterator[socket.socket]:
    """A socket that was made in the host's network: it stays there."""

    def make() -> socket.socket:
        with open(f"/run/netns/{host.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):  # of this thread
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server(("127.0.0.1", 0))

    with ThreadPoolExecutor(1) as thread:
        listener = thread.submit(make).result()
    try:
        yield listener
    finally:
        listener.close()


def lead(listener: socket.socket, port: int) -> None:
    """Lead each connection to a port of this host."""

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()

    while True:
        try:
            inner, _ = listener.accept()
        except OSError:
            return
        outer = socket.create_connection(("127.0.0.1", port))
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def test_a_server_that_reaches_the_client_does_so_directly_and_says_so(server: ConnectServer, session: Any) -> None:
    with structlog.testing.capture_logs() as logs, Sidecar(session) as sidecar:
        assert sidecar.status().relay.way == "direct"
        assert tunnels(server) == 0
    assert [log["way"] for log in logs if log["event"] == "way to this process"] == ["direct"]


def test_an_executor_that_cannot_dial_the_client_is_given_the_tunnel(session: Any) -> None:
    """The server itself can, but for the tasks a port is advertised where nobody answers."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        addresses = Addresses(advertised_host="127.0.0.1", advertised_port=unused.getsockname()[1], way="auto")
        with structlog.testing.capture_logs() as logs, Sidecar(session, SidecarConfig(addresses=addresses)) as sidecar:
            handle = sidecar.coordinate("numbers", lambda: Numbers(range(4)), parallelism=2)
            assert sidecar.run(lambda: read(session, handle)) == list(range(4))
            assert sidecar.status().relay.way == "tunnel"
    [opening] = [log for log in logs if log["event"] == "tunnel opening"]
    assert "cannot reach this process" in opening["why"]


def test_two_clients_with_tunnels_and_tls_learn_only_of_their_jobs(server: ConnectServer) -> None:
    sessions = [server.session(), server.session()]
    coordinators = [Numbers(range(8)), Numbers(range(100, 108), DieOnce(103))]

    def client(index: int) -> list[int]:
        config = SidecarConfig(tls=index == 1, addresses=Addresses(way="tunnel"))
        with Sidecar(sessions[index], config) as sidecar:
            handle = sidecar.coordinate("numbers", lambda: coordinators[index], parallelism=1)
            return list(sidecar.run(lambda: read(sessions[index], handle)))

    with ThreadPoolExecutor(2) as clients:
        assert list(clients.map(client, range(2))) == [list(range(8)), list(range(100, 108))]
    assert [coordinator.lost for coordinator in coordinators] == [[], ["FAILED"]]
    for session in sessions:
        session.stop()
    wait_until(lambda: tunnels(server) == 0 and ours(server) == [])


def test_interrupting_everything_in_a_session_does_not_end_its_tunnel(session: Any) -> None:
    """``interruptAll`` ends the call whose responses bring the packets: it is made again."""
    with Sidecar(session, TUNNEL) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: Numbers(range(6)), parallelism=2)
        assert session.interruptAll()
        assert sidecar.run(lambda: read(session, handle)) == list(range(6))


def test_a_client_that_is_killed_leaves_nothing_in_the_server_after_its_lease(
    server: ConnectServer, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.spark.connect.client_behind_nat", server.url, str(tmp_path), "tunnel"]
    client = subprocess.Popen([*program, str(LEASE_S)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "waiting\n"
        assert tunnels(server) == 1
    finally:
        client.kill()
        client.communicate()
    wait_until(lambda: tunnels(server) == 0 and ours(server) == [])


def test_a_server_that_ends_ends_the_run_of_a_client_with_a_tunnel(tmp_path: Path) -> None:
    server = ConnectServer()
    server.start()
    try:
        session, held = server.session(), Held(range(2))
        with Sidecar(session, TUNNEL) as sidecar, ThreadPoolExecutor(1) as client:
            handle = sidecar.coordinate("numbers", lambda: held, parallelism=1)
            job = client.submit(sidecar.run, lambda: read(session, handle))
            assert held.waiting.wait(WAIT_S)
            server.kill()
            with pytest.raises(ServerLost, match="nothing listens at"):
                job.result(WAIT_S)
    finally:
        server.stop()


def test_no_key_of_a_tunnel_is_in_anything_that_the_server_shows_or_writes(server: ConnectServer, session: Any) -> None:
    """Anyone who knows it can put packets into the tunnel. The name is public, and only for its session."""
    with Sidecar(session, TUNNEL) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: Numbers(range(2)), parallelism=1)
        read(session, handle)
        calls = sidecar._entered()[1]._driver._reach._tunnel._calls  # type: ignore[attr-defined]
        texts = texts_of(server)
    assert any(calls._function in text for text in texts.values()), "the search must find what is there"
    assert found_in(texts, [calls._key]) == []


# --- the tunnel alone ---------------------------------------------------------------------------------------------


class Echo(asyncio.Protocol):
    """Says what it is told, and does not listen while nobody listens to it."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


def an_echo(
    session: Any, kind: type[TunnelCalls] = StubCalls
) -> AbstractAsyncContextManager[tuple[tuple[str, int], Tunnel, list[str]]]:
    """A tunnel to an echo in this process."""
    return tunnel_to(session, Echo, kind)


async def sent_and_received(address: tuple[str, int], data: bytes, portion: int = 65_536) -> bytes:
    """Send data, and then an end; return what comes back, up to the other end."""
    reader, writer = await asyncio.open_connection(*address)

    async def send() -> None:
        for at in range(0, len(data), portion):
            writer.write(data[at : at + portion])
            await writer.drain()
        writer.write_eof()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        received = await reader.read()
    writer.close()
    return received


def numbered(count: int, salt: int = 0) -> bytes:
    """Bytes of which no part is like another."""
    number = Struct(">II")
    return b"".join(number.pack(salt, index) for index in range(count))


@pytest.mark.parametrize("kind", [StubCalls, PublicCalls])
async def test_bytes_arrive_once_and_in_order_while_everything_is_interrupted(
    session: Any, kind: type[TunnelCalls]
) -> None:
    """Small ones and large ones, what redaction would change, and several connections at the same time."""
    size = 500_000 if kind is StubCalls else 20_000
    async with an_echo(session, kind) as (address, _, lost):

        async def interrupt() -> None:
            while True:
                await DRIVER.run(session.interruptAll)
                await asyncio.sleep(0.2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interrupt)
            large = [numbered(size, salt) for salt in range(3)]
            results = await asyncio.gather(*(sent_and_received(address, data) for data in large))
            assert results == large
            tasks.cancel_scope.cancel()
        for data in (REDACTED, b"\0" + REDACTED, b"\0\0" + REDACTED, b"token=secret password"):
            assert await sent_and_received(address, data) == data
        assert lost == []


async def test_a_packet_with_a_false_length_closes_its_tunnel_and_no_other(server: ConnectServer, session: Any) -> None:
    other = server.session()
    async with an_echo(other) as (beside, _, lost_beside), an_echo(session) as (address, tunnel, lost):
        assert await sent_and_received(address, b"before") == b"before"
        assert await sent_and_received(beside, b"before") == b"before"
        number = tunnel._machine._number + 1
        claims = Struct(">QQIBI").pack(number, 0, 1, 2, 0x7FFF_FFFF)
        with pytest.raises(Exception, match="claims 2147483647 bytes of 0"):
            await DRIVER.run(tunnel._calls.up, claims)
        await DRIVER.run(wait_until, lambda: bool(lost))
        assert await sent_and_received(beside, b"after") == b"after"
        assert lost_beside == []
    other.stop()


async def test_a_connection_that_is_not_read_stops_no_other_and_holds_little(session: Any) -> None:
    """A slow peer: what it does not read stays where it comes from, in the program that sends."""
    async with an_echo(session) as (address, _, lost):
        _, slow = await asyncio.open_connection(*address, limit=1024)
        sent, taken = 0, True
        while taken:
            taken = False
            with anyio.move_on_after(5.0):
                slow.write(bytes(65_536))
                await slow.drain()
                sent, taken = sent + 65_536, True
            assert sent < 256 * 2**20, "the sockets and the tunnel hold some MiB, and then nothing more is taken"
        assert await sent_and_received(address, numbered(1000)) == numbered(1000)
        slow.transport.abort()
        assert lost == []


def test_the_port_of_a_tunnel_that_is_closed_is_closed(session: Any) -> None:
    async def use() -> tuple[str, int]:
        async with an_echo(session) as (address, _, _):
            assert await sent_and_received(address, b"hello") == b"hello"
            return address

    address = asyncio.run(use())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5).close()
