# SPDX-License-Identifier: Apache-2.0

"""The sidecar's end of the loopback connection to the listener in the driver's JVM.

The sidecar listens, the JVM connects. Nothing is parsed before the peer has proved that it knows the key of this
driver's JVM (H61, H76). Then both sides send frames: a ``u32`` length and a body. A frame from the JVM begins with an
``i64`` sequence number, 0 for answers and increasing by one for records, so that a reconnect loses or repeats nothing
unnoticed: a known number is skipped, a gap is counted and reported as ``FactsDropped``.

A command stays pending until its answer comes. After a reconnect the pending ones are sent again, which
is harmless: a task attempt, a job and a stage can be killed only once, and a query changes nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from actors.logs import CountedLog, get_logger
from protocol.errors import RemoteProtocolError
from protocol.facts import ApplicationEnded, FactsDropped, StageLook, StatusReported, TaskPlace
from protocol.wire.framing import frame
from protocol.wire.keys import Key, KeyRing, Purpose
from spark_bridge.bridge.relay.interface import REJECTED, OnFact, OnLost, RelayError, RelayStatistics, RelayStopped
from spark_bridge.bridge.relay.records import CommandAnswered, RecordDecodeError, RelayedFact, decode_record, shorten
from spark_bridge.bridge.runs import ActiveStage
from spark_bridge.server.server import AuthenticatedServer, Connection, Dialect, ServerConfig

FRAME_MAX_BYTES = 4 << 20
HANDSHAKE_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 1024

_log = get_logger("headgate.relay")
_repeated = CountedLog(_log)  # what each fact may cause

_SEQUENCE = struct.Struct(">q")
_KILL_TASK, _CANCEL_JOB, _QUERY_STATUS, _PING, _ACTIVE_STAGES, _LOOK_AT_STAGE = range(1, 7)
_WATCH, _HOLD_BACK, _GOODBYE = range(7, 10)


class _FromJvm(NamedTuple):
    """A frame from the JVM."""

    sequence: int
    body: bytes


def _decode(body: bytes) -> _FromJvm:
    if len(body) < _SEQUENCE.size:
        raise RemoteProtocolError(f"a frame of {len(body)} bytes is too short")
    (sequence,) = _SEQUENCE.unpack_from(body)
    return _FromJvm(sequence, body[_SEQUENCE.size :])


_JVM = Dialect(_decode, frame, FRAME_MAX_BYTES)


class RelayServer:
    """Listens for the JVM, delivers facts in order, and sends commands. Bound to one event loop.

    Args:
        on_fact: called on the loop for each fact.
        statistics: counted up in place.
        keys: the keys of the application.
        on_lost: called once if the JVM does not come back within ``reconnect_timeout_s`` of a broken
            connection.
        on_disconnected: called when its connection has broken.
        driver: the identity of the driver whose JVM is expected. None: the first one that connects is served, and from
            then on no other.
        tls: encrypts the connection (H77).
        joins: the JVM may have sent facts to another sidecar before, so the first number is not a gap.
        reconnect_timeout_s: see above, in seconds.
        command_timeout_s: how long a command waits for its answer, reconnects included, in seconds.
    """

    def __init__(
        self,
        on_fact: OnFact,
        statistics: RelayStatistics,
        keys: KeyRing,
        *,
        on_lost: OnLost | None = None,
        on_disconnected: Callable[[], None] | None = None,
        driver: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        joins: bool = False,
        reconnect_timeout_s: float = 15.0,
        command_timeout_s: float = 30.0,
    ) -> None:
        self._keys = keys
        self.driver = driver
        """The identity of the driver whose JVM is served; None until it is known."""
        self._tls = tls
        self._joins = joins
        self._on_fact = on_fact
        self._statistics = statistics
        self._on_lost = on_lost
        self._on_disconnected = on_disconnected
        self._reconnect_timeout_s = reconnect_timeout_s
        self._command_timeout_s = command_timeout_s
        self._server: AuthenticatedServer | None = None
        self._link: Connection | None = None
        self.connected_once = asyncio.Event()
        """Set once the JVM has connected for the first time."""
        self.broken = False
        """Whether the JVM's connection has ended, other than by ``close``, and does not stand again."""
        self._end_expected = False
        self._lost_timer: asyncio.TimerHandle | None = None
        self._last_sequence = 0
        self._last_request = 0
        self._pending: dict[int, tuple[bytes, asyncio.Future[CommandAnswered]]] = {}
        self._over: str | None = None

    async def listen(
        self, host: str = "127.0.0.1", port: int = 0, advertised_host: str | None = None
    ) -> tuple[str, int]:
        """Listen, on a free port unless one is given; returns the host and port that the JVM connects to.

        ``advertised_host`` is needed if ``host`` means every address. Raises ``ServerStartError``.
        """
        config = ServerConfig(
            bind_host=host,
            port=port,
            advertised_host=advertised_host,
            tls=self._tls,
            authenticate_timeout_s=HANDSHAKE_TIMEOUT_S,
            connections_max=CONNECTIONS_MAX,
        )
        self._server = AuthenticatedServer(self, self._find_key, _JVM, config, purpose="relay")
        await self._server.start()
        return self._server.address

    def _find_key(self, identity: bytes) -> Key | None:
        if self._over is not None or self.driver not in (None, identity):
            return None
        return self._keys.key(Purpose.RELAY, identity)

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
            self._link.abort("the relay is closed")
        server, self._server = self._server, None
        if server is not None:
            await server.close()

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
            self._link.send(body, immediately=True)
        try:
            async with asyncio.timeout(self._command_timeout_s):
                answered = await answer
        except TimeoutError:
            raise RelayError(
                f"the driver's JVM did not answer within {self._command_timeout_s} s; "
                "check the driver for a long garbage collection or a deadlock"
            ) from None
        finally:
            del self._pending[request_id]
        if answered.problem is not None:
            raise RelayError(f"Spark rejected the command: {answered.problem}. {REJECTED}")
        return answered

    # --- for the server ---

    def connected(self, connection: Connection) -> None:
        """The peer knows the key: it replaces the previous link, and gets all unanswered commands."""
        if self._over is not None:
            connection.abort("the relay is closed")
            return
        if self.driver not in (None, connection.authenticated_as):  # it has become another one during the handshake
            connection.abort("another driver is expected")
            return
        connection.identified()
        self.broken = False
        self.driver = connection.authenticated_as
        before, self._link = self._link, connection
        if before is not None:
            before.abort("the JVM has connected again")
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        if self.connected_once.is_set():
            self._statistics.reconnects += 1
        self.connected_once.set()
        for body, _ in self._pending.values():
            connection.send(body)

    def messages_received(self, connection: Connection, messages: list[_FromJvm]) -> None:
        """Records and answers of the JVM."""
        for sequence, body in messages:
            self._frame_received(sequence, body)

    def disconnected(self, connection: Connection, reason: str) -> None:
        """A connection is gone. If it was the one in use, the JVM has some time to reconnect."""
        if connection is not self._link:
            return
        self._link = None
        if self._over is None and not self._end_expected:
            _log.warning("relay connection lost", cause=reason)
            self.broken = True
            self._lost_timer = asyncio.get_running_loop().call_later(self._reconnect_timeout_s, self._give_up)
            if self._on_disconnected is not None:
                self._on_disconnected()

    # --- facts ---

    def _frame_received(self, sequence: int, body: bytes) -> None:
        """If a record cannot be decoded, it is logged and counted as a dropped fact."""
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
            _repeated.error("relay record refused", problem=str(problem))
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
        _repeated.error("Spark fact handler failed", fact=relayed.fact, exc_info=True)


class JvmCommands:
    """The commands of a ``Relay`` whose listener is in a JVM at the other end of ``server``."""

    def __init__(self, server: RelayServer) -> None:
        self._server = server

    async def ping(self) -> None:
        """Return when the JVM has answered. Raises as ``Relay.kill_task`` does."""
        await self._server.command(_PING, b"")

    async def hold_back(self) -> None:
        """Have the JVM hold back the facts of the tasks of every stage, until ``watch`` names it."""
        await self._server.command(_HOLD_BACK, b"")

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """See ``Relay.watch``."""
        await self._server.command(_WATCH, struct.pack(">iq", stage_id, task_attempt_id))

    async def goodbye(self) -> None:
        """Have the listener leave the bus and end. Raises as ``Relay.kill_task`` does."""
        await self._server.command(_GOODBYE, b"")

    async def active_stages(self) -> tuple[ActiveStage, ...]:
        """Return every stage of each running job. Raises as ``Relay.kill_task`` does."""
        answered = await self._server.command(_ACTIVE_STAGES, b"")
        if answered.stages is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected its active stages"
                ". Use one release of Headgate on both sides"
            )
        return answered.stages

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        """See ``Relay.kill_task``."""
        stage_id, partition = (-1, -1) if place is None else (place.stage_id, place.partition)
        arguments = struct.pack(">qii", task_attempt_id, stage_id, partition)
        await self._server.command(_KILL_TASK, arguments + _text(reason))

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """See ``Relay.cancel_job``."""
        await self._server.command(_CANCEL_JOB, struct.pack(">i", job_id) + _text(reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        """See ``Relay.query_status``."""
        arguments = _ids("i", job_ids) + _ids("q", task_attempt_ids)
        answered = await self._server.command(_QUERY_STATUS, arguments)
        if answered.status is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected a status. Use one release of Headgate on both sides"
            )
        return answered.status

    async def look_at_stage(self, stage_id: int) -> StageLook:
        """See ``Relay.look_at_stage``."""
        answered = await self._server.command(_LOOK_AT_STAGE, struct.pack(">i", stage_id))
        if answered.look is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected the state of a stage"
                ". Use one release of Headgate on both sides"
            )
        return answered.look


def _text(text: str) -> bytes:
    encoded = shorten(text).encode("utf-8", errors="replace")
    return struct.pack(">H", len(encoded)) + encoded


def _ids(layout: str, ids: Iterable[int]) -> bytes:
    ordered = sorted(ids)
    return struct.pack(f">I{len(ordered)}{layout}", len(ordered), *ordered)
