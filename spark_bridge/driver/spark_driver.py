# SPDX-License-Identifier: Apache-2.0

"""The Spark driver that a sidecar serves, in the same process or in another one."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from actors.threads import DRIVER
from protocol.describing import show
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, KeyRing, Purpose
from spark_bridge.bridge.jvm_classes import has_stopped
from spark_bridge.bridge.relay import OnFact, OnLost, Relay, open_relay
from spark_bridge.bridge.relay.awaited import AwaitedRelay
from spark_bridge.bridge.runs import ActiveStage, InheritedRuns
from spark_bridge.common.arrow_types import for_spark
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.actions import ActionMarks, spark_stopped
from spark_bridge.driver.config import SidecarConfig, Way
from spark_bridge.driver.environment import (
    active_context,
    advertised_and_bind_host,
    allocates_executors,
    check_worker_python,
    driver_context,
    encrypts_files,
    task_failures_max,
    task_slots,
)
from spark_bridge.driver.shipping import ship_packages

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_bridge.driver.handle import OperatorHandle
    from spark_bridge.sources.source import Source
    from spark_bridge.streams.task import StreamClient
    from spark_bridge.task_entry import SubtaskTask

__all__ = ["LocalDriver", "RemoteDriver", "SparkDriver", "columns_of", "register_source"]


class SparkDriver(ABC):
    """The Spark driver, as a ``SidecarRuntime`` uses it. For the runtime's loop.

    A subclass overrides what its driver can do. A driver that cannot be asked says nothing about itself, is equipped,
    and marks its actions itself.

    Attributes:
        keys: the keys of the application (H76).
        is_here: whether the driver is in this process, and not at the other end of a connection.
        identity: tells this driver from the ones before it: task attempt ids begin again with each. Empty if the keys
            are as new as the driver.
        spark_context: the context, if it is in this process: it knows the jobs of an action (H65).
        way: how tasks reach this process, for its status.
        inherited: the runs of an earlier sidecar; None if there cannot have been one.
    """

    keys: KeyRing
    is_here = True
    way: Way = "direct"
    identity = NO_IDENTITY
    spark_context: SparkContext | None = None
    inherited: InheritedRuns | None = None

    @property
    def session(self) -> SparkSession | None:
        """The session that the user has given, or the active one of the context, if it is in this process."""
        return None

    @abstractmethod
    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        """The host to listen on, and the one that tasks connect to.

        Raises ``SidecarError`` for a driver that cannot be served.
        """

    async def task_failures_max(self) -> int | None:
        """How often Spark lets a task fail; None if that is not known here."""
        return None

    async def cores(self) -> int | None:
        """How many tasks the application can run at the same time; None if that is not known here."""
        return None

    async def cores_max(self) -> int | None:
        """Like ``cores``, and None if Spark starts executors when tasks wait for them."""
        return None

    async def require_spark(self) -> None:
        """Raise ``SidecarError`` if Spark has stopped here, so that no operator can run any more."""
        return

    async def encrypts_files(self) -> bool:
        """Whether Spark encrypts what it writes to the executors' directories. True if that is not known here."""
        return True

    @abstractmethod
    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
    ) -> Relay:
        """The relay, not started yet. ``tasks_at()`` is the address that tasks connect to now."""

    async def equip(self) -> None:
        """Give the executors what a task needs. The address that tasks connect to does not change after that."""
        return

    def reached_at(self, purpose: Purpose, port: int, advertised: tuple[str, int]) -> tuple[str, int]:
        """The address that tasks, or the JVM, connect to for a port of this process."""
        return advertised

    async def close(self) -> None:
        """The sidecar has closed everything that listened. Idempotent."""
        return

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        """Within the block, the jobs of the calling thread belong to the action. Any thread; may block."""
        return nullcontext()

    async def forbid(self, action_id: str, reason: str) -> None:
        """Have Spark refuse what the thread of the action submits from now on, as far as that is possible here.

        Otherwise each job is cancelled when it has started.
        """
        return


_inherited: SparkContext | None = None


def _begin_in_a_forked_process() -> None:
    global _inherited  # noqa: PLW0603 - a fact about this process
    _inherited = active_context()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_a_forked_process)


class LocalDriver(SparkDriver):
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

    @property
    def session(self) -> SparkSession:
        """See ``SparkDriver``."""
        from pyspark.sql import SparkSession

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

    async def cores_max(self) -> int | None:
        may_grow = await DRIVER.run(allocates_executors, self.spark_context)
        return None if may_grow else await self.cores()

    async def require_spark(self) -> None:
        if await DRIVER.run(has_stopped, self.spark_context):
            raise spark_stopped("SparkContext", "no operator can be coordinated")

    async def encrypts_files(self) -> bool:
        return await DRIVER.run(encrypts_files, self.spark_context)

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
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


class RemoteDriver(SparkDriver):
    """A driver in another process, which has attached to ``relay``, and has checked and equipped itself."""

    is_here = False

    def __init__(self, relay: AwaitedRelay, keys: KeyRing, stages: tuple[ActiveStage, ...], *, resume: bool) -> None:
        self._relay = relay
        self.keys = keys
        self.identity = relay.driver or NO_IDENTITY
        self.inherited = InheritedRuns(stages, resume=resume)

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        bind_host = config.host or "127.0.0.1"
        return bind_host, config.addresses.advertised_host or bind_host

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
    ) -> Relay:
        self._relay.connect(on_fact, on_lost)
        return self._relay


# --- a source as a format of the session --------------------------------------------------------------------------


def columns_of(source: Source, schema: Any) -> StructType:
    """Return the columns of a source as Spark has them. May read the head of a file, and blocks.

    ``schema``: a ``StructType``, a ``pyarrow.Schema`` or Spark's text for one; None for what the source knows itself.

    Raises ``ValueError`` if nobody knows them, or Spark has no type for one of them.
    """
    from pyspark.sql.types import StructType

    known = getattr(source, "schema", None) if schema is None else schema
    if known is None:
        raise ValueError(f"{show(source)} does not know its columns: pass schema=")
    if isinstance(known, StructType):
        return known
    if isinstance(known, str):
        parsed = StructType.fromDDL(known)
        if not isinstance(parsed, StructType):
            raise ValueError(
                f"{show(known)} is a type without column names: pass a schema such as 'id long, name string'"
            )
        return parsed
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(for_spark(known))


def register_source(
    session: SparkSession, columns: StructType, task: SubtaskTask, stream: StreamClient, handle: OperatorHandle
) -> None:
    """Make ``session.read.format(name)`` read with ``task``; ``name`` is that of the operator. Blocks.

    ``stream`` plans the micro-batches of ``session.readStream.format(name)``.
    """
    from spark_bridge.task_source import source_format

    session.dataSource.register(source_format(handle.operator_id, columns, task, stream, handle.parallelism))
