"""How a relay is chosen."""

from __future__ import annotations

from typing import Any, Literal

import structlog

from protocol.facts import StatusReported
from spark_bridge.relay.interface import OnFact, OnLost, Relay, RelayRefused, RelayStatistics
from spark_bridge.relay.janino import BUFFER_CAPACITY, JaninoRelay
from spark_bridge.relay.py4j_listener import Py4jRelay

RelayKind = Literal["jvm", "py4j"]

_log = structlog.get_logger(__name__)


def open_relay(
    spark: Any,
    on_fact: OnFact,
    *,
    kind: RelayKind = "jvm",
    on_lost: OnLost | None = None,
    buffer_capacity: int = BUFFER_CAPACITY,
) -> Relay:
    """A relay that is not started yet. Nothing blocks here.

    Args:
        spark: a classic SparkContext or SparkSession.
        on_fact: called for each fact, on the event loop on which ``start`` is called.
        kind: ``"jvm"``: Java in the driver's JVM, with ``"py4j"`` in its place where Spark refuses it
            (one log line says so); ``"py4j"``: a Python listener, slower for each event.
        on_lost: called once, on the loop, if the JVM's end is lost for good while the relay is open.
        buffer_capacity: records that the JVM holds for a slow sidecar before it drops (``"jvm"`` only).
            Spark's own bound before it is ``spark.scheduler.listenerbus.eventqueue.headgate.capacity``.

    Raises:
        RelayError: a Spark Connect session. RelayStopped: the SparkContext has stopped.
        ValueError: another kind.
    """
    if kind == "py4j":
        return Py4jRelay(spark, on_fact)
    if kind == "jvm":
        first = JaninoRelay(spark, on_fact, on_lost=on_lost, buffer_capacity=buffer_capacity)
        return _WithFallback(first, Py4jRelay(spark, on_fact))
    raise ValueError(f"relay kind {kind!r}: one of 'jvm' and 'py4j' is meant")


class _WithFallback:
    """The first relay, or the second where the first is refused at its start."""

    def __init__(self, first: Relay, second: Relay) -> None:
        self._relay = first
        self._second = second

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
            _log.warning("relay falls back to py4j", because=str(refusal), cause=repr(refusal.__cause__))
            self._relay = self._second
            await self._relay.start()

    async def close(self) -> None:
        await self._relay.close()

    async def kill_task(self, task_attempt_id: int, reason: str) -> None:
        await self._relay.kill_task(task_attempt_id, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        await self._relay.cancel_job(job_id, reason)

    async def cancel_stage(self, stage_id: int, reason: str) -> None:
        await self._relay.cancel_stage(stage_id, reason)

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        return await self._relay.query_status(task_attempt_ids, job_ids)
