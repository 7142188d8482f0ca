# SPDX-License-Identifier: Apache-2.0

"""Where a suspended coroutine waits, whatever is between it and the innermost frame (H70)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actors.waiting_at import waiting_at


async def never() -> None:
    await asyncio.get_running_loop().create_future()  # the innermost frame of them all


class ByHand:
    """An awaitable that a user wrote."""

    def __await__(self) -> Generator[Any, None, None]:
        return never().__await__()


class Generated:
    def __await__(self) -> Generator[Any, None, None]:
        yield from never().__await__()


async def items() -> AsyncIterator[int]:
    yield 1
    await never()


@asynccontextmanager
async def resource() -> AsyncIterator[None]:
    await never()
    yield


async def plain() -> None:
    await never()


async def by_hand() -> None:
    await ByHand()


async def generated() -> None:
    await Generated()


async def over_items() -> None:
    async for _ in items():
        pass


async def in_context() -> None:
    async with resource():
        pass


async def for_a_task() -> None:
    await asyncio.create_task(never())  # noqa: TID251


async def with_a_timeout() -> None:
    await asyncio.wait_for(never(), 1000)  # noqa: TID251 - what users may write


async def waiting_for_any() -> None:
    await asyncio.wait([asyncio.create_task(never())])  # noqa: TID251


async def gathered() -> None:
    await asyncio.gather(anyio.lowlevel.checkpoint(), never())


async def in_asyncios_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(never())


async def in_anyios_group() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(never)


async def in_a_cancel_scope() -> None:
    with anyio.move_on_after(1000):
        await never()


async def suspended(function: Callable[[], Awaitable[None]], check: Callable[[object], None]) -> None:
    """Run ``function`` until it waits, check where, and end it."""
    awaited = function()

    async def drive() -> None:
        await awaited

    task = asyncio.ensure_future(drive())  # noqa: TID251
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    try:
        check(awaited)
    finally:
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        with pytest.raises((asyncio.CancelledError, BaseExceptionGroup)):
            await task


@pytest.mark.parametrize(
    "function",
    [
        plain,
        by_hand,
        generated,
        over_items,
        in_context,
        for_a_task,
        with_a_timeout,
        waiting_for_any,
        gathered,
        in_asyncios_group,
        in_anyios_group,
        in_a_cancel_scope,
    ],
    ids=lambda function: function.__name__,
)
async def test_innermost_frame_is_found(function: Callable[[], Awaitable[None]]) -> None:  # H70
    def check(awaited: object) -> None:
        line = never.__code__.co_firstlineno + 1
        assert waiting_at(awaited) == f"{__file__}:{line} in never"

    await suspended(function, check)


@pytest.mark.parametrize("primitive", [anyio.Event, asyncio.Event])
async def test_wait_in_a_library_names_the_users_line_first(primitive: type[Any]) -> None:  # H70
    async def meet() -> None:
        await primitive().wait()

    def check(awaited: object) -> None:
        line = meet.__code__.co_firstlineno + 1
        place = waiting_at(awaited)
        assert place.startswith(f"{__file__}:{line} in {meet.__qualname__} (inside ")
        assert "locks.py" in place

    await suspended(meet, check)


async def test_line_is_the_current_one() -> None:  # H70
    gate = asyncio.Event()

    async def twice() -> None:
        await gate.wait()
        await never()

    awaited = twice()
    task = asyncio.ensure_future(awaited)  # noqa: TID251
    await anyio.lowlevel.checkpoint()
    before = waiting_at(awaited)
    gate.set()
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    assert f":{twice.__code__.co_firstlineno + 1} in" in before
    assert waiting_at(awaited).endswith("in never")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiting_at(awaited) == ""  # it is over


def test_object_that_is_not_a_coroutine_has_no_place() -> None:
    assert waiting_at(None) == ""
    assert waiting_at(7) == ""
