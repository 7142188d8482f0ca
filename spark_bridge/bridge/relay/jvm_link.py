# SPDX-License-Identifier: Apache-2.0

"""The sidecar's end of the loopback connection to the listener in the driver's JVM.

The sidecar listens, the JVM connects. Nothing is parsed before the peer has proved that it knows the
secret (H61). Then both sides send frames: a ``u32`` length and a body. A frame from the JVM begins with
an ``i64`` sequence number, 0 for answers and increasing by one for records, so that a reconnect loses or
repeats nothing unnoticed: a known number is skipped, a gap is counted and reported as ``FactsDropped``.

A command stays pending until its answer comes. After a reconnect the pending ones are sent again, which
is harmless: a task attempt, a job and a stage can be killed only once, and a query changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from enum import Enum
from typing import cast

import structlog

from protocol.errors import RemoteProtocolError
from protocol.facts import ApplicationEnded, FactsDropped
from protocol.wire.framing import FrameDecoder, frame
from protocol.wire.handshake import NONCE_BYTES, ServerHandshake
from spark_bridge.bridge.relay.interface import OnFact, OnLost, RelayError, RelayStatistics, RelayStopped
from spark_bridge.bridge.relay.records import CommandAnswered, RecordDecodeError, RelayedFact, decode_record

FRAME_MAX_BYTES = 4 << 20
UNPROVEN_LINKS_MAX = 8
HANDSHAKE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)

_SEQUENCE = struct.Struct(">q")


class LinkState(Enum):
    """The lifecycle of a connection, which only moves downwards."""

    GREETING = "shaking hands"
    OPEN = "frames flow"
    CLOSED = "closed"


class RelayLink(asyncio.Protocol):
    """One connection, from accept to close: shakes hands, then cuts the stream into frames."""

    def __init__(self, server: RelayServer) -> None:
        self._server = server
        self._state = LinkState.GREETING
        self._handshake = ServerHandshake(server.secret, secrets.token_bytes(NONCE_BYTES))
        self._frames = FrameDecoder(FRAME_MAX_BYTES)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        if not self._server.admit(self):
            self.close("the relay is closed")
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HANDSHAKE_TIMEOUT_S, self.close, "the handshake timed out")

    def data_received(self, data: bytes) -> None:
        try:
            if self._state is LinkState.GREETING:
                data = self._shake_hands(data)
            if self._state is LinkState.OPEN:
                for body in self._frames.feed(data):
                    self._take_frame(body)
        except RemoteProtocolError as problem:
            self.close(str(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_quietly()
        self._server.link_lost(self, exc)

    def send(self, body: bytes) -> None:
        """Write one frame; nothing happens on a closed link."""
        if self._transport is not None and self._state is LinkState.OPEN:
            self._transport.write(frame(body))

    def close(self, problem: str | None = None) -> None:
        """Close immediately, and log ``problem`` if given. Idempotent."""
        if problem is not None and self._state is not LinkState.CLOSED:
            _log.warning("relay connection closed", problem=problem, state=self._state.name)
        self._close_quietly()

    def _close_quietly(self) -> None:
        before, self._state = self._state, LinkState.CLOSED
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is None:
            return
        if before is LinkState.GREETING:
            self._transport.close()  # after the few bytes that tell a refused peer our version
        else:
            self._transport.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """Feed the handshake; returns what came after it, which belongs to frames."""
        try:
            self._write(self._handshake.receive(data))
        except RemoteProtocolError:
            self._write(self._handshake.last_words)
            raise
        if self._handshake.done:
            assert self._deadline is not None
            self._deadline.cancel()
            self._state = LinkState.OPEN
            self._server.link_opened(self)
        return self._handshake.trailing_data

    def _take_frame(self, body: bytes) -> None:
        if len(body) < _SEQUENCE.size:
            raise RemoteProtocolError(f"a frame of {len(body)} bytes is too short")
        (sequence,) = _SEQUENCE.unpack_from(body)
        self._server.frame_received(sequence, body[_SEQUENCE.size :])

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)


class RelayServer:
    """Listens for the JVM, delivers facts in order, and sends commands. Bound to one event loop.

    Args:
        on_fact: called on the loop for each fact.
        statistics: counted up in place.
        on_lost: called once if the JVM does not come back within ``reconnect_timeout_s`` of a broken
            connection.
        secret: at least 16 bytes; by default a random one.
        joins: the JVM may have sent facts to another sidecar before, so the first number is not a gap.
        reconnect_timeout_s: see above, in seconds.
        command_timeout_s: how long a command waits for its answer, reconnects included, in seconds.
    """

    def __init__(
        self,
        on_fact: OnFact,
        statistics: RelayStatistics,
        *,
        on_lost: OnLost | None = None,
        secret: bytes | None = None,
        joins: bool = False,
        reconnect_timeout_s: float = 15.0,
        command_timeout_s: float = 30.0,
    ) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self._joins = joins
        self._on_fact = on_fact
        self._statistics = statistics
        self._on_lost = on_lost
        self._reconnect_timeout_s = reconnect_timeout_s
        self._command_timeout_s = command_timeout_s
        self._server: asyncio.Server | None = None
        self._unproven: dict[RelayLink, None] = {}  # the oldest first
        self._link: RelayLink | None = None
        self.connected = asyncio.Event()
        """Set once the JVM has connected for the first time."""
        self._end_expected = False
        self._lost_timer: asyncio.TimerHandle | None = None
        self._last_sequence = 0
        self._last_request = 0
        self._pending: dict[int, tuple[bytes, asyncio.Future[CommandAnswered]]] = {}
        self._over: str | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen, on a free port unless one is given; returns host and port. Raises ``OSError`` for one in use."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: RelayLink(self), host, port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def expect_end(self) -> None:
        """The JVM's end is about to be closed, so its disconnection is not a loss."""
        self._end_expected = True

    @property
    def linked(self) -> bool:
        """Whether the JVM is connected now."""
        return self._link is not None

    def end(self, why: str) -> None:
        """Serve the JVM no more: pending and later commands fail with ``RelayStopped(why)``. Idempotent."""
        self._end(why)
        if self._lost_timer is not None:
            self._lost_timer.cancel()

    async def close(self) -> None:
        """Close every connection; pending commands fail with ``RelayStopped``. Idempotent."""
        self.end("the relay is closed")
        if self._link is not None:
            self._link.close()
        for link in tuple(self._unproven):
            link.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def command(self, operation: int, arguments: bytes) -> CommandAnswered:
        """Send one command and return its answer.

        Raises:
            RelayStopped: closed, the application has ended, or the JVM did not come back.
            RelayError: Spark refused, or no answer came in time.
        """
        if self._over is not None:
            raise RelayStopped(self._over)
        self._last_request += 1
        request_id = self._last_request
        body = struct.pack(">Bq", operation, request_id) + arguments
        answer: asyncio.Future[CommandAnswered] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = (body, answer)
        if self._link is not None:
            self._link.send(body)
        try:
            answered = await asyncio.wait_for(answer, self._command_timeout_s)
        except TimeoutError:
            raise RelayError(
                f"the driver's JVM did not answer within {self._command_timeout_s} s; "
                "check the driver for a long garbage collection or a deadlock"
            ) from None
        finally:
            del self._pending[request_id]
        if answered.problem is not None:
            raise RelayError(f"Spark rejected the command: {answered.problem}")
        return answered

    # --- for links ---

    def admit(self, link: RelayLink) -> bool:
        """Whether one more connection may authenticate. If there are too many, the oldest is closed (H62).

        So silent peers never keep out the JVM, which needs only milliseconds.
        """
        if self._over is not None:
            return False
        if len(self._unproven) >= UNPROVEN_LINKS_MAX:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.close("too many unauthenticated connections")
        self._unproven[link] = None
        return True

    def link_opened(self, link: RelayLink) -> None:
        """The peer knows the secret: it replaces the previous link, and gets all unanswered commands."""
        self._unproven.pop(link, None)
        before, self._link = self._link, link
        if before is not None:
            before.close()
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        if self.connected.is_set():
            self._statistics.reconnects += 1
        self.connected.set()
        for body, _ in self._pending.values():
            link.send(body)

    def link_lost(self, link: RelayLink, exc: Exception | None) -> None:
        """A connection is gone. If it was the one in use, the JVM has some time to reconnect."""
        self._unproven.pop(link, None)
        if link is not self._link:
            return
        self._link = None
        if self._over is None and not self._end_expected:
            _log.warning("relay connection lost", cause=repr(exc))
            self._lost_timer = asyncio.get_running_loop().call_later(self._reconnect_timeout_s, self._give_up)

    def frame_received(self, sequence: int, body: bytes) -> None:
        """One frame of an authenticated peer. If it cannot be decoded, it is logged and counted as a dropped fact."""
        if sequence != 0:
            if self._joins:
                self._joins, self._last_sequence = False, sequence - 1
            if sequence <= self._last_sequence:
                return
            missing = sequence - self._last_sequence - 1
            self._last_sequence = sequence
            if missing:
                self._report_drops(missing)
        try:
            decoded = decode_record(body)
        except RecordDecodeError as problem:
            _log.error("relay record refused", problem=str(problem))
            self._report_drops(1)
            return
        if isinstance(decoded, RelayedFact):
            self._statistics.records += 1
            self._deliver(decoded)
        elif (pending := self._pending.get(decoded.request_id)) is not None and not pending[1].done():
            pending[1].set_result(decoded)

    def _deliver(self, relayed: RelayedFact) -> None:
        if isinstance(relayed.fact, FactsDropped):
            self._statistics.dropped += relayed.fact.count
        if isinstance(relayed.fact, ApplicationEnded):
            self._end("the SparkContext has stopped")
        deliver(self._on_fact, relayed)

    def _report_drops(self, count: int) -> None:
        self._deliver(RelayedFact(FactsDropped(count), time.time_ns() // 1000))

    def _give_up(self) -> None:
        problem = f"the listener in the driver's JVM did not reconnect within {self._reconnect_timeout_s} s"
        _log.error("relay lost", problem=problem)
        self._end(problem)
        if self._on_lost is not None:
            self._on_lost(RelayStopped(problem))

    def _end(self, why: str) -> None:
        self._over = self._over or why
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(RelayStopped(self._over))


def deliver(on_fact: OnFact, relayed: RelayedFact) -> None:
    """Call ``on_fact`` and log its exception, so that a faulty handler does not cost the facts after it."""
    try:
        on_fact(relayed)
    except Exception:
        _log.exception("Spark fact handler failed", fact=relayed.fact)
