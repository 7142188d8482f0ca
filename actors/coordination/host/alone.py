# SPDX-License-Identifier: Apache-2.0

"""A host without tasks, for code that needs a ``CoordinatorContext`` where no operator runs.

It has everything that a context offers. There are no attempts, so its gateways stay empty. Handlers do not run by
themselves: they wait until ``run_due`` is awaited, between whatever else its owner does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from actors.clock import LoopClock
from actors.coordination.host.context import Context, Outcome
from actors.coordination.host.gateway import GatewayTable
from actors.coordination.host.incarnation import Incarnation, Sender
from actors.coordination.store import CoordinatorStore
from actors.exits import as_exception, contained
from actors.threads import USER
from protocol.facts import StageLook
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import RestoreMode

__all__ = ["HostAlone"]

CLOSE_S = 5.0
"""How long ``close`` waits for functions in the background that it has cancelled."""


class HostAlone:
    """Has a ``context``, with which code lives that has no operator. Make it on the event loop, and close it there."""

    checkpoints_in_doubt: frozenset[int] = frozenset()
    input_begins_again = True

    def __init__(
        self,
        operator_id: str,
        store: CoordinatorStore,
        log: Any,
        parallelism: int = 1,
        mode: RestoreMode = RestoreMode.BATCH,
    ) -> None:
        self.operator_id = operator_id
        self.parallelism = parallelism
        self.mode = mode
        self.store = store.view()
        self.log = log
        self.clock = LoopClock()
        self._due: deque[Callable[[], Awaitable[None]]] = deque()  # any thread may append
        self._timers: list[tuple[float, Callable[[], Awaitable[None]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self.gateways = GatewayTable(parallelism, self._due.append, lambda: False, DEFAULT_LIMITS, lambda: False)
        self._incarnation = Incarnation(Sender("", 0), 1)
        self._incarnation.begun.set()
        self.context = Context(self, self._incarnation, self.store, log)

    def handles_restored(self, part: Sender) -> bool:
        return False

    def events_taken(self, part: Sender, subtask: int) -> int:
        return 0

    async def look_at_run(self) -> StageLook:
        return StageLook()

    def fail_job(self, error: BaseException) -> None:
        self._failure = self._failure or as_exception("fail_job", error)

    def run_in_thread(self, function: Callable[..., Any], *args: Any, handler: Outcome) -> None:
        """The function runs in ``run_due``, which waits for it, because the plan needs what it finds."""

        async def call() -> None:
            await self._handle(USER.run(partial(function, *args)), "call_async", handler)

        self._due.append(call)

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any, handler: Outcome) -> None:
        async def hand_in(result: Any, error: Exception | None) -> None:
            self._due.append(partial(handler, result, error))

        work = self._handle(function(*args), "run_in_background", hand_in)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _handle(outcome: Awaitable[Any], caller: str, handler: Outcome) -> None:
        try:
            result = await outcome
        except BaseException as error:  # a user's exit must not end the loop
            failure = contained(caller, error)
            await handler(None, failure)
        else:
            await handler(result, None)

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self._timers.append((self.clock.now() + delay_s, handler))

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._due.append(handler)

    async def run_due(self) -> None:
        """Call what is due now, and what that calls on worker threads. Raises what a handler raises."""
        now = self.clock.now()
        self._due.extend(handler for due_at, handler in self._timers if due_at <= now)
        self._timers = [entry for entry in self._timers if entry[0] > now]
        while self._due:
            await self._due.popleft()()
        self.check()

    def check(self) -> None:
        """Raise the cause of ``fail_job``, if that was called."""
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """From here on the context has no effect. Functions in the background are cancelled."""
        self._incarnation.part.acting = 0
        self._incarnation.cancel_guarded()
        self.store.revoke()
        self._due.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
