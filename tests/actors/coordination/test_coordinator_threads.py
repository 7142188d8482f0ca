# SPDX-License-Identifier: Apache-2.0

"""The coordinator's context and real threads (H9)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread

from actors import ActorSystem
from actors.coordination import BarrierTrackerActor, OperatorConfig, OperatorPorts, OperatorStatistics, parts_of
from actors.coordination.engine.barrier_tracker import UNBOUNDED
from actors.coordination.engine.messages import StartOperator
from tests.actors.coordination.operator_world import RecordingCoordinator


async def _nothing(*args: Any) -> None:
    return None


@asynccontextmanager
async def started(coordinator: RecordingCoordinator) -> AsyncIterator[None]:
    ports = OperatorPorts(
        lambda _: None, lambda *_: None, lambda _: None, _nothing, _nothing, lambda _: None, _nothing, lambda: 1
    )
    async with ActorSystem() as system:
        tracker = system.spawn(
            lambda: BarrierTrackerActor(
                parts_of(coordinator), OperatorConfig("words", 1), ports, OperatorStatistics("words")
            ),
            name="operator",
            mailbox=UNBOUNDED,
        )
        await tracker.ask(StartOperator, timeout_s=60.0)
        yield


async def test_blocking_work_runs_on_a_worker_thread_and_its_handler_on_the_loop() -> None:  # H9
    threads: list[int] = []
    done = anyio.Event()

    async def take(result: int | None, error: Exception | None) -> None:
        assert error is None
        assert result is not None
        threads.extend([result, threading.get_ident()])
        done.set()

    coordinator = RecordingCoordinator()
    async with started(coordinator):
        coordinator.context.call_async(threading.get_ident, handler=take)
        with anyio.fail_after(60.0):
            await done.wait()
    assert threads[0] != threading.get_ident()
    assert threads[1] == threading.get_ident()


async def test_any_thread_may_call_the_coordinator_in_the_order_of_its_calls() -> None:  # H9
    heard: list[tuple[int, int]] = []
    done = anyio.Event()

    async def take(number: int) -> None:
        heard.append((number, threading.get_ident()))
        if number == 9:
            done.set()

    def call_often() -> None:
        for number in range(10):
            coordinator.context.call_soon_threadsafe(lambda number=number: take(number))  # type: ignore[misc]

    coordinator = RecordingCoordinator()
    async with started(coordinator):
        await anyio.to_thread.run_sync(call_often)
        with anyio.fail_after(60.0):
            await done.wait()
    assert heard == [(number, threading.get_ident()) for number in range(10)]


async def test_a_call_from_a_thread_after_the_end_is_dropped() -> None:  # H9
    coordinator = RecordingCoordinator()
    async with started(coordinator):
        pass

    async def too_late() -> None:
        coordinator.calls.append(("too late",))

    await anyio.to_thread.run_sync(coordinator.context.call_soon_threadsafe, too_late)
    await anyio.lowlevel.checkpoint()
    assert coordinator.calls[-1] == ("close",)


def test_a_call_from_a_thread_after_the_loop_is_gone_is_dropped() -> None:  # H9
    coordinator = RecordingCoordinator()

    async def live() -> None:
        async with started(coordinator):
            pass

    anyio.run(live)
    coordinator.context.call_soon_threadsafe(_nothing)
    assert coordinator.calls[-1] == ("close",)
