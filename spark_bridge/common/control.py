# SPDX-License-Identifier: Apache-2.0

"""Requests to a sidecar from a process that is not a task, each with its own connection.

After the handshake (H61), in which the client shows its own identity, it sends one frame, ``[method, argument]``, and
reads one, ``[True, result]`` or ``[False, kind, text]``. Both are encoded like events, so they are plain values.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import HandshakeFailed, HeadgateError, RemoteProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import FrameDecoder, WireLimits, frame
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import Key
from spark_bridge.common.tls import check_certificate, client_context

__all__ = ["CONTROL_LIMITS", "ControlEndpoint", "ControlUnreachable", "exchange"]

CONTROL_LIMITS = WireLimits(message_bytes_max=64 * 2**20, event_bytes_max=4 * 2**20)
"""The limits of what a sidecar and another process say to each other."""

FIRST_PAUSE_S = 0.05
PAUSE_MAX_S = 1.0
ATTEMPT_TIMEOUT_S = 5.0
CUT_OFF_MAX = 3
"""How often in a row the connection may be closed after our proof, before that means that the secret is wrong: a
server that is flooded with connections closes the oldest."""
CUT_OFF_EARLY_MAX = 8
"""The same before our proof, where it means that only one end encrypts, or that something else listens there."""


class ControlUnreachable(HeadgateError):
    """The sidecar cannot be reached, or ended before it had answered.

    Check that the sidecar's process runs, and its address.
    """


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """Where a sidecar answers requests, and what both ends must know (H61). ``repr`` shows no secret.

    ``certificate_sha256`` is the digest of the sidecar's certificate; empty if the connection is not encrypted (H77).
    ``start_hint`` and ``secret_hint`` complete the errors: what to do if nobody answers, or if the key is refused.
    """

    host: str
    port: int
    key: Key = field(repr=False)
    certificate_sha256: bytes = field(default=b"", repr=False)
    start_hint: str = field(default="check that it is running", repr=False)
    secret_hint: str = field(default="check the port", repr=False)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def exchange(
    endpoint: ControlEndpoint, method: str, argument: Any = None, *, timeout_s: float, connect_timeout_s: float
) -> Any:
    """Send one request and return the raw answer, ``[True, result]`` or ``[False, kind, text]``. Blocks; any thread.

    Connecting is tried for ``connect_timeout_s`` seconds, because the sidecar may be about to start. The answer may
    take ``timeout_s`` seconds, in whatever portions it comes (H158). Raises ``ControlUnreachable``, and
    ``EventEncodeError`` for an argument that cannot be sent.
    """
    request = frame(encode_event([method, argument], CONTROL_LIMITS))
    connection = _connect(endpoint, connect_timeout_s)
    try:
        with connection:
            deadline = time.monotonic() + timeout_s
            _send(connection, request, deadline)
            return decode_event(_read_frame(connection, deadline), CONTROL_LIMITS)
    except (OSError, RemoteProtocolError) as error:
        raise ControlUnreachable(
            f"the sidecar at {endpoint} stopped before it answered {method!r} ({error}): the request may or may not "
            "have been carried out. Look at the sidecar's log before you repeat it"
        ) from error


class _CutOff(OSError):
    """The connection was closed in the handshake: we were refused, or the server had too many connections."""

    def __init__(self, *, proof_sent: bool) -> None:
        super().__init__("the connection was closed in the handshake")
        self.times_max = CUT_OFF_MAX if proof_sent else CUT_OFF_EARLY_MAX


def _connect(endpoint: ControlEndpoint, timeout_s: float) -> socket.socket:
    """Open a connection on which both ends have proved that they know the secret."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    cut_off = 0
    while True:
        try:
            return _connect_once(endpoint)
        except RemoteProtocolError as error:
            raise _wrong_secret(endpoint, error) from error
        except OSError as error:
            cut_off = cut_off + 1 if isinstance(error, _CutOff) else 0
            if isinstance(error, _CutOff) and cut_off >= error.times_max:
                raise _wrong_secret(endpoint, error) from error
            if time.monotonic() + pause_s > deadline:
                raise ControlUnreachable(
                    f"no sidecar answers at {endpoint} after {timeout_s:g} s ({error}): {endpoint.start_hint}"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _wrong_secret(endpoint: ControlEndpoint, error: Exception) -> ControlUnreachable:
    return ControlUnreachable(
        f"the process at {endpoint} does not know this secret, or is not a sidecar of this release ({error}): "
        f"{endpoint.secret_hint}"
    )


def _connect_once(endpoint: ControlEndpoint) -> socket.socket:
    deadline = time.monotonic() + ATTEMPT_TIMEOUT_S
    connection = socket.create_connection((endpoint.host, endpoint.port), ATTEMPT_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.certificate_sha256:
            connection = _encrypt(connection, endpoint.certificate_sha256)
        handshake = ClientHandshake(endpoint.key, secrets.token_bytes(NONCE_BYTES))
        _send(connection, handshake.initial_bytes(), deadline)
        proof_sent = False
        while not handshake.done:
            try:
                data = _receive(connection, deadline)
            except ConnectionResetError:
                data = b""
            if not data:
                raise _CutOff(proof_sent=proof_sent)
            if reply := handshake.receive(data):
                _send(connection, reply, deadline)
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
        raise HandshakeFailed(
            f"the TLS handshake failed: {error.reason or error}. Pass the same tls= on both sides"
        ) from error
    try:
        check_certificate(encrypted.getpeercert(binary_form=True), certificate_sha256)
    except HandshakeFailed:
        encrypted.close()
        raise
    return encrypted


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _allow_until(connection, deadline)
        view = view[connection.send(view) :]


def _receive(connection: socket.socket, deadline: float) -> bytes:
    _allow_until(connection, deadline)
    return connection.recv(65_536)


def _allow_until(connection: socket.socket, deadline: float) -> None:
    """A socket's own timeout begins anew with each byte."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)


def _read_frame(connection: socket.socket, deadline: float) -> bytes:
    decoder = FrameDecoder(CONTROL_LIMITS.message_bytes_max)
    while data := _receive(connection, deadline):
        for body in decoder.feed(data):
            return body
    raise RemoteProtocolError("the connection was closed")
