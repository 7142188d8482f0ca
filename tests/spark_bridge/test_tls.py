# SPDX-License-Identifier: Apache-2.0

"""Encrypted connections (H77): real TCP, real certificates, and somebody between the two ends."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from structlog.testing import capture_logs

from protocol.errors import HandshakeFailed, RemoteProtocolError
from protocol.wire.handshake import PROTOCOL_VERSION, ServerHandshake
from protocol.wire.keys import KeyRing, Purpose
from protocol.wire.messages import Confirm, EventMessage
from spark_bridge.common import control
from spark_bridge.common.certificates import Encryption, TlsCertificate, certificate_digest, encryption
from spark_bridge.common.control import ControlEndpoint, ControlUnreachable
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import SidecarError
from spark_bridge.common.tls import HANDSHAKE_BYTES_MAX, TlsStream, client_context
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.server.connection import task_dialect
from spark_bridge.server.server import AuthenticatedServer, Connection, ServerConfig
from spark_bridge.subtask.connection import Connection as TaskConnection
from tests.fuzz.line import Line as HostileLine
from tests.fuzz.records import (
    ALERT,
    APPLICATION_DATA,
    CLOSE_NOTIFY,
    HANDSHAKE,
    RecordLayer,
    cleartext_record,
    shaken,
)

KEYS = KeyRing(b"the secret of this application!!")
PATIENCE_S = 120.0


class Echo:
    """Answers each event with an event of the same payload."""

    def __init__(self) -> None:
        self.served = self.heard = 0

    def connected(self, connection: Connection) -> None:
        connection.identified()
        self.served += 1

    def messages_received(self, connection: Connection, messages: list[Any]) -> None:
        self.heard += len(messages)
        for message in messages:
            connection.send(message)

    def disconnected(self, connection: Connection, reason: str) -> None:
        """Nothing to do."""


@asynccontextmanager
async def a_server(encryption: Encryption) -> AsyncIterator[tuple[AuthenticatedServer, Echo]]:
    handler = Echo()
    server = AuthenticatedServer(
        handler,
        lambda identity: KEYS.key(Purpose.TASKS, identity),
        task_dialect(),
        ServerConfig(tls=encryption.context, authenticate_timeout_s=PATIENCE_S),
    )
    await server.start()
    try:
        yield server, handler
    finally:
        await server.close()


def an_endpoint(address: tuple[str, int], certificate_sha256: bytes) -> TaskEndpoint:
    return TaskEndpoint(*address, KEYS.task_key("words"), "words", 4, certificate_sha256=certificate_sha256)


def deadline() -> float:
    return asyncio.get_running_loop().time() + PATIENCE_S


@contextmanager
def opened(endpoint: TaskEndpoint, until: float) -> Iterator[TaskConnection]:
    connection = TaskConnection.open(endpoint, until)
    try:
        yield connection
    finally:
        connection.close()


def exchange(endpoint: TaskEndpoint, until: float, sizes: tuple[int, ...]) -> list[int]:
    """Send events of these sizes and return the sizes of the events that come back."""
    with opened(endpoint, until) as connection:
        back: list[int] = []
        for seq, size in enumerate(sizes, 1):
            answers = connection.exchange(EventMessage(7, seq, os.urandom(size)), until)
            back += [len(answer.payload) for answer in answers if isinstance(answer, EventMessage)]
        return back


@pytest.fixture(scope="module")
def made() -> Encryption:
    return encryption(True, KEYS)


async def test_frames_of_every_size_go_both_ways(made: Encryption) -> None:  # H77
    sizes = (0, 1, 16_383, 16_384, 16_385, 1_000_000)
    async with a_server(made) as (server, _):
        endpoint = an_endpoint(server.address, made.certificate_sha256)
        assert await asyncio.to_thread(exchange, endpoint, deadline(), sizes) == list(sizes)


async def test_nothing_can_be_read_on_the_way(made: Encryption) -> None:  # H77
    async with a_server(made) as (server, _), a_line_to(server.address) as line:
        secret = b"what nobody else may read" * 10
        event = EventMessage(7, 1, secret)
        endpoint = an_endpoint(line.address, made.certificate_sha256)

        def talk() -> Any:
            with opened(endpoint, until) as connection:
                return connection.exchange(event, until)

        until = deadline()
        assert await asyncio.to_thread(talk) == [EventMessage(7, 1, secret)]
        heard = b"".join(line.heard)
        assert b"what nobody" not in heard
        assert b"HDGT" not in heard
        assert KEYS.task_key("words").identity not in heard
        assert len(heard) > 2 * len(secret), "the line has seen the conversation"


async def test_a_task_refuses_another_certificate(made: Encryption) -> None:  # H77: certificate pinned
    other = encryption(True, KeyRing(b"the secret of another sidecar!!!"))
    async with a_server(other) as (server, handler):
        endpoint = an_endpoint(server.address, made.certificate_sha256)
        with pytest.raises(HandshakeFailed, match="certificate is not the one"):
            await asyncio.to_thread(exchange, endpoint, deadline(), (1,))
        assert handler.served == 0


async def test_a_program_with_its_own_requests_refuses_another_certificate_too(made: Encryption) -> None:  # H77
    other = encryption(True, KeyRing(b"the secret of another sidecar!!!"))
    async with a_server(other) as (server, handler):
        for certificate, text in ((made, "certificate is not the one"), (other, "stopped before it answered")):
            endpoint = ControlEndpoint(*server.address, KEYS.task_key("words"), certificate.certificate_sha256)
            ask = partial(control.exchange, endpoint, "status", timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
            with pytest.raises(ControlUnreachable, match=text):
                await asyncio.to_thread(ask)
            assert handler.served == (certificate is other)


async def test_somebody_in_the_middle_with_another_certificate_hears_nothing(made: Encryption) -> None:  # H77
    """He decrypts, and passes on: the handshake inside would succeed. Only the pinned certificate stops him."""
    his = encryption(True, KeyRing(b"the secret of the one between!!!"))
    heard: list[bytes] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        further = await asyncio.open_connection(*server.address, ssl=client_context())
        heard.append(await reader.read(100))
        for one in (writer, further[1]):
            one.close()

    async with a_server(made) as (server, handler):
        listener = await asyncio.start_server(between, "127.0.0.1", 0, ssl=his.context)
        async with listener:
            address = listener.sockets[0].getsockname()
            with pytest.raises(HandshakeFailed, match="certificate is not the one"):
                await asyncio.to_thread(exchange, an_endpoint(address, made.certificate_sha256), deadline(), (1,))
        assert handler.served == 0
    assert b"".join(heard) == b""


async def test_both_ends_say_that_only_one_of_them_encrypts(made: Encryption) -> None:  # H77
    async with a_server(Encryption()) as (server, handler):
        endpoint = an_endpoint(server.address, made.certificate_sha256)
        with capture_logs() as log, pytest.raises(OSError, match="closed the connection instead of the TLS"):
            await asyncio.to_thread(exchange, endpoint, deadline(), (1,))
        assert handler.served == 0
        assert "does not speak this protocol" in log[0]["why"]
    async with a_server(made) as (server, handler):
        with capture_logs() as log, pytest.raises(OSError, match="closed the connection instead of the handshake"):
            await asyncio.to_thread(exchange, an_endpoint(server.address, b""), deadline(), (1,))
        assert handler.served == 0
        assert "set tls at both ends or at neither" in log[0]["why"]


async def test_a_peer_of_an_older_tls_is_refused(made: Encryption) -> None:  # H77: TLS 1.3 only
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with a_server(made) as (server, _):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*server.address, ssl=context)


async def test_a_task_refuses_a_server_of_an_older_tls(made: Encryption) -> None:  # H77: TLS 1.3 only
    """Even if it shows the pinned certificate: its private key belongs to the sidecar, its protocol is not ours."""
    older = encryption(True, KEYS)
    assert older.context is not None
    older.context.minimum_version = older.context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert older.certificate_sha256 == made.certificate_sha256
    async with a_server(older) as (server, handler):
        endpoint = an_endpoint(server.address, made.certificate_sha256)
        with capture_logs() as log, pytest.raises(OSError, match="closed the connection instead of the TLS handshake"):
            await asyncio.to_thread(exchange, endpoint, deadline(), (1,))
        assert handler.served == 0
    assert [entry["why"] for entry in log] == ["the TLS handshake failed: UNSUPPORTED_PROTOCOL"]


async def test_the_deadline_to_authenticate_counts_from_the_accept(made: Encryption) -> None:  # H62, H77
    handler = Echo()
    config = ServerConfig(tls=made.context, authenticate_timeout_s=0.05)
    server = AuthenticatedServer(handler, lambda identity: None, task_dialect(), config)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection(*server.address)
        with capture_logs() as log:
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
        assert "did not authenticate within" in log[0]["why"]
        writer.close()
    finally:
        await server.close()


def test_the_certificate_is_the_same_after_a_restart_and_for_the_driver() -> None:  # H77
    again = KeyRing(b"the secret of this application!!")
    assert certificate_digest(True, again) == encryption(True, KEYS).certificate_sha256
    assert certificate_digest(True, KeyRing(bytes(32))) != certificate_digest(True, KEYS)
    assert certificate_digest(False, KEYS) == b""


@pytest.mark.parametrize("password", [None, "a password"])
async def test_a_certificate_of_ones_own(tmp_path: Path, password: str | None) -> None:  # H77
    certificate, private_key = write_own(tmp_path, password)
    own = TlsCertificate(certificate, private_key, password)
    given = encryption(own, KEYS)
    assert given.certificate_sha256 == certificate_digest(TlsCertificate(certificate), KEYS)
    async with a_server(given) as (server, _):
        endpoint = an_endpoint(server.address, given.certificate_sha256)
        assert await asyncio.to_thread(exchange, endpoint, deadline(), (5,)) == [5]
    assert password is None or password not in repr(own)


def test_wrong_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    certificate, private_key = write_own(tmp_path, "a password")
    nothing = tmp_path / "nothing"
    nothing.write_text("no certificate")
    for given, text in (
        (TlsCertificate(tmp_path / "missing"), "cannot read the certificate from .*missing"),
        (TlsCertificate(nothing), "there is no certificate in it"),
        (TlsCertificate(certificate), "needs the private key"),
        (TlsCertificate(certificate, nothing), "cannot use the certificate .* with the private key"),
        (TlsCertificate(certificate, private_key), "pass its password"),
        (TlsCertificate(certificate, private_key, "wrong"), "cannot use the certificate"),
    ):
        with pytest.raises(SidecarError, match=text):
            encryption(given, KEYS)


@pytest.mark.parametrize("tls", ["yes", 1, None, Path("certificate.pem")])
def test_another_kind_of_setting_is_refused(tls: Any) -> None:
    with pytest.raises(TypeError, match="tls must be True, False or a TlsCertificate, not "):
        SidecarConfig(tls=tls)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from protocol.wire.keys import KeyRing\n"
        "from spark_bridge.common.certificates import encryption\n"
        "encryption(True, KeyRing(bytes(32)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'headgate[tls]'" in ended.stderr.splitlines()[-1]


def test_the_private_key_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # H77
    seen: list[int] = []
    unlink = os.unlink

    def look_and_unlink(path: str) -> None:
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        assert b"ENCRYPTED PRIVATE KEY" in Path(path).read_bytes()
        unlink(path)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.unlink", look_and_unlink)
    encryption(True, KEYS)
    assert seen == [0o600]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("portion", [1, 7, 1000])
def test_the_portions_in_which_bytes_come_do_not_matter(made: Encryption, portion: int) -> None:  # H77
    assert made.context is not None
    server = TlsStream(made.context)
    client = TlsStream(client_context(), pin=made.certificate_sha256)
    to_client, to_server = server.encrypt(b"early"), client.encrypt(b"words") + client.start()
    from_client, from_server = b"", b""
    while to_server or to_client:
        part, to_server = to_server[:portion], to_server[portion:]
        plain, reply = server.receive(part) if part else (b"", b"")
        from_client, to_client = from_client + plain, to_client + reply
        part, to_client = to_client[:portion], to_client[portion:]
        plain, reply = client.receive(part) if part else (b"", b"")
        from_server, to_server = from_server + plain, to_server + reply
    assert server.established
    assert client.established
    assert (from_client, from_server) == (b"words", b"early")


def test_a_stream_that_is_damaged_says_so(made: Encryption) -> None:  # H77
    assert made.context is not None
    server, client = TlsStream(made.context), TlsStream(client_context(), pin=made.certificate_sha256)
    _, challenge = server.receive(client.start())
    _, finished = client.receive(challenge)
    server.receive(finished)
    record = bytearray(client.encrypt(b"an event"))
    record[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="damaged"):
        server.receive(bytes(record))


# --- parts --------------------------------------------------------------------------------------------------------


class Line:
    """A wire that is listened to."""

    def __init__(self) -> None:
        self.address = ("", 0)
        self.heard: list[bytes] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            self.heard.append(data)
            writer.write(data)
        writer.close()


@asynccontextmanager
async def a_line_to(address: tuple[str, int]) -> AsyncIterator[Line]:
    line = Line()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        further_reader, further_writer = await asyncio.open_connection(*address)
        await asyncio.gather(
            line.carry(reader, further_writer),
            line.carry(further_reader, writer),
            return_exceptions=True,
        )

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        line.address = listener.sockets[0].getsockname()
        yield line


def write_own(folder: Path, password: str | None) -> tuple[Path, Path]:
    """A certificate as an administrator would make it, with another kind of key."""
    private_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a driver")])
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, private_key.public_key(), 7, begin, begin + datetime.timedelta(days=1))
        .sign(private_key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    protection = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate)
    files[1].write_bytes(private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
    return files


# --- peers that speak below the plaintext (H157) ----------------------------------------------------------------------


def a_pair(made: Encryption) -> tuple[TlsStream, TlsStream, RecordLayer]:
    assert made.context is not None
    return shaken(made.context, made.certificate_sha256)


def kept_bytes(stream: TlsStream) -> int:
    return stream._incoming.pending + stream._outgoing.pending + len(stream._waiting) + len(stream._head)


@pytest.mark.parametrize("portion", [1, 7, 4096, 200_000])
def test_nothing_is_kept_after_the_peer_has_said_that_it_ends(made: Encryption, portion: int) -> None:
    """1.5 GiB were, in 25 s (H157)."""
    server, _, records = a_pair(made)
    data = records.record(APPLICATION_DATA, b"last words") + records.record(ALERT, CLOSE_NOTIFY) + bytes(100_000)
    plain = b""
    for start in range(0, len(data), portion):
        plain += server.receive(data[start : start + portion])[0]
        assert kept_bytes(server) < portion + 5
    assert plain == b"last words"
    assert server.ended
    assert server.receive(bytes(100_000)) == (b"", b"")
    assert kept_bytes(server) == 0


@pytest.mark.parametrize("answered", [False, True])
def test_a_flood_of_new_keys_ends_the_connection_before_it_costs_much(made: Encryption, *, answered: bool) -> None:
    """64 KiB of them took 37 ms of the loop, and the answers to a peer that does not read had no limit (H157)."""
    server, _, records = a_pair(made)
    flood = b"".join(records.new_keys(answered=answered) for _ in range(3000))
    with pytest.raises(RemoteProtocolError, match="hold too much other than data"):
        server.receive(flood)
    assert kept_bytes(server) < 20_000
    server, _, records = a_pair(made)  # nor does it help to send data in between
    mixed = (records.record(APPLICATION_DATA, bytes(100)) + records.new_keys(answered=answered) for _ in range(1000))
    with pytest.raises(RemoteProtocolError, match="hold too much other than data"):
        take_all(server, mixed)


def take_all(stream: TlsStream, sent: Iterable[bytes]) -> None:
    for data in sent:
        stream.receive(data)


def test_new_keys_now_and_then_and_padding_are_allowed(made: Encryption) -> None:
    server, client, records = a_pair(made)
    for number in range(10):
        data = bytes([number]) * 20_000
        sent = records.new_keys(answered=number % 2 == 0) + records.record(APPLICATION_DATA, b"a", padding=20)
        sent += b"".join(records.record(APPLICATION_DATA, data[at : at + 16_384]) for at in (0, 16_384))
        plain, reply = server.receive(sent)
        assert plain == b"a" + data
        assert client.receive(reply + server.encrypt(b"back"))[0] == b"back"


@pytest.mark.parametrize("portion", [1, 5, 4096, 65_536])
def test_a_record_is_counted_right_however_it_is_cut(made: Encryption, portion: int) -> None:
    server, client, _ = a_pair(made)
    data = os.urandom(100_000)
    sent = client.encrypt(data) + client.encrypt(b"x") + client.encrypt(data[:17])
    plain = b"".join(server.receive(sent[at : at + portion])[0] for at in range(0, len(sent), portion))
    assert plain == data + b"x" + data[:17]
    assert server._hidden == 0


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_handshake_without_an_end_is_refused_whatever_it_claims(made: Encryption, end: str) -> None:  # H157
    assert made.context is not None
    stream = TlsStream(made.context) if end == "client" else TlsStream(client_context(), pin=made.certificate_sha256)
    if end == "server":
        stream.start()
    claim = b"\x01\x01\xff\xff" if end == "client" else b"\x02\x00\xff\xff"
    records = [cleartext_record(HANDSHAKE, claim + bytes(60)), *[cleartext_record(HANDSHAKE, bytes(64))] * 4000]

    def take(count: int) -> None:
        for record in records[:count]:
            stream.receive(record)

    fits = HANDSHAKE_BYTES_MAX[end] // len(records[0])
    with pytest.raises(HandshakeFailed):
        take(fits + 1)


async def test_a_stranger_that_ends_its_encryption_is_disconnected(made: Encryption) -> None:  # H157
    """Before it has authenticated, and with no deadline near."""
    async with a_server(made) as (server, _):
        line = await HostileLine.open(server.address, made.certificate_sha256, below=True)
        assert line.records is not None
        await line.send_raw(line.records.record(ALERT, CLOSE_NOTIFY))
        assert await line.until_closed() == b""
        assert server.statistics.unauthenticated == 0
        await line.close()


async def test_a_task_that_ends_its_encryption_is_disconnected_after_what_it_has_said(made: Encryption) -> None:  # H157
    async with a_server(made) as (server, handler):
        line = await HostileLine.open(server.address, made.certificate_sha256, below=True)
        await line.greet(KEYS.task_key("words"), bytes(32))
        assert line.records is not None
        await line.say(*(Confirm(7, seq) for seq in range(1, 200)))
        await line.send_raw(line.records.record(ALERT, CLOSE_NOTIFY) + bytes(1_000_000))
        await line.until_closed()
        assert handler.heard == 199
        assert server.statistics.identified == 0
        await line.close()


async def test_a_large_message_still_leaves_to_a_peer_that_has_ended_its_side(made: Encryption) -> None:  # H157
    """As over plain TCP, where a peer may close its half."""
    async with a_server(made) as (server, _):
        line = await HostileLine.open(server.address, made.certificate_sha256, below=True)
        await line.greet(KEYS.task_key("words"), bytes(32))
        assert line.records is not None
        event = EventMessage(7, 1, os.urandom(8 * 2**20))
        await line.say(event)
        await line.send_raw(line.records.record(ALERT, CLOSE_NOTIFY))
        assert await line.messages() == [event]
        assert await line.until_closed() == b""
        await line.close()


@pytest.mark.parametrize("port", ["a task", "a driver"])
async def test_a_client_survives_a_server_that_ends_its_encryption_and_goes_on(made: Encryption, port: str) -> None:
    """A hostile server, which has the right certificate, filled the memory of the task (H157)."""
    assert made.context is not None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert made.context is not None
        stream = TlsStream(made.context)
        with suppress(ConnectionError):
            while not stream.established:
                _, reply = stream.receive(await reader.read(65_536))
                writer.write(reply)
            with suppress(ssl.SSLError):
                stream._object.unwrap()
            writer.write(stream._outgoing.read())
            while True:
                writer.write(bytes(65_536))
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    until = deadline()
    endpoint = an_endpoint(address, made.certificate_sha256)
    key = KEYS.key(Purpose.CONTROL, b"i" * 16)
    asked = ControlEndpoint(address[0], address[1], key, made.certificate_sha256)

    def talk() -> None:
        if port == "a task":
            TaskConnection.open(endpoint, until).close()
        else:
            control._connect_once(asked).close()

    with pytest.raises(OSError, match=r"sends no more|in the handshake"):
        await asyncio.to_thread(talk)
    server.close()


@pytest.mark.parametrize("step", ["connect", "answer"])
async def test_no_deadline_of_a_driver_is_moved_by_a_byte_at_a_time(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte allowed as much time again (H158)."""
    monkeypatch.setattr(control, "ATTEMPT_TIMEOUT_S", 1.0 if step == "connect" else PATIENCE_S)
    sent, left = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(ConnectionError):
            if step == "answer":
                handshake = ServerHandshake(lambda identity: KEYS.key(Purpose.CONTROL, identity), bytes(32))
                while not handshake.done:
                    writer.write(handshake.receive(await reader.read(65_536)))
                await reader.read(65_536)
                writer.write(b"\x00\x00\x10\x00")
            else:
                writer.write(b"HDGT" + PROTOCOL_VERSION.to_bytes(2, "big"))
            while sent < 30:
                writer.write(b"x")
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.1)
        writer.close()
        left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    endpoint = ControlEndpoint(host, port, KEYS.key(Purpose.CONTROL, b"i" * 16))
    ask = partial(control.exchange, endpoint, "failures", timeout_s=1.0, connect_timeout_s=1.0)
    with pytest.raises(ControlUnreachable, match="timed out"):
        await asyncio.to_thread(ask)
    await left.wait()
    assert sent < 30
    server.close()


@pytest.mark.parametrize(("tls", "proof"), [(False, False), (True, False), (False, True)])
async def test_a_driver_whose_connection_is_closed_tries_again_and_more_often_before_its_proof(
    tls: bool, proof: bool, made: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H77 H158: a server closes the oldest connections at a limit, also of drivers that know the secret."""
    monkeypatch.setattr(control, "PAUSE_MAX_S", control.FIRST_PAUSE_S)
    tries = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        with suppress(ConnectionError):
            handshake = ServerHandshake(lambda identity: KEYS.key(Purpose.CONTROL, identity), bytes(32))
            hello = await reader.read(65_536)
            if proof:
                writer.write(handshake.receive(hello))
                await reader.read(65_536)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    certificate = made.certificate_sha256 if tls else b""
    endpoint = ControlEndpoint(host, port, KEYS.key(Purpose.CONTROL, b"i" * 16), certificate)
    ask = partial(control.exchange, endpoint, "failures", timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
    with pytest.raises(ControlUnreachable, match="does not know this secret"):
        await asyncio.to_thread(ask)
    assert tries == (control.CUT_OFF_MAX if proof else control.CUT_OFF_EARLY_MAX)
    server.close()
