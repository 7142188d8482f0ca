# SPDX-License-Identifier: Apache-2.0

"""Answers a driver's requests; see ``control_client``. Each request is answered in a separate task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup, TaskStatus

from actors.logs import CountedLog, get_logger
from protocol.describing import text_of, type_name
from protocol.errors import EventEncodeError, HeadgateError, RemoteProtocolError
from protocol.wire.codec import decode_event, encode_event, fit_text
from protocol.wire.framing import frame
from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.common.control import CONTROL_LIMITS
from spark_bridge.common.errors import SidecarError
from spark_bridge.server.server import AuthenticatedServer, Connection, Dialect, ServerConfig

__all__ = ["CONNECTIONS_MAX", "Answer", "serve_control"]

CONNECTIONS_MAX = 1024
NAME_CHARS_MAX = 256
ERROR_CHARS_LOGGED_MAX = 1000

log = CountedLog(get_logger("headgate.control"))

Answer = Callable[[bytes, str, Any], Awaitable[Any]]
"""Called with the identity of the driver that asks, the method and the argument."""


class _Question(NamedTuple):
    method: str
    argument: Any


def _decode(body: bytes) -> _Question:
    match decode_event(body, CONTROL_LIMITS):
        case [str(method), argument]:
            return _Question(method, argument)
    raise RemoteProtocolError("invalid request")


_CONTROL = Dialect(_decode, frame, CONTROL_LIMITS.event_bytes_max)


async def serve_control(
    answer: Answer,
    keys: KeyRing,
    config: ServerConfig,
    *,
    purpose: Purpose = Purpose.CONTROL,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, and report the port when started. An exception of ``answer`` is sent to the client.

    ``purpose`` is that of the clients' keys.

    Raises ``ServerStartError`` if the address cannot be used.
    """
    async with anyio.create_task_group() as tasks:
        server = AuthenticatedServer(
            _Requests(answer, tasks),
            partial(keys.key, purpose),
            _CONTROL,
            config,
            purpose=purpose.name.lower(),
        )
        await server.start()
        try:
            task_status.started(server.address[1])
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await server.close()


class _Requests:
    """The server's handler: one request for each connection."""

    def __init__(self, answer: Answer, tasks: TaskGroup) -> None:
        self._answer = answer
        self._tasks = tasks
        self._served: dict[Connection, anyio.CancelScope] = {}

    def connected(self, connection: Connection) -> None:
        """The peer has a driver's key; its request comes next."""

    def messages_received(self, connection: Connection, messages: list[_Question]) -> None:
        if connection.is_identified or len(messages) > 1:
            raise RemoteProtocolError("more than one request on a connection")
        connection.identified()
        scope = self._served[connection] = anyio.CancelScope()
        self._tasks.start_soon(self._serve, connection, messages[0], scope)

    def disconnected(self, connection: Connection, reason: str) -> None:
        """The driver has its answer, or does not wait for it any longer: it was interrupted, or is dead (H160)."""
        if (scope := self._served.pop(connection, None)) is not None:
            scope.cancel()

    async def _serve(self, connection: Connection, question: _Question, scope: anyio.CancelScope) -> None:
        with scope:
            await self._reply(connection, question)

    async def _reply(self, connection: Connection, question: _Question) -> None:
        try:
            answer = await self._answer(connection.authenticated_as, *question)
            try:
                reply = encode_event([True, answer], CONTROL_LIMITS)
            except EventEncodeError as error:
                raise SidecarError(f"the answer to this {question.method!r} cannot be sent: {error}") from error
        except Exception as error:
            if not isinstance(error, HeadgateError):
                text = f"{type_name(error)}: {_text_of(error)}"[:ERROR_CHARS_LOGGED_MAX]
                log.warning("request failed", method=question.method[:NAME_CHARS_MAX], error=text)
            reply = encode_event([False, type_name(error)[:NAME_CHARS_MAX], _text_of(error)], CONTROL_LIMITS)
        connection.send(reply)
        connection.close(reason="answered")


def _text_of(error: Exception) -> str:
    """The error's text, in a form that can always be sent."""
    return fit_text(text_of(error), CONTROL_LIMITS.text_chars_max)
