# SPDX-License-Identifier: Apache-2.0

"""Virtual time and worker threads inside a deterministic system, and steps at the wrong moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from actors import Actor, ActorContext
from actors.testing import DeterministicKit, deterministic_system

Behaviour = Callable[[], Awaitable[Any]]


class Doer(Actor[Behaviour]):
    """Awaits each message, and keeps the results."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    async def receive(self, context: ActorContext[Behaviour], message: Behaviour) -> None:
        try:
            self._results.append(await message())
        except Exception as error:
            self._results.append(error)


def doer(kit: DeterministicKit, name: str = "doer") -> tuple[Any, list[Any]]:
    results: list[Any] = []
    return kit.system.spawn(lambda: Doer(results), name=name), results


async def asyncio_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60.0):
            await asyncio.get_running_loop().create_future()


async def anyio_timeout() -> None:
    with anyio.move_on_after(60.0) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() == 100.0


async def tasks_that_sleep() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 50.0)
        tasks.start_soon(anyio.sleep, 60.0)


@pytest.mark.parametrize(
    "wait",
    [lambda: anyio.sleep(60.0), lambda: asyncio.sleep(60.0), asyncio_timeout, anyio_timeout, tasks_that_sleep],
    ids=["anyio.sleep", "asyncio.sleep", "asyncio.timeout", "anyio.move_on_after", "tasks of an actor"],
)
async def test_what_an_actor_waits_for_follows_the_virtual_clock(wait: Behaviour) -> None:
    async with deterministic_system() as kit:
        ref, results = doer(kit)
        await kit.advance(40.0)
        ref.tell(wait)
        await kit.advance(59.9)
        assert results == []
        await kit.advance(0.1)
        assert results == [None]


async def test_cancelled_timeout_never_fires() -> None:
    async with deterministic_system() as kit:
        ref, results = doer(kit)

        async def finish_in_time() -> str:
            async with asyncio.timeout(1.0):
                await asyncio.sleep(0.5)
            return "in time"

        ref.tell(finish_in_time)
        await kit.advance(0.5)
        assert results == ["in time"]
        assert kit.clock.next_due_s() is None
        await kit.advance(10.0)
        assert results == ["in time"]


async def test_the_test_itself_keeps_real_time() -> None:
    loop = asyncio.get_running_loop()
    async with deterministic_system():
        assert abs(loop.time() - time.monotonic()) < 60.0
        await asyncio.sleep(0.001)  # would never end on a clock that does not move
    assert "time" not in vars(loop)


async def test_driven_coroutine_sees_virtual_time_and_cannot_wait_for_it() -> None:
    async with deterministic_system() as kit:
        with pytest.raises(AssertionError, match="nothing moves any more"):
            await kit.drive(anyio.sleep(1.0))


async def test_leaving_does_not_wait_for_sleeping_actors() -> None:
    async with deterministic_system() as kit:
        ref, results = doer(kit)

        async def sleep_long() -> str:
            await anyio.sleep(80_000.0)
            await anyio.sleep(80_000.0)
            return "woken"

        ref.tell(sleep_long)
        await kit.run_until_idle()
    assert results == ["woken"]


@pytest.mark.parametrize(
    "in_thread",
    [
        asyncio.to_thread,
        anyio.to_thread.run_sync,
        lambda function: asyncio.get_running_loop().run_in_executor(None, function),
    ],
    ids=["asyncio.to_thread", "anyio.to_thread.run_sync", "run_in_executor"],
)
async def test_worker_threads_finish_within_one_step(in_thread: Callable[[Any], Awaitable[Any]]) -> None:
    async with deterministic_system() as kit:
        ref, results = doer(kit)
        ref.tell(lambda: in_thread(threading.get_ident))
        ref.tell(lambda: in_thread(lambda: 1 // 0))
        await kit.run_until_idle()
        assert isinstance(results[0], int)
        assert results[0] != threading.get_ident()
        assert isinstance(results[1], ZeroDivisionError)
        assert await in_thread(lambda: "the test's own") == "the test's own"


async def test_worker_thread_that_waits_for_the_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.virtual_loop.THREAD_LIMIT_S", 0.01)
    event = threading.Event()
    async with deterministic_system() as kit:
        ref, results = doer(kit)
        ref.tell(lambda: asyncio.to_thread(event.wait))
        await kit.run_until_idle()
        event.set()
    assert "wait has not returned from its worker thread" in str(results[0])


async def test_two_systems_on_one_loop_have_separate_times() -> None:
    async with deterministic_system("one") as one, deterministic_system("two") as two:
        (first, of_first), (second, of_second) = doer(one), doer(two)

        async def sleep() -> float:
            await anyio.sleep(2.0)
            return anyio.current_time()

        first.tell(sleep)
        second.tell(sleep)
        await one.run_until_idle()
        await two.advance(2.0)
        assert (of_first, of_second) == ([], [2.0])
        await one.advance(3.0)
        assert of_first == [2.0]


@pytest.mark.parametrize("move", ["step", "run_until_idle", "advance"])
async def test_step_taken_by_a_driven_coroutine_is_refused(move: str) -> None:
    async with deterministic_system() as kit:

        async def move_it_myself() -> None:
            await (kit.advance(1.0) if move == "advance" else getattr(kit, move)())

        with pytest.raises(RuntimeError, match=rf"{move}\(\) was called while drive\(\) is moving the same system"):
            await kit.drive(move_it_myself())
        assert await kit.run_until_idle() == 0


async def test_drive_inside_drive_is_refused() -> None:
    async def nothing() -> None:
        return None

    async with deterministic_system() as kit:

        async def drive_again() -> None:
            await kit.drive(nothing())

        with pytest.raises(RuntimeError, match=r"drive\(\) was called while drive\(\) is moving"):
            await kit.drive(drive_again())


async def test_step_taken_inside_an_actor_is_refused() -> None:
    async with deterministic_system() as kit:
        ref, results = doer(kit)
        ref.tell(kit.run_until_idle)
        await kit.step()
        assert "run_until_idle() was called while step() is moving the same system" in str(results[0])


async def test_step_taken_by_a_second_task_is_refused() -> None:
    async with deterministic_system() as kit:
        ref, _ = doer(kit)
        ref.tell(lambda: asyncio.sleep(0))
        errors: list[RuntimeError] = []

        async def step() -> None:
            try:
                await kit.step()
            except RuntimeError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
            tasks.start_soon(step)
        assert len(errors) == 1


async def test_advancing_the_clock_itself_while_drive_runs_is_refused() -> None:
    async with deterministic_system() as kit:
        with pytest.raises(RuntimeError, match=r"run_until_idle\(\) was called while drive\(\) is moving"):
            await kit.drive(kit.clock.advance(1.0))
