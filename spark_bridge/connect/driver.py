# SPDX-License-Identifier: Apache-2.0

"""The driver of a Spark Connect server, as a sidecar uses it: one in the client's process, or one beside the server."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.wire.keys import KEY_BYTES, Key, KeyRing, Purpose
from spark_bridge.bridge.relay import OnFact, OnLost, Relay
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import ConnectRefused, ServerLost, SidecarError
from spark_bridge.connect.opening import Artifact, Installed, Opening, Wanted, opening_of
from spark_bridge.connect.reach import Reach
from spark_bridge.connect.relay import CONNECT_TIMEOUT_S, ConnectRelay
from spark_bridge.connect.remote_session import BESIDE, LOOK_PAUSE_S, RemoteSession, Unreachable
from spark_bridge.driver.actions import spark_stopped
from spark_bridge.driver.config import SidecarConfig, Way
from spark_bridge.driver.spark_driver import SparkDriver
from spark_bridge.standalone.driver_end import SidecarElsewhere

__all__ = ["AttachedSession", "ConnectDriver"]


LEASE_S = 60.0
LOOKS_PER_RENEWAL = 5
log = get_logger("headgate.attached")


class ConnectDriver(SparkDriver):
    """The driver of a Spark Connect session."""

    def __init__(self, session: Any) -> None:
        self._session = RemoteSession(session)
        self._given = session
        self.keys = KeyRing(secrets.token_bytes(KEY_BYTES))
        self._hosts = ("", "")
        self._tasks_at: Callable[[], tuple[str, int]]
        self._opening: Opening
        self._reach: Reach | None = None
        self._relay: ConnectRelay

    @property
    def session(self) -> Any:
        return self._given

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        self._opening = await DRIVER.run(opening_of, config.addresses.relay_secret_file)
        await DRIVER.run(self._session.check_version)
        if config.addresses.way == "tunnel":  # nothing else has to reach this process
            self._hosts = config.host or "127.0.0.1", "127.0.0.1"
            return self._hosts
        own = ""
        if config.host is None or config.addresses.advertised_host is None:
            own = await DRIVER.run(self._session.own_address)
        bind_host = own if config.host is None else config.host
        given = config.host if config.host not in ("", "0.0.0.0", "::") else None
        self._hosts = bind_host, config.addresses.advertised_host or given or own
        return self._hosts

    async def cores(self) -> int | None:
        return await DRIVER.run(self._session.cores)

    async def require_spark(self) -> None:
        if self._given.is_stopped:
            raise spark_stopped("Spark Connect session", "no operator can be coordinated")

    async def encrypts_files(self) -> bool:
        return await DRIVER.run(self._session.encrypts_files)

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
    ) -> Relay:
        self._tasks_at = tasks_at
        bind_host, advertised_host = self._hosts
        addresses = config.addresses
        self._reach = Reach(
            self._session,
            addresses.way,
            addresses.relay_lease_s,
            bind_host,
            ships=isinstance(self._opening, Artifact),
            on_lost=self._tunnel_lost,
        )
        self._relay = ConnectRelay(
            self._session,
            self._opening,
            self._reach,
            on_fact,
            on_lost,
            listens_at=(bind_host, addresses.relay_port, advertised_host),
            tasks_at=tasks_at,
            lease_s=addresses.relay_lease_s,
            encryption=encryption,
            keys=self.keys,
        )
        return self._relay

    def _tunnel_lost(self, why: str) -> None:
        self._relay.lose(why)

    async def equip(self) -> None:
        await DRIVER.run(partial(self._session.ship_packages, needed=isinstance(self._opening, Artifact)))
        assert self._reach is not None
        try:
            await DRIVER.run(self._session.check_executors, *self._tasks_at())
        except Unreachable as error:
            if not self._reach.may_change:
                raise
            await self._reach.to_tunnel(str(error))
            await DRIVER.run(self._session.check_executors, *self._tasks_at())
        log.info("way to this process", way=self.way)

    @property
    def way(self) -> Way:  # type: ignore[override]  # it may change until equip
        return "direct" if self._reach is None else self._reach.way

    def reached_at(self, purpose: Purpose, port: int, advertised: tuple[str, int]) -> tuple[str, int]:
        return advertised if self._reach is None else self._reach.address(purpose, port, advertised)

    async def close(self) -> None:
        if self._reach is not None:
            await self._reach.close()

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        with self._session.marked(action_id):
            try:
                yield
            except Exception:
                self._relay.look_for_session()
                raise


class AttachedSession:
    """A ``DriverEnd``: a session that is attached to a sidecar in another process, which runs beside the server.

    The sidecar cannot tell a client that is dead from one that is quiet: the server's JVM, with the relay, goes on. So
    the client renews a lease. The client cannot be told by the sidecar either that the server is gone, so it looks
    itself. With ``secret``, the server's operator has installed the relay, and given it to the sidecar.
    """

    lease_s: float = LEASE_S

    def __init__(self, session: Any, secret: bytes | None) -> None:
        self._session = RemoteSession(session, BESIDE)
        self._opening = Artifact() if secret is None else Installed(secret)
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: ServerLost | None = None

    def check(self) -> None:
        """See ``DriverEnd``. Raises ``ConnectRefused``."""
        self._session.check_version()

    def open(self, place: Mapping[str, Any], key: Key, certificate_sha256: bytes, sidecar: SidecarElsewhere) -> None:
        """See ``DriverEnd``. Raises ``ConnectRefused``."""
        self._session.ship_packages(needed=isinstance(self._opening, Artifact))
        address = place["host"], place["relay_port"]
        self._opening.open(self._session, Wanted(key, address, None, self.lease_s, certificate_sha256))
        if not sidecar.joined(CONNECT_TIMEOUT_S):
            raise ConnectRefused(self._opening.why_silent(address, BESIDE))
        self._left.clear()
        self.lost = None
        self._session.watch_retries()
        self._thread = threading.Thread(target=self._watch, args=(sidecar,), name="headgate-attached", daemon=True)
        self._thread.start()

    def equip(self, endpoints: list[TaskEndpoint]) -> None:
        """See ``DriverEnd``. Raises ``ConnectRefused`` if an executor cannot run subtasks, or reach the sidecar."""
        for host, port in sorted({(endpoint.host, endpoint.port) for endpoint in endpoints}):
            self._session.check_executors(host, port)

    def close(self) -> None:
        """See ``DriverEnd``. The sidecar has the relay leave the server."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        self._session.unwatch_retries()

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        """See ``DriverEnd``."""
        return self._session.marked(action_id)

    def _watch(self, sidecar: SidecarElsewhere) -> None:
        looks = 0
        while not self._left.wait(LOOK_PAUSE_S) and self.lost is None:
            looks += 1
            why = self._session.why_unreachable()
            if why is None and looks % LOOKS_PER_RENEWAL == 0:
                why = self._session.why_closed()
                self._renew(sidecar)
            if why is not None:
                log.error("server lost", why=why)
                self.lost = ServerLost(
                    f"the Spark Connect server, or the session there, is gone: {why}. Attach a new session: the "
                    "sidecar's operators continue from their last checkpoint"
                )
                self._session.stop_retries()

    @staticmethod
    def _renew(sidecar: SidecarElsewhere) -> None:
        try:
            sidecar.renew()
        except SidecarError as error:  # it may be starting again
            log.warning("lease not renewed", error=str(error))
