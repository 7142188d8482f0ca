# SPDX-License-Identifier: Apache-2.0

"""The port at which Spark's planning processes ask for the streams of a sidecar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from protocol.wire.keys import KeyRing, Purpose, identity_of
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.control import ControlEndpoint, exchange
from spark_bridge.common.errors import StreamRefused
from spark_bridge.server.server import ServerConfig
from spark_bridge.standalone.control_server import serve_control
from spark_bridge.streams.driver import StreamPlanner
from spark_bridge.streams.task import StreamClient

CONNECTIONS_MAX = 256
ANSWER_TIMEOUT_S = 150.0
CONNECT_TIMEOUT_S = 30.0


class Streams:
    """The planners of a sidecar, by the names of their sources: ``async with Streams(...)``. Loop only.

    The port is opened with the first source. The key of a source opens its own planner only (H76). ``reached_at`` is
    given this port and its advertised address, and returns the one that the planning process connects to.
    """

    def __init__(
        self,
        keys: KeyRing,
        bind_host: str,
        advertised_host: str,
        reached_at: Callable[[int, tuple[str, int]], tuple[str, int]],
        encryption: Encryption,
    ) -> None:
        self._keys = keys
        self._encryption = encryption
        self._host = advertised_host
        self._reached_at = reached_at
        self._config = ServerConfig(
            bind_host=bind_host,
            advertised_host=advertised_host,
            connections_max=CONNECTIONS_MAX,
            tls=encryption.context,
        )
        self._planners: dict[bytes, StreamPlanner] = {}
        self._tasks: TaskGroup
        self._opening = anyio.Lock()
        self._port: int | None = None

    async def __aenter__(self) -> Streams:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)  # without the caller's exception, which it would wrap in a group
        for planner in self._planners.values():
            await planner.close()

    async def serve(self, name: str, planner: StreamPlanner) -> StreamClient:
        """Answer for ``planner`` from now on; return what Spark's planning process needs to ask.

        Raises ``ServerStartError`` if the port cannot be opened.
        """
        async with self._opening:
            if self._port is None:
                serve = partial(serve_control, purpose=Purpose.STREAMS)
                self._port = await self._tasks.start(serve, self._answer, self._keys, self._config)
        identity = identity_of(name)
        self._planners[identity] = planner
        endpoint = ControlEndpoint(
            *self._reached_at(self._port, (self._host, self._port)),
            self._keys.key(Purpose.STREAMS, identity),
            self._encryption.certificate_sha256,
            "the query runs only while the sidecar does, so stop it before the `with` block ends",
            "register the source again with sidecar.source(...), and load it again",
        )
        ask = partial(exchange, endpoint, timeout_s=ANSWER_TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S)
        return StreamClient(ask)

    async def release(self, name: str) -> None:
        """Answer no longer. Does nothing for an unknown name."""
        planner = self._planners.pop(identity_of(name), None)
        if planner is not None:
            await planner.close()

    async def _answer(self, identity: bytes, method: str, argument: Any) -> Any:
        planner = self._planners.get(identity)
        if planner is None:
            raise StreamRefused("this source is not registered any more: call sidecar.source(...) again")
        return await planner.answer(method, argument)
