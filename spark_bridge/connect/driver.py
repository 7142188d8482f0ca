# SPDX-License-Identifier: Apache-2.0

"""The driver of a Spark Connect server, as the sidecar of a client uses it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pyspark import SparkContext

from actors.threads import DRIVER
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, KeyRing
from spark_bridge.bridge.relay import OnFact, OnLost, Relay
from spark_bridge.bridge.takeover import InheritedRuns
from spark_bridge.common.certificates import Encryption
from spark_bridge.connect.opening import Artifact, Opening, opening_of
from spark_bridge.connect.relay import ConnectRelay
from spark_bridge.connect.remote_session import RemoteSession
from spark_bridge.driver.config import SidecarConfig

__all__ = ["ConnectDriver"]


class ConnectDriver:
    """A ``SparkDriver``. ``session`` is a Spark Connect session."""

    def __init__(self, session: Any) -> None:
        self._session = RemoteSession(session)
        self.spark_context: SparkContext | None = None
        self.session: Any = session
        self.keys = KeyRing(secrets.token_bytes(KEY_BYTES))
        self.is_here = True
        self.identity = NO_IDENTITY  # the keys are as new as the driver
        self.inherited: InheritedRuns | None = None
        self._hosts = ("", "")
        self._tasks_at = ("", 0)
        self._opening: Opening
        self._relay: ConnectRelay

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        self._opening = await DRIVER.run(opening_of, config.addresses.relay_secret_file)
        await DRIVER.run(self._session.check_version)
        own = ""
        if config.host is None or config.addresses.advertised_host is None:
            own = await DRIVER.run(self._session.own_address)
        bind_host = own if config.host is None else config.host
        given = config.host if config.host not in ("", "0.0.0.0", "::") else None
        self._hosts = bind_host, config.addresses.advertised_host or given or own
        return self._hosts

    async def task_failures_max(self) -> int | None:
        return None

    async def cores(self) -> int | None:
        return await DRIVER.run(self._session.cores)

    async def encrypts_files(self) -> bool:
        return await DRIVER.run(self._session.encrypts_files)

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: tuple[str, int],
    ) -> Relay:
        self._tasks_at = tasks_at
        bind_host, advertised_host = self._hosts
        self._relay = ConnectRelay(
            self._session,
            self._opening,
            on_fact,
            on_lost,
            listens_at=(bind_host, config.addresses.relay_port, advertised_host),
            tasks_at=tasks_at,
            lease_s=config.addresses.relay_lease_s,
            encryption=encryption,
            keys=self.keys,
        )
        return self._relay

    async def equip(self) -> None:
        await DRIVER.run(partial(self._session.ship_packages, needed=isinstance(self._opening, Artifact)))
        await DRIVER.run(self._session.check_executors, *self._tasks_at)

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        with self._session.marked(action_id):
            try:
                yield
            except Exception:
                self._relay.look_for_session()
                raise

    async def forbid(self, action_id: str, reason: str) -> None:
        """Each job is cancelled when it has started."""
