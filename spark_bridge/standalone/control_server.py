# SPDX-License-Identifier: Apache-2.0

"""Answers a driver's requests; see ``control_client``. Each connection runs in a separate task."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import structlog
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

from protocol.errors import RemoteProtocolError
from protocol.wire.codec import DEFAULT_LIMITS, decode_event, encode_event
from protocol.wire.framing import FrameDecoder, frame
from protocol.wire.handshake import NONCE_BYTES, ServerHandshake

__all__ = ["serve_control"]

AUTHENTICATE_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 256

log = structlog.get_logger("headgate.control")

Answer = Callable[[str, Any], Awaitable[Any]]


async def serve_control(
    answer: Answer, secret: bytes, host: str, port: int, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled, and report the port when started. An exception of ``answer`` is sent to the driver.

    Raises ``OSError`` if the address cannot be used.
    """
    room = anyio.CapacityLimiter(CONNECTIONS_MAX)

    async def handle(stream: SocketStream) -> None:
        async with stream, room:
            try:
                await _converse(stream, answer, secret)
            except (RemoteProtocolError, TimeoutError) as error:
                peer = stream.extra(SocketAttribute.remote_address, "?")
                log.warning("control connection refused", peer=str(peer), why=str(error) or "it took too long")
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                pass  # the driver has gone

    async with await anyio.create_tcp_listener(local_host=host, local_port=port) as listener:
        task_status.started(listener.extra(SocketAttribute.local_port))
        await listener.serve(handle)


async def _converse(stream: SocketStream, answer: Answer, secret: bytes) -> None:
    with anyio.fail_after(AUTHENTICATE_TIMEOUT_S):
        data = await _shake_hands(stream, secret)
        question = await _read_question(stream, data)
    try:
        result = [True, await answer(*question)]
        reply = encode_event(result)
    except Exception as error:
        reply = encode_event([False, type(error).__name__, str(error)])
    await stream.send(frame(reply))


async def _shake_hands(stream: SocketStream, secret: bytes) -> bytes:
    """Carry out the handshake; returns the bytes that came after it."""
    handshake = ServerHandshake(secret, secrets.token_bytes(NONCE_BYTES))
    while not handshake.done:
        try:
            reply = handshake.receive(await stream.receive())
        except RemoteProtocolError:
            if handshake.last_words:
                await stream.send(handshake.last_words)
            raise
        if reply:
            await stream.send(reply)
    return handshake.trailing_data


async def _read_question(stream: SocketStream, data: bytes) -> tuple[str, Any]:
    decoder = FrameDecoder(DEFAULT_LIMITS.frame_bytes_max)
    bodies = decoder.feed(data)
    while not bodies:
        bodies = decoder.feed(await stream.receive())
    match decode_event(bodies[0]):
        case [str(method), argument]:
            return method, argument
    raise RemoteProtocolError("invalid request")
