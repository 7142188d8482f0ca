# SPDX-License-Identifier: Apache-2.0

"""What is entered in one task can be left in another (H163)."""

# ruff: noqa: PT012 - the exit of the whole `async with` raises

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest

from actors import ActorSystem
from actors.host import Host
from actors.testing import settle
from tests.actors.actors_under_test import Counter, Explode, running_system

TURNS = 12
"""More turns of the loop than entering and leaving take here."""


class Recorded:
    """A context manager with a task group, which can be slow; it records what happens to it."""

    def __init__(self, slow_turns: int = 0) -> None:
        self.story: list[str] = []
        self.slow_turns = slow_turns
        self.seen: BaseException | None = None
        self.host: Host[str] = Host("recorded", self.enter, self.leave)

    async def enter(self) -> str:
        self.group = await anyio.create_task_group().__aenter__()
        self.group.start_soon(anyio.sleep_forever)
        try:
            for _ in range(self.slow_turns):
                await asyncio.sleep(0)
        except BaseException:
            await self.leave(None, None, None)
            raise
        self.story.append("entered")
        return "it"

    async def leave(self, exc_type: object, exc: BaseException | None, traceback: object) -> bool:
        self.seen = exc
        self.group.cancel_scope.cancel()
        try:
            await self.group.__aexit__(None, None, None)
        finally:
            self.story.append("left")
        return isinstance(exc, KeyError)

    async def __aenter__(self) -> str:
        return await self.host.enter()

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: object) -> bool:
        return bool(await self.host.leave(exc_type, exc, exc.__traceback__ if exc is not None else None))


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def in_a_task(manager: AbstractAsyncContextManager[object], *, leave: bool) -> object:
    loop = asyncio.get_running_loop()
    if leave:
        return await loop.create_task(manager.__aexit__(None, None, None))
    return await loop.create_task(manager.__aenter__())


async def test_entered_in_one_task_and_left_in_another() -> None:  # H163
    recorded = Recorded()
    assert await in_a_task(recorded, leave=False) == "it"
    await in_a_task(recorded, leave=True)
    assert recorded.story == ["entered", "left"]
    assert not others()


async def test_system_of_actors_entered_in_one_task_and_left_in_another() -> None:  # H163
    system = ActorSystem()
    await in_a_task(system, leave=False)
    await in_a_task(system, leave=True)
    assert not others()


async def test_exception_of_the_body_reaches_what_was_entered_and_can_be_swallowed_there() -> None:
    recorded = Recorded()
    async with recorded:
        raise KeyError("swallowed")
    assert isinstance(recorded.seen, KeyError)
    with pytest.raises(ValueError, match="raised") as raised:
        async with Recorded():
            raise ValueError("raised")
    assert raised.traceback[-1].name == "test_exception_of_the_body_reaches_what_was_entered_and_can_be_swallowed_there"


@pytest.mark.parametrize("scoped", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("turns", range(TURNS))
async def test_cancellation_at_any_turn_of_entering_or_leaving_leaves_nothing_and_is_not_lost(
    turns: int, scoped: bool
) -> None:  # H160, H163
    recorded = Recorded(slow_turns=3)
    ended: list[str] = []

    async def use() -> None:
        async with recorded:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append("never cancelled")

    async def use_in_scope() -> None:
        with scope:
            await use()

    scope = anyio.CancelScope()
    task = asyncio.get_running_loop().create_task(use_in_scope())
    for _ in range(turns):
        await asyncio.sleep(0)
    cancel_came_in_time = not task.done()
    if scoped:
        scope.cancel()
    else:
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (cancel_came_in_time and not scoped)
    print(turns, ended, recorded.story)
    assert recorded.story in ([], ["left"], ["entered", "left"])
    assert ("never cancelled" in ended) == (not cancel_came_in_time)
    assert not others()


@pytest.mark.parametrize("leaves", [False, True], ids=["entering", "leaving"])
async def test_cancelled_scope_ends_entering_and_leaving_that_wait_for_nothing_else(leaves: bool) -> None:  # H163
    never = asyncio.Event()

    async def enter() -> None:
        if not leaves:
            await never.wait()

    async def leave(*_: object) -> None:
        await never.wait()

    async def use() -> None:
        with scope:
            host = Host("patient", enter, leave)
            await host.enter()
            await host.leave(None, None, None)

    scope = anyio.CancelScope()
    task = asyncio.get_running_loop().create_task(use())
    try:
        await settle()
        scope.cancel()
        await settle()
        assert task.done()
    finally:
        never.set()
    assert not others()


async def test_failure_between_entering_and_leaving_cancels_the_body_and_is_raised_at_its_end() -> None:
    """A task group that fails inside the host, which nobody is leaving yet."""
    recorded = Recorded()

    async def fail() -> None:
        raise LookupError("in the background")

    with pytest.raises(ExceptionGroup) as raised:
        async with recorded:
            recorded.group.start_soon(fail)
            await asyncio.Event().wait()
    assert raised.group_contains(LookupError, match="in the background")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert not others()


async def test_failure_is_raised_where_another_task_leaves() -> None:  # H163
    system = ActorSystem()
    await in_a_task(system, leave=False)
    system.spawn(Counter).tell(Explode(KeyError("boom")))
    await settle()
    with pytest.raises(KeyError, match="boom"):
        await in_a_task(system, leave=True)
    assert not others()


async def test_failure_of_an_inner_host_cancels_the_body_of_the_outer_one() -> None:
    @asynccontextmanager
    async def inner() -> AsyncIterator[object]:
        async with running_system() as system:
            yield system

    manager = inner()
    outer: Host[object] = Host("outer", manager.__aenter__, manager.__aexit__)
    system = await outer.enter()
    system.spawn(Counter).tell(Explode(KeyError("boom")))  # type: ignore[attr-defined]
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as error:
        with pytest.raises(KeyError, match="boom"):
            await outer.leave(type(error), error, error.__traceback__)
    assert not others()


async def test_cancellation_from_outside_is_not_swallowed_with_that_of_a_failure() -> None:
    task = asyncio.current_task()
    assert task is not None

    async def use() -> None:
        async with running_system() as system:
            system.spawn(Counter).tell(Explode(KeyError("boom")))
            try:
                await asyncio.Event().wait()
            finally:
                inner = asyncio.current_task()
                assert inner is not None
                inner.cancel()
                try:
                    await asyncio.sleep(0)
                finally:
                    assert inner.cancelling() == 2

    with pytest.raises(KeyError):
        await asyncio.get_running_loop().create_task(use())
    assert not others()


def test_loop_that_ends_leaves_what_nobody_has_left() -> None:
    recorded = Recorded()

    async def forget() -> None:
        await recorded.__aenter__()

    asyncio.run(forget())
    assert recorded.story == ["entered", "left"]
    assert isinstance(recorded.seen, asyncio.CancelledError)
