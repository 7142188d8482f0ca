# SPDX-License-Identifier: Apache-2.0

"""A system that is cancelled, once or twice: running handlers are cut off, and no task is left."""

from __future__ import annotations

import asyncio

import anyio

from actors import Actor, ActorContext, ActorSystem
from actors.testing import settle

PATIENCE_S = 120.0
AN_HOUR_S = 3600.0
"""The timeout of a shutdown that no test waits for."""


class Hanging(Actor[str]):
    """Never finishes a message, and is slow to stop: ``stopped`` waits for ``may_end``."""

    def __init__(self, stopping: asyncio.Event, may_end: asyncio.Event) -> None:
        self._stopping = stopping
        self._may_end = may_end

    async def receive(self, context: ActorContext[str], message: str) -> None:
        await asyncio.Event().wait()

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        self._stopping.set()
        await self._may_end.wait()


async def run_forever(running: asyncio.Event, stopping: asyncio.Event, may_end: asyncio.Event) -> None:
    async with ActorSystem("t", shutdown_timeout_s=AN_HOUR_S) as system:
        system.spawn(lambda: Hanging(stopping, may_end)).tell("hang")
        await settle()
        running.set()
        await asyncio.Event().wait()


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_cancelling_a_scope_around_the_system_cancels_its_handlers() -> None:
    running, stopping, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    may_end.set()

    async def scoped() -> None:
        with anyio.CancelScope() as scope:
            async with asyncio.TaskGroup() as group:
                group.create_task(cancel_when(running, scope))
                await run_forever(running, stopping, may_end)

    async with asyncio.timeout(PATIENCE_S):
        await scoped()
    assert not others()


async def cancel_when(running: asyncio.Event, scope: anyio.CancelScope) -> None:
    await running.wait()
    scope.cancel()


async def test_system_cancelled_while_stopping_leaves_no_task() -> None:
    running, stopping, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(run_forever(running, stopping, may_end))
        try:
            await running.wait()
            task.cancel()
            await settle()
            assert not stopping.is_set()  # it waits for the handler, for up to an hour
            task.cancel()
            await stopping.wait()  # the handler is cut off
            task.cancel()
            await settle()
            assert not task.done()
        finally:
            may_end.set()
    assert task.cancelled()
    assert not others()
