"""The relay that runs inside the driver's JVM: one Java source file, compiled there by Spark's own Janino."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Iterable
from importlib import resources
from typing import Any

import anyio
import structlog
from py4j.protocol import Py4JError

from protocol.facts import StatusReported
from spark_bridge.facts import shorten
from spark_bridge.relay.connection import RelayServer
from spark_bridge.relay.interface import (
    OnFact,
    OnLost,
    RelayError,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
    require_driver,
)

CLASS_NAME = "headgate.relay.TaskEventRelay"
BUFFER_CAPACITY = 10_000
CONNECT_TIMEOUT_S = 20.0

_KILL_TASK, _CANCEL_JOB, _CANCEL_STAGE, _QUERY_STATUS, _PING = 1, 2, 3, 4, 5

_log = structlog.get_logger(__name__)

_compiling = threading.Lock()
_compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class JaninoRelay:
    """A ``Relay`` whose listener is Java in the driver's JVM, connected by one authenticated loopback socket.

    Args:
        spark: a classic SparkContext or SparkSession.
        on_fact: called on the event loop of ``start`` for each fact.
        on_lost: called once if the JVM's end is lost for good while the relay is open.
        buffer_capacity: how many records the JVM holds for a slow sidecar before it drops.
    """

    kind = "jvm"

    def __init__(
        self,
        spark: Any,
        on_fact: OnFact,
        *,
        on_lost: OnLost | None = None,
        buffer_capacity: int = BUFFER_CAPACITY,
    ) -> None:
        self._context = require_driver(spark)
        self._buffer_capacity = buffer_capacity
        self.statistics = RelayStatistics()
        self._server = RelayServer(on_fact, self.statistics, on_lost=on_lost)
        self._listener: Any = None

    async def start(self) -> None:
        """See ``Relay.start``. A start that fails leaves nothing behind."""
        try:
            host, port = await self._server.listen()
            await anyio.to_thread.run_sync(self._compile_and_open, host, port)
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                await self._server.command(_PING, b"")
            await anyio.to_thread.run_sync(self._attach)
        except BaseException as problem:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(problem, TimeoutError | OSError):
                raise RelayRefused(
                    "the driver's JVM could not connect back over 127.0.0.1; is loopback filtered?"
                ) from problem
            raise

    async def close(self) -> None:
        """See ``Relay.close``."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._server.expect_end()
            await anyio.to_thread.run_sync(_close_listener, listener)
        await self._server.close()

    async def kill_task(self, task_attempt_id: int, reason: str) -> None:
        """See ``Relay.kill_task``."""
        await self._server.command(_KILL_TASK, struct.pack(">q", task_attempt_id) + _text(reason))

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """See ``Relay.cancel_job``."""
        await self._server.command(_CANCEL_JOB, struct.pack(">i", job_id) + _text(reason))

    async def cancel_stage(self, stage_id: int, reason: str) -> None:
        """See ``Relay.cancel_stage``."""
        await self._server.command(_CANCEL_STAGE, struct.pack(">i", stage_id) + _text(reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        """See ``Relay.query_status``."""
        arguments = _ids("i", job_ids) + _ids("q", task_attempt_ids)
        answered = await self._server.command(_QUERY_STATUS, arguments)
        if answered.status is None:
            raise RelayError("the driver's JVM answered something else than a status")
        return answered.status

    # On worker threads: Py4J blocks.

    def _compile_and_open(self, host: str, port: int) -> None:
        jvm, java_context = self._context._jvm, self._context._jsc.sc()
        if java_context.isStopped():
            raise RelayStopped("the SparkContext has stopped: build a new session first")
        try:
            java_class = _compiled_class(self._context._gateway, jvm)
            no_types = self._context._gateway.new_array(jvm.java.lang.Class, 0)
            no_values = self._context._gateway.new_array(jvm.java.lang.Object, 0)
            listener = java_class.getConstructor(no_types).newInstance(no_values)
        except (Py4JError, TypeError) as problem:  # TypeError: Py4J's word for a class that is not there
            raise RelayRefused(
                "the driver's JVM would not compile the relay; is Spark's janino jar in place?"
            ) from problem
        listener.open(java_context, host, port, bytearray(self._server.secret), self._buffer_capacity)
        self._listener = listener

    def _attach(self) -> None:
        self._listener.attach()


def source() -> str:
    """The Java source of the listener, as it stands in the package."""
    return resources.files("spark_bridge.relay").joinpath("TaskEventRelay.java").read_text(encoding="utf-8")


def _compiled_class(gateway: Any, jvm: Any) -> Any:
    """The listener's class, compiled once in the life of a JVM.

    Py4J remembers the methods of a class by its name, for each of the JVM's threads: of a second class with the same
    name it would call the methods of the first.
    """
    with _compiling:
        java_class = _compiled.get(gateway)
        if java_class is None:
            compiler = jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
            compiler.cook(source())
            java_class = _compiled[gateway] = compiler.getClassLoader().loadClass(CLASS_NAME)
        return java_class


def _close_listener(listener: Any) -> None:
    try:
        listener.close()
    except (Py4JError, OSError) as problem:  # the JVM is gone, and the listener with it
        _log.debug("relay listener was gone before it could be closed", cause=repr(problem))


def _text(text: str) -> bytes:
    encoded = shorten(text).encode("utf-8", errors="replace")
    return struct.pack(">H", len(encoded)) + encoded


def _ids(layout: str, ids: Iterable[int]) -> bytes:
    ordered = sorted(ids)
    return struct.pack(f">I{len(ordered)}{layout}", len(ordered), *ordered)
