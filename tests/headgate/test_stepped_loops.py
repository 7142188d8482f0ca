# SPDX-License-Identifier: Apache-2.0

"""The coroutines of an async stage in virtual time, in an order that a seed decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from actors.coordination import OperatorCoordinator
from headgate.testing import running_operator
from protocol.errors import AttemptOver
from spark_bridge.subtask import TimedOut
from spark_bridge.subtask.coroutines.concurrently import concurrently

pytestmark = pytest.mark.anyio


class Adding(OperatorCoordinator):
    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await anyio.sleep(0.5)
        return request + 1


async def waiting(number: int) -> int:
    await asyncio.sleep((5, 4, 3, 2, 2)[number])
    with anyio.move_on_after(0.1):
        await anyio.sleep(60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert await anyio.to_thread.run_sync(lambda: 3) + await asyncio.to_thread(lambda: 4) == 7
    return 10 * number


@pytest.mark.parametrize(("ordered", "outputs"), [(True, [0, 10, 20, 30, 40]), (False, [20, 10, 0, 30, 40])])
async def test_time_passes_only_as_the_world_says(ordered: bool, outputs: list[int]) -> None:  # H181
    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(waiting, limit=3, ordered=ordered), range(5))
        assert list(task.records_left) == [3, 4]
        assert task.outputs == []
        await world.advance(10)
        assert task.outputs == outputs
        assert task.outcome == "success"


async def story(seed: int) -> list[Any]:
    told: list[Any] = []

    async def call(number: int) -> None:
        for step in range(3):
            told.append((number, step))
            await asyncio.sleep(0)

    async with running_operator(parallelism=1, seed=seed) as world:
        await world.launch_operator(0, concurrently(call, limit=4), range(8))
    return told


async def test_a_seed_repeats_its_order_and_others_have_others() -> None:
    stories = [await story(seed) for seed in range(8)]
    assert stories == [await story(seed) for seed in range(8)]
    assert len(set(map(tuple, stories))) > 4
    for told in stories:
        assert sorted(told) == [(number, step) for number in range(8) for step in range(3)]
        for number in range(8):
            assert [step for one, step in told if one == number] == [0, 1, 2]


async def test_coroutines_overtake_each_other_and_callbacks_do_not() -> None:
    overtaken = 0

    async def call(number: int) -> None:
        begun.append(number)
        for step in range(3):
            asyncio.get_running_loop().call_soon(called.append, 3 * len(begun) + step)

    for seed in range(8):
        begun: list[int] = []
        called: list[int] = []
        async with running_operator(parallelism=1, seed=seed) as world:
            await world.launch_operator(0, concurrently(call, limit=8), range(8))
        assert called == sorted(called)
        overtaken += begun != sorted(begun)
    assert overtaken


async def test_a_question_takes_virtual_time() -> None:
    async def ask(context: Any, number: int) -> Any:
        with pytest.raises(TimedOut, match=r"within 0\.1 s"):
            await context.request(number, timeout_s=0.1)
        return await context.request(number)

    async with running_operator(Adding, parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(ask, limit=3), range(3))
        await world.advance(10)
        assert task.outputs == [1, 2, 3]


@pytest.mark.parametrize("how", ["killed", "stopped", "failed"])
async def test_the_end_of_the_attempt_cancels_what_runs(how: str) -> None:
    ended: list[Any] = []

    async def call(number: int) -> None:
        try:
            await asyncio.sleep(100 if number else 1)
        finally:
            ended.append(number)
        raise ValueError("the first one")

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call, limit=3), range(9))
        if how == "killed":
            await world.kill(task)
        elif how == "stopped":
            await world.stop()
        else:
            await world.advance(2)
        assert sorted(ended) == [0, 1, 2]
        assert len(task.records_left) == 6
        if how == "stopped":
            assert isinstance(task.error, AttemptOver)
        elif how == "failed":
            assert isinstance(task.error, ValueError)


async def test_the_end_of_the_attempt_cancels_what_the_task_waits_for() -> None:
    ended: list[float] = []

    async def nothing(service: None, record: int) -> None: ...

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(world.now)
        yield

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(nothing, lifespan=slow), range(1))
        await world.stop()
        assert ended == [0.0]
        assert isinstance(task.error, AttemptOver)


async def test_what_the_task_waits_for_fails_it_with_its_error() -> None:
    async def connect() -> None:
        await asyncio.sleep(1)
        raise ValueError("no service")

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await connect()
        yield

    async def call(service: None, record: int) -> None: ...

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call, lifespan=broken), range(1))
        await world.advance(2)
        assert isinstance(task.error, ValueError)


async def test_the_end_closes_what_generators_have_open_and_the_loop() -> None:
    """A generator that is left is closed when it is collected, and one that is kept at the end of the loop."""
    closed: list[str] = []
    kept: list[Any] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(name)

    async def call(record: int) -> None:
        kept.extend([asyncio.get_running_loop(), numbers("kept")])
        for generator in (kept[1], numbers("left")):
            async for _ in generator:
                break
        del generator
        await asyncio.sleep(1)
        assert closed == ["left"]

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call), range(1))
        await world.advance(2)
        assert (task.error, task.outcome) == (None, "success")
        assert closed == ["left", "kept"]
        assert kept[0].is_closed()


async def test_a_coroutine_that_does_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def call(number: int) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(100)

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call), range(1))
        await world.kill(task)
    assert "a coroutine did not end when it was cancelled" in caplog.text
