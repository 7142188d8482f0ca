# SPDX-License-Identifier: Apache-2.0

"""The requests of the coroutines of one loop: thousands may be open, and each costs little.

What coroutines ask in one turn of their loop leaves in one write. What comes in one read wakes the loop once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial

from spark_bridge.subtask.channel import AwaitedRequest
from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["LoopRequests", "of_this_loop"]

_Answer = asyncio.Future[bytes]


class LoopRequests:
    """The requests of one loop over one channel. For the loop's thread, except ``_deliver``."""

    def __init__(self, channel: TaskChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._asked: list[AwaitedRequest] = []  # in this turn of the loop
        self._answers: deque[tuple[_Answer, bytes | Exception]] = deque()
        self._woken = False

    async def ask(self, payload: bytes, timeout_s: float, part: int) -> bytes:
        """Send an encoded request and await its answer; see ``SubtaskContext.request_async`` for what it raises."""
        answer: _Answer = self._loop.create_future()
        request = AwaitedRequest(payload, part, partial(self._deliver, answer))
        if not self._asked:
            self._loop.call_soon(self._send)
        self._asked.append(request)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._channel.timed_out(f"no answer to a request within {timeout_s:g} s") from None
        finally:
            if not answer.done() or answer.cancelled():
                if request in self._asked:
                    self._asked.remove(request)
                else:
                    self._channel.abandon(request)

    def _send(self) -> None:
        requests, self._asked = self._asked, []
        try:
            self._channel.ask_soon(requests)
        except Exception as error:
            for request in requests:
                request.deliver(error)

    def _deliver(self, answer: _Answer, outcome: bytes | Exception) -> None:
        """On any thread, and perhaps under the channel's lock."""
        self._answers.append((answer, outcome))
        if not self._woken:  # it is set before the answers are taken, so none is left behind
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        self._woken = False
        while self._answers:
            answer, outcome = self._answers.popleft()
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def of_this_loop(channel: TaskChannel, known: dict[asyncio.AbstractEventLoop, LoopRequests]) -> LoopRequests:
    """Those of the loop that runs here; ``known`` are those of the attempt, which keeps no loop that has closed."""
    loop = asyncio.get_running_loop()
    if loop not in known:
        for closed in [one for one in known if one.is_closed()]:
            del known[closed]
        known[loop] = LoopRequests(channel, loop)
    return known[loop]
