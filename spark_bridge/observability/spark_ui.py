# SPDX-License-Identifier: Apache-2.0

"""The tab in Spark's own UI: a Java class in the driver's JVM, compiled there by Spark's own Janino, and an actor.

The class serves the page's files and the newest status (``StatusTab.java``). Once a second, the actor asks it whether
somebody looks, and only then takes a status and hands it over. Everything that calls the JVM runs on worker threads,
because Py4J blocks. A tab that cannot be opened is not tried again.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from actors import Actor, ActorContext
from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.values import value
from spark_bridge.bridge.jvm_classes import cause_of, has_stopped, java_source, new_compiled_object, problems
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability import page_files as page
from spark_bridge.observability.diagnosis import explain
from spark_bridge.observability.page_data import page_parts
from spark_bridge.observability.status import SidecarStatus

log = get_logger("headgate.observability")

CLASS_NAME = "headgate.observability.StatusTab"
LOOK_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 5.0
WATCHED_MS = 10_000
"""A page that has not asked for this long is no longer watched."""


class SparkTab:
    """The tab's object in the JVM. All methods block, on any thread; ``close`` may come while ``open`` still works.

    ``context``: a classic SparkContext.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._java: Any = None
        self._closed = False

    def open(self) -> str:
        """Attach the tab, and return its path in Spark's UI; empty if the UI is off or the tab is closed already.

        Raises one of ``problems()`` if the JVM cannot do it.
        """
        java_context = self.context._jsc.sc()
        if java_context.ui().isEmpty():
            return ""
        tab = new_compiled_object(self.context, CLASS_NAME, _source)
        with self._lock:
            if self._closed:
                return ""
            self._java = tab
            return str(self._java.open(java_context, page.body(), page.script(), page.style()))

    def is_watched(self) -> bool:
        """Whether somebody has asked for the status lately; nobody has once the tab is closed."""
        java = self._java
        return java is not None and 0 <= int(java.askedMillisAgo()) < WATCHED_MS

    def show(self, status: SidecarStatus) -> None:
        """Publish a new status, unless the tab is closed: that may happen while this waits for its thread."""
        packer = zlib.compressobj(level=1, wbits=31)
        packed = [packer.compress(part) for part in page_parts(status, explain(status))]
        java = self._java
        if java is not None:
            java.put(b"".join(packed) + packer.flush())

    def close(self) -> None:
        """Leave Spark's UI. Idempotent; also after the context has stopped, or the JVM is gone."""
        with self._lock:
            self._closed = True
            java, self._java = self._java, None
            if java is not None:
                java.close()


async def close_tab(tab: SparkTab, timeout_s: float) -> None:
    """Close the tab, whatever else happens, and within the limit."""
    with anyio.CancelScope(shield=True):
        try:
            with anyio.fail_after(timeout_s):
                await DRIVER.run(tab.close, abandon_on_cancel=True)
        except problems() as problem:  # among them TimeoutError; or the JVM is gone, and the tab with it
            log.debug("Spark UI tab already gone", cause=repr(problem))


@value
class Look:
    """It is time to see whether somebody looks."""


class SparkTabActor(Actor[Look]):
    """Opens the tab, feeds it, and closes it when it stops. ``take``: takes a status."""

    def __init__(self, tab: SparkTab, take: Callable[[], Awaitable[SidecarStatus]]) -> None:
        self._tab = tab
        self._take = take
        self._open = False

    async def started(self, context: ActorContext[Look]) -> None:
        context.timers.start("look", Look(), every_s=LOOK_EVERY_S)
        context.self_ref.tell(Look())

    async def receive(self, context: ActorContext[Look], message: Look) -> None:
        try:
            await self._look(context)
        except problems() as problem:
            if await DRIVER.run(has_stopped, self._tab.context):  # and the tab with it
                context.timers.cancel("look")
                return
            if self._open:
                raise
            context.timers.cancel("look")
            cause = await DRIVER.run(cause_of, problem)
            await close_tab(self._tab, CLOSE_TIMEOUT_S)
            raise SidecarError(f"Spark's UI cannot have a tab: {cause}") from None

    async def _look(self, context: ActorContext[Look]) -> None:
        if not self._open:
            path = await DRIVER.run(self._tab.open, abandon_on_cancel=True)
            if not path:
                context.log.info(
                    "Spark UI tab not opened", cause="spark.ui.enabled is false, or the sidecar is leaving"
                )
                context.timers.cancel("look")
                return
            self._open = True
            context.log.info("Spark UI tab opened", path=path)
        elif await DRIVER.run(self._tab.is_watched):
            await DRIVER.run(self._tab.show, await self._take())


def _source() -> str:
    return java_source(__package__, "StatusTab")
