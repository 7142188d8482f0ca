# SPDX-License-Identifier: Apache-2.0

"""Calls that take several steps, and that a cancellation cannot leave halfway (H160).

Each runs in a separate task, so that a cancellation of the caller, even by ``asyncio``, reaches it only as a request:
it undoes what it has done, or goes on to its end. The caller waits for that, and then raises the cancellation. Calls
for one name follow each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from actors import ActorSystem
from spark_bridge.common.errors import SidecarNotRunning

__all__ = ["WholeCalls"]

T = TypeVar("T")


class WholeCalls:
    """The calls of a sidecar that change which operators there are. Loop only. They end with ``system``."""

    def __init__(self, system: ActorSystem, require_running: Callable[[], None]) -> None:
        """``require_running`` raises ``SidecarNotRunning`` if no call may begin any more."""
        self._system = system
        self._require_running = require_running
        self._turns: dict[str, anyio.Lock] = {}

    async def run(self, name: str, call: Callable[[], Awaitable[T]], *, certain: bool = False) -> T:
        """Return the result of ``call``, which is the only one for ``name`` until it has ended.

        If the caller is cancelled, so is ``call``, by a cancel scope, unless it is ``certain``: what it shields
        continues. The cancellation is raised when ``call`` has ended. Raises ``SidecarNotRunning`` if the sidecar ends
        first.
        """
        self._require_running()
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        scope = anyio.CancelScope()
        self._system.start_task(self._carry_out, name, call, outcome, scope, name=f"call for {name}")
        cancelled: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.wait([outcome])
            except asyncio.CancelledError as error:
                cancelled = error
                if not certain:
                    scope.cancel()
        if cancelled is not None:
            raise cancelled from None if outcome.cancelled() else outcome.exception()
        if outcome.cancelled():
            raise SidecarNotRunning(
                f"the sidecar was closed before the call for operator {name!r} had ended: leave the `with` block, or "
                "stop the sidecar, only after the call has returned"
            )
        return outcome.result()

    async def _carry_out(
        self, name: str, call: Callable[[], Awaitable[T]], outcome: asyncio.Future[T], scope: anyio.CancelScope
    ) -> None:
        try:
            with scope:
                async with self._turn(name):
                    self._require_running()
                    outcome.set_result(await call())
        except Exception as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():  # it was cancelled
                outcome.cancel()

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(name, anyio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked() and not turn.statistics().tasks_waiting:
                self._turns.pop(name, None)
