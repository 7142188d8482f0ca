# SPDX-License-Identifier: Apache-2.0

"""The Spark driver that a sidecar serves, in the same process or in another one."""

from __future__ import annotations

import os
import secrets
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from pyspark import SparkContext
from pyspark.sql import SparkSession

from actors.threads import DRIVER
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, KeyRing
from spark_bridge.bridge.relay import OnFact, OnLost, Relay, open_relay
from spark_bridge.bridge.relay.awaited import AwaitedRelay
from spark_bridge.bridge.takeover import ActiveStage, InheritedRuns
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.actions import ActionMarks
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.environment import (
    advertised_and_bind_host,
    check_worker_python,
    driver_context,
    encrypts_files,
    is_remote,
    task_failures_max,
    task_slots,
)
from spark_bridge.driver.shipping import ship_packages

__all__ = ["LocalDriver", "RemoteDriver", "SparkDriver", "driver_of"]


class SparkDriver(Protocol):
    """The Spark driver, as a ``SidecarRuntime`` uses it. For the runtime's loop."""

    @property
    def keys(self) -> KeyRing:
        """The keys of the application (H76)."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether the driver is in this process, and not at the other end of a connection."""
        ...

    @property
    def identity(self) -> bytes:
        """Tells this driver from the ones before it: task attempt ids begin again with each."""
        ...

    @property
    def spark_context(self) -> SparkContext | None:
        """The context, if it is in this process: it knows the jobs of an action (H65)."""
        ...

    @property
    def session(self) -> SparkSession | None:
        """The session that the user has given, or the active one of the context, if it is in this process."""
        ...

    @property
    def inherited(self) -> InheritedRuns | None:
        """The runs of an earlier sidecar; None if there cannot have been one."""
        ...

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        """The host to listen on, and the one that tasks connect to.

        Raises ``SidecarError`` for a driver that cannot be served.
        """
        ...

    async def task_failures_max(self) -> int | None:
        """How often Spark lets a task fail; None if that is not known here."""
        ...

    async def cores(self) -> int | None:
        """How many tasks the application can run at the same time; None if that is not known here."""
        ...

    async def encrypts_files(self) -> bool:
        """Whether Spark encrypts what it writes to the executors' directories. True if that is not known here."""
        ...

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: tuple[str, int],
    ) -> Relay:
        """The relay, not started yet. ``tasks_at`` is the address that tasks connect to."""
        ...

    async def equip(self) -> None:
        """Give the executors what a task needs."""
        ...

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        """Within the block, the jobs of the calling thread belong to the action. Any thread; may block."""
        ...

    async def forbid(self, action_id: str, reason: str) -> None:
        """Have Spark refuse what the thread of the action submits from now on, as far as that is possible here."""
        ...


def driver_of(spark: Any) -> SparkDriver:
    """The driver of a session or context, classic or of Spark Connect.

    Raises ``TypeError`` for something else, and ``RelayStopped`` for a stopped context.
    """
    if is_remote(spark):
        from spark_bridge.connect.driver import ConnectDriver

        return ConnectDriver(spark)
    return LocalDriver(spark)


_inherited: SparkContext | None = None


def _begin_in_a_forked_process() -> None:
    global _inherited  # noqa: PLW0603 - a fact about this process
    _inherited = SparkContext._active_spark_context


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_a_forked_process)


class LocalDriver:
    """The driver in this process. ``spark`` is a classic SparkSession or SparkContext.

    Raises as ``driver_context`` does, and ``SidecarError`` in a process that was forked from the driver.
    """

    def __init__(self, spark: Any) -> None:
        self.spark_context = driver_context(spark)
        if self.spark_context is _inherited:  # the two would read each other's answers from its connections to the JVM
            raise SidecarError(
                "this process was forked from the driver, and its SparkContext is a copy that only the driver can use: "
                "start the sidecar in the driver, or make this process with multiprocessing.get_context('spawn') and "
                "start Spark in it"
            )
        self._marks = ActionMarks(self.spark_context)
        self._given = spark
        self.keys = KeyRing(secrets.token_bytes(KEY_BYTES))
        self.is_here = True
        self.identity = NO_IDENTITY  # the keys are as new as the driver
        self.inherited: InheritedRuns | None = None

    @property
    def session(self) -> SparkSession:
        """See ``SparkDriver``."""
        return self._given if isinstance(self._given, SparkSession) else SparkSession.builder.getOrCreate()

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        await DRIVER.run(check_worker_python, self.spark_context)
        return await DRIVER.run(
            advertised_and_bind_host, self.spark_context, config.host, config.addresses.advertised_host
        )

    async def task_failures_max(self) -> int | None:
        return await DRIVER.run(task_failures_max, self.spark_context)

    async def cores(self) -> int | None:
        return await DRIVER.run(task_slots, self.spark_context)

    async def encrypts_files(self) -> bool:
        return await DRIVER.run(encrypts_files, self.spark_context)

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: tuple[str, int],
    ) -> Relay:
        return open_relay(
            self.spark_context,
            on_fact,
            kind=config.relay,
            on_lost=on_lost,
            keys=self.keys,
            encryption=encryption,
            watched_only=True,
        )

    async def equip(self) -> None:
        await DRIVER.run(ship_packages, self.spark_context)

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        return self._marks.marked(action_id)

    async def forbid(self, action_id: str, reason: str) -> None:
        await DRIVER.run(self._marks.forbid, action_id, reason)


class RemoteDriver:
    """A driver in another process, which has attached to ``relay``, and has checked and equipped itself."""

    def __init__(self, relay: AwaitedRelay, keys: KeyRing, stages: tuple[ActiveStage, ...], *, resume: bool) -> None:
        self._relay = relay
        self.spark_context: SparkContext | None = None
        self.session: SparkSession | None = None
        self.keys = keys
        self.is_here = False
        self.identity = relay.driver or NO_IDENTITY
        self.inherited: InheritedRuns | None = InheritedRuns(stages, resume=resume)

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        bind_host = config.host or "127.0.0.1"
        return bind_host, config.addresses.advertised_host or bind_host

    async def task_failures_max(self) -> int | None:
        return None

    async def cores(self) -> int | None:
        return None

    async def encrypts_files(self) -> bool:
        return True

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: tuple[str, int],
    ) -> Relay:
        self._relay.connect(on_fact, on_lost)
        return self._relay

    async def equip(self) -> None:
        """Done by the driver, before it attached."""

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        return nullcontext()  # the driver does it

    async def forbid(self, action_id: str, reason: str) -> None:
        """Each job is cancelled when it has started."""
