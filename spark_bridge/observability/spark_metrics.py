# SPDX-License-Identifier: Apache-2.0

"""The figures as gauges in Spark's own metrics, which reach every sink that Spark is configured with.

An actor takes a status every 10 s and hands the figures to the driver's JVM (``SparkGauges.java``) in one call. Reading
a gauge costs the sidecar nothing. Gauges that cannot be registered are not tried again.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio

from actors import Actor, ActorContext
from actors.threads import DRIVER
from protocol.describing import as_float
from protocol.values import value
from spark_bridge.bridge.jvm_classes import cause_of, has_stopped, java_source, new_compiled_object, problems
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.figures import figures
from spark_bridge.observability.status import LatencyStatus, SidecarStatus

CLASS_NAME = "headgate.observability.SparkGauges"
PUBLISH_EVERY_S = 10.0
ROOT = "headgate"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def gauges(status: SidecarStatus) -> dict[str, float]:
    """The figures by the names of their gauges.

    ``headgate.FIGURE`` for the sidecar, ``headgate.OPERATOR.FIGURE`` for an operator, then the values of further
    labels, and for a latency ``count``, and ``p50``, ``p99`` and ``p999`` of the last minute, which are missing without
    a sample there; the last values then stay away from the sinks. An operator's name keeps its letters, digits,
    underscores and hyphens; other characters become underscores, because sinks split names at dots.

    Sinks do not compute rates as Prometheus does, so there are three more figures for each operator.
    """
    found: dict[str, float] = {}
    for family, samples in figures(status):
        of_operator = family.labels[:1] == ("operator",)
        for labels, figure in samples:
            head = [_safe(labels[0])] if of_operator else []
            name = ".".join([ROOT, *head, family.name, *map(_safe, labels[1:] if of_operator else labels)])
            if isinstance(figure, LatencyStatus):
                found.update((f"{name}.{part}", one) for part, one in _parts(figure))
            else:
                found.setdefault(name, as_float(figure))
    for operator in status.operators.values():
        name = f"{ROOT}.{_safe(operator.operator_id)}"
        found.setdefault(f"{name}.events_received_per_second", operator.events_up_per_s)
        found.setdefault(f"{name}.events_sent_per_second", operator.events_down_per_s)
        found.setdefault(f"{name}.requests_received_per_second", operator.requests_per_s)
    return found


def _parts(latency: LatencyStatus) -> Iterator[tuple[str, float]]:
    yield "count", float(latency.samples)
    for part, microseconds in zip(("p50", "p99", "p999"), latency.last_minute, strict=True):
        if microseconds is not None:
            yield part, microseconds / 1e6


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)


class SparkGauges:
    """The object in the JVM. All methods block, on any thread; ``close`` may come while another one still works.

    ``context``: a classic SparkContext.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._java: Any = None
        self._closed = False

    def publish(self, status: SidecarStatus) -> None:
        """Replace all figures. Raises one of ``problems()`` if the JVM cannot do it."""
        now = gauges(status)
        with self._lock:
            if self._closed:
                return
            if self._java is None:
                java = new_compiled_object(self.context, CLASS_NAME, _source)
                java.open(self.context._jsc.sc())
                self._java = java
            self._java.publish("\n".join(now), struct.pack(f">{len(now)}d", *now.values()))

    def close(self) -> None:
        """Remove all gauges. Idempotent; raises one of ``problems()`` if the JVM is gone, and the gauges with it."""
        with self._lock:
            self._closed = True
            java, self._java = self._java, None
            if java is not None:
                java.close()


@value
class Publish:
    """It is time to refresh the gauges."""


@value
class Forget:
    """An operator was released: its gauges go now, if there are any."""


class SparkGaugesActor(Actor[Publish | Forget]):
    """Keeps the gauges up to date. ``take``: takes a status."""

    def __init__(self, gauges: SparkGauges, take: Callable[[], Awaitable[SidecarStatus]]) -> None:
        self._gauges = gauges
        self._take = take
        self._published = self._failed = False

    async def started(self, context: ActorContext[Publish | Forget]) -> None:
        context.timers.start("publish", Publish(), every_s=PUBLISH_EVERY_S)

    async def receive(self, context: ActorContext[Publish | Forget], message: Publish | Forget) -> None:
        if self._failed or (message == Forget() and not self._published):
            return
        status = await self._take()
        try:
            await DRIVER.run(self._gauges.publish, status, abandon_on_cancel=True)
            self._published = True
        except problems() as problem:
            if await DRIVER.run(has_stopped, self._gauges.context):  # and the gauges with it
                context.timers.cancel("publish")
                return
            if self._published:
                raise
            self._failed = True
            context.timers.cancel("publish")
            cause = await DRIVER.run(cause_of, problem)
            raise SidecarError(f"Spark cannot register the gauges: {cause}") from None


async def close_gauges(gauges: SparkGauges, timeout_s: float) -> None:
    """Remove the gauges, whatever else happens, and within the limit."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(timeout_s):
        try:
            await DRIVER.run(gauges.close, abandon_on_cancel=True)
        except problems():  # the JVM is gone, and the gauges with it
            return


def _source() -> str:
    return java_source(__package__, "SparkGauges")
