"""Events between a coordinator and a subtask, beside bare frames between the same two processes.

``event_confirm``: ``send_event`` until its confirmation, which comes once the event is in the operator's mailbox.
``event_echo``: ``send_event`` until the event with which the operator's ``handle_event`` answers has reached
``handle_event_from_operator``. Both with one in flight. ``event_confirm_busy``: as the first, while the task computes
pure Python. ``event_pipelined``: time for one confirmed event where many are in flight. ``event_flood_up``: for one
event of many that a task sends in a row, each a write of its own, as far as the window lets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import Figure, Progress, interleave_async
from benchmarks.pair import Pair, running_pair
from benchmarks.raw_frames import ECHO, EVENT, FLOOD

PAYLOAD_BYTES = 100
IN_FLIGHT = 64
PAYLOAD = b"." * PAYLOAD_BYTES


async def _timed(count: int, once: Callable[[int], Awaitable[object]]) -> list[float]:
    """Microseconds of each of ``count`` calls, one after the other."""
    samples = []
    for number in range(count):
        began = time.perf_counter()
        await once(number)
        samples.append((time.perf_counter() - began) * 1e6)
    return samples


async def _confirmed(pair: Pair, number: int) -> None:
    await (await pair.gateway.send_event([EVENT, number, PAYLOAD]))


async def _echoed(pair: Pair, number: int) -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.coordinator.answers[number] = answer
    await pair.gateway.send_event([ECHO, number, PAYLOAD])
    await answer


async def _measure(
    name: str,
    once: Callable[[Pair, int], Awaitable[object]],
    raw_kind: int,
    progress: Progress,
    *,
    rounds: int,
    count: int,
    busy: bool = False,
) -> Figure:
    async with running_pair(busy=busy) as pair:
        samples, baseline = await interleave_async(
            rounds,
            lambda: _timed(count, lambda number: pair.raw.send(raw_kind, PAYLOAD)),
            lambda: _timed(count, lambda number: once(pair, number)),
            progress,
        )
    params: dict[str, Any] = {"payload_bytes": PAYLOAD_BYTES, "in_flight": 1, "events": count, "rounds": rounds}
    params |= {"busy": busy, "baseline": "asyncio.Protocol and a blocking socket, msgpack frames"}
    return Figure(name, "µs", samples, baseline, params)


def event_confirm(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` to the confirmation, one event at a time."""
    rounds, count = (2, 100) if quick else (10, 1000)
    return [asyncio.run(_measure("event_confirm", _confirmed, EVENT, progress, rounds=rounds, count=count))]


def event_echo(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` until the operator's answering event is in the coordinator's method."""
    rounds, count = (2, 100) if quick else (10, 1000)
    return [asyncio.run(_measure("event_echo", _echoed, ECHO, progress, rounds=rounds, count=count))]


def event_confirm_busy(quick: bool, progress: Progress) -> list[Figure]:
    """As ``event_confirm``, while the task's own thread computes and looks at its mailbox between records."""
    rounds, count = (2, 20) if quick else (6, 200)
    return [
        asyncio.run(_measure("event_confirm_busy", _confirmed, EVENT, progress, rounds=rounds, count=count, busy=True))
    ]


async def _windows(send: Callable[[int], Awaitable[Any]], events: int, batches: int) -> list[float]:
    """Microseconds for one event, averaged over each batch; ``IN_FLIGHT`` are unanswered at any time."""
    samples = []
    for _ in range(batches):
        began = time.perf_counter()
        window = [await send(number) for number in range(IN_FLIGHT)]
        for number in range(IN_FLIGHT, events):
            await window[number % IN_FLIGHT]
            window[number % IN_FLIGHT] = await send(number)
        for answer in window:
            await answer
        samples.append((time.perf_counter() - began) / events * 1e6)
    return samples


async def _floods(send: Callable[[], Awaitable[object]], events: int, batches: int) -> list[float]:
    samples = []
    for _ in range(batches):
        began = time.perf_counter()
        await send()
        samples.append((time.perf_counter() - began) / events * 1e6)
    return samples


async def _measure_flood(progress: Progress, rounds: int, events: int, batches: int) -> Figure:
    async with running_pair() as pair:

        async def subject() -> None:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pair.coordinator.answers[0] = answer
            await pair.gateway.send_event([FLOOD, 0, PAYLOAD, events])
            await answer

        samples, baseline = await interleave_async(
            rounds,
            lambda: _floods(lambda: pair.raw.send_flood(events, PAYLOAD), events, batches),
            lambda: _floods(subject, events, batches),
            progress,
        )
    params = {"payload_bytes": PAYLOAD_BYTES, "events": events, "rounds": rounds}
    return Figure("event_flood_up", "µs", samples, baseline, {**params, "baseline": "as event_confirm"})


def event_flood_up(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one event from the task to the coordinator's method, many in a row."""
    rounds, events, batches = (2, 256, 2) if quick else (8, 4096, 2)
    return [asyncio.run(_measure_flood(progress, rounds, events, batches))]


async def _measure_pipelined(progress: Progress, rounds: int, events: int, batches: int) -> Figure:
    async with running_pair() as pair:

        async def raw(number: int) -> Any:
            return pair.raw.send(EVENT, PAYLOAD)

        async def subject(number: int) -> Any:
            return await pair.gateway.send_event([EVENT, number, PAYLOAD])

        samples, baseline = await interleave_async(
            rounds, lambda: _windows(raw, events, batches), lambda: _windows(subject, events, batches), progress
        )
    params = {"payload_bytes": PAYLOAD_BYTES, "in_flight": IN_FLIGHT, "events": events, "rounds": rounds}
    return Figure("event_pipelined", "µs", samples, baseline, {**params, "baseline": "as event_confirm"})


def event_pipelined(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one confirmed event with 64 in flight: the inverse of the throughput of one gateway."""
    rounds, events, batches = (2, 256, 2) if quick else (8, 2048, 4)
    return [asyncio.run(_measure_pipelined(progress, rounds, events, batches))]
