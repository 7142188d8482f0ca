# SPDX-License-Identifier: Apache-2.0

"""``actors_10k``: ten thousand idle actors in one event loop, compared with as many asyncio tasks with a queue each.

Three cases. ``created``: microseconds for each, from the call until all of them have taken their first step and wait
for a message. ``told``: microseconds for each when every one of them gets one message, until the last is handled.
``memory``: bytes of Python's allocator for each that waits.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from actors import Actor, ActorContext, ActorSystem
from benchmarks.harness import Figure, Progress, interleave

ACTORS = 10_000
TIMES_TOLD = 10
Tell = Callable[[], None]
"""Sends one message to each."""


class _Countdown:
    """``reached`` resolves at the last of ``count`` calls."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.begin()

    def begin(self) -> None:
        self._left = self._count
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self.reached.set_result(None)


class _Counted(Actor[int]):
    def __init__(self, countdown: _Countdown) -> None:
        self._countdown = countdown

    async def started(self, context: ActorContext[int]) -> None:
        self._countdown.one()

    async def receive(self, context: ActorContext[int], message: int) -> None:
        self._countdown.one()


@asynccontextmanager
async def _actors(count: int, countdown: _Countdown) -> AsyncIterator[Tell]:
    async with ActorSystem("bench") as system:
        refs = [system.spawn(lambda: _Counted(countdown)) for _ in range(count)]

        def tell() -> None:
            for ref in refs:
                ref.tell(0)

        yield tell


@asynccontextmanager
async def _tasks(count: int, countdown: _Countdown) -> AsyncIterator[Tell]:
    async def work(queue: asyncio.Queue[int]) -> None:
        countdown.one()
        while True:
            await queue.get()
            countdown.one()

    loop = asyncio.get_running_loop()
    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(count)]
    tasks = [loop.create_task(work(queue)) for queue in queues]

    def tell() -> None:
        for queue in queues:
            queue.put_nowait(0)

    try:
        yield tell
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_Population = Callable[[int, _Countdown], AbstractAsyncContextManager[Tell]]
_Measured = Callable[[_Population, int], Coroutine[None, None, list[float]]]


async def _created(population: _Population, count: int) -> list[float]:
    countdown = _Countdown(count)
    gc.collect()
    began = time.perf_counter()
    async with population(count, countdown):
        await countdown.reached
        return [(time.perf_counter() - began) / count * 1e6]


async def _told(population: _Population, count: int) -> list[float]:
    countdown = _Countdown(count)
    samples = []
    async with population(count, countdown) as tell:
        await countdown.reached
        gc.collect()
        for _ in range(TIMES_TOLD):
            countdown.begin()
            began = time.perf_counter()
            tell()
            await countdown.reached
            samples.append((time.perf_counter() - began) / count * 1e6)
            await asyncio.sleep(0)  # the last ones wait for their next message again
    return samples


async def _memory(population: _Population, count: int) -> list[float]:
    countdown = _Countdown(count)
    gc.collect()
    tracemalloc.start()
    try:
        async with population(count, countdown):
            await countdown.reached
            await asyncio.sleep(0)
            gc.collect()
            return [tracemalloc.get_traced_memory()[0] / count]
    finally:
        tracemalloc.stop()


def actors_10k(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds to create one and to send it a message, bytes to keep it; ten thousand at a time."""
    count = 500 if quick else ACTORS

    def figure(case: str, unit: str, measure: _Measured, rounds: int) -> Figure:
        samples, baseline = interleave(
            2 if quick else rounds,
            lambda: asyncio.run(measure(_tasks, count)),
            lambda: asyncio.run(measure(_actors, count)),
            lambda text: progress(f"{case}, {text}"),
        )
        params = {"case": {"what": case}, "actors": count, "baseline": "asyncio tasks, each with an asyncio.Queue"}
        return Figure("actors_10k", unit, samples, baseline, params)

    return [
        figure("created", "µs", _created, 7),
        figure("told", "µs", _told, 4),
        figure("memory", "bytes", _memory, 2),
    ]
