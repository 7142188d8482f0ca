"""A system that is cancelled, once or again: what still runs is cut off, and no task of it is left."""

from __future__ import annotations

import asyncio

import anyio

from actors import Actor, ActorContext, ActorSystem
from actors.testing import settle

PATIENCE_S = 120.0
AN_HOUR_S = 3600.0
"""Of a shutdown that nobody is to wait for."""


class Hanging(Actor[str]):
    """Never comes to the end of a message, and is slow to stop: ``stopped`` waits for ``may_end``."""

    def __init__(self, stopping: asyncio.Event, may_end: asyncio.Event) -> None:
        self._stopping = stopping
        self._may_end = may_end

    async def receive(self, context: ActorContext[str], message: str) -> None:
        await asyncio.Event().wait()

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        self._stopping.set()
        await self._may_end.wait()


async def run_for_ever(running: asyncio.Event, stopping: asyncio.Event, may_end: asyncio.Event) -> None:
    async with ActorSystem("t", shutdown_timeout_s=AN_HOUR_S) as system:
        system.spawn(lambda: Hanging(stopping, may_end)).tell("hang")
        await settle()
        running.set()
        await asyncio.Event().wait()


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_scope_around_it_cancels_what_its_actors_do_at_once() -> None:
    running, stopping, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    may_end.set()

    async def scoped() -> None:
        with anyio.CancelScope() as scope:
            async with asyncio.TaskGroup() as group:
                group.create_task(cancel_when(running, scope))
                await run_for_ever(running, stopping, may_end)

    async with asyncio.timeout(PATIENCE_S):
        await scoped()
    assert not others()


async def cancel_when(running: asyncio.Event, scope: anyio.CancelScope) -> None:
    await running.wait()
    scope.cancel()


async def test_cancelled_while_it_stops_it_cuts_off_what_still_runs_and_leaves_no_task() -> None:
    running, stopping, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(run_for_ever(running, stopping, may_end))
        try:
            await running.wait()
            task.cancel()
            await settle()
            assert not stopping.is_set()  # it waits for the handler, an hour if need be
            task.cancel()
            await stopping.wait()  # the handler is cut off
            task.cancel()
            await settle()
            assert not task.done()
        finally:
            may_end.set()
    assert task.cancelled()
    assert not others()
