# SPDX-License-Identifier: Apache-2.0

"""One socket of a server: encryption, handshake, frames in, frames out, deadlines (H61, H62, H77).

    AUTHENTICATING -> UNIDENTIFIED -> IDENTIFIED -> CLOSING -> CLOSED
         |      the key         the handler knows     the last bytes leave,
         |      is proved       what it is for        what still comes is not looked at
         +-> REFUSED
             another version: it is told ours, and may take its time to leave

The first two states each have a deadline, and so has closing: one moment, which no byte of the peer moves (H158). Every
state may change directly to CLOSED, if the peer disconnects or is dropped.

This is an ``asyncio.Protocol`` instead of a stream and a task for each connection: one callback handles a whole batch
of messages, and no task can outlive its connection.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, cast, get_args

from actors.logs import LINES_MAX, LimitedLog, get_logger
from protocol.arguments import ANY, AT_LEAST_1, PORT, check_fields
from protocol.describing import type_name
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import decode_message, encode_message
from protocol.wire.fragments import FragmentDecoder, Outbox
from protocol.wire.framing import DEFAULT_LIMITS, FrameDecoder, WireLimits
from protocol.wire.handshake import NONCE_BYTES, FindKey, ServerHandshake
from protocol.wire.messages import Message, UpMessage
from spark_bridge.common.tls import TlsStream

log = get_logger("headgate.server")

FRAMES_TOGETHER = 16
"""This many frames are sent before the end of the turn, so that the peer can work on them in the meantime."""
WRITE_PAUSE_BYTES = 256 * 1024
"""So many bytes that a peer has not read pause the writing to it."""
FLUSHED_TOGETHER = 64
"""So many connections write in one turn: together they take less than a millisecond."""
SHARE = 16
"""The number of messages that one turn of the loop takes from the connections that have many."""
LIGHT = 4
"""A read of up to this many messages does not wait for a share."""
READ_BYTES_MAX = 64 * 1024
"""The largest read of a connection. It bounds what a backlog holds, and the time to divide it into frames."""
PROGRESS_BYTES = 2**20
TIMEOUTS_MAX = 20
"""With the usual 60 s, 20 minutes: a state of 1 GiB needs a megabyte in a second."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the frames of a server's connections hold.

    ``decode`` turns the body of a frame into a message, and raises ``RemoteProtocolError`` for one that a client must
    not send. ``encode`` turns a message into a frame, and raises ``LocalProtocolError``. A body that arrives has at
    most ``frame_bytes_max`` bytes.

    With ``fragments``, large messages travel in fragments within these limits instead (``protocol.wire.fragments``),
    and ``decode`` is also given messages that have been put together.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[Any], bytes]
    frame_bytes_max: int = 64 * 2**20
    fragments: WireLimits | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The address and the limits of a server. Times are in seconds.

    ``bind_host`` and ``port`` (0: any free one) are listened on; ``advertised_host`` and ``advertised_port`` are what
    clients connect to, by default the address that is listened on (H63). With ``tls``, every connection is encrypted
    (H77). A peer has ``authenticate_timeout_s`` to prove the key, encryption included, and the same time again to
    identify what it is for. At most ``unauthenticated_max`` peers are in each of these two states, and as many are
    closing because of their version. If there is one more, the oldest is dropped, so that silent peers never keep out a
    legitimate client, which needs only milliseconds. At most ``connections_max`` connections have proved a key; peers
    that have not do not count. If there is one more of either kind, one of the identity that has the most connections
    of this kind is dropped: the oldest that has yet to identify itself, or the newest of all. So an operator that fills
    a limit keeps out no other (H157).

    At most ``log_lines_max`` lines of a kind about peers are logged in 10 s, and in longer times while more come; the
    others are counted.

    Frames of which only a part has arrived take about ``incomplete_bytes_max`` bytes, those of all connections
    together. Beyond that, only the connection whose frame began first is read. Such a frame has to grow by a
    mebibyte in each ``frame_timeout_s``, or be completed, and be completed within 20 times as long; see
    ``IncompleteFrames``.

    A peer that does not read is dropped when ``write_buffer_bytes_max`` bytes wait for it. Before that, from
    ``WRITE_PAUSE_BYTES`` on, ``is_write_paused`` is set. A closing peer has ``close_timeout_s`` to read the rest.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    advertised_port: int | None = None
    authenticate_timeout_s: float = 10.0
    unauthenticated_max: int = 256
    connections_max: int = 10_000
    tls: ssl.SSLContext | None = None
    incomplete_bytes_max: int = 256 * 2**20
    frame_timeout_s: float = 60.0
    write_buffer_bytes_max: int = 96 * 2**20
    close_timeout_s: float = 2.0
    log_lines_max: int = LINES_MAX

    def __post_init__(self) -> None:
        check_fields(
            self,
            bind_host=ANY,
            advertised_host=ANY,
            port=PORT,
            advertised_port=PORT,
            unauthenticated_max=AT_LEAST_1,
            connections_max=AT_LEAST_1,
            incomplete_bytes_max=AT_LEAST_1,
            log_lines_max=AT_LEAST_1,
        )


class ConnectionHandler(Protocol):
    """Receives the events of connections, on the loop, in order for each connection. Must not block.

    An exception from it drops that connection.
    """

    def connected(self, connection: Connection) -> None:
        """The peer has authenticated. Call ``identified()`` before its deadline."""

    def messages_received(self, connection: Connection, messages: list[Any]) -> None:
        """One or more messages, in the order in which they were sent. Not called after ``close``."""

    def disconnected(self, connection: Connection, reason: str) -> None:
        """The last call for a connection, exactly once for each that was ``connected``."""


class ConnectionState(Enum):
    """See the module."""

    AUTHENTICATING = "authenticating"
    REFUSED = "refused"
    UNIDENTIFIED = "unidentified"
    IDENTIFIED = "identified"
    CLOSING = "closing"
    CLOSED = "closed"


_TALKING = (ConnectionState.UNIDENTIFIED, ConnectionState.IDENTIFIED)
_UPWARD = frozenset(get_args(UpMessage))


class Turns:
    """Divides the turns of the loop among the connections of a server (H65). Loop only.

    What one read delivers may be a thousand messages of a task that floods. Handled in one go, they would delay every
    other connection by milliseconds. So a read of more than ``LIGHT`` messages is handled in shares of ``SHARE``, and
    all connections together get one share in a turn of the loop, each in its turn. A connection that still has messages
    is not read meanwhile, so its peer waits at its own socket. A read of few messages is handled immediately: a peer
    that sends little waits for at most one share of the others.

    What a turn sends leaves at its end, for all connections together, but at most ``FLUSHED_TOGETHER`` of them in one
    turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Connection] = deque()
        self._unsent: deque[Connection] = deque()
        self._taken = False  # this turn's share; the next turn begins with ``_next``

    def wait(self, connection: Connection) -> None:
        """Give the connection its turns until it has no backlog; the first one now if this turn's share is left."""
        self._waiting.append(connection)
        if not self._taken:
            self._taken = True
            self._loop.call_soon(self._next)
            self._serve()

    def forget(self, connection: Connection) -> None:
        """The connection has no backlog any more. Idempotent."""
        if connection in self._waiting:
            self._waiting.remove(connection)

    def flush_at_end(self, connection: Connection) -> None:
        """Have the connection write when this turn has ended, after those that have asked before."""
        if not self._unsent:
            self._loop.call_soon(self._flush_some)
        self._unsent.append(connection)

    def _flush_some(self) -> None:
        unsent = self._unsent
        for _ in range(min(FLUSHED_TOGETHER, len(unsent))):
            unsent.popleft().flush()
        if unsent:
            self._loop.call_soon(self._flush_some)

    def _next(self) -> None:
        if self._waiting:
            self._loop.call_soon(self._next)
            self._serve()
        else:
            self._taken = False

    def _serve(self) -> None:
        connection = self._waiting.popleft()
        if connection.take_share():
            self._waiting.append(connection)


@dataclass(slots=True)
class _Frame:
    """``checked_bytes``: its size at the last check; None if it began later, or was not read at that time.

    ``checks``: how often it had grown enough.
    """

    size: int = 0
    checked_bytes: int | None = None
    checks: int = 0


class IncompleteFrames:
    """Bounds the frames of a server's connections of which only a part has arrived (H62, H157). Loop only.

    Their bytes wait in memory, and a peer need not send the rest. So there are two limits. All of them together take
    about ``bytes_max``: beyond that, only the connection whose frame began first is read, until enough frames are
    complete. The others wait at their own sockets and lose nothing, because a thousand honest tasks may send their
    states at the same time. And each frame has to grow by ``PROGRESS_BYTES`` in each ``timeout_s``, or be completed. A
    fixed time for a whole frame alone would either be too short for a large state on a slow network, or long enough to
    hold much memory. A whole frame may take ``TIMEOUTS_MAX`` times ``timeout_s``, however it grows (H158). A connection
    that the server itself does not read is given time. If the frames exceed the limit for a whole ``timeout_s``, the
    largest one is dropped, so that a slow peer cannot keep out the others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int, timeout_s: float) -> None:
        self._loop = loop
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._frames: dict[Connection, _Frame] = {}  # in the order in which they began
        self._total = 0
        self._over = False
        self._over_at_check = False  # and never below the limit since
        self._timer: asyncio.TimerHandle | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes that wait for the rest of their frames."""
        return self._total

    def changed(self, connection: Connection, size: int, *, another: bool) -> None:
        """``size`` bytes of the connection's incomplete frame have arrived; ``another`` if one was completed before.

        With 0, the connection has none any more.
        """
        if another or not size:
            self.forget(connection)
        if not size:
            return
        frame = self._frames.setdefault(connection, _Frame())
        self._total += size - frame.size
        frame.size = size
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check)
        if self._total <= self._bytes_max:
            return
        first, *others = self._frames if not self._over else (next(iter(self._frames)), connection)
        self._over = True
        for other in others:
            if other is not first:
                other.hold()

    def forget(self, connection: Connection) -> None:
        """The connection has no incomplete frame any more. Idempotent."""
        frame = self._frames.pop(connection, None)
        if frame is None:
            return
        self._total -= frame.size
        if not self._over:
            return
        self._over = self._total > self._bytes_max
        self._over_at_check &= self._over
        connection.release()
        for waiting in list(self._frames):
            waiting.release()
            if self._over:  # only the first one
                return

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        assert self._timer is not None
        late_s = self._loop.time() - self._timer.when()
        held_up = late_s > self._timeout_s / 2  # the loop itself was: nothing could arrive in that time
        found = [(one, self._why_too_slow(one, frame, held_up)) for one, frame in self._frames.items()]
        largest = max(self._frames, key=lambda c: self._frames[c].size) if self._over and self._over_at_check else None
        self._over_at_check = self._over
        self._timer = self._loop.call_later(self._timeout_s, self._check) if self._frames else None
        for connection, why in found:
            if why:
                connection.drop(why)
        if largest is not None and self._over:
            largest.drop(
                f"the incomplete frames of all peers exceeded {self._bytes_max} bytes for {self._timeout_s:g} s, and "
                "this one is the largest"
            )

    def _why_too_slow(self, connection: Connection, frame: _Frame, held_up: bool) -> str:
        """Why the rest of a frame is not waited for any longer, as this check finds; empty if it is."""
        before, frame.checked_bytes = frame.checked_bytes, frame.size if connection.is_read else None
        if before is None or frame.checked_bytes is None or held_up:
            return ""
        frame.checks += 1
        if frame.size - before < PROGRESS_BYTES:
            return f"the rest of a frame did not arrive: less than {PROGRESS_BYTES} bytes in {self._timeout_s:g} s"
        if frame.checks >= TIMEOUTS_MAX:
            return f"the rest of a frame did not arrive within {TIMEOUTS_MAX} times {self._timeout_s:g} s"
        return ""


class Connection(asyncio.Protocol):
    """One peer. All methods are for the loop's thread.

    ``connection_id`` is unique in the life of the server. ``peer`` is the other end's address, for logs.
    ``authenticated_as`` is the identity whose key the peer has proved (H76); empty before.
    """

    __slots__ = (
        "_backlog",
        "_config",
        "_deadline",
        "_decoder",
        "_dialect",
        "_flush_due",
        "_handler",
        "_handler_knows",
        "_handshake",
        "_heard",
        "_held",
        "_incomplete",
        "_incomplete_bytes",
        "_loop",
        "_outbox",
        "_outgoing",
        "_peer_ended",
        "_peer_log",
        "_progressed",
        "_pump_due",
        "_reason",
        "_state_changed",
        "_talks",
        "_tls",
        "_transport",
        "_turns",
        "authenticated_as",
        "connection_id",
        "is_write_paused",
        "peer",
        "state",
    )

    def __init__(
        self,
        connection_id: int,
        handler: ConnectionHandler,
        find_key: FindKey,
        dialect: Dialect,
        config: ServerConfig,
        state_changed: Callable[[Connection], None],
        turns: Turns,
        incomplete: IncompleteFrames,
        peer_log: LimitedLog,
    ) -> None:
        self.connection_id = connection_id
        self.peer = "?"
        self.authenticated_as = b""
        self.state = ConnectionState.AUTHENTICATING
        self.is_write_paused = False
        self._handler = handler
        self._config = config
        self._dialect = dialect
        self._state_changed = state_changed
        self._turns = turns
        self._incomplete = incomplete
        self._incomplete_bytes = 0
        self._held = False
        self._heard = True
        self._peer_log = peer_log
        self._tls = None if config.tls is None else TlsStream(config.tls)
        self._handshake: ServerHandshake | None = ServerHandshake(find_key, secrets.token_bytes(NONCE_BYTES))
        self._decoder: FragmentDecoder | FrameDecoder
        self._outbox: Outbox | None = None
        if dialect.fragments is None:
            self._decoder = FrameDecoder(dialect.frame_bytes_max)
        else:
            self._decoder, self._outbox = FragmentDecoder(dialect.fragments), Outbox(dialect.fragments)
        self._pump_due = self._peer_ended = self._progressed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self._talks = False  # whether the state is one of _TALKING
        self._outgoing: list[bytes] = []
        self._flush_due = False
        self._backlog: list[Any] = []  # what the decoder returned that waits for its share of a turn
        self._handler_knows = False
        self._reason = ""

    # --- for the handler ----------------------------------------------------------------------------------------

    @property
    def is_identified(self) -> bool:
        """``identified`` has been called, and the connection is open."""
        return self.state is ConnectionState.IDENTIFIED

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that wait for the peer to read."""
        waiting = 0 if self._outbox is None else self._outbox.waiting_bytes
        return sum(map(len, self._outgoing)) + waiting + self._transport.get_write_buffer_size()

    @property
    def descriptor(self) -> int:
        """The number of its socket; negative if it has none."""
        transport: asyncio.Transport | None = getattr(self, "_transport", None)
        one = None if transport is None else transport.get_extra_info("socket")
        return -1 if one is None else int(one.fileno())

    def identified(self) -> None:
        """The handler knows what the peer is for: no deadline any more. Idempotent; no effect after close."""
        if self.state is ConnectionState.UNIDENTIFIED:
            self._cancel_deadline()
            self._enter(ConnectionState.IDENTIFIED)

    def send(self, message: Any, *, immediately: bool = False) -> None:
        """Queue a message. The messages of one turn of the loop leave together, in order, in groups of limited size.

        With ``immediately``, it leaves before this returns, together with the queue. Use that for the last message of a
        batch, which would gain nothing by waiting for the end of the turn.

        A large message leaves in fragments, as fast as the peer reads, one in a turn. Whatever is sent after it waits,
        unless its order does not matter (``protocol.wire.fragments.PASSING``).

        After ``close``, or if the peer is gone, the message is dropped: what was not confirmed is sent again on the
        next connection (H24). May drop a peer that does not read. Raises ``LocalProtocolError`` for a message that
        cannot be encoded.
        """
        if not self._talks:
            return
        outbox, outgoing = self._outbox, self._outgoing
        frame = self._dialect.encode(message) if outbox is None else outbox.put(message)
        if not frame:
            assert outbox is not None
            self._send_later(outbox)
        elif immediately and not (outgoing or self._has_unread or self._transport.is_closing()):
            self._write(frame)
        else:
            outgoing.append(frame)
            if immediately or len(outgoing) >= FRAMES_TOGETHER:
                self._flush()
            elif not self._flush_due:
                self._flush_due = True
                self._turns.flush_at_end(self)

    def _send_later(self, outbox: Outbox) -> None:
        """The outbox has kept the message: it is large, or waits for a large one."""
        if not self.is_write_paused:
            self._pump_soon()
        elif outbox.kept_bytes:
            self._check_unsent()

    def close(self, *, flush: bool = True, reason: str = "closed here") -> None:
        """Close when everything has been sent, at the latest after ``close_timeout_s``; without ``flush``, immediately.

        Messages that still arrive are dropped. Idempotent. ``flush=False`` also ends an earlier ``close``.
        """
        if self.state is ConnectionState.CLOSED:
            return
        if not flush:
            self.abort(reason)
        elif self.state is not ConnectionState.CLOSING:
            self._reason = self._reason or reason
            self._flush()
            self._enter(ConnectionState.CLOSING)
            self._set_deadline(self._config.close_timeout_s)
            if not self._is_sending_large:
                self._say_last_words()

    def abort(self, reason: str = "closed here") -> None:
        """Drop the connection and its queue immediately. Idempotent."""
        self._reason = self._reason or reason
        self._forget_unsent()
        if self.state is not ConnectionState.CLOSED:
            self._enter(ConnectionState.CLOSING)
            self._transport.abort()

    def drop(self, why: str) -> None:
        """Like ``abort``, but log the reason: the peer is at fault, or there are too many (H62)."""
        self._peer_log.warning("connection dropped", peer=self.peer, connection=self.connection_id, why=why)
        self.abort(why)

    # --- for the server -------------------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether what the peer sends is read: it has no backlog, and is not held."""
        return not (self._held or self._backlog)

    def heard(self) -> bool:
        """Whether bytes came from the peer since the last call, or were not read because others come first."""
        heard, self._heard = self._heard or not self.is_read, False
        return heard

    def progressed(self) -> bool:
        """Whether a part of a large message has left since the last call, after the peer has read earlier ones."""
        progressed, self._progressed = self._progressed, False
        return progressed

    def flush(self) -> None:
        """Write what has waited for the end of the turn; see ``Turns``. A failure ends this connection only."""
        self._flush_due = False
        if self._outgoing:
            try:
                self._flush()
            except Exception:
                log.exception("connection dropped, write failed", peer=self.peer, connection=self.connection_id)
                self.abort("it could not be written to")

    def take_share(self) -> bool:
        """Handle the next messages of the backlog; see ``Turns``. Returns whether more are left."""
        self._guarded(self._take_backlog, SHARE)
        if self._backlog:
            return True
        self._end_if_said()
        self._read_again()
        return False

    def hold(self) -> None:
        """Do not read until ``release``; see ``IncompleteFrames``."""
        if not self._held and not self._transport.is_closing():
            self._held = True
            self._transport.pause_reading()

    def release(self) -> None:
        """Read again, unless there is a backlog. Idempotent."""
        if self._held:
            self._held = False
            self._read_again()

    # --- for asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Not paused means: less is waiting than the limit, so only a paused one has to be asked how much it is.
        high = min(WRITE_PAUSE_BYTES, self._config.write_buffer_bytes_max)
        self._transport.set_write_buffer_limits(high=high)
        if hasattr(self._transport, "max_size"):  # a transport of asyncio itself
            self._transport.max_size = READ_BYTES_MAX
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "?"
        _tune(transport.get_extra_info("socket"))
        self._set_deadline(self._config.authenticate_timeout_s)
        self._state_changed(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            if self._talks and self._tls is None:
                self._take_frames(data)
            else:
                self._take_data(data)
        except Exception as error:
            self._failed(error)

    def eof_received(self) -> bool:
        """Return whether something large has yet to leave, for a peer that only sends nothing more."""
        self._reason = self._reason or "the peer closed the connection"
        self._peer_ended = True
        if self.state is not ConnectionState.CLOSING:
            self._flush()
            self._enter(ConnectionState.CLOSING)
            self._set_deadline(self._config.close_timeout_s)
        return self._is_sending_large

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._is_sending_large:
            self._pump_soon()

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or (f"the connection broke: {error}" if error else "the peer closed the connection")
        if self._backlog:  # it arrived before the peer was gone
            self._turns.forget(self)
            self._guarded(self._take_backlog, len(self._backlog))
        self._cancel_deadline()
        self._forget_unsent()
        self._enter(ConnectionState.CLOSED)
        if self._handler_knows:
            try:
                self._handler.disconnected(self, reason)
            except Exception:
                log.exception("handler failed on closed connection", peer=self.peer)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _guarded(self, take: Callable[[Any], None], argument: Any) -> None:
        """Handle what has arrived; whatever fails in it ends this connection only."""
        try:
            take(argument)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, RemoteProtocolError):
            self._refuse(str(error))
        else:
            log.error(
                "connection dropped, handler failed", peer=self.peer, connection=self.connection_id, exc_info=error
            )
            self.abort("its handler failed")

    def _take_data(self, data: bytes) -> None:
        is_new = self.state is ConnectionState.AUTHENTICATING
        if not (is_new or self._talks):
            return
        if self._tls is not None:
            data = self._decrypt(self._tls, data)
        if is_new:
            self._authenticate(data)
        else:
            self._take_frames(data)
        self._end_if_said()

    def _end_if_said(self) -> None:
        """If the peer has said below the frames that nothing more comes, treat it as one that has disconnected."""
        ended = self._tls is not None and self._tls.ended
        if ended and not self._backlog and not self._transport.is_closing() and not self.eof_received():
            self._transport.close()

    def _decrypt(self, tls: TlsStream, data: bytes) -> bytes:
        plain, reply = tls.receive(data)
        if reply:
            self._transport.write(reply)
        return plain

    def _write(self, data: bytes) -> None:
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))

    def _authenticate(self, data: bytes) -> None:
        handshake = self._handshake
        assert handshake is not None
        answer = handshake.receive(data)
        if answer:
            self._write(answer)
        if not handshake.done:
            return
        self._handshake = None
        self.authenticated_as = handshake.identity
        self._enter(ConnectionState.UNIDENTIFIED)
        if not self._talks:  # it was one too many
            return
        self._set_deadline(self._config.authenticate_timeout_s)
        self._handler_knows = True
        self._handler.connected(self)
        if handshake.trailing_data and self.state is not ConnectionState.CLOSING:
            self._take_frames(handshake.trailing_data)

    def _take_frames(self, data: bytes) -> None:
        if not self._incomplete_bytes and not self._backlog and (body := self._decoder.whole(data)):
            self._handler.messages_received(self, [self._dialect.decode(body)])  # as most reads of a quiet task
            return
        bodies = self._decoder.feed(data)
        before, self._incomplete_bytes = self._incomplete_bytes, self._decoder.buffered_bytes
        if before or self._incomplete_bytes:
            another = bool(bodies) if isinstance(self._decoder, FrameDecoder) else self._decoder.is_another
            self._incomplete.changed(self, self._incomplete_bytes, another=another)
        if self._backlog:
            self._backlog.extend(bodies)
        elif len(bodies) > LIGHT:
            self._backlog.extend(bodies)
            self._transport.pause_reading()
            self._turns.wait(self)
        elif bodies:
            self._hand_over(bodies)

    def _take_backlog(self, count: int) -> None:
        backlog = self._backlog
        share = backlog[:count]
        del backlog[:count]
        self._hand_over(share)

    def _hand_over(self, bodies: Sequence[Any]) -> None:
        decode = self._dialect.decode
        self._handler.messages_received(self, [decode(body) for body in bodies])

    def _read_again(self) -> None:
        if self.is_read and not self._transport.is_closing():
            self._transport.resume_reading()

    def _refuse(self, why: str) -> None:
        self._peer_log.warning("connection refused", peer=self.peer, connection=self.connection_id, why=why)
        last_words = b"" if self._handshake is None else self._handshake.last_words
        if last_words:
            self._reason = self._reason or why
            self._write(last_words)
            self._enter(ConnectionState.REFUSED)
            self._set_deadline(self._config.close_timeout_s)
            self._say_last_words()
        else:
            self.abort(why)

    def _say_last_words(self) -> None:
        """Close our half only, and wait.

        Closing a socket with unread bytes would reset it, and the peer could lose the last message, which may be the
        one that says why.
        """
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset it already
            self._transport.abort()

    def _flush(self) -> None:
        outgoing = self._outgoing
        if not outgoing:
            return
        if self._has_unread and not self._check_unsent():
            return
        frames = outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
        outgoing.clear()
        if not self._transport.is_closing():
            self._write(frames)

    @property
    def _has_unread(self) -> bool:
        """Whether the peer has left so much unread that its amount must be checked."""
        return self.is_write_paused or (self._outbox is not None and self._outbox.kept_bytes > 0)

    def _check_unsent(self) -> bool:
        """Whether what waits for the peer is within its limit; otherwise drop the peer. Large messages do not count."""
        waiting = self._transport.get_write_buffer_size()
        if self._outbox is not None:
            waiting += self._outbox.kept_bytes
        if waiting <= self._config.write_buffer_bytes_max:
            return True
        self.drop(f"the peer does not read: {waiting} bytes are waiting")
        return False

    @property
    def _is_sending_large(self) -> bool:
        return self._outbox is not None and self._outbox.busy

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Write one fragment, unless the peer has yet to read the last ones. So each connection has one in a turn."""
        self._pump_due = False
        if not self._is_sending_large or self.is_write_paused or self._transport.is_closing():
            return
        assert self._outbox is not None
        self._flush()  # what was sent before the large message
        self._write(self._outbox.next())
        self._progressed = True
        if self._outbox.busy:
            self._pump_soon()
        elif self._peer_ended:
            self._transport.close()
        elif self.state is ConnectionState.CLOSING:
            self._say_last_words()

    def _forget_unsent(self) -> None:
        self._outgoing.clear()
        if self._outbox is not None:
            self._outbox.clear()

    def _enter(self, state: ConnectionState) -> None:
        if state is not self.state:
            self.state = state
            self._talks = state in _TALKING
            if not self._talks:
                self._drop_what_waits()
            self._state_changed(self)

    def _drop_what_waits(self) -> None:
        """Nothing more is handled. Read on: what still comes is dropped, and the peer's end must be seen."""
        if self._incomplete_bytes:
            self._incomplete_bytes = 0
            self._incomplete.forget(self)
        if self._backlog:
            self._backlog.clear()
            self._turns.forget(self)
            self._read_again()

    def _set_deadline(self, timeout_s: float) -> None:
        self._cancel_deadline()
        self._deadline = self._loop.call_later(timeout_s, self._deadline_reached, timeout_s)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_reached(self, timeout_s: float) -> None:
        match self.state:
            case ConnectionState.AUTHENTICATING:
                self.drop(f"the peer did not authenticate within {timeout_s:g} s")
            case ConnectionState.UNIDENTIFIED:
                self.drop(f"the peer did not identify itself within {timeout_s:g} s")
            case _:
                self.abort(f"the peer did not read its last bytes within {timeout_s:g} s")


def _tune(sock: socket.socket) -> None:
    """Send small frames immediately, and detect a peer whose machine is gone within about a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def task_dialect(limits: WireLimits = DEFAULT_LIMITS) -> Dialect:
    """What tasks and the sidecar say to each other: ``UpMessage`` in, ``Downward`` out, within these limits."""

    def decode(body: bytes | Message) -> Message:
        message = decode_message(body, limits) if type(body) is bytes else cast(Message, body)
        if type(message) not in _UPWARD:
            raise RemoteProtocolError(f"unexpected message: tasks do not send {type_name(message)}")
        return message

    return Dialect(decode, partial(encode_message, limits=limits), fragments=limits)
