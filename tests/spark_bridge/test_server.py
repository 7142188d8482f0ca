# SPDX-License-Identifier: Apache-2.0

"""The server over real TCP on loopback: honest peers, unauthenticated peers, and how each ends (H24, H61, H62, H63)."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from protocol.errors import HandshakeFailed, LocalProtocolError
from protocol.wire.codec import DEFAULT_LIMITS, WireLimits, encode_message
from protocol.wire.fragments import FragmentDecoder, encode_whole
from protocol.wire.handshake import PROTOCOL_VERSION, ClientHandshake
from protocol.wire.keys import Key, KeyRing, Purpose
from protocol.wire.messages import (
    CheckpointCompleted,
    Confirm,
    EventMessage,
    Message,
    Opened,
    Resumed,
    UpMessage,
)
from spark_bridge.server.connection import FRAMES_TOGETHER, ConnectionState, task_dialect
from spark_bridge.server.server import AuthenticatedServer, Connection, Dialect, ServerConfig, ServerStartError

HELLO_BYTES, CHALLENGE_BYTES = 54, 38
KEYS = KeyRing(b"a secret of this application!!!!")
KEY = KEYS.task_key("words")
NONCE = b"n" * 32
CONFIG = ServerConfig(authenticate_timeout_s=30.0, close_timeout_s=30.0)


class Recorder:
    """A handler that records its calls and lets a test wait for them."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.messages: list[UpMessage] = []
        self.batches: list[int] = []
        self.reasons: list[str] = []
        self.identify = True
        self.on_messages: Callable[[Connection, list[UpMessage]], None] = lambda connection, messages: None
        self._changed = asyncio.Event()

    def connected(self, connection: Connection) -> None:
        self.connections.append(connection)
        if self.identify:
            connection.identified()
        self._changed.set()

    def messages_received(self, connection: Connection, messages: list[UpMessage]) -> None:
        self.messages += messages
        self.batches.append(len(messages))
        self._changed.set()
        self.on_messages(connection, messages)

    def disconnected(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Peer:
    """The other end of a connection, honest unless a test makes it otherwise."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = FragmentDecoder(DEFAULT_LIMITS)
        self.received: list[Message] = []

    async def authenticate(self, key: Key = KEY) -> None:
        handshake = ClientHandshake(key, NONCE)
        outgoing = handshake.initial_bytes()
        while True:
            self.writer.write(outgoing)
            await self.writer.drain()
            data = await self.read_some()
            if not data:
                raise ConnectionError("the server closed during the handshake")
            outgoing = handshake.receive(data)
            if handshake.done:
                self._take(handshake.trailing_data)
                return

    async def read_some(self) -> bytes:
        async with asyncio.timeout(120):
            return await self.reader.read(65536)

    async def send(self, *messages: Message) -> None:
        self.writer.write(b"".join(encode_whole(message, DEFAULT_LIMITS) for message in messages))
        await self.writer.drain()

    async def receive(self) -> Message:
        while not self.received:
            data = await self.read_some()
            if not data:
                raise ConnectionError("the server closed")
            self._take(data)
        return self.received.pop(0)

    async def until_closed(self) -> bytes:
        """Return what came before the end; a reset is an end, too."""
        data = b""
        with suppress(ConnectionError):
            while portion := await self.read_some():
                data += portion
        return data

    def _take(self, data: bytes) -> None:
        self.received += self.decoder.messages(data)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class RunningServer:
    """A running server with its recorder, and peers that are closed with it."""

    def __init__(self, server: AuthenticatedServer, handler: Recorder) -> None:
        self.server = server
        self.handler = handler
        self.peers: list[Peer] = []

    async def a_stranger(self) -> Peer:
        peer = Peer(*await asyncio.open_connection(*self.server.address))
        self.peers.append(peer)
        return peer

    async def a_task(self) -> Peer:
        peer = await self.a_stranger()
        known = len(self.handler.connections)
        await peer.authenticate()
        await self.handler.until(lambda: len(self.handler.connections) > known)
        return peer

    async def is_well(self) -> bool:
        """Check that an honest task can still connect and send."""
        peer = await self.a_task()
        await peer.send(Confirm(4711, 1))
        await self.handler.until(lambda: Confirm(4711, 1) in self.handler.messages)
        self.handler.connections[-1].send(Confirm(4711, 2))
        return await peer.receive() == Confirm(4711, 2)


def a_server(
    handler: Recorder, config: ServerConfig | None = None, dialect: Dialect | None = None
) -> AuthenticatedServer:
    return AuthenticatedServer(
        handler, lambda identity: KEYS.key(Purpose.TASKS, identity), dialect or task_dialect(), config
    )


@asynccontextmanager
async def a_running_server(
    config: ServerConfig = CONFIG, dialect: Dialect | None = None
) -> AsyncIterator[RunningServer]:
    handler = Recorder()
    server = a_server(handler, config, dialect)
    await server.start()
    running = RunningServer(server, handler)
    try:
        yield running
    finally:
        for peer in running.peers:
            await peer.close()
        await server.close()


@pytest.fixture
async def running() -> AsyncIterator[RunningServer]:
    async with a_running_server() as running:
        yield running


async def written_by(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, send: Callable[[], None]
) -> list[list[Message]]:
    """Return the messages of each write that ``send`` causes, now and at the end of the turn; "now" ends with []."""
    written: list[list[Message]] = []

    def write(data: bytes) -> None:
        written.append(FragmentDecoder(DEFAULT_LIMITS).messages(data))

    monkeypatch.setattr(connection._transport, "write", write)
    send()
    written.append([])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return written


# --- honest peers -------------------------------------------------------------------------------------------


async def test_messages_go_both_ways_in_order(running: RunningServer) -> None:
    peer = await running.a_task()
    events = [EventMessage(7, seq, b"\xc0") for seq in range(1, 1001)]
    await peer.send(*events)
    await running.handler.until(lambda: len(running.handler.messages) == 1000)
    assert running.handler.messages == events
    for event in events:
        running.handler.connections[0].send(event)
    assert [await peer.receive() for _ in events] == events


@pytest.mark.parametrize("count", [10, 2 * FRAMES_TOGETHER + 1])
async def test_what_is_sent_in_one_turn_leaves_at_its_end_or_earlier_if_it_is_very_much(
    count: int, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running.a_task()
    (connection,) = running.handler.connections
    messages = [Confirm(7, seq) for seq in range(count)]

    def send() -> None:
        for message in messages:
            connection.send(message)

    *early, now, last = await written_by(connection, monkeypatch, send)
    assert [len(early), now] == [count // FRAMES_TOGETHER, []]
    assert [message for frames in (*early, last) for message in frames] == messages


async def test_an_immediate_message_leaves_together_with_the_queue(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running.a_task()
    (connection,) = running.handler.connections
    first, second, third = (Confirm(7, seq) for seq in (1, 2, 3))

    def send() -> None:
        connection.send(first)
        connection.send(second, immediately=True)
        connection.send(third, immediately=True)

    assert await written_by(connection, monkeypatch, send) == [[first, second], [third], []]


async def test_frames_right_after_the_handshake_are_received(running: RunningServer) -> None:
    peer = await running.a_stranger()
    handshake = ClientHandshake(KEY, NONCE)
    peer.writer.write(handshake.initial_bytes())
    peer.writer.write(handshake.receive(await peer.reader.readexactly(CHALLENGE_BYTES)) + encode_message(Opened(7, 1)))
    await running.handler.until(lambda: running.handler.messages == [Opened(7, 1)])


async def test_the_handler_is_notified_once_of_a_disconnection(running: RunningServer) -> None:
    peer = await running.a_task()
    await peer.close()
    await running.handler.until(lambda: bool(running.handler.reasons))
    connection = running.handler.connections[0]
    connection.send(Confirm(7, 1))  # dropped
    connection.close()
    connection.abort()
    assert running.handler.reasons == ["the peer closed the connection"]


async def test_a_reset_connection_is_reported_as_one(running: RunningServer) -> None:
    peer = await running.a_task()
    sock = peer.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.writer.transport.abort()
    await running.handler.until(lambda: bool(running.handler.reasons))
    assert "the connection broke" in running.handler.reasons[0]


# --- closing ------------------------------------------------------------------------------------------------


async def test_close_lets_everything_that_was_sent_leave_first(running: RunningServer) -> None:
    peer = await running.a_task()
    connection = running.handler.connections[0]
    payload = bytes(1_000_000)
    for seq in range(1, 6):
        connection.send(EventMessage(7, seq, payload))
    connection.send(CheckpointCompleted(7, 6, 1))
    connection.close()
    connection.send(Confirm(7, 99))  # after close: dropped
    assert [await peer.receive() for _ in range(6)][5] == CheckpointCompleted(7, 6, 1)
    assert await peer.until_closed() == b""


async def test_a_peer_that_does_not_read_its_last_bytes_is_dropped_in_time() -> None:  # H48
    async with a_running_server(replace(CONFIG, close_timeout_s=0.05)) as running:
        await running.a_task()
        running.handler.connections[0].close()
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert running.handler.reasons == ["closed here"]


async def test_a_peer_that_resets_while_we_close_is_simply_gone(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut_down() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    await running.a_task()
    connection = running.handler.connections[0]
    monkeypatch.setattr(connection._transport, "write_eof", shut_down)
    connection.close()
    await running.handler.until(lambda: running.handler.reasons == ["closed here"])
    assert running.server.statistics.closing == 0


async def test_a_peer_that_only_stops_sending_gets_what_was_sent_to_it(running: RunningServer) -> None:
    peer = await running.a_task()
    payload = bytes(1_000_000)
    for seq in range(1, 6):
        running.handler.connections[0].send(EventMessage(7, seq, payload))
    peer.writer.write_eof()
    assert [await peer.receive() for _ in range(5)][4] == EventMessage(7, 5, payload)
    await running.handler.until(lambda: running.handler.reasons == ["the peer closed the connection"])


async def test_close_without_flush_is_immediate(running: RunningServer) -> None:
    peer = await running.a_task()
    running.handler.connections[0].send(Confirm(7, 1))
    running.handler.connections[0].close(flush=False, reason="no more")
    await running.handler.until(lambda: running.handler.reasons == ["no more"])
    assert await peer.until_closed() == b""


async def test_closing_the_server_ends_every_connection_and_notifies_the_handler(running: RunningServer) -> None:
    task, stranger = await running.a_task(), await running.a_stranger()
    address = running.server.address
    closing = asyncio.gather(running.server.close(), running.server.close())
    assert await task.until_closed() == b""
    assert await stranger.until_closed() == b""
    await task.close()
    await closing
    assert running.handler.reasons == ["the server is closing"]
    with pytest.raises(OSError):  # noqa: PT011 - refused, whatever the platform calls it
        await asyncio.open_connection(*address)
    await running.server.close()


async def test_a_cancelled_close_drops_the_connections_immediately(running: RunningServer) -> None:
    await running.a_task()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await running.server.close()
    await running.handler.until(lambda: running.handler.reasons == ["the server is closing"])


@pytest.mark.parametrize("turns", range(4))
async def test_a_peer_that_is_accepted_in_the_turn_in_which_the_server_closes_is_disconnected(
    running: RunningServer, turns: int
) -> None:
    """asyncio drops its half-made transport, whose socket only the garbage collector would close."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        stack.callback(gc.enable)
        gc.disable()
        peers = [stack.enter_context(socket.create_connection(running.server.address)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await running.server.close()
        for peer in peers:
            peer.setblocking(False)
            with suppress(ConnectionResetError):
                async with asyncio.timeout(30):
                    assert await loop.sock_recv(peer, 1) == b""


async def test_a_server_that_was_never_started_can_be_closed() -> None:
    server = a_server(Recorder())
    await server.close()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.address


# --- strangers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 38, b"HDGT\x00\x05" + bytes(80), b"\x16\x03\x01" + bytes(200)]
)
async def test_garbage_is_refused_with_one_line_and_affects_no_other_peer(
    running: RunningServer, garbage: bytes
) -> None:  # H62
    honest = await running.a_task()
    with capture_logs() as lines:
        stranger = await running.a_stranger()
        stranger.writer.write(garbage)
        answer = await stranger.until_closed()
    assert len(answer) <= CHALLENGE_BYTES  # at most a challenge, never a proof
    assert [line["event"] for line in lines] == ["connection refused"]
    assert lines[0]["why"]
    assert len(running.handler.connections) == 1
    await honest.send(Opened(7, 1))
    await running.handler.until(lambda: running.handler.messages == [Opened(7, 1)])
    assert await running.is_well()


@pytest.mark.parametrize("length", range(HELLO_BYTES + 32))
async def test_a_handshake_cut_off_anywhere_leaves_nothing_behind(running: RunningServer, length: int) -> None:  # H62
    stranger = await running.a_stranger()
    handshake = ClientHandshake(KEY, NONCE)
    stranger.writer.write(handshake.initial_bytes()[:length])
    if length > HELLO_BYTES:
        proof = handshake.receive(await stranger.reader.readexactly(CHALLENGE_BYTES))
        stranger.writer.write(proof[: length - HELLO_BYTES])
    stranger.writer.write_eof()
    assert len(await stranger.until_closed()) in (0, CHALLENGE_BYTES)
    assert running.handler.connections == []
    assert await running.is_well()


async def test_a_peer_with_another_secret_learns_nothing(running: RunningServer) -> None:  # H61
    with capture_logs() as lines:
        stranger = await running.a_stranger()
        with pytest.raises((ConnectionError, HandshakeFailed)):
            await stranger.authenticate(key=Key(KEY.identity, b"x" * 32))
    assert "secret" in lines[0]["why"]
    assert repr(KEY.secret) not in str(lines)
    assert running.handler.connections == []
    assert await running.is_well()


async def test_a_peer_that_says_nothing_is_dropped_in_time() -> None:  # H62
    async with a_running_server(replace(CONFIG, authenticate_timeout_s=0.05)) as running:
        with capture_logs() as lines:
            stranger = await running.a_stranger()
            assert await stranger.until_closed() == b""
        assert "did not authenticate within 0.05 s" in lines[0]["why"]


async def test_a_task_that_never_identifies_itself_is_dropped_in_time() -> None:  # H62
    async with a_running_server(replace(CONFIG, authenticate_timeout_s=0.2)) as running:
        running.handler.identify = False
        peer = await running.a_task()
        with capture_logs() as lines:
            await peer.until_closed()
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert "did not identify itself" in running.handler.reasons[0]
        assert [line["event"] for line in lines] == ["connection dropped"]


async def test_an_identified_task_has_no_deadline() -> None:
    async with a_running_server(replace(CONFIG, authenticate_timeout_s=0.05)) as running:
        peer, late = await running.a_task(), await running.a_stranger()
        await late.until_closed()  # so the time is over
        await peer.send(Opened(7, 1))
        await running.handler.until(lambda: running.handler.messages == [Opened(7, 1)])


async def test_hundreds_of_half_open_connections_do_not_keep_a_task_out() -> None:  # H62
    async with a_running_server(replace(CONFIG, unauthenticated_max=50)) as running:
        honest = await running.a_task()
        for number in range(300):
            stranger = await running.a_stranger()
            if number % 2:
                stranger.writer.write(b"HDGT" + PROTOCOL_VERSION.to_bytes(2, "big") + b"half of a hello")
        assert await running.is_well()
        statistics = running.server.statistics
        assert statistics.unauthenticated <= 50
        assert statistics.identified == 2
        assert statistics.turned_away_total >= 250
        await honest.send(Opened(7, 1))
        await running.handler.until(lambda: Opened(7, 1) in running.handler.messages)


async def test_peers_of_another_version_that_do_not_leave_are_bounded_like_all_strangers() -> None:  # H62
    # They received our version and were left to close their end, as many as there are connections at all.
    async with a_running_server(replace(CONFIG, unauthenticated_max=5)) as running:
        with capture_logs() as lines:
            for _ in range(20):
                stranger = await running.a_stranger()
                stranger.writer.write(b"HDGT\x00\x63")
                assert (await stranger.read_some())[:6] == b"HDGT" + PROTOCOL_VERSION.to_bytes(2, "big")
                statistics = running.server.statistics
                assert statistics.unauthenticated + statistics.closing <= 6
        assert [line["event"] for line in lines] == ["connection refused"] * 20


async def test_a_crowd_is_accepted_a_few_at_a_time(running: RunningServer) -> None:  # H62
    # A thousand were, in one turn of the loop: honest peers were pushed out before their data was read. A process with
    # the usual 1024 files had none left, which stopped the listening for a second and filled the log.
    crowd = [socket.create_connection(running.server.address) for _ in range(200)]
    steps, before = [], 0
    while before < len(crowd):
        await asyncio.sleep(0)
        steps.append(running.server.statistics.accepted_total - before)
        before = running.server.statistics.accepted_total
    assert max(steps) <= 16
    for sock in crowd:
        sock.close()


async def test_one_connection_too_many_is_refused() -> None:  # H62
    async with a_running_server(replace(CONFIG, connections_max=2)) as running:
        first = await running.a_task()
        await running.a_task()
        third = await running.a_stranger()
        await third.authenticate()
        assert await third.until_closed() == b""
        assert len(running.handler.connections) == 2
        await first.close()
        await running.handler.until(lambda: len(running.handler.reasons) == 1)
        assert await running.is_well()


@pytest.mark.parametrize("limit", ["connections_max", "unauthenticated_max"])
async def test_an_operator_that_fills_a_limit_keeps_out_no_other(limit: str) -> None:  # H157
    """The limit of connections refused the next one, and that of peers without a purpose dropped the oldest."""
    few: dict[str, Any] = {limit: 8}
    async with a_running_server(replace(CONFIG, **few)) as running:
        running.handler.identify = limit == "connections_max"
        honest = [await running.a_task() for _ in range(2)]
        for _ in range(20):
            await (await running.a_stranger()).authenticate(KEYS.task_key("hostile"))
        honest += [await running.a_task() for _ in range(2)]
        assert running.handler.reasons == [r for r in running.handler.reasons if "limit" in r or "too many" in r]
        gone = [c for c in running.handler.connections if c.state is ConnectionState.CLOSED]
        assert all(c.authenticated_as == KEYS.task_key("hostile").identity for c in gone)
        for number, peer in enumerate(honest):
            await peer.send(Confirm(number, 1))
        await running.handler.until(lambda: len(running.handler.messages) == len(honest))


async def test_strangers_do_not_count_as_connections() -> None:  # H158
    """As many idle strangers as there may be connections kept out everybody at the port for streams."""
    async with a_running_server(replace(CONFIG, connections_max=4, unauthenticated_max=4)) as running:
        strangers = [await running.a_stranger() for _ in range(8)]
        assert await running.is_well()
        for oldest in strangers[:4]:
            assert await oldest.until_closed() == b""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\x00\x00\x00\x00", "an empty frame"),
        (b"\x00\x00\x00\x01\xc2", "not msgpack"),
        (b"\x00\x00\x00\x02\xc1x", "a part of a large message that has not begun"),
        (b"\x00\x00\x00\x05\xc0\xff\xff\xff\xff", "a large message of 4294967295 bytes"),
        (b"\x00\x00\x00\x03\x92\x63\x01", "no message with tag 99"),
        (encode_message(Resumed(7, 1)), "tasks do not send Resumed"),
    ],
    ids=["huge", "empty", "no-msgpack", "part", "claim", "unknown-tag", "downward"],
)
async def test_a_bad_frame_closes_that_connection_with_one_line(running: RunningServer, data: bytes, why: str) -> None:
    # H62
    honest, bad = await running.a_task(), await running.a_task()
    with capture_logs() as lines:
        bad.writer.write(data)
        await bad.until_closed()
        await running.handler.until(lambda: bool(running.handler.reasons))
    assert why in running.handler.reasons[0]
    assert [(line["log_level"], line["event"]) for line in lines] == [("warning", "connection refused")]
    await honest.send(Opened(7, 1))
    await running.handler.until(lambda: running.handler.messages == [Opened(7, 1)])


# --- back-pressure ------------------------------------------------------------------------------------------


async def test_a_peer_that_does_not_read_is_dropped_at_the_limit() -> None:  # H24: it is sent again
    async with a_running_server(replace(CONFIG, write_buffer_bytes_max=5_000_000)) as running:
        await running.a_task()
        connection = running.handler.connections[0]
        with capture_logs() as lines:
            for seq in range(1, 100):
                connection.send(EventMessage(7, seq, bytes(200_000)))
                await asyncio.sleep(0)
                if not connection.is_identified:
                    break
                assert connection.unsent_bytes <= 5_300_000
        assert connection.is_write_paused
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert "does not read" in running.handler.reasons[0]
        assert len(lines) == 1


async def test_writing_continues_when_the_peer_reads_again(running: RunningServer) -> None:
    peer = await running.a_task()
    connection = running.handler.connections[0]
    events = [EventMessage(7, seq, bytes(200_000)) for seq in range(1, 101)]
    for event in events:
        connection.send(event)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.is_write_paused
    assert [await peer.receive() for _ in events] == events
    assert not connection.is_write_paused


async def test_an_oversized_message_raises_and_leaves_the_connection_open() -> None:
    limits = WireLimits(message_bytes_max=2**20, event_bytes_max=1000)
    async with a_running_server(dialect=task_dialect(limits)) as running:
        peer = await running.a_task()
        with pytest.raises(LocalProtocolError):
            running.handler.connections[0].send(EventMessage(7, 1, bytes(1001)))
        running.handler.connections[0].send(Confirm(7, 1))
        assert await peer.receive() == Confirm(7, 1)


# --- the log ----------------------------------------------------------------------------------------------------


async def test_many_strangers_cost_few_lines_and_are_counted() -> None:  # H62
    with capture_logs() as lines:
        async with a_running_server() as running:
            for _ in range(100):
                reader, writer = await asyncio.open_connection(*running.server.address)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
    refused = [line for line in lines if line["event"] == "connection refused"]
    suppressed = [line for line in lines if line["event"] == "similar lines suppressed"]
    assert 20 <= len(refused) < 100
    assert len(refused) + sum(line["count"] for line in suppressed) == 100
    assert all(line["line"] == "connection refused" for line in suppressed)


# --- addresses ----------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = a_server(Recorder(), replace(CONFIG, port=port))
        with pytest.raises(ServerStartError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use.*another one"):
            await server.start()
        await server.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70])
async def test_an_address_that_is_not_ours_is_a_clear_error(host: str) -> None:
    server = a_server(Recorder(), replace(CONFIG, bind_host=host))
    with pytest.raises(ServerStartError, match=f"cannot listen on {host}:0"):
        await server.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_never_advertised(host: str) -> None:  # H63
    with pytest.raises(ServerStartError, match=r"bind_host .* set advertised_host"):
        a_server(Recorder(), replace(CONFIG, bind_host=host))
    with pytest.raises(ServerStartError, match=r"advertised_host is .* set advertised_host"):
        a_server(Recorder(), replace(CONFIG, advertised_host=host))


async def test_a_wildcard_in_another_notation_is_not_advertised_either() -> None:  # H63
    with pytest.raises(ServerStartError, match="set advertised_host"):
        await a_server(Recorder(), replace(CONFIG, bind_host="0")).start()


async def test_bound_and_advertised_address_are_fixed_separately() -> None:  # H63
    config = replace(CONFIG, bind_host="0.0.0.0", advertised_host="driver.example", advertised_port=7077)
    server = a_server(Recorder(), config)
    await server.start()
    assert server.address == ("driver.example", 7077)
    await server.close()


async def test_an_ipv6_address_is_listened_on_and_written_in_brackets() -> None:  # H63
    with capture_logs() as lines:
        async with a_running_server(replace(CONFIG, bind_host="::1")) as running:
            port = running.server.address[1]
            assert running.server.address == ("::1", port)
            assert await running.is_well()
    assert lines[0]["bound"] == lines[0]["advertised"] == f"[::1]:{port}"


@pytest.mark.parametrize("first", [socket.AF_INET, socket.AF_INET6])
async def test_a_name_with_addresses_of_both_kinds_is_served_over_ipv4(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # H63
    found = {
        socket.AF_INET: (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0)),
        socket.AF_INET6: (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", 0, 0, 0)),
    }

    async def resolve(host: str, *_: object, **__: object) -> list[Any]:
        assert host == "driver.example"
        return sorted(found.values(), key=lambda entry: entry[0] != first)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with a_running_server(replace(CONFIG, bind_host="driver.example")) as running:
        assert running.server.address[0] == "127.0.0.1"
        assert await running.is_well()


@asynccontextmanager
async def a_running_server_with_few_files() -> AsyncIterator[RunningServer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with AsyncExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            running = await stack.enter_async_context(a_running_server(ServerConfig()))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # this process has the other ends, too
        yield running


async def test_connections_stay_within_the_files_that_the_process_may_open() -> None:  # H62
    """Five eighths: Spark, storage, the driver's own code and strangers need some, too. The reason says how to allow
    more."""
    async with a_running_server_with_few_files() as running:
        for _ in range(160):
            await running.a_task()
        with capture_logs() as lines:
            one_too_many = await running.a_stranger()
            await one_too_many.authenticate()
            assert await one_too_many.until_closed() == b""
        assert "limit of 160 connections is reached" in lines[-1]["why"]
        assert "raise ulimit -n" in lines[-1]["why"]


async def test_with_few_files_fewer_strangers_are_kept() -> None:  # H62
    async with a_running_server_with_few_files() as running:
        for _ in range(60):
            await running.a_stranger()
        assert await running.is_well()
        assert running.server.statistics.unauthenticated <= 192 // 8


BOUNDS = ["authenticate_timeout_s", "close_timeout_s", "unauthenticated_max", "connections_max"]


@pytest.mark.parametrize("name", BOUNDS)
def test_a_limit_of_zero_is_refused(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=name):
        ServerConfig(**nothing)
