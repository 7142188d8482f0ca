# SPDX-License-Identifier: Apache-2.0

"""What a part's half in a task waits with, on a thread or in a coroutine. The part itself is written once, as async
functions, which never suspend on a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import GatewayFull, ProtocolError

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

T = TypeVar("T")

SEND_AGAIN_S = 0.05
"""After so long, a coroutine's event that found no capacity is sent again."""


class OnThread:
    """Waits block the calling thread."""

    def __init__(self, context: SubtaskContext) -> None:
        self._context = context

    async def request(self, payload: Any, timeout_s: float) -> Any:
        return self._context.request(payload, timeout_s)

    async def sleep(self, seconds: float) -> None:
        self._context.sleep(seconds)

    def send(self, event: Any) -> bool:
        """Send an event; return whether it has left."""
        self._context.send_event(event)
        return True


class OnLoop(OnThread):
    """Waits suspend the calling coroutine, and nothing blocks the thread of its loop."""

    async def request(self, payload: Any, timeout_s: float) -> Any:
        return await self._context.request_async(payload, timeout_s)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def send(self, event: Any) -> bool:
        try:
            self._context.send_event_nowait(event)
        except GatewayFull:
            return False
        return True


class Unsent:
    """What a part has to send, in its order. What fails to leave is sent by a later call. For any thread."""

    def __init__(self) -> None:
        self._events: deque[list[Any]] = deque()

    def append(self, event: list[Any]) -> None:
        self._events.append(event)

    def send(self, by: OnThread) -> None:
        """Send all, as far as there is capacity. Raises as ``send_event`` does."""
        while True:
            try:
                event = self._events.popleft()
            except IndexError:
                return
            left = False
            try:
                left = by.send(event)
            finally:
                if not left:
                    self._events.appendleft(event)
            if not left:  # a coroutine does not wait for capacity
                asyncio.get_running_loop().call_later(SEND_AGAIN_S, self._send_later, by)
                return

    def _send_later(self, by: OnThread) -> None:
        with suppress(ProtocolError):  # the attempt is over
            self.send(by)


class Block:
    """``async with`` ends as ``with`` does, because nothing waits at the end of a block."""

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exception_type, exception, traceback)


def waiting_here(context: SubtaskContext) -> OnThread:
    """What suits the caller: it is in a coroutine, or on a thread that may block."""
    return OnThread(context) if asyncio._get_running_loop() is None else OnLoop(context)


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of an async function that waits with ``OnThread``."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        result: T = returned.value
        return result
    raise RuntimeError("an async function was suspended, although its waits block")
