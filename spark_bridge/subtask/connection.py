# SPDX-License-Identifier: Apache-2.0

"""One socket to the sidecar: connect, encrypt, prove the key, send the first message, read the answer.

These steps wait, each within a deadline, and can be interrupted. After them the socket is non-blocking and belongs to
the channel (``channel``).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING, cast, get_args

from protocol.describing import type_name
from protocol.errors import HandshakeFailed, RemoteProtocolError
from protocol.wire.fragments import FragmentDecoder, encode_whole
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import Key
from protocol.wire.messages import Downward, Message
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.subtask.waker import Waker

if TYPE_CHECKING:
    from spark_bridge.common.tls import TlsStream

__all__ = ["Connection", "ConnectionBroken"]

READ_BYTES = 64 * 1024  # from 128 KiB on, the C library may map and unmap memory for each read: 14 µs
_DOWNWARD = get_args(Downward)
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)


class ConnectionBroken(OSError):
    """The peer closed the connection, or a step timed out. The message names the step."""


class Connection:
    """An authenticated, non-blocking connection to the sidecar.

    A ``waker`` can end a step that waits, with ``Interrupted``. Deadlines are readings of ``time.monotonic()``. They
    hold whatever comes meanwhile (H158).
    """

    __slots__ = ("_decoder", "_tls", "_waker", "limits", "sock")

    def __init__(
        self,
        sock: socket.socket,
        waker: Waker | None,
        tls: TlsStream | None = None,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self.sock = sock
        self._waker = waker
        self._tls = tls
        self.limits = limits
        self._decoder = FragmentDecoder(limits)

    @classmethod
    def open(cls, endpoint: TaskEndpoint, deadline: float, waker: Waker | None = None) -> Connection:
        """Connect and authenticate.

        Raises:
            OSError: nothing listens there, the connection broke, or the deadline passed.
            HandshakeFailed: one of the two ends does not know the key, or the sidecar has another certificate.
            VersionMismatch: the sidecar speaks another protocol version (H60).
            Interrupted: the waker ended the wait.
        """
        pin = endpoint.certificate_sha256
        tls = None
        if pin:
            # Only here, because the import of ssl takes a tenth of the time in which a new worker imports this package.
            from spark_bridge.common.tls import TlsStream, client_context

            tls = TlsStream(client_context(), pin=pin)
        connection = cls(_connect(endpoint.host, endpoint.port, deadline, waker), waker, tls, endpoint.wire_limits)
        try:
            if tls is not None:
                connection._encrypt(tls, deadline)
            connection._authenticate(endpoint.key, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def exchange(self, message: Message, deadline: float) -> list[Downward]:
        """Send ``message``, wait for at least one, and return all that arrived with it."""
        self._send_all(encode_whole(message, self.limits), deadline)
        while True:
            messages = self.decode(self._receive(deadline, "an answer"))
            if messages:
                return messages

    def decode(self, data: bytes) -> list[Downward]:
        """Return the messages that ``data`` completes.

        Raises ``RemoteProtocolError`` for a bad frame, and ``ConnectionBroken`` if nothing came, and never will.
        """
        return [_downward(message) for message in self._decoder.messages(self._decrypt(data))]

    def encode(self, frames: bytes) -> bytes:
        """The bytes to send for these frames."""
        return frames if self._tls is None else self._tls.encrypt(frames)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self.sock.close()

    def _encrypt(self, tls: TlsStream, deadline: float) -> None:
        self._send_raw(tls.start(), deadline)
        while not tls.established:
            _, reply = tls.receive(self._receive(deadline, "the TLS handshake"))
            self._send_raw(reply, deadline)

    def _authenticate(self, key: Key, deadline: float) -> None:
        handshake = ClientHandshake(key, os.urandom(NONCE_BYTES))
        self._send_all(handshake.initial_bytes(), deadline)
        proof_sent = False
        while not handshake.done:
            try:
                data = self._decrypt(self._receive(deadline, "the handshake"))
            except ConnectionBroken as broken:
                if proof_sent:
                    raise HandshakeFailed(
                        "the sidecar rejected this task's secret: the task was created by another application or an "
                        "earlier sidecar; create it again with the sidecar that is running now"
                    ) from broken
                raise
            reply = handshake.receive(data)
            if reply:
                self._send_all(reply, deadline)
                proof_sent = True
        if handshake.trailing_data:
            raise RemoteProtocolError("the peer sent data before it was asked for any")

    def _decrypt(self, data: bytes) -> bytes:
        tls = self._tls
        if tls is not None:
            data, _ = tls.receive(data)  # no answer is needed: the sidecar never asks for new keys
            if tls.ended and not data:
                raise ConnectionBroken("the peer has said that it sends no more")
        return data

    def _send_all(self, data: bytes, deadline: float) -> None:
        self._send_raw(self.encode(data), deadline)

    def _send_raw(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                _wait(self.sock, selectors.EVENT_WRITE, deadline, self._waker, "the socket to take more data")

    def _receive(self, deadline: float, what: str) -> bytes:
        while True:
            _wait(self.sock, selectors.EVENT_READ, deadline, self._waker, what)
            try:
                data = self.sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            if not data:
                raise ConnectionBroken(f"the peer closed the connection instead of {what}")
            return data


def _downward(message: Message) -> Downward:
    if not isinstance(message, _DOWNWARD):
        raise RemoteProtocolError(f"{type_name(message)} is not a message that a sidecar sends")
    return cast(Downward, message)


def _connect(host: str, port: int, deadline: float, waker: Waker | None) -> socket.socket:
    """Try each address of ``host``, in the resolver's order."""
    last: OSError | None = None
    for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code not in _IN_PROGRESS:
                raise OSError(code, os.strerror(code))
            _wait(sock, selectors.EVENT_WRITE, deadline, waker, "a connection")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            _tune(sock)
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last if last is not None else ConnectionBroken(f"{host} has no address")


def _tune(sock: socket.socket) -> None:
    """Send small frames without delay, and detect a driver whose machine vanished even while the task only waits."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _wait(sock: socket.socket, events: int, deadline: float, waker: Waker | None, what: str) -> None:
    """Wait until ``sock`` is ready for ``events``. Not with ``select``: an executor may have over 1024 open files."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, events)
        if waker is not None:
            selector.register(waker, selectors.EVENT_READ)
        while True:
            if time.monotonic() >= deadline:
                raise ConnectionBroken(errno.ETIMEDOUT, f"timed out waiting for {what}")
            ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
            if waker is not None and waker in ready:
                waker.drain()
            if sock in ready:
                return
