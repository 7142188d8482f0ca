# SPDX-License-Identifier: Apache-2.0

"""Checkpoints of many subtasks, compared with bare frames to the same number of connections between the same
processes.

``checkpoint``: milliseconds from the trigger until the coordinator and every subtask know that it is complete. The
raw baseline is, twice, a frame to each connection and an answer from each: the cost of barrier and acknowledgement,
completion and confirmation alone. Headgate's checkpoint has one more such round, in which each subtask closes its
valve.

``checkpoint_hold``: milliseconds that an event takes which is sent at a random moment of a checkpoint, compared with
the same event without a checkpoint; down until its confirmation, up until the coordinator's method. ``details`` has
the difference.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.crowd import Crowd, running_crowd
from benchmarks.harness import Figure, Progress, flatten, interleave_async, percentile
from benchmarks.many_endpoints import STATE, TAKE

PLAN = {1: (6, 20), 16: (6, 10), 64: (6, 5), 256: (6, 4), 1000: (4, 2), 4000: (3, 1)}
"""For each number of subtasks, the number of rounds and of checkpoints per round."""
QUICK_PLAN = {1: (2, 2), 16: (2, 2)}
FLINK_P50_MS = {1: 3.0, 16: 8.0, 64: 30.0, 256: 144.0}
"""The times of Flink 2.3.0's own coordinators, measured elsewhere: for comparison, not as the baseline."""
TIMELINE_SUBTASKS = 256
HOLD_SUBTASKS, HOLD_EVENTS = 256, 16
BASELINE = "asyncio.Protocol and bare sockets, msgpack frames, twice there and back"


def checkpoint(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the trigger until both sides know of the end, for each number of subtasks."""
    plan = QUICK_PLAN if quick else PLAN
    timelined = TIMELINE_SUBTASKS if TIMELINE_SUBTASKS in plan else max(plan)
    return [
        asyncio.run(_measure(subtasks, rounds, count, subtasks == timelined, progress))
        for subtasks, (rounds, count) in plan.items()
    ]


async def _measure(subtasks: int, rounds: int, count: int, timelined: bool, progress: Progress) -> Figure:
    progress(f"{subtasks} subtasks: connecting")
    async with running_crowd(subtasks) as crowd:
        await crowd.open_raw(subtasks)
        await crowd.open(subtasks)
        samples, baseline = await interleave_async(
            rounds,
            lambda: timed(count, lambda: _raw_checkpoint(crowd)),
            lambda: timed(count, lambda: checkpoint_ms(crowd)),
            lambda text: progress(f"{subtasks} subtasks: {text}"),
        )
        details = {"timeline": await _timeline(crowd)} if timelined else {}
    params = {"case": {"subtasks": subtasks}, "rounds": rounds, "checkpoints": count, "processes": len(crowd.children)}
    params |= {"state_bytes": len(STATE), "storage": "memory", "baseline": BASELINE}
    if subtasks in FLINK_P50_MS:
        params["flink_p50_ms"] = FLINK_P50_MS[subtasks]
    return Figure("checkpoint", "ms", samples, baseline, params, details)


async def timed(count: int, once: Callable[[], Awaitable[float]]) -> list[float]:
    return [await once() for _ in range(count)]


async def checkpoint_ms(crowd: Crowd) -> float:
    taken = await crowd.checkpoint()
    await crowd.settle()
    return taken.took_ms


async def _raw_checkpoint(crowd: Crowd) -> float:
    began = time.monotonic_ns()
    await crowd.raw.ask_all(1)
    await crowd.raw.ask_all(2)
    return (time.monotonic_ns() - began) / 1e6


async def _timeline(crowd: Crowd) -> dict[str, Any]:
    """One checkpoint, step by step, in milliseconds since its trigger.

    ``closed``, ``barrier`` and ``acknowledged`` are steps of the subtask. ``reopened`` is when it receives the
    confirmation of its acknowledgement; from then on its gateway is open again. ``completed`` is when the subtask is
    told of the end, and without a subtask when the coordinator is. ``cut``: the coordinator's snapshot; ``stored``:
    it is in the storage.
    """
    for child in crowd.children:
        child.tell(do="record")
    await crowd.settle()
    taken = await crowd.checkpoint()
    moments: list[tuple[str, int | None, int]] = [
        ("cut", None, crowd.coordinator.cut_ns),
        ("stored", None, crowd.runtime.storage.stored_ns),
        ("completed", None, crowd.coordinator.completed_ns),
        *taken.moments,
    ]
    moments.sort(key=lambda moment: moment[2])
    return {
        "events": [
            {"what": what, "subtask": subtask, "ms": round((at - taken.began_ns) / 1e6, 3)}
            for what, subtask, at in moments
        ]
    }


def checkpoint_hold(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of an event during a checkpoint, compared with the same event without one; both directions."""
    return asyncio.run(_measure_holds(quick, progress))


async def _measure_holds(quick: bool, progress: Progress) -> list[Figure]:
    subtasks, rounds, count = (16, 2, 1) if quick else (HOLD_SUBTASKS, 10, 3)
    progress(f"{subtasks} subtasks: connecting")
    async with running_crowd(subtasks) as crowd:
        await crowd.open(subtasks)
        await checkpoint_ms(crowd)
        figures = []
        for direction in ("down", "up"):
            holds = _Holds(crowd, direction)
            samples, baseline = await interleave_async(
                rounds, partial(_batches, count, holds.without), partial(_batches, count, holds.during), progress
            )
            params = {"case": {"direction": direction}, "subtasks": subtasks, "rounds": rounds, "checkpoints": count}
            params |= {"events": HOLD_EVENTS, "baseline": "the same event without a checkpoint"}
            details = _added(flatten(samples), flatten(baseline), holds.behind_the_cut)
            figures.append(Figure("checkpoint_hold", "ms", samples, baseline, params, details))
    return figures


def _added(samples: list[float], baseline: list[float], behind_the_cut: list[float]) -> dict[str, Any]:
    """The hold: how much longer an event takes, in milliseconds; also for the events sent after the cut alone."""
    usual = median(baseline)
    added: dict[str, Any] = {"added_p50_ms": median(samples) - usual, "added_p99_ms": percentile(samples, 0.99) - usual}
    if behind_the_cut:
        added["behind_the_cut"] = len(behind_the_cut)
        added["behind_the_cut_added_p50_ms"] = median(behind_the_cut) - usual
    return added


async def _batches(count: int, once: Callable[[], Awaitable[list[float]]]) -> list[float]:
    return [sample for _ in range(count) for sample in await once()]


Sent = list[tuple[int, float]]
"""When each event was sent, in monotonic nanoseconds, and how many milliseconds it took."""


class _Holds:
    """Events to (``down``) or from (``up``) random subtasks, at random moments within the time of the last checkpoint.

    ``behind_the_cut``: of the events during a checkpoint, those that were sent after its cut, in milliseconds.
    """

    def __init__(self, crowd: Crowd, direction: str) -> None:
        self._crowd = crowd
        self._span_s = 0.02
        self._send = self._down if direction == "down" else self._up
        self._dice = random.Random(1)
        self.behind_the_cut: list[float] = []

    async def without(self) -> list[float]:
        return [took_ms for _, took_ms in await self._send()]

    async def during(self) -> list[float]:
        """Times of the events sent before the checkpoint had ended. If there were none, another checkpoint is taken."""
        met: Sent = []
        while not met:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send())
                checkpointing = group.create_task(self._crowd.checkpoint())
            taken = checkpointing.result()
            met = [event for event in sending.result() if event[0] < taken.ended_ns]
            self._span_s = taken.took_ms / 1e3
            await self._crowd.settle()
        cut = self._crowd.coordinator.cut_ns
        self.behind_the_cut += [took_ms for at, took_ms in met if at > cut]
        return [took_ms for _, took_ms in met]

    async def _down(self) -> Sent:
        """Time until the confirmation."""
        async with asyncio.TaskGroup() as group:
            events = [group.create_task(self._one_down(*moment)) for moment in self._moments()]
        return [event.result() for event in events]

    async def _one_down(self, delay_s: float, subtask: int) -> tuple[int, float]:
        await asyncio.sleep(delay_s)
        began = time.monotonic_ns()
        await (await self._crowd.coordinator.gateways[subtask].send_event([TAKE]))
        return began, (time.monotonic_ns() - began) / 1e6

    async def _up(self) -> Sent:
        """Time until the coordinator's method."""
        children = self._crowd.children
        moments = self._moments()
        for place, child in enumerate(children):
            child.tell(do="send", at=[moment for moment in moments if moment[1] % len(children) == place])
        arrived = [await self._crowd.coordinator.arrived.get() for _ in moments]
        return [(event[1], (at - event[1]) / 1e6) for event, at in arrived]

    def _moments(self) -> list[tuple[float, int]]:
        subtasks = len(self._crowd.coordinator.gateways)
        return [(self._dice.uniform(0, self._span_s), self._dice.randrange(subtasks)) for _ in range(HOLD_EVENTS)]
