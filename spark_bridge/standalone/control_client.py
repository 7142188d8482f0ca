# SPDX-License-Identifier: Apache-2.0

"""A driver's requests to a sidecar in another process, each with its own connection.

After the handshake (H61), in which the driver shows its own identity, it sends one frame, ``[method, argument]``, and
reads one, ``[True, result]`` or ``[False, kind, text]``. Both are encoded like events, so they are plain values.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from actors.coordination import CheckpointFailed
from protocol.errors import HandshakeFailed, RemoteProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import FrameDecoder, frame
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.addresses import written
from spark_bridge.errors import CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning
from spark_bridge.standalone.control_limits import CONTROL_LIMITS
from spark_bridge.storage import StorageFenced
from spark_bridge.subtask.tls import check_certificate, client_context

__all__ = ["ControlAddress", "SidecarUnreachable", "ask"]

FIRST_PAUSE_S = 0.05
PAUSE_MAX_S = 1.0
ATTEMPT_TIMEOUT_S = 5.0
CUT_OFF_MAX = 3
"""How often in a row the connection may be closed after our proof, before that means that the secret is wrong: a
server that is flooded with connections closes the oldest."""
CUT_OFF_EARLY_MAX = 8
"""The same before our proof, where it means that only one end encrypts, or that something else listens there."""

# These errors of the other side are raised with their own class. Any other becomes a SidecarError that names its class.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointFailed, CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning, StorageFenced)
}


class SidecarUnreachable(SidecarError):
    """The sidecar's process cannot be reached, or ended before it had answered."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The address at which a sidecar answers drivers, and what both must know (H61).

    ``certificate_sha256`` is the digest of the sidecar's certificate; empty if the connection is not encrypted (H77).
    """

    host: str
    port: int
    keys: KeyRing = field(repr=False)
    certificate_sha256: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return written(self.host, self.port)


def ask(
    address: ControlAddress,
    driver: bytes,
    method: str,
    argument: Any = None,
    *,
    timeout_s: float,
    connect_timeout_s: float,
) -> Any:
    """Send a request of this driver to the sidecar and return its answer. Blocks; for any thread.

    Connecting is tried for ``connect_timeout_s`` seconds, because the sidecar may be about to start. The answer may
    take ``timeout_s`` seconds. Raises ``SidecarUnreachable``, and what the sidecar raised.
    """
    connection = _connect(address, driver, connect_timeout_s)
    try:
        with connection:
            connection.settimeout(timeout_s)
            connection.sendall(frame(encode_event([method, argument], CONTROL_LIMITS)))
            answer = decode_event(_read_frame(connection), CONTROL_LIMITS)
    except (OSError, RemoteProtocolError) as error:
        raise SidecarUnreachable(
            f"the sidecar at {address} went away before it answered {method!r} ({error}): the request may have been "
            "carried out or not"
        ) from error
    match answer:
        case [True, result]:
            return result
        case [False, str(kind), str(text)] if kind in _KINDS:
            raise _KINDS[kind](text)
        case [False, str(kind), str(text)]:
            raise SidecarError(f"{kind}: {text}")
        case _:
            raise SidecarUnreachable(
                f"the sidecar at {address} sent an invalid answer: {answer!r}; use the same release on both sides"
            )


class _CutOff(OSError):
    """The connection was closed in the handshake: we were refused, or the server had too many connections."""

    def __init__(self, *, proof_sent: bool) -> None:
        super().__init__("the connection was closed in the handshake")
        self.times_max = CUT_OFF_MAX if proof_sent else CUT_OFF_EARLY_MAX


def _connect(address: ControlAddress, driver: bytes, timeout_s: float) -> socket.socket:
    """Open a connection on which both ends have proved that they know the secret."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    cut_off = 0
    while True:
        try:
            return _connect_once(address, driver)
        except RemoteProtocolError as error:
            raise _wrong_secret(address, error) from error
        except OSError as error:
            cut_off = cut_off + 1 if isinstance(error, _CutOff) else 0
            if isinstance(error, _CutOff) and cut_off >= error.times_max:
                raise _wrong_secret(address, error) from error
            if time.monotonic() + pause_s > deadline:
                raise SidecarUnreachable(
                    f"no sidecar answers at {address} after {timeout_s:g} s ({error}): start it with "
                    "`python -m headgate sidecar MODULE:FACTORY`, or check host and port"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _wrong_secret(address: ControlAddress, error: Exception) -> SidecarUnreachable:
    return SidecarUnreachable(
        f"the process at {address} does not know this secret, or is not a sidecar of this release ({error}): "
        "give both ends the same --secret-file, use tls at both ends or at neither, and check the port"
    )


def _connect_once(address: ControlAddress, driver: bytes) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), ATTEMPT_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.certificate_sha256:
            connection = _encrypt(connection, address.certificate_sha256)
        handshake = ClientHandshake(address.keys.key(Purpose.CONTROL, driver), secrets.token_bytes(NONCE_BYTES))
        connection.sendall(handshake.initial_bytes())
        proof_sent = False
        while not handshake.done:
            try:
                data = connection.recv(4096)
            except ConnectionResetError:
                data = b""
            if not data:
                raise _CutOff(proof_sent=proof_sent)
            if reply := handshake.receive(data):
                connection.sendall(reply)
                proof_sent = True
    except BaseException:
        connection.close()
        raise
    return connection


def _encrypt(connection: socket.socket, certificate_sha256: bytes) -> ssl.SSLSocket:
    try:
        encrypted = client_context().wrap_socket(connection)
    except (ssl.SSLEOFError, ConnectionResetError) as error:
        raise _CutOff(proof_sent=False) from error
    except ssl.SSLError as error:
        raise HandshakeFailed(f"the TLS handshake failed: {error.reason or error}") from error
    try:
        check_certificate(encrypted.getpeercert(binary_form=True), certificate_sha256)
    except HandshakeFailed:
        encrypted.close()
        raise
    return encrypted


def _read_frame(connection: socket.socket) -> bytes:
    decoder = FrameDecoder(CONTROL_LIMITS.message_bytes_max)
    while data := connection.recv(65_536):
        for body in decoder.feed(data):
            return body
    raise RemoteProtocolError("the connection was closed")
