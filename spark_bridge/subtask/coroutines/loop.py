# SPDX-License-Identifier: Apache-2.0

"""The event loop of one attempt, on a separate thread: coroutines run there, whatever the task's thread waits for.

They must not run on the I/O thread, because one that computes would delay confirmations and heartbeats; nor on the
task's own, because a call that waits there for the next record would make every other call miss its time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from random import Random
from typing import Any, TypeVar

from spark_bridge.subtask.parts import parts_here
from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["TaskLoop"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

END_S = 10.0
"""How long coroutines that are cancelled may take to end, in seconds."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class TaskLoop:
    """A loop and its thread. For the task's own thread, except ``nudge_soon``, which is for the loop's.

    As soon as the attempt is over, all coroutines are cancelled, even if the task's thread is away. ``dice``: what is
    left to chance, such as the pauses of retries.
    """

    def __init__(
        self, channel: TaskChannel, loop: asyncio.AbstractEventLoop | None = None, dice: Random | None = None
    ) -> None:
        self._channel = channel
        self.dice = dice or Random()
        self._parts = parts_here()
        self.loop = loop or _new_loop()
        self._begin()
        channel.at_end(self._cancel_soon)

    def _begin(self) -> None:
        name = f"headgate-loop-{self._channel.key[0]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Await on the loop what ``make`` returns. Raises ``AttemptOver`` if the attempt ends meanwhile."""

        async def run() -> T:
            return await make()

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self._channel.check()
            raise

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a plain function on the loop, and return its result."""

        async def called() -> T:
            return function(*args)

        return self.run(called)

    def nudge_soon(self) -> None:
        """Have the task's thread look at what has ended, when the loop has gone through this turn."""
        self.loop.call_soon(self._channel.nudge)

    def close(self) -> None:
        """Cancel what runs, and end the loop. A coroutine that does not end is left behind, and named in the log."""
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2 * END_S)
        if self._thread.is_alive():
            _log.error("task %s: a coroutine blocks its event loop, which cannot be ended", self._channel.key[0])

    def _run(self) -> None:
        with nullcontext() if self._parts is None else self._parts.here():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_forever()
                self._end_coroutines()
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()

    def _end_coroutines(self) -> None:
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            _, still = self.loop.run_until_complete(asyncio.wait(left, timeout=END_S))
            self._name_those_left(still)

    def _name_those_left(self, still: set[asyncio.Task[Any]]) -> None:
        for task in still:
            _log.error("task %s: a coroutine did not end when it was cancelled: %r", self._channel.key[0], task)

    def _cancel_soon(self) -> None:
        """On any thread: the attempt is over, so nothing that is paid for may go on."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
