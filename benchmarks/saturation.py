# SPDX-License-Identifier: Apache-2.0

"""How much one event loop can do, and what is its limit: many subtasks of one operator, without Spark.

Each figure is in microseconds, once of the clock (``time`` is "wall") and once of processor time of the loop's thread
("processor"). The second is what the loop can do if it has a core to itself, and depends less on what else runs on the
machine: its inverse is where the loop saturates. ``details`` has that rate, and the share of the time for which the
loop was busy. If that is far below 1, other processes limited the wall time.

Case "events": one event of many that 64 subtasks send to the coordinator's method as fast as their windows allow, on
asyncio's loop and, if it is installed, on uvloop's. The baseline is one bare frame of the same size, over as many
connections between the same processes, on the same loop.

Case "checkpoint": one subtask of checkpoints that follow each other without a pause, with 1,000 and 4,000 subtasks in
both modes (``crowd.MODES``). The baseline is, twice, a frame to each bare connection and an answer from each, divided
by the connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

from benchmarks.checkpoint import BASELINE
from benchmarks.crowd import MODES, TIMEOUT_S, CrowdCoordinator, running_crowd
from benchmarks.harness import Figure, Progress, Rounds, flatten, interleave_async

SUBTASKS = 64
PAYLOAD_BYTES = 100
PORTIONS = 2
"""The loops take turns so many times, each with new processes."""
CHECKPOINT_PLAN = {1000: (4, 3), 4000: (3, 2)}
"""For each number of subtasks, the number of rounds and of checkpoints in a row."""
BARE_FRAMES = "asyncio.Protocol on the same loop and bare sockets, msgpack frames, a write for each"


class _Timed:
    """A step of ``units`` equal parts, and what each part has taken on the running loop, in microseconds."""

    def __init__(self, units: int, step: Callable[[], Awaitable[None]]) -> None:
        self._units = units
        self._step = step
        self.wall: list[list[float]] = []
        self.processor: list[list[float]] = []

    async def __call__(self) -> list[float]:
        began, spent = time.perf_counter(), time.thread_time()
        async with asyncio.timeout(TIMEOUT_S):
            await self._step()
        self.processor.append([(time.thread_time() - spent) / self._units * 1e6])
        self.wall.append([(time.perf_counter() - began) / self._units * 1e6])
        return self.wall[-1]

    def without_warm_up(self) -> dict[str, Rounds]:
        return {"wall": self.wall[1:], "processor": self.processor[1:]}


Both = tuple[dict[str, Rounds], dict[str, Rounds]]
"""The rounds of the subject and of its baseline, each in both kinds of time."""


async def _alternate(rounds: int, bare: _Timed, ours: _Timed, progress: Progress) -> Both:
    await interleave_async(rounds, bare, ours, progress)
    return ours.without_warm_up(), bare.without_warm_up()


def _figures(case: dict[str, Any], both: Both, params: dict[str, Any]) -> list[Figure]:
    samples, baseline = both
    per_s = 1e6 / median(flatten(samples["processor"]))
    busy = median(flatten(samples["processor"])) / median(flatten(samples["wall"]))
    details = {"per_s_of_processor_time": round(per_s), "busy": round(busy, 2)}
    return [
        Figure("saturation", "µs", samples[kind], baseline[kind], {"case": {**case, "time": kind}, **params}, details)
        for kind in samples
    ]


class _Counting(CrowdCoordinator):
    """Counts the events that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._missing = 0
        self._all_arrived = asyncio.Event()

    def expect(self, events: int) -> asyncio.Event:
        """Set when so many more events have arrived."""
        self._missing = events
        self._all_arrived.clear()
        return self._all_arrived

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._missing -= 1
        if not self._missing:
            self._all_arrived.set()


async def _measure_events(subtasks: int, rounds: int, each: int, progress: Progress) -> Both:
    coordinator = _Counting()
    async with running_crowd(subtasks, coordinator=coordinator) as crowd:
        await crowd.open_raw(subtasks)
        await crowd.open(subtasks)

        async def bare() -> None:
            all_there = crowd.raw.expect(subtasks * each)
            for child in crowd.children:
                child.tell(do="raw_flood", events=each, size_bytes=PAYLOAD_BYTES)
            await all_there

        async def ours() -> None:
            all_there = coordinator.expect(subtasks * each)
            for child in crowd.children:
                child.tell(do="flood", events=each, size_bytes=PAYLOAD_BYTES)
            await all_there.wait()

        return await _alternate(rounds, _Timed(subtasks * each, bare), _Timed(subtasks * each, ours), progress)


def _loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if find_spec("uvloop") is not None:
        import uvloop

        loops["uvloop"] = uvloop.new_event_loop
    return loops


def _say(progress: Progress, prefix: str, text: str) -> None:
    progress(f"{prefix}: {text}")


def _events(quick: bool, progress: Progress) -> list[Figure]:
    subtasks, rounds, each = (4, 1, 64) if quick else (SUBTASKS, 4, 1024)
    loops = _loops()
    merged: dict[str, Both] = {}
    for portion in range(PORTIONS):
        for name in sorted(loops, reverse=bool(portion % 2)):
            say = partial(_say, progress, f"events on {name}")
            with asyncio.Runner(loop_factory=loops[name]) as runner:
                both = runner.run(_measure_events(subtasks, rounds, each, say))
            if name in merged:
                for earlier, later in zip(merged[name], both, strict=True):
                    for kind, of_kind in later.items():
                        earlier[kind] = [*earlier[kind], *of_kind]
            else:
                merged[name] = both
    params = {"subtasks": subtasks, "payload_bytes": PAYLOAD_BYTES, "events": subtasks * each, "baseline": BARE_FRAMES}
    return [
        figure
        for name, both in sorted(merged.items())
        for figure in _figures({"of": "events", "loop": name}, both, params)
    ]


async def _measure_checkpoints(mode: str, subtasks: int, rounds: int, count: int, progress: Progress) -> Both:
    async with running_crowd(subtasks, checkpoint=MODES[mode]) as crowd:
        await crowd.open_raw(subtasks)
        await crowd.open(subtasks)

        async def bare() -> None:
            for number in range(2 * count):
                await crowd.raw.ask_all(number)

        async def ours() -> None:
            for _ in range(count):
                await crowd.checkpoint()

        return await _alternate(rounds, _Timed(subtasks * count, bare), _Timed(subtasks * count, ours), progress)


def _checkpoints(quick: bool, progress: Progress) -> list[Figure]:
    figures = []
    for subtasks, (rounds, count) in ({16: (1, 2)} if quick else CHECKPOINT_PLAN).items():
        for mode in MODES:
            say = partial(_say, progress, f"checkpoints of {subtasks}, {mode}")
            both = asyncio.run(_measure_checkpoints(mode, subtasks, rounds, count, say))
            case = {"of": "checkpoint", "subtasks": subtasks, "mode": mode}
            figures += _figures(case, both, {"checkpoints": count, "storage": "memory", "baseline": BASELINE})
    return figures


def saturation(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds of one event, and of one subtask of a checkpoint, at the full rate of one loop."""
    return _events(quick, progress) + _checkpoints(quick, progress)
