# SPDX-License-Identifier: Apache-2.0

"""``local_tell`` and ``local_ask``: messages inside one event loop, compared with a bare queue and a bare future."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from actors import Actor, ActorContext, ActorSystem, MailboxConfig, Reply
from benchmarks.harness import Figure, Progress, interleave


@dataclass(frozen=True, slots=True)
class _Last:
    reply_to: Reply[int]


class _Sink(Actor[int | _Last]):
    def __init__(self) -> None:
        self.count = 0

    async def receive(self, context: ActorContext[int | _Last], message: int | _Last) -> None:
        if isinstance(message, _Last):
            message.reply_to.answer(self.count)
        else:
            self.count += 1


async def _tell(messages: int) -> float:
    async with ActorSystem("bench") as system:
        sink = system.spawn(_Sink, name="sink", mailbox=MailboxConfig(capacity=None))
        began = time.perf_counter()
        for number in range(messages):
            sink.tell(number)
            if number % 1000 == 999:
                await asyncio.sleep(0)
        count = await sink.ask(_Last, timeout_s=60)
        took = time.perf_counter() - began
    assert count == messages
    return took


async def _queue(messages: int) -> float:
    queue: asyncio.Queue[int | None] = asyncio.Queue()

    async def consume() -> int:
        count = 0
        while await queue.get() is not None:
            count += 1
        return count

    async with asyncio.TaskGroup() as group:
        consumer = group.create_task(consume())
        began = time.perf_counter()
        for number in range(messages):
            queue.put_nowait(number)
            if number % 1000 == 999:
                await asyncio.sleep(0)
        queue.put_nowait(None)
        assert await consumer == messages
        return time.perf_counter() - began


def local_tell(quick: bool, progress: Progress) -> list[Figure]:
    """Nanoseconds for one message, sent and received, with a turn of the loop every thousand."""
    messages = 20_000 if quick else 200_000

    def subject() -> list[float]:
        return [asyncio.run(_tell(messages)) / messages * 1e9]

    def baseline() -> list[float]:
        return [asyncio.run(_queue(messages)) / messages * 1e9]

    samples, raw = interleave(3 if quick else 9, baseline, subject, progress)
    return [Figure("local_tell", "ns", samples, raw, {"messages": messages, "baseline": "asyncio.Queue"})]


async def _ask(rounds: int) -> list[float]:
    async with ActorSystem("bench") as system:
        sink = system.spawn(_Sink, name="sink")
        samples = []
        for _ in range(rounds):
            began = time.perf_counter()
            await sink.ask(_Last, timeout_s=60)
            samples.append((time.perf_counter() - began) * 1e6)
    return samples


async def _future(rounds: int) -> list[float]:
    queue: asyncio.Queue[asyncio.Future[int] | None] = asyncio.Queue()

    async def answer() -> None:
        while (future := await queue.get()) is not None:
            future.set_result(0)

    samples = []
    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        loop = asyncio.get_running_loop()
        for _ in range(rounds):
            began = time.perf_counter()
            future = loop.create_future()
            queue.put_nowait(future)
            await future
            samples.append((time.perf_counter() - began) * 1e6)
        queue.put_nowait(None)
    return samples


def local_ask(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one question and its answer."""
    rounds = 2_000 if quick else 20_000
    samples, raw = interleave(
        3 if quick else 5, lambda: asyncio.run(_future(rounds)), lambda: asyncio.run(_ask(rounds)), progress
    )
    return [Figure("local_ask", "µs", samples, raw, {"asks": rounds, "baseline": "asyncio.Queue and a future"})]
