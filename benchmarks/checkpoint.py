# SPDX-License-Identifier: Apache-2.0

"""Checkpoints of many subtasks, compared with bare frames to the same number of connections between the same
processes.

``checkpoint``: milliseconds from the trigger until the coordinator and every subtask know that it is complete. The
raw baseline is, twice, a frame to each connection and an answer from each: the cost of barrier and acknowledgement,
completion and confirmation alone. Headgate's checkpoint has one more such round, in which each subtask closes its
valve. ``checkpoint_unheld`` has not (``hold_events=False``).

``checkpoint_hold``: milliseconds that an event takes which meets a checkpoint, compared with the same event without
one; down until its confirmation, up until the coordinator's method. ``details`` has the difference. At the moment
"closing", which is the worst, it is sent as soon as the gateway closes (down: the coordinator's first step after its
snapshot) or as soon as the subtask's valve closes (up). At "random", it is sent at any moment of a checkpoint. In mode
"unheld" nothing closes: there, "closing" up is right after the subtask's snapshot.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.crowd import MODES, Crowd, running_crowd
from benchmarks.harness import Figure, Progress, flatten, interleave_async, percentile
from benchmarks.many_endpoints import STATE, TAKE

PLAN = {1: (6, 20), 16: (6, 10), 64: (6, 5), 256: (6, 4), 1000: (4, 2), 4000: (3, 1)}
"""For each number of subtasks, the number of rounds and of checkpoints per round."""
QUICK_PLAN = {1: (2, 2), 16: (2, 2)}
FLINK_P50_MS = {1: 3.0, 16: 8.0, 64: 30.0, 256: 144.0}
"""The times of Flink 2.3.0's own coordinators, measured elsewhere: for comparison, not as the baseline."""
TIMELINE_SUBTASKS = 256
HOLD_PLAN = {16: 12, 256: 10, 1000: 6}
"""For each number of subtasks, the number of rounds in which events are sent at the closing."""
HOLD_SUBTASKS, HOLD_EVENTS = 256, 16
"""The number of subtasks for random moments; of events in one checkpoint, each to or from another subtask."""
_WAYS = ("down", "up")
FLINK_HOLD_MS = {256: 113.0}
"""The wait of an event that was sent as soon as its gateway closed, in Flink 2.3.0, measured elsewhere."""
BASELINE = "asyncio.Protocol and bare sockets, msgpack frames, twice there and back"


def checkpoint(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the trigger until both sides know of the end, for each number of subtasks."""
    plan = QUICK_PLAN if quick else PLAN
    timelined = TIMELINE_SUBTASKS if TIMELINE_SUBTASKS in plan else max(plan)
    return [
        asyncio.run(_measure("checkpoint", "aligned", subtasks, rounds, count, progress, timelined))
        for subtasks, (rounds, count) in plan.items()
    ]


def checkpoint_unheld(quick: bool, progress: Progress) -> list[Figure]:
    """The same with ``hold_events=False``: no subtask closes, so there is one round less."""
    plan = QUICK_PLAN if quick else PLAN
    return [
        asyncio.run(_measure("checkpoint_unheld", "unheld", subtasks, rounds, count, progress))
        for subtasks, (rounds, count) in plan.items()
    ]


async def _measure(
    name: str, mode: str, subtasks: int, rounds: int, count: int, progress: Progress, timelined: int = 0
) -> Figure:
    progress(f"{subtasks} subtasks: connecting")
    async with running_crowd(subtasks, checkpoint=MODES[mode]) as crowd:
        await crowd.open_raw(subtasks)
        await crowd.open(subtasks)
        samples, baseline = await interleave_async(
            rounds,
            lambda: timed(count, lambda: raw_checkpoint_ms(crowd)),
            lambda: timed(count, lambda: checkpoint_ms(crowd)),
            lambda text: progress(f"{subtasks} subtasks: {text}"),
        )
        details = {"timeline": await _timeline(crowd)} if subtasks == timelined else {}
    params = {"case": {"subtasks": subtasks}, "rounds": rounds, "checkpoints": count, "processes": len(crowd.children)}
    params |= {"state_bytes": len(STATE), "storage": "memory", "baseline": BASELINE}
    if subtasks in FLINK_P50_MS:
        params["flink_p50_ms"] = FLINK_P50_MS[subtasks]
    return Figure(name, "ms", samples, baseline, params, details)


async def timed(count: int, once: Callable[[], Awaitable[float]]) -> list[float]:
    return [await once() for _ in range(count)]


async def checkpoint_ms(crowd: Crowd) -> float:
    taken = await crowd.checkpoint()
    await crowd.settle()
    return taken.took_ms


async def raw_checkpoint_ms(crowd: Crowd) -> float:
    began = time.monotonic_ns()
    await crowd.raw.ask_all(1)
    await crowd.raw.ask_all(2)
    return (time.monotonic_ns() - began) / 1e6


async def _timeline(crowd: Crowd) -> dict[str, Any]:
    """One checkpoint, step by step, in milliseconds since its trigger.

    ``closed``, ``barrier`` and ``acknowledged`` are steps of the subtask. ``reopened`` is when it receives the
    confirmation of its acknowledgement; from then on its gateway is open again. ``completed`` is when the subtask
    learns of the end, and without a subtask when the coordinator is. ``cut``: the coordinator's snapshot; ``stored``:
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
    figures = []
    plan = {16: 2} if quick else HOLD_PLAN
    for mode, subtasks in itertools.product(MODES, plan):
        progress(f"{mode}: {subtasks} subtasks: connecting")
        async with running_crowd(subtasks, checkpoint=MODES[mode]) as crowd:
            await crowd.open(subtasks)
            await checkpoint_ms(crowd)
            random_too = quick or subtasks == HOLD_SUBTASKS
            for moment, direction in itertools.product(("closing", "random") if random_too else ("closing",), _WAYS):
                case = {"mode": mode, "moment": moment, "direction": direction, "subtasks": subtasks}
                say = partial(_say, progress, f"{mode}, {moment}, {subtasks} subtasks, {direction}: ")
                figures.append(await _hold(crowd, case, plan[subtasks], 1 if quick else 3, say))
    return figures


def _say(progress: Progress, prefix: str, text: str) -> None:
    progress(prefix + text)


async def _hold(crowd: Crowd, case: dict[str, Any], rounds: int, count: int, progress: Progress) -> Figure:
    holds = _Holds(crowd, case["direction"])
    during = holds.at_the_closing if case["moment"] == "closing" else holds.during
    samples, baseline = await interleave_async(
        rounds, partial(_batches, count, holds.without), partial(_batches, count, during), progress
    )
    params: dict[str, Any] = {"case": case, "rounds": rounds, "checkpoints": count, "events": HOLD_EVENTS}
    params["baseline"] = "the same event without a checkpoint"
    if case["moment"] == "closing" and case["subtasks"] in FLINK_HOLD_MS:
        params["flink_ms"] = FLINK_HOLD_MS[case["subtasks"]]
    details = _added(flatten(samples), flatten(baseline), holds.behind_the_cut)
    return Figure("checkpoint_hold", "ms", samples, baseline, params, details)


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

    async def at_the_closing(self) -> list[float]:
        """Times of events that were sent as soon as the gateway, or the valve of the subtask, had closed."""
        subtasks = self._some_subtasks()
        sent: list[asyncio.Task[tuple[int, float]]] = []
        async with asyncio.TaskGroup() as group:

            async def send() -> None:
                sent.extend(group.create_task(self._one_down(0, subtask)) for subtask in subtasks)

            if self._send == self._down:
                self._crowd.coordinator.after_cut = send
            else:
                self._tell_children("send_at_close", "subtasks", [(subtask, subtask) for subtask in subtasks])
                for child in self._crowd.children:  # the checkpoint could overtake it
                    await child.hear()
            await self._crowd.checkpoint()
        times = [event.result() for event in sent] or await self._arrivals(len(subtasks))
        await self._crowd.settle()
        return [took_ms for _, took_ms in times]

    def _some_subtasks(self) -> list[int]:
        subtasks = len(self._crowd.coordinator.gateways)
        return self._dice.sample(range(subtasks), min(HOLD_EVENTS, subtasks))

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
        moments = self._moments()
        self._tell_children("send", "at", [(moment, moment[1]) for moment in moments])
        return await self._arrivals(len(moments))

    def _tell_children(self, what: str, argument: str, values: list[tuple[Any, int]]) -> None:
        """Give each child those values that are for one of its subtasks."""
        children = self._crowd.children
        for place, child in enumerate(children):
            mine = [value for value, subtask in values if subtask % len(children) == place]
            child.tell(do=what, **{argument: mine})

    async def _arrivals(self, count: int) -> Sent:
        arrived = [await self._crowd.coordinator.arrived.get() for _ in range(count)]
        return [(event[1], (at - event[1]) / 1e6) for event, at in arrived]

    def _moments(self) -> list[tuple[float, int]]:
        subtasks = len(self._crowd.coordinator.gateways)
        return [(self._dice.uniform(0, self._span_s), self._dice.randrange(subtasks)) for _ in range(HOLD_EVENTS)]
