# SPDX-License-Identifier: Apache-2.0

"""``status``: milliseconds that ``status()`` takes with many live subtasks.

The baseline makes as many ``AttemptStatus`` values from constants, which is the least that it can cost. ``details`` has
the longest time for which the event loop could not do anything else meanwhile, from a callback in each of its turns.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.crowd import Crowd, running_crowd
from benchmarks.harness import Figure, Progress, interleave_async, percentile
from spark_bridge.observability.status import AttemptStatus

PLAN = {1000: (10, 10), 10_000: (10, 5)}
"""For each number of subtasks, the number of rounds and of statuses per round."""
QUICK_PLAN = {100: (2, 2)}
PORTION = 1000
BASELINE = "as many AttemptStatus values, from constants"


def status(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of one status, for each number of subtasks."""
    plan = QUICK_PLAN if quick else PLAN
    return [asyncio.run(_measure(subtasks, *counts, progress)) for subtasks, counts in plan.items()]


async def _measure(subtasks: int, rounds: int, count: int, progress: Progress) -> Figure:
    progress(f"{subtasks} subtasks: connecting")
    async with running_crowd(subtasks, bare_too=False, processes=4) as crowd:
        for opened in range(0, subtasks, PORTION):
            await crowd.open(min(PORTION, subtasks - opened))
        turns: list[float] = []
        samples, baseline = await interleave_async(
            rounds,
            lambda: _raw(subtasks, count),
            lambda: _statuses(crowd, count, turns),
            lambda text: progress(f"{subtasks} subtasks: {text}"),
        )
    params = {"case": {"subtasks": subtasks}, "rounds": rounds, "statuses": count, "baseline": BASELINE}
    details = {"longest_turn_ms": {"p50": percentile(turns, 0.5), "max": max(turns)}}
    return Figure("status", "ms", samples, baseline, params, details)


async def _raw(subtasks: int, count: int) -> list[float]:
    async def once() -> float:
        began = time.perf_counter()
        made = [
            AttemptStatus(subtask, 0, 1, "ready", 1.0, "", "host", "1", True, True, 0.1, 0, None, 0, (), 0, 0, None)
            for subtask in range(subtasks)
        ]
        assert made
        return (time.perf_counter() - began) * 1e3

    return [await once() for _ in range(count)]


async def _statuses(crowd: Crowd, count: int, turns: list[float]) -> list[float]:
    """Take statuses, and add the longest turn of the loop during each of them to ``turns``."""
    loop = asyncio.get_running_loop()
    longest, last, running = 0.0, 0.0, True

    def turn() -> None:
        nonlocal longest, last
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if running:
            loop.call_soon(turn)

    samples = []
    for _ in range(count):
        longest, last, running = 0.0, time.perf_counter(), True
        loop.call_soon(turn)
        began = time.perf_counter()
        taken = await crowd.runtime.status()
        samples.append((time.perf_counter() - began) * 1e3)
        running = False
        await asyncio.sleep(0)
        turns.append(longest * 1e3)
        assert taken.operators["bench"].ready
    return samples
