# SPDX-License-Identifier: Apache-2.0

"""Chooses a relay, and replaces one that is refused or lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, TypeVar

from actors.logs import get_logger
from protocol.facts import FactsDropped, StageLook, StatusReported, TaskPlace
from protocol.wire.keys import KeyRing
from spark_bridge.bridge.relay.interface import (
    OnFact,
    OnLost,
    Relay,
    RelayError,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
)
from spark_bridge.bridge.relay.jvm_link import deliver
from spark_bridge.bridge.relay.jvm_relay import BUFFER_CAPACITY, JvmRelay
from spark_bridge.bridge.relay.py4j_listener import Py4jRelay
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.common.certificates import Encryption

RelayKind = Literal["jvm", "py4j"]

T = TypeVar("T")

_log = get_logger("headgate.relay")


def open_relay(
    spark: Any,
    on_fact: OnFact,
    *,
    kind: RelayKind = "jvm",
    on_lost: OnLost | None = None,
    keys: KeyRing | None = None,
    encryption: Encryption | None = None,
    buffer_capacity: int = BUFFER_CAPACITY,
    watched_only: bool = False,
) -> Relay:
    """Make a relay, which is not started yet. Does not block.

    Args:
        spark: a classic SparkContext or SparkSession.
        on_fact: called for each fact, on the event loop on which ``start`` is called.
        kind: ``"jvm"`` is Java in the driver's JVM, replaced by ``"py4j"`` if Spark refuses it or its connection is
            lost permanently (with one line in the log); ``"py4j"`` is a Python listener, slower for each event.
        on_lost: called once, on the loop, if the JVM's end is lost permanently while the relay is open, and the
            other kind cannot replace it.
        keys: the keys of the application; by default random ones (``"jvm"`` only).
        encryption: for the connection of the JVM (``"jvm"`` only); by default none.
        buffer_capacity: records that the JVM holds for a slow sidecar before it drops (``"jvm"`` only).
            Spark's own bound before it is ``spark.scheduler.listenerbus.eventqueue.headgate.capacity``.
        watched_only: the JVM holds back the facts of tasks until ``Relay.watch`` names their stage (``"jvm"`` only):
            the tasks of jobs without an operator then cost the sidecar nothing. Facts of jobs, stages and executors
            are always delivered.

    Raises:
        RelayError: a Spark Connect session. RelayStopped: the SparkContext has stopped.
        ValueError: another kind.
    """
    if kind == "py4j":
        return Py4jRelay(spark, on_fact)
    if kind == "jvm":
        settings = {"keys": keys, "encryption": encryption, "buffer_capacity": buffer_capacity}
        settings["watched_only"] = watched_only
        first = partial(_in_jvm, spark, on_fact, settings)
        return _WithFallback(first, Py4jRelay(spark, on_fact), on_fact, on_lost or _nobody_asked)
    raise ValueError(f"invalid relay kind {kind!r}: expected 'jvm' or 'py4j'")


def _in_jvm(spark: Any, on_fact: OnFact, settings: dict[str, Any], on_lost: OnLost) -> Relay:
    return JvmRelay(spark, on_fact, on_lost=on_lost, **settings)


def _nobody_asked(error: RelayError) -> None:
    _log.error("relay lost", error=str(error))


class _WithFallback:
    """The first relay, or the second if the first is refused at its start or lost permanently."""

    def __init__(self, first: Callable[[OnLost], Relay], second: Relay, on_fact: OnFact, on_lost: OnLost) -> None:
        self._first = self._relay = first(self._first_is_lost)
        self._second = second
        self._on_fact = on_fact
        self._on_lost = on_lost
        self._change: asyncio.Task[None] | None = None

    @property
    def kind(self) -> str:
        return self._relay.kind

    @property
    def statistics(self) -> RelayStatistics:
        return self._relay.statistics

    async def start(self) -> None:
        try:
            await self._relay.start()
        except RelayRefused as refusal:
            _log.warning("relay replaced by py4j", because=str(refusal), cause=repr(refusal.__cause__))
            self._relay = self._second
            await self._relay.start()

    async def close(self) -> None:
        if self._change is not None:
            await asyncio.wait({self._change})
            await self._first.close()
        await self._relay.close()

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        await self._ask(lambda relay: relay.kill_task(task_attempt_id, reason, place))

    async def cancel_job(self, job_id: int, reason: str) -> None:
        await self._ask(lambda relay: relay.cancel_job(job_id, reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        return await self._ask(lambda relay: relay.query_status(task_attempt_ids, job_ids))

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        await self._ask(lambda relay: relay.watch(stage_id, task_attempt_id))

    async def look_at_stage(self, stage_id: int) -> StageLook:
        return await self._ask(lambda relay: relay.look_at_stage(stage_id))

    async def _ask(self, command: Callable[[Relay], Awaitable[T]]) -> T:
        """Repeat a command on the second relay if the first was lost with it: each may be carried out twice."""
        asked = self._relay
        try:
            return await command(asked)
        except RelayStopped:
            if self._change is not None:
                await asyncio.wait({self._change})
            if self._relay is asked:
                raise
        return await command(self._relay)

    def _first_is_lost(self, error: RelayError) -> None:
        _log.warning("relay replaced by py4j", because=str(error), cause=repr(error.__cause__))
        self._change = asyncio.get_running_loop().create_task(self._change_over(error))

    async def _change_over(self, lost: RelayError) -> None:
        try:
            await self._second.start()
        except Exception as problem:  # whatever it is, there is no relay now, which must be reported
            _log.warning("fallback relay start failed", problem=repr(problem))
            self._on_lost(lost)
            return
        totals, before = self._second.statistics, self._first.statistics
        totals.records += before.records
        totals.reconnects += before.reconnects
        totals.dropped += before.dropped + 1
        self._relay = self._second
        # How many facts were lost is unknown. Reporting one makes the ledger query Spark's state.
        deliver(self._on_fact, RelayedFact(FactsDropped(1), time.time_ns() // 1000))
