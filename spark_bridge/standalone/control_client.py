# SPDX-License-Identifier: Apache-2.0

"""A driver's requests to a sidecar in another process, each with its own connection.

After the handshake (H61), the driver sends one frame, ``[method, argument]``, and reads one, ``[True, result]`` or
``[False, kind, text]``. Both are encoded like events, so they are plain values.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from actors.coordination import CheckpointFailed
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import DEFAULT_LIMITS, decode_event, encode_event
from protocol.wire.framing import FrameDecoder, frame
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from spark_bridge.errors import CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning
from spark_bridge.storage import StorageFenced

__all__ = ["ControlAddress", "SidecarUnreachable", "ask"]

FIRST_PAUSE_S = 0.05
PAUSE_MAX_S = 1.0
ATTEMPT_TIMEOUT_S = 5.0

# These errors of the other side are raised with their own class. Any other becomes a SidecarError that names its class.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointFailed, CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning, StorageFenced)
}


class SidecarUnreachable(SidecarError):
    """The sidecar's process cannot be reached, or ended before it had answered."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The address at which a sidecar answers drivers, and the secret that both must know (H61)."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def ask(
    address: ControlAddress, method: str, argument: Any = None, *, timeout_s: float, connect_timeout_s: float
) -> Any:
    """Send a request to the sidecar and return its answer. Blocks; for any thread.

    Connecting is tried for ``connect_timeout_s`` seconds, because the sidecar may be about to start. The answer may
    take ``timeout_s`` seconds. Raises ``SidecarUnreachable``, and what the sidecar raised.
    """
    connection = _connect(address, connect_timeout_s)
    try:
        with connection:
            connection.settimeout(timeout_s)
            connection.sendall(frame(encode_event([method, argument])))
            answer = decode_event(_read_frame(connection))
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


def _connect(address: ControlAddress, timeout_s: float) -> socket.socket:
    """Open a connection on which both ends have proved that they know the secret."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return _connect_once(address)
        except RemoteProtocolError as error:
            raise SidecarUnreachable(
                f"the process at {address} does not know this secret, or is not a sidecar of this release ({error}): "
                "give both ends the same --secret-file, and check the port"
            ) from error
        except OSError as error:
            if time.monotonic() + pause_s > deadline:
                raise SidecarUnreachable(
                    f"no sidecar answers at {address} after {timeout_s:g} s ({error}): start it with "
                    "`python -m headgate sidecar MODULE:FACTORY`, or check host and port"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _connect_once(address: ControlAddress) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), ATTEMPT_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ClientHandshake(address.secret, secrets.token_bytes(NONCE_BYTES))
        connection.sendall(handshake.initial_bytes())
        while not handshake.done:
            data = connection.recv(4096)
            if not data:
                raise RemoteProtocolError("the connection was closed in the handshake")
            connection.sendall(handshake.receive(data))
    except BaseException:
        connection.close()
        raise
    return connection


def _read_frame(connection: socket.socket) -> bytes:
    decoder = FrameDecoder(DEFAULT_LIMITS.frame_bytes_max)
    while data := connection.recv(65_536):
        for body in decoder.feed(data):
            return body
    raise RemoteProtocolError("the connection was closed")
