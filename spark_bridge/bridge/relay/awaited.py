# SPDX-License-Identifier: Apache-2.0

"""The relay of a sidecar in a separate process: the driver attaches the listener, and this end waits for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress

import anyio

from actors.logs import get_logger
from protocol.facts import ApplicationEnded
from protocol.wire.keys import KeyRing
from spark_bridge.bridge.relay.interface import OnFact, RelayError, RelayStatistics, RelayStopped
from spark_bridge.bridge.relay.jvm_link import JvmCommands, RelayServer, deliver
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.bridge.runs import ActiveStage

__all__ = ["AwaitedRelay"]

JOIN_TIMEOUT_S = 30.0
JOIN_PAUSE_S = 0.25
GOODBYE_TIMEOUT_S = 5.0

_log = get_logger("headgate.relay")


class AwaitedRelay(JvmCommands):
    """A ``Relay`` for one application. ``listen`` first, then ``join``, then give it to the sidecar. Loop only.

    ``over`` is set when the application has ended, or its driver has not come back for ``lost_after_s`` seconds.
    """

    kind = "jvm"

    def __init__(self, keys: KeyRing, *, lost_after_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.statistics = RelayStatistics()
        self.over = asyncio.Event()
        self._on_fact: OnFact | None = None
        self._on_lost: Callable[[RelayError], None] = lambda error: None
        self._early: list[RelayedFact] = []
        self._broken = anyio.Event()  # the connection that stands now
        super().__init__(
            RelayServer(
                self._hear,
                self.statistics,
                keys,
                on_lost=self._lost,
                on_disconnected=self._notice_break,
                tls=tls,
                joins=True,
                reconnect_timeout_s=lost_after_s,
            )
        )

    async def listen(self, host: str, port: int, advertised_host: str | None = None) -> tuple[str, int]:
        """See ``RelayServer.listen``."""
        return await self._server.listen(host, port, advertised_host)

    async def join(self) -> tuple[ActiveStage, ...]:
        """Wait, without limit, for a driver's JVM, and return its running stages.

        Raises ``RelayError`` if it does not tell them within ``JOIN_TIMEOUT_S`` seconds, whatever it does instead, and
        ``RelayStopped`` if the application ends in the meantime.
        """
        await self._server.connected_once.wait()
        problem = "it does not answer"
        with anyio.move_on_after(JOIN_TIMEOUT_S):
            await self.hold_back()
            while True:
                try:
                    return await self.active_stages()
                except RelayStopped:
                    raise
                except RelayError as error:  # its tables have changed while it was reading them
                    problem = str(error)
                    _log.info("active stages query failed, retry scheduled", error=problem)
                    await asyncio.sleep(JOIN_PAUSE_S)
        raise RelayError(
            f"the driver's JVM has not told its running stages within {JOIN_TIMEOUT_S:g} s: {problem}. Look into the "
            "log of the driver, which may be overloaded, and start the application again"
        )

    @property
    def driver(self) -> bytes | None:
        """The identity of the driver whose JVM is expected or served; None if any may come."""
        return self._server.driver

    def expect(self, driver: bytes | None) -> None:
        """Only this driver's JVM may connect; None: any may. No effect once one has."""
        if not self.joined:
            self._server.driver = driver

    def connect(self, on_fact: OnFact, on_lost: Callable[[RelayError], None]) -> None:
        """Set the functions that receive the facts from ``start`` on, including those that have arrived before."""
        self._on_fact, self._on_lost = on_fact, on_lost

    async def start(self) -> None:
        """See ``Relay.start``. The driver has attached the listener; deliver the facts that have arrived since."""
        assert self._on_fact is not None, "connect comes first"
        early, self._early = self._early, []
        for relayed in early:
            deliver(self._on_fact, relayed)

    @property
    def joined(self) -> bool:
        """Whether a driver's JVM has ever connected."""
        return self._server.connected_once.is_set()

    async def first_connected(self) -> None:
        """Wait, without limit, until a driver's JVM has connected."""
        await self._server.connected_once.wait()

    @property
    def connected(self) -> bool:
        """Whether a driver's JVM is connected now."""
        return self._server.linked

    @property
    def lost(self) -> bool:
        """Whether the application is over, or the connection to the driver's JVM is broken."""
        return self.over.is_set() or self._server.broken

    async def answers(self) -> bool:
        """Whether the driver's JVM is connected and not frozen. False as soon as its connection breaks."""
        answered = False
        if self.connected:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_if_broken, tasks.cancel_scope)
                with suppress(RelayError):
                    await self.ping()
                    answered = True
                tasks.cancel_scope.cancel()
        return answered

    async def _cancel_if_broken(self, scope: anyio.CancelScope) -> None:
        await self._broken.wait()
        scope.cancel()

    def _notice_break(self) -> None:
        broken, self._broken = self._broken, anyio.Event()
        broken.set()

    def detach(self) -> None:
        """The driver has left and will not come back, so it is not waited for."""
        self._server.end("the driver has detached")
        self.over.set()

    async def leave(self) -> None:
        """Have the listener of a driver's JVM that goes on leave the bus, if it can be reached."""
        if self.connected:
            self._server.expect_end()
            try:
                with anyio.move_on_after(GOODBYE_TIMEOUT_S):
                    await self.goodbye()
            except RelayError as error:
                _log.debug("relay ended unexpectedly", cause=repr(error))

    async def close(self) -> None:
        """See ``Relay.close``."""
        await self._server.close()

    def _hear(self, relayed: RelayedFact) -> None:
        if isinstance(relayed.fact, ApplicationEnded):
            self.over.set()
        if self._on_fact is None or self._early:
            self._early.append(relayed)
        else:
            deliver(self._on_fact, relayed)

    def _lost(self, error: RelayError) -> None:
        self.over.set()
        self._on_lost(error)
