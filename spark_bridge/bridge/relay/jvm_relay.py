# SPDX-License-Identifier: Apache-2.0

"""The relay that runs inside the driver's JVM: a Java class, loaded there from ``relay.jar``."""

from __future__ import annotations

import os
import secrets
import tempfile
from typing import Any
from zipfile import BadZipFile

import anyio

from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.wire.keys import IDENTITY_BYTES, Key, KeyRing, Purpose
from spark_bridge.bridge.jvm_classes import new_packaged_object
from spark_bridge.bridge.relay.interface import (
    OnFact,
    OnLost,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
    require_driver,
)
from spark_bridge.bridge.relay.jvm_link import JvmCommands, RelayServer
from spark_bridge.bridge.relay_jar import DRIVER_CLASS, jar
from spark_bridge.common.certificates import Encryption
from spark_bridge.server.server import ServerStartError

BUFFER_CAPACITY = 10_000
CONNECT_TIMEOUT_S = 20.0

_log = get_logger("headgate.relay")


class JvmRelay(JvmCommands):
    """A ``Relay`` whose listener is Java in the driver's JVM, connected by one authenticated loopback socket.

    Args:
        spark: a classic SparkContext or SparkSession.
        on_fact: called on the event loop of ``start`` for each fact.
        on_lost: called once if the JVM's end is lost permanently while the relay is open.
        keys: the keys of the application; by default random ones.
        encryption: for the connection of the JVM; by default none.
        buffer_capacity: how many records the JVM holds for a slow sidecar before it drops.
        watched_only: hold back the facts of tasks until ``watch`` names their stage.
    """

    kind = "jvm"

    def __init__(
        self,
        spark: Any,
        on_fact: OnFact,
        *,
        on_lost: OnLost | None = None,
        keys: KeyRing | None = None,
        encryption: Encryption | None = None,
        buffer_capacity: int = BUFFER_CAPACITY,
        watched_only: bool = False,
    ) -> None:
        self._context = require_driver(spark)
        self._buffer_capacity = buffer_capacity
        self._watched_only = watched_only
        encryption = encryption or Encryption()
        self._certificate_sha256 = encryption.certificate_sha256
        self.statistics = RelayStatistics()
        keys = keys or KeyRing(secrets.token_bytes(32))
        self._key = keys.key(Purpose.RELAY, secrets.token_bytes(IDENTITY_BYTES))
        super().__init__(
            RelayServer(
                on_fact, self.statistics, keys, on_lost=on_lost, driver=self._key.identity, tls=encryption.context
            )
        )
        self._listener: Any = None

    async def start(self) -> None:
        """See ``Relay.start``. A start that fails leaves nothing behind."""
        try:
            host, port = await self._listen_on_loopback()
            await DRIVER.run(self._load_and_open, host, port)
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                await (self.hold_back() if self._watched_only else self.ping())
            await DRIVER.run(self._attach)
        except BaseException as problem:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(problem, TimeoutError | OSError | ServerStartError):
                raise RelayRefused(
                    "the driver's JVM could not connect to this process on the loopback interface: check that loopback "
                    "traffic is not filtered"
                ) from problem
            raise

    async def close(self) -> None:
        """See ``Relay.close``."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._server.expect_end()
            await DRIVER.run(close_listener, listener)
        await self._server.close()

    async def _listen_on_loopback(self) -> tuple[str, int]:
        try:
            return await self._server.listen("127.0.0.1")
        except ServerStartError:  # a machine with IPv6 only
            return await self._server.listen("::1")

    # --- on worker threads, because Py4J blocks ---

    def _load_and_open(self, host: str, port: int) -> None:
        self._listener = open_listener(
            self._context, host, port, self._key, self._certificate_sha256, self._buffer_capacity
        )

    def _attach(self) -> None:
        self._listener.attach()


def open_listener(
    context: Any,
    host: str,
    port: int,
    key: Key,
    certificate_sha256: bytes = b"",
    buffer_capacity: int = BUFFER_CAPACITY,
    *,
    patient: bool = False,
) -> Any:
    """Make the Java object in the driver's JVM, which connects in the background. Blocks.

    The key is handed over in a file that only this user can read, and that is deleted before this returns: Py4J logs
    the arguments of a call. With ``certificate_sha256``, the JVM uses TLS and accepts only this certificate.

    The object receives events from ``attach()`` until ``close_listener``. A ``patient`` one tries to connect until the
    context stops. Raises ``RelayStopped``, or ``RelayRefused`` if the JVM cannot load its class.
    """
    from py4j.protocol import Py4JError

    java_context = context._jsc.sc()
    if java_context.isStopped():
        raise RelayStopped("the SparkContext has stopped: build a new session first")
    try:
        listener = new_listener(context)
    except (Py4JError, TypeError, OSError, BadZipFile) as problem:  # Py4J raises TypeError for a missing class
        raise RelayRefused(
            "the driver's JVM could not load the relay: check that it can read relay.jar in the folder of the Python "
            "package spark_bridge, and that its Spark is 4.1 or later"
        ) from problem
    descriptor, path = tempfile.mkstemp(prefix="headgate-relay-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.identity + key.secret + certificate_sha256)
        listener.open(java_context, host, port, path, buffer_capacity, patient)
    finally:
        os.unlink(path)
    return listener


def new_listener(context: Any) -> Any:
    """Make the Java object, which is not open yet."""
    return new_packaged_object(context, DRIVER_CLASS, jar())


def close_listener(listener: Any) -> None:
    """Leave the bus and end the listener's threads. Idempotent; also after the context has stopped."""
    from py4j.protocol import Py4JError

    try:
        listener.close()
    except (Py4JError, OSError) as problem:  # the JVM is gone, and the listener with it
        _log.debug("relay listener already gone", cause=repr(problem))
