# SPDX-License-Identifier: Apache-2.0

"""The socket of a task: how it is opened, how the task registers over it, and what reads and writes it then.

To open one means to connect, encrypt, prove the key, send the first message and read the answer. These steps wait, each
within a deadline, and a ``Waker`` can interrupt them. After them the socket is non-blocking, and the channel's
``CurrentConnection`` holds it: it sends and receives what the socket takes and has, and never waits. ``OwnReads``
decides which of the task's two threads waits for the next bytes.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import select
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast, get_args

from protocol.describing import type_name
from protocol.errors import AttemptOver, HandshakeFailed, RemoteProtocolError
from protocol.wire.fragments import FragmentDecoder, Outbox, encode_frames, encode_whole
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import Key
from protocol.wire.messages import AttemptEnded, Downward, Message, Refused, Register, Registered, UpMessage
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import CannotReachSidecar, RegistrationFailed, RegistrationRefused

if TYPE_CHECKING:
    from spark_bridge.common.tls import TlsStream

__all__ = ["Connection", "ConnectionBroken", "CurrentConnection", "Interrupted", "OwnReads", "Waker", "register"]

READ_BYTES = 64 * 1024  # from 128 KiB on, the C library may map and unmap memory for each read: 14 µs
WRITE_BYTES = 256 * 1024
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
REFUSED_TIMEOUT_S = 2.0
"""How long to retry a refused connection. Short, because the driver is up before its tasks are."""
SOON_S: Final = 0.005  # after a wait shorter than this, the task reads during the next one
IDLE_S: Final = 0.02  # after this long without news, the I/O thread reads again
WATCH_S: Final = (
    0.001  # while the task reads, the I/O thread checks on it this often; at the second check it takes over
)
_DOWNWARD = get_args(Downward)
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)


class Interrupted(Exception):
    """The attempt is being closed: the thread must stop waiting."""


class Waker:
    """Lets one thread wake another that waits for a socket: one more socket, which becomes readable on ``wake()``.

    ``stopping`` tells whether the waiting thread must end.

    Any thread may call ``wake``, even after ``close``. Everything else belongs to the thread that waits.
    """

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor for a selector."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the thread's current wait, or its next one."""
        with suppress(OSError):  # full: a wake-up is pending; closed: nothing waits any more
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Consume the wake-ups so far. Raises ``Interrupted`` if the thread must end; otherwise its wait continues."""
        with suppress(BlockingIOError, InterruptedError):
            self._reader.recv(4096)
        if self._stopping():
            raise Interrupted

    def close(self) -> None:
        """Close both ends. Safe to call twice."""
        self._reader.close()
        self._writer.close()


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


def register(
    endpoint: TaskEndpoint, identity: TaskIdentity, waker: Waker
) -> tuple[Connection, Registered, list[Downward]]:
    """Connect, authenticate and register. Return the connection, the answer, and the messages that came with it.

    Raises:
        CannotReachSidecar: no connection within ``connect_timeout_s``.
        RegistrationRefused: the sidecar refused the task; the message says why.
        RegistrationFailed: no answer within ``register_timeout_s``, or the connection broke meanwhile.
        HandshakeFailed, VersionMismatch: without a second try, which could not help.
        AttemptOver: Spark or the driver ended this attempt meanwhile.
    """
    connection = _reach(endpoint, waker)
    try:
        answer, *rest = _introduce(connection, endpoint, identity)
        match answer:
            case Registered():
                return connection, answer, rest
            case Refused(code=code, message=message):
                raise RegistrationRefused(code, message)
            case AttemptEnded(reason=reason):
                raise AttemptOver(f"task {identity.task_attempt_id} was ended before it began: {reason}")
            case other:
                raise RemoteProtocolError(f"the sidecar answered a registration with {type_name(other)}")
    except BaseException:
        connection.close()
        raise


def _reach(endpoint: TaskEndpoint, waker: Waker) -> Connection:
    began = time.monotonic()
    deadline = began + endpoint.connect_timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return Connection.open(endpoint, deadline, waker)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):  # an answer, not silence: nothing listens there
                deadline = min(deadline, began + REFUSED_TIMEOUT_S)
            if time.monotonic() + pause_s >= deadline:
                raise CannotReachSidecar(
                    f"cannot reach the sidecar at {endpoint.host}:{endpoint.port} from {socket.gethostname()} "
                    f"within {deadline - began:g} s: {error}. Check that the sidecar is still running (its `with` "
                    "block has not ended), and that its log does not say `event loop blocked`. If executors reach the "
                    "driver by another name or port, set advertised_host and advertised_port. If there is a firewall "
                    "between them, set a fixed port and open it"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _introduce(connection: Connection, endpoint: TaskEndpoint, identity: TaskIdentity) -> list[Downward]:
    message = Register(
        task_attempt_id=identity.task_attempt_id,
        operator_id=endpoint.operator_id,
        subtask=identity.subtask,
        run_id=identity.run_id,
        attempt_number=identity.attempt_number,
        mode=int(endpoint.mode),
        parallelism=endpoint.parallelism,
        location=f"{socket.gethostname()}/{os.getpid()}",
        python_version=platform.python_version(),
        action=identity.action,
    )
    who = f"task {identity.task_attempt_id} (subtask {identity.subtask} of {endpoint.operator_id!r})"
    try:
        return connection.exchange(message, time.monotonic() + endpoint.register_timeout_s)
    except ConnectionBroken as error:
        if error.errno == errno.ETIMEDOUT:
            raise RegistrationFailed(
                f"{who} reached the sidecar, which did not accept it within {endpoint.register_timeout_s:g} s. The "
                "sidecar holds a task back while an older attempt of the same subtask is alive, or while the "
                "coordinator is being reset. The driver's log says which; raise register_timeout_s to wait longer"
            ) from error
        raise RegistrationFailed(
            f"{who}: the connection broke before the sidecar accepted it: {error}. Look into the log of the "
            "driver for this task"
        ) from error
    except OSError as error:
        raise RegistrationFailed(
            f"{who}: the connection broke before the sidecar accepted it: {error}. Look into the log of the "
            "driver for this task"
        ) from error


class CurrentConnection:
    """At most one connection, and the bytes that it has not taken yet. Not thread-safe: the channel locks it.

    The task's own thread and the I/O thread both use it; the first one to arrive reads. Bytes that were not sent when
    the connection breaks are discarded: the machine has the messages, and sends them again (H24).
    """

    __slots__ = ("_limits", "_outbox", "_outgoing", "connection")

    def __init__(self, limits: WireLimits) -> None:
        self.connection: Connection | None = None
        self._limits = limits
        self._outgoing = bytearray()
        self._outbox = Outbox(limits)

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        return bool(self._outgoing) or self._outbox.busy

    def attach(self, connection: Connection) -> None:
        """Replace the connection, closing the previous one."""
        self.drop()
        self.connection = connection

    def drop(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._outgoing.clear()
        self._outbox.clear()

    def break_off(self) -> None:
        """Shut the connection down, so that the I/O thread notices and drops it."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def encode(self, message: UpMessage) -> bytes:
        """Return what ``send`` has to be given for the message: nothing if it leaves later, by itself.

        Raises ``LocalProtocolError`` for a message that cannot be encoded.
        """
        if self.connection is None:
            encode_frames(message, self._limits)
            return b""
        return self._outbox.put(message)

    def send(self, data: bytes) -> bool:
        """Write what the socket takes now and keep the rest. False if the I/O thread has to finish it.

        Of a large message, this writes the beginning.
        """
        if self.connection is None:
            return True
        if not data and not self._outgoing:
            data = self._outbox.next()
        return self._write(data, self.connection) and not self._outbox.busy

    def _write(self, data: bytes, connection: Connection) -> bool:
        if not data:
            return not self._outgoing
        data = connection.encode(data)
        if not self._outgoing:
            try:
                sent = connection.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return False  # the I/O thread reads the same error
            if sent == len(data):
                return True
            data = data[sent:]
        self._outgoing += data
        return False

    def flush(self) -> None:
        """Write what was kept, as far as the socket takes it. Raises ``OSError`` if the connection is broken."""
        if self.connection is None:
            return
        if not self._outgoing and self._outbox.busy:
            self._outgoing += self.connection.encode(self._outbox.next())
        if self._outgoing:
            with suppress(BlockingIOError, InterruptedError):
                sent = self.connection.sock.send(memoryview(self._outgoing)[:WRITE_BYTES])
                del self._outgoing[:sent]

    def receive(self) -> list[Downward]:
        """Return the messages that have arrived, often none.

        Raises ``OSError`` at the end of the connection, ``RemoteProtocolError`` for a bad frame.
        """
        if self.connection is None:
            return []
        try:
            data = self.connection.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError("the sidecar closed the connection")
        return self.connection.decode(data)


class OwnReads:
    """Lets the task's own thread read the socket while it waits, instead of being woken by the I/O thread.

    Being woken by the I/O thread costs a second wake-up and a hand-over of the interpreter lock for each event. So a
    task that waits again soon after something arrived takes over the reading. It gives it back when nothing arrives for
    a while, or when the I/O thread notices that the task is doing something else. A task that waits rarely never takes
    it over.

        the I/O thread reads --(news came soon, and the task waits again)--> the task reads
                             <--(no news for IDLE_S; the task went away; the connection broke)--

    If the previous wait took less than ``spin_s``, the next one starts by polling: a sleeping processor takes longer to
    wake than the other end takes to answer. On a single core there is no polling, because the other end may need the
    core.

    Used under the channel's lock, except ``wait``.

    ``active``: the task's thread reads, and the I/O thread leaves the socket alone. ``waiting``: the task's thread is
    waiting now, and only ``wake`` can wake it.
    """

    __slots__ = ("_last_wait_s", "_poller", "_registered", "_seen", "_spin_s", "_waits", "_waker", "active", "waiting")

    def __init__(self, spin_s: float) -> None:
        self.active = False
        self.waiting = False
        self._spin_s = spin_s if _has_several_cores() else 0.0
        self._last_wait_s = math.inf
        self._waits = self._seen = 0
        self._waker = Waker(lambda: False)
        self._poller = select.poll()
        self._poller.register(self._waker.fileno(), select.POLLIN)
        self._registered = -1

    @property
    def are_worthwhile(self) -> bool:
        """Whether the next wait is likely to be short."""
        return self.active or self._last_wait_s < SOON_S

    def was_told(self, waited_s: float) -> None:
        """How long the task waited until the I/O thread woke it; ``math.inf`` if it was not woken."""
        self._last_wait_s = waited_s

    def begin(self, sock: socket.socket) -> None:
        """The task is about to call ``wait``."""
        if sock.fileno() != self._registered:
            if self._registered >= 0:
                self._poller.unregister(self._registered)
            self._registered = sock.fileno()
            self._poller.register(self._registered, select.POLLIN)
        self.active = self.waiting = True
        self._waits += 1

    def wait(self, timeout_s: float | None) -> bool:
        """Wait, without the lock, until data arrives or ``wake`` is called. False after ``IDLE_S`` or ``timeout_s``."""
        poll, began = self._poller.poll, time.monotonic()
        timeout_s = IDLE_S if timeout_s is None else min(IDLE_S, timeout_s)
        ready: list[tuple[int, int]] = []
        if self._last_wait_s < self._spin_s:
            spin_until = began + min(self._spin_s, timeout_s)
            while not (ready := poll(0)) and time.monotonic() < spin_until:
                pass
        if not ready:
            ready = poll(math.ceil(1000 * timeout_s))
        self._last_wait_s = time.monotonic() - began if ready else math.inf
        if ready and ready != [(self._registered, select.POLLIN)]:
            with suppress(OSError):  # closed meanwhile: the channel knows why
                self._waker.drain()
        return bool(ready)

    def has_been_away(self) -> bool:
        """Whether the task has not waited at all since the previous call."""
        away = not self.waiting and self._waits == self._seen
        self._seen = self._waits
        return away

    def wake(self) -> None:
        """Wake the task's thread."""
        self._waker.wake()

    def close(self) -> None:
        """Safe to call twice."""
        self._waker.close()


def _has_several_cores() -> bool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1
