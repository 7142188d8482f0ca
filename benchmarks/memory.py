# SPDX-License-Identifier: Apache-2.0

"""``memory``: bytes on the driver for what stays, compared with a bare connection, and memory growth.

Case ``gateway``: all that an idle, ready attempt holds, from the records about its task to its connection. Case
``connection``: a connection that has proved the secret and sends nothing more. Both are what Python has allocated
(``tracemalloc``), without the kernel's buffers, compared with a bare ``asyncio.Protocol`` that has a ``bytearray``.

Case ``growth``: resident memory of the driver, and of the task, after many events through one pair, half of them down
and half up. The baseline is the same process after the first three tenths of them: by then the statistics keep as
many samples as they ever do. So 1.00 means that nothing grows.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.crowd import Crowd, running_crowd
from benchmarks.harness import Figure, Progress, interleave_async
from benchmarks.many_endpoints import ECHO, resident_bytes

IN_FLIGHT = 64
PAYLOAD = b"." * 100
LOOKS, SETTLED = 20, 6
"""How often memory is measured while events pass, and after which measurement nothing should grow any more."""


def memory(quick: bool, progress: Progress) -> list[Figure]:
    """Bytes for one gateway, for one connection, and of growth."""
    rounds, portion, events = (2, 20, 20_000) if quick else (8, 100, 1_000_000)
    tracemalloc.start()
    try:
        figures = asyncio.run(_measure_portions(rounds, portion, progress))
    finally:
        tracemalloc.stop()
    return [*figures, *asyncio.run(_measure_growth(events, progress))]


async def _measure_portions(rounds: int, portion: int, progress: Progress) -> list[Figure]:
    async with running_crowd(portion * (rounds + 1)) as crowd:  # one more for the warm-up
        bare = partial(_bytes_each, portion, partial(crowd.open_raw, portion))
        gateways = await interleave_async(
            rounds, bare, partial(_bytes_each, portion, partial(crowd.open, portion)), progress
        )
        connections = await interleave_async(rounds, bare, partial(_connections, crowd, portion), progress)
    figures = []
    for what, (samples, baseline) in (("gateway", gateways), ("connection", connections)):
        params = {"case": {"of": what}, "rounds": rounds, "portion": portion}
        params["baseline"] = "asyncio.Protocol with a bytearray, connected"
        figures.append(Figure("memory", "bytes", samples, baseline, params))
    return figures


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _bytes_each(count: int, make: Callable[[], Awaitable[None]]) -> list[float]:
    """Bytes for each of ``count``; they stay."""
    before = _traced_bytes()
    await make()
    await asyncio.sleep(0.05)  # let messages in transit settle after the last is known
    return [(_traced_bytes() - before) / count]


async def _connections(crowd: Crowd, count: int) -> list[float]:
    taken = await _bytes_each(count, partial(crowd.connect, count))
    await crowd.disconnect()
    return taken


async def _measure_growth(events: int, progress: Progress) -> list[Figure]:
    async with running_crowd(1) as crowd:
        await crowd.open(1)
        began = time.perf_counter()
        curve = [await _look(crowd)]
        for look in range(1, LOOKS + 1):
            await _echoes(crowd, events // LOOKS // 2)
            curve.append(await _look(crowd))
            progress(f"{look * events // LOOKS} events: {curve[-1]}")
        took_s = time.perf_counter() - began
    figures = []
    for side in ("driver", "task"):
        resident = [look[side] for look in curve]
        settled, end = resident[SETTLED], resident[-1]
        params = {"case": {"of": "growth", "side": side}, "events": events, "payload_bytes": len(PAYLOAD)}
        params["baseline"] = "the same process after the first three tenths of the events"
        details = {"growth_bytes": end - settled, "resident": resident, "took_s": took_s}
        figures.append(Figure("memory", "bytes", [[float(end)]], [[float(settled)]], params, details))
    return figures


async def _look(crowd: Crowd) -> dict[str, int]:
    """Resident bytes of both sides."""
    gc.collect()
    crowd.children[0].tell(do="memory")
    of_child = await crowd.children[0].hear()
    return {"driver": resident_bytes(), "task": of_child["resident"]}


async def _echoes(crowd: Crowd, count: int) -> None:
    """Send this many events down, ``IN_FLIGHT`` of them at a time, and as many up."""
    gateway, arrived = crowd.coordinator.gateways[0], crowd.coordinator.arrived
    for first in range(0, count, IN_FLIGHT):
        together = range(first, min(first + IN_FLIGHT, count))
        confirmations = [await gateway.send_event([ECHO, number, PAYLOAD]) for number in together]
        for confirmation in confirmations:
            await confirmation
        for number in together:
            event, _ = await arrived.get()
            assert event[1] == number
