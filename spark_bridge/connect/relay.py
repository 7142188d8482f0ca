# SPDX-License-Identifier: Apache-2.0

"""The relay of a Spark Connect session: Java in the server's JVM, which dials this process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.facts import ApplicationEnded
from protocol.wire.keys import IDENTITY_BYTES, KeyRing, Purpose
from spark_bridge.bridge.relay import ApplicationLost, OnFact, OnLost, RelayError, RelayStatistics, RelayStopped
from spark_bridge.bridge.relay.jvm_link import JvmCommands, RelayServer, deliver
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect.opening import Opening, Wanted
from spark_bridge.connect.reach import Reach
from spark_bridge.connect.remote_session import LOOK_PAUSE_S, RemoteSession, Unreachable

__all__ = ["ConnectRelay"]

CONNECT_TIMEOUT_S = 20.0
GOODBYE_TIMEOUT_S = 5.0
PINGS_PER_LEASE = 6

_log = get_logger("headgate.relay")


async def look_until(why_gone: Callable[[], str | None], over: Callable[[], bool]) -> str | None:
    """Look for a server that has ended, and return why it has; None as soon as ``over()``.

    ``why_gone`` blocks, so it runs on another thread.
    """
    while not over():
        why = await DRIVER.run(why_gone, abandon_on_cancel=True)
        if why is not None:
            return None if over() else why
        await asyncio.sleep(LOOK_PAUSE_S)
    return None


class ConnectRelay(JvmCommands):
    """A ``Relay`` for the jobs of one session. Loop only.

    Args:
        session: the session.
        opening: how the server is made to open its end.
        reach: how the server's end reaches this one.
        on_fact: called on the event loop of ``start`` for each fact.
        on_lost: called once if the server's end is lost permanently while the relay is open.
        listens_at: the host and port to listen on, and the host that the server dials.
        tasks_at: the address that tasks connect to now, which the server tries as well.
        lease_s: after this time without a word from here, the server's end ends itself, in seconds.
        encryption: for the connection of the JVM.
        keys: the keys of the application.
    """

    kind = "jvm"

    def __init__(
        self,
        session: RemoteSession,
        opening: Opening,
        reach: Reach,
        on_fact: OnFact,
        on_lost: OnLost,
        *,
        listens_at: tuple[str, int, str],
        tasks_at: Callable[[], tuple[str, int]],
        lease_s: float,
        encryption: Encryption,
        keys: KeyRing,
    ) -> None:
        self._session = session
        self._opening = opening
        self._reach = reach
        self._on_fact = on_fact
        self._listens_at = listens_at
        self._tasks_at = tasks_at
        self._lease_s = lease_s
        self._certificate_sha256 = encryption.certificate_sha256
        keys = opening.keys(keys)
        self._key = keys.key(Purpose.RELAY, secrets.token_bytes(IDENTITY_BYTES))
        self.statistics = RelayStatistics()
        self._on_lost = on_lost
        self._gone = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(
            RelayServer(
                on_fact,
                self.statistics,
                keys,
                on_lost=self._lost,
                on_disconnected=self._disconnected,
                driver=self._key.identity,
                tls=encryption.context,
                reconnect_timeout_s=lease_s,
            )
        )

    async def start(self) -> None:
        """See ``Relay.start``. Raises ``ConnectRefused``. A start that fails leaves nothing behind."""
        self._loop = asyncio.get_running_loop()
        try:
            listening = await self._server.listen(*self._listens_at)
            await self._reach.begin()
            try:
                address = await self._open(listening)
            except Unreachable as error:
                if not self._reach.may_change:
                    raise
                await self._reach.to_tunnel(str(error))
                address = await self._open(listening)
            try:
                with anyio.fail_after(CONNECT_TIMEOUT_S):
                    await self.hold_back()
            except TimeoutError as error:
                raise ConnectRefused(self._opening.why_silent(address, self._session.listener)) from error
            self._session.watch_retries()
            self._spawn(self._keep_lease())
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def _open(self, listening: tuple[str, int]) -> tuple[str, int]:
        """Have the server open its end; returns the address that it connects to. Raises ``ConnectRefused``."""
        address = self._reach.address(Purpose.RELAY, listening[1], listening)
        wanted = Wanted(self._key, address, self._tasks_at(), self._lease_s, self._certificate_sha256)
        await DRIVER.run(self._opening.open, self._session, wanted)
        return address

    async def close(self) -> None:
        """See ``Relay.close``. The server's end leaves now, or when its lease has run out."""
        for task in self._tasks:
            task.cancel()
        self._session.unwatch_retries()
        if self._server.linked:
            self._server.expect_end()
            try:
                with anyio.move_on_after(GOODBYE_TIMEOUT_S):
                    await self.goodbye()
            except RelayError as error:
                _log.debug("relay ended unexpectedly", cause=repr(error))
        await self._server.close()

    # --- the server's health --------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / PINGS_PER_LEASE)
            try:
                await self.ping()
            except RelayStopped:
                return
            except RelayError as error:
                _log.warning("server silent", error=str(error))

    def _disconnected(self) -> None:
        """A broken connection may come back, but a server that has ended does not."""
        self._spawn(self._look(self._session.why_unreachable))
        self._spawn(self._look(self._session.why_closed))

    def look_for_session(self) -> None:
        """After a failed action: the session may be gone, although the server is not. Any thread; blocks."""
        why = self._session.why_closed()
        if why is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self.lose, why)

    async def _look(self, why_gone: Callable[[], str | None]) -> None:
        why = await look_until(why_gone, lambda: self._server.linked or self._gone)
        if why is not None:
            self.lose(why)

    def lose(self, why: str) -> None:
        """The server cannot be reached any more, for this reason."""
        self._lost(RelayStopped(f"the Spark Connect server, or the session there, is gone: {why}"))

    def _lost(self, error: RelayError) -> None:
        """Nothing of the session's jobs is left, or can be observed: they count as ended."""
        if self._gone:
            return
        self._gone = True
        self._session.stop_retries()
        self._server.end(str(error))
        deliver(self._on_fact, RelayedFact(ApplicationEnded(), time.time_ns() // 1000))
        self._on_lost(ApplicationLost(str(error)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
