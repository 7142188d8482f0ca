# SPDX-License-Identifier: Apache-2.0

"""Two clients of one server with a tunnel each, where the server's code is that of each session, or is installed.

Without an installed relay, each session loads its own classes. With one, all sessions share them, and with them the
list of tunnels.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from struct import Struct
from typing import Any

import anyio
import pytest

from actors.threads import DRIVER
from headgate import Addresses, Sidecar, SidecarConfig
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect.remote_session import RemoteSession
from spark_bridge.connect.tunnel_calls import SMALL_BYTES_MAX, StubCalls, TunnelCalls, TunnelClosed
from tests.spark.connect.conftest import SHOWING
from tests.spark.connect.jobs import DieOnce, Numbers, read
from tests.spark.connect.own_bytes import SIZES, begin_visit, bytes_of, serving, visit
from tests.spark.connect.server import ConnectServer, with_relay
from tests.spark.connect.server_restarts import continue_after_the_server_has_died
from tests.spark.connect.test_connect_lifetimes import ours, wait_until
from tests.spark.connect.test_connect_tunnel import tunnels

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
LEASE_S = 30.0
OURS, THEIRS, LATER = range(1, 4)
"""The seeds of the bytes of three clients."""
TUNNELS_MAX = 16


@pytest.fixture(scope="module", params=["shipped", "installed"])
def ships(request: pytest.FixtureRequest) -> bool:
    """Whether each client brings the relay to the server."""
    return bool(request.param == "shipped")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the installed relay, with the secret of a client."""
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def config(ships: bool, folder: Path) -> SidecarConfig:
    """Of a sidecar that is to use a tunnel."""
    return SidecarConfig(addresses=Addresses(way="tunnel", relay_secret_file=None if ships else folder / "ann"))


@pytest.fixture(scope="module")
def server(ships: bool, folder: Path) -> Iterator[ConnectServer]:
    options = () if ships else with_relay(folder, "ann")
    server = ConnectServer(settings={**SHOWING, "spark.eventLog.enabled": "false"}, options=options)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def a_client(
    server: ConnectServer, session_id: str, seed: int, ships: bool
) -> AsyncIterator[tuple[tuple[str, int], subprocess.Popen[str]]]:
    """A client in another process, and the address of its door. At the end of the block it leaves, if it lives."""
    url = f"{server.url}/;session_id={session_id}"
    words = [url, str(seed), str(LEASE_S), "ships" if ships else "-"]
    command = [sys.executable, "-m", "tests.spark.connect.own_bytes", *words]
    with subprocess.Popen(  # noqa: ASYNC220
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            host, port = (await asyncio.to_thread(client.stdout.readline)).split()
            yield (host, int(port)), client
            client.stdin.close()
            await asyncio.to_thread(client.wait)
        finally:
            client.kill()


async def test_no_client_gets_a_byte_of_another_one_while_that_is_killed_and_comes_back(
    server: ConnectServer, session: Any, ships: bool
) -> None:
    """H198: it comes back in the same session. Its old tunnel stands until its lease is over."""
    session_id, numbers, witnessed = str(uuid.uuid4()), count(1), 0

    async def visit_each_size(address: tuple[str, int], seed: int) -> None:
        async with anyio.create_task_group() as tasks:
            for size in SIZES:
                tasks.start_soon(visit, address, seed, next(numbers), size)

    async def witness(ours: tuple[str, int]) -> None:
        nonlocal witnessed
        while True:
            for size in SIZES[:-1]:
                await visit(ours, OURS, next(numbers), size)
                witnessed += 1

    async with serving(session, OURS, 60.0, ships=ships) as (ours, _, lost), anyio.create_task_group() as tasks:
        async with a_client(server, session_id, THEIRS, ships) as (theirs, client):
            await asyncio.gather(visit_each_size(ours, OURS), visit_each_size(theirs, THEIRS))
            tasks.start_soon(witness, ours)
            size, number = SIZES[-1], next(numbers)
            reader, writer = await begin_visit(theirs, number, size)
            told = [await reader.readexactly(100_000)]
            client.kill()
            late, late_writer = await begin_visit(theirs, next(numbers), size)
        async with a_client(server, session_id, LATER, ships) as (later, client):
            before = witnessed
            await visit_each_size(later, LATER)
            assert witnessed > before
            assert await until_reset(late) == b"", "nobody is behind the door of the client that was killed"
            told.append(await until_reset(reader))
        assert client.returncode == 0
        for one in (writer, late_writer):
            one.close()
        assert bytes_of(THEIRS, "down", number, size).startswith(b"".join(told))
        tasks.cancel_scope.cancel()
    assert lost == []
    await DRIVER.run(wait_until, lambda: tunnels(server) == 0)


async def until_reset(reader: asyncio.StreamReader) -> bytes:
    """What a connection is told before it is reset."""
    told = b""
    try:
        while data := await reader.read(65_536):
            told += data
    except ConnectionResetError:
        return told
    raise AssertionError("the connection has ended as if all had been said")


def new_calls(session: Any, ships: bool) -> TunnelCalls:
    remote = RemoteSession(session)
    if ships:
        remote.ship_relay()
    return remote.tunnel_calls()


async def test_a_name_and_a_key_that_are_not_of_the_session_lead_to_no_tunnel(
    server: ConnectServer, session: Any, ships: bool
) -> None:
    """H198: names are in the texts of plans, where each client can read them. Keys are not."""
    other = server.session()
    async with serving(session, OURS, 60.0, ships=ships) as (ours, tunnel, lost):
        calls, thief = tunnel._calls, await DRIVER.run(new_calls, other, ships)
        thief._name = calls._name
        for polls in (False, True):
            thief._polls = polls  # type: ignore[attr-defined]
            told: list[bytes] = []
            with pytest.raises(TunnelClosed, match="this tunnel is closed"):
                await DRIVER.run(thief.down, 0.1, 0, told.append)
            assert told == []
        await DRIVER.run(thief._execute, bytes([4]) + calls._name)  # close
        _, ports = await DRIVER.run(thief.open, 60.0, 1)
        assert ports != [ours[1]]
        assert thief._key != calls._key
        thief._key = secrets.token_bytes(16)
        await DRIVER.run(thief.up, bytes(16))  # as if there were no such setting
        with pytest.raises(TunnelClosed, match="this tunnel is closed"):
            await DRIVER.run(thief.up, bytes(SMALL_BYTES_MAX + 1))
        await DRIVER.run(thief.close)  # its own one, of the same name
        await visit(ours, OURS, 1, 300)
        assert lost == []
    other.stop()


async def test_packets_of_one_session_do_not_get_among_the_responses_of_another(
    server: ConnectServer, session: Any, ships: bool
) -> None:
    """H198: the ids of operations are in the texts of plans, too."""
    other, operations = server.session(), SimpleQueue[str]()
    async with serving(session, OURS, 60.0, ships=ships) as (ours, tunnel, lost):
        calls, thief = tunnel._calls, await DRIVER.run(new_calls, other, ships)
        assert isinstance(calls, StubCalls)
        execution = calls._execution

        def noted(argument: bytes, operation: str) -> Any:
            operations.put(operation)
            return execution(argument, operation)

        calls._execution = noted  # type: ignore[method-assign]
        calls.interrupt()
        await DRIVER.run(thief.open, 60.0, 1)
        operation = await DRIVER.run(operations.get)
        await visit(ours, OURS, 1, 300)
        push = bytes([1]) + thief._name + Struct(">qq").pack(1, 0) + operation.encode()
        with pytest.raises(Exception, match="this session has no operation"):
            await DRIVER.run(thief._execute, push)
        await DRIVER.run(thief.close)
        await visit(ours, OURS, 2, 300)
        assert lost == []
    other.stop()


def test_a_session_with_too_many_tunnels_takes_none_from_another_one(
    server: ConnectServer, session: Any, ships: bool
) -> None:
    """H198"""
    other = server.session()

    def opened(owner: Any) -> TunnelCalls:
        calls = new_calls(owner, ships)
        calls.open(60.0, 1)
        return calls

    mine = [opened(session) for _ in range(TUNNELS_MAX)]
    with pytest.raises(ConnectRefused, match="this session has too many tunnels"):
        opened(session)
    for calls in [*mine, opened(other)]:
        calls.close()
    wait_until(lambda: tunnels(server) == 0)
    other.stop()


def test_a_sidecar_uses_its_tunnel_although_a_task_dies(
    server: ConnectServer, session: Any, config: SidecarConfig
) -> None:
    """H196"""
    numbers = Numbers(range(20), DieOnce(7))
    with Sidecar(session, config) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=2)
        assert sidecar.run(lambda: read(session, handle)) == list(range(20))
        assert sidecar.status().relay.way == "tunnel"
        assert tunnels(server) == 1
    assert numbers.lost == ["FAILED"]
    wait_until(lambda: tunnels(server) == 0 and ours(server) == [])


def test_a_job_continues_through_a_new_tunnel_after_the_server_has_died(
    server: ConnectServer, config: SidecarConfig, tmp_path: Path
) -> None:
    """Last: it kills the server, and starts it again."""
    continue_after_the_server_has_died(server, replace(config, storage=tmp_path))
    wait_until(lambda: tunnels(server) == 0 and ours(server) == [])
