# SPDX-License-Identifier: Apache-2.0

"""Code that ignores its cancellation is logged and abandoned, and the system still ends (H70)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from actors import Actor, ActorContext, ActorSystem

RELEASES = [threading.Event()]
"""The last one belongs to the running test: it ends code that nothing else can end."""


async def swallows_its_cancellation() -> None:
    while True:
        try:
            await anyio.sleep(1000.0)
        except anyio.get_cancelled_exc_class():
            pass


async def swallows_whatever_comes() -> None:
    release = RELEASES[-1]
    while not release.is_set():  # so that it can be collected, after the test
        with suppress(BaseException):
            await anyio.sleep(1000.0)


async def waits_for_a_thread() -> None:
    await anyio.to_thread.run_sync(RELEASES[-1].wait)


class Hanging(Actor[str]):
    """Hangs at the place that the test chooses."""

    def __init__(self, where: str, how: Callable[[], Awaitable[None]]) -> None:
        self.where = where
        self.how = how
        self.hangs = anyio.Event()
        self.received = anyio.Event()

    async def hang_in(self, where: str) -> None:
        if where == self.where:
            self.hangs.set()
            await self.how()

    async def receive(self, context: ActorContext[str], message: str) -> None:
        self.received.set()
        if self.where == "background":
            context.run(self.hang_in, "background")
        await self.hang_in("receive")

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        await self.hang_in("stopped")


class Parent(Actor[str]):
    def __init__(self, child: Actor[str]) -> None:
        self.child = child

    async def receive(self, context: ActorContext[str], message: str) -> None:
        context.spawn(lambda: self.child, name="child").tell(message)


@pytest.mark.parametrize("below", [False, pytest.param(True, marks=pytest.mark.long)], ids=["an actor", "a child"])
@pytest.mark.parametrize("where", ["receive", "stopped", "background"])
@pytest.mark.parametrize("how", [swallows_its_cancellation, swallows_whatever_comes, waits_for_a_thread])
async def test_system_ends_even_if_code_ignores_its_cancellation(  # H48, H70
    how: Callable[[], Awaitable[None]], where: str, below: bool
) -> None:
    RELEASES.append(threading.Event())
    actor = Hanging(where, how)
    with capture_logs() as logged:
        try:
            async with ActorSystem("abandoning", shutdown_timeout_s=0.1) as system:
                factory: Callable[[], Actor[Any]] = (lambda: Parent(actor)) if below else (lambda: actor)
                ref = system.spawn(factory, name="one")
                ref.tell("hang")
                await (actor.received if where == "stopped" else actor.hangs).wait()
        finally:
            RELEASES[-1].set()
    named = [line for line in logged if "ignored its cancellation" in line["event"]]
    assert named, logged
    assert any(how.__name__ in line["waiting_at"] for line in named), named


async def test_a_system_whose_end_is_cancelled_does_not_wait_for_code_that_ignores_its_cancellation() -> None:
    """H48 H70 H161: the wait for the actor, which would end it later, was cut off itself."""
    RELEASES.append(threading.Event())
    actor = Hanging("receive", swallows_whatever_comes)

    async def program() -> None:
        async with ActorSystem("abandoning", shutdown_timeout_s=3600.0) as system:
            system.spawn(lambda: actor, name="one").tell("hang")
            await anyio.sleep_forever()

    with capture_logs() as logged:
        task = asyncio.get_running_loop().create_task(program())
        await actor.hangs.wait()
        for _ in range(10):
            task.cancel()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait({task}, timeout=60.0)
    RELEASES[-1].set()
    assert done == {task}
    assert task.cancelled()
    assert [line["waiting_at"] for line in logged if "ignored its cancellation" in line["event"]]
