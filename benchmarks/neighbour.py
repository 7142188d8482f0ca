# SPDX-License-Identifier: Apache-2.0

"""An operator next to another one whose four tasks send events as fast as they can, without Spark.

``neighbour_flood``: the round trip of an event, from ``send_event`` until the event with which the subtask answers is
in the coordinator's method, one at a time with a pause before each. The baseline is the same round trip while the
four tasks are silent. All tasks are real subtask ends (``benchmarks.many_endpoints``) in two other processes, and the
flood is limited only by their windows.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.cores import this_thread_on, two_cores
from benchmarks.crowd import TIMEOUT_S, Child, CrowdRuntime, PretendedSpark, running_child
from benchmarks.harness import Figure, Progress, interleave_async
from benchmarks.many_endpoints import ECHO
from protocol.facts import JobStarted, StageSubmitted, TaskStarted
from protocol.wire.messages import RestoreMode

FLOODING, NEIGHBOUR = "flooding", "neighbour"
STAGES = {FLOODING: 1, NEIGHBOUR: 2}
PARALLELISM = {FLOODING: 4, NEIGHBOUR: 1}
PAYLOAD_BYTES = 100
PAUSE_S = (0.0005, 0.003)
FILES = 64
CORES = two_cores() or (None, None)
"""The driver's core and the core of all tasks; determined before this process pins its loop."""
FLOODING_NICENESS = 5
"""The flooding process shares a core with the neighbour's, and must not delay it there: on a cluster it would not."""


class FloodedCoordinator(OperatorCoordinator):
    """Counts what arrives, and keeps the last event with its time."""

    def __init__(self) -> None:
        self.gateway: SubtaskGateway
        self.ready = asyncio.Event()
        self.events = 0
        self.arrived = asyncio.Event()
        self.arrived_ns = 0

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway
        self.ready.set()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.events += 1
        self.arrived_ns = time.monotonic_ns()
        self.arrived.set()


class Neighbours:
    """Both operators."""

    def __init__(self) -> None:
        self.coordinators = {operator: FloodedCoordinator() for operator in STAGES}
        self.children: dict[str, Child] = {}

    async def round_trips(self, count: int) -> list[float]:
        """Microseconds of each of ``count`` round trips."""
        coordinator = self.coordinators[NEIGHBOUR]
        samples = []
        for _ in range(count):
            await asyncio.sleep(random.uniform(*PAUSE_S))
            coordinator.arrived.clear()
            began = time.monotonic_ns()
            await coordinator.gateway.send_event([ECHO, bytes(PAYLOAD_BYTES)])
            await coordinator.arrived.wait()
            samples.append((coordinator.arrived_ns - began) / 1e3)
        return samples

    async def flooded_round_trips(self, count: int) -> list[float]:
        """The same while the four tasks send."""
        flooding = self.coordinators[FLOODING]
        before = flooding.events
        self.children[FLOODING].tell(do="flood", size_bytes=PAYLOAD_BYTES)
        while flooding.events < before + 4096:  # every window has been full
            flooding.arrived.clear()
            await flooding.arrived.wait()
        try:
            return await self.round_trips(count)
        finally:
            self.children[FLOODING].tell(do="end_flood")
            await self.children[FLOODING].hear()


@asynccontextmanager
async def running_neighbours() -> AsyncIterator[Neighbours]:
    """Two jobs of one sidecar, all of whose tasks are open."""
    spark, neighbours = PretendedSpark(), Neighbours()
    _, task_core = CORES
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(CrowdRuntime(spark))
        host, port = runtime.address
        for operator, stage in STAGES.items():
            coordinator, parallelism = neighbours.coordinators[operator], PARALLELISM[operator]
            await runtime.coordinate(operator, coordinator, parallelism=parallelism, mode=RestoreMode.BATCH)
            spark.say(JobStarted(stage, (stage,)))
            spark.say(StageSubmitted(stage, 0, parallelism))
            numbers = [[10 * stage + subtask, subtask] for subtask in range(parallelism)]
            for task_attempt_id, subtask in numbers:
                spark.say(TaskStarted(task_attempt_id, stage, 0, subtask, 0))
            task = {
                "host": host,
                "port": port,
                "key": spark.keys.task_key(operator).secret.hex(),
                "operator_id": operator,
                "parallelism": parallelism,
                "mode": int(RestoreMode.BATCH),
                "stage_id": stage,
                "files": FILES,
                "core": task_core,
                "niceness": FLOODING_NICENESS if operator == FLOODING else 0,
            }
            child = neighbours.children[operator] = await stack.enter_async_context(running_child(task))
            child.tell(do="open", tasks=numbers)
            await child.hear()
            async with asyncio.timeout(TIMEOUT_S):
                await coordinator.ready.wait()
        yield neighbours


def neighbour_flood(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds of a round trip while another operator's four tasks flood, compared with the same without it."""
    rounds, count = (2, 20) if quick else (8, 500)

    async def measure() -> Figure:
        async with running_neighbours() as neighbours:
            flooding = neighbours.coordinators[FLOODING]
            spent_s = 0.0

            async def flooded() -> list[float]:
                nonlocal spent_s
                began = time.perf_counter()
                samples = await neighbours.flooded_round_trips(count)
                spent_s += time.perf_counter() - began
                return samples

            samples, baseline = await interleave_async(rounds, lambda: neighbours.round_trips(count), flooded, progress)
            rate = flooding.events / spent_s
        params = {
            "payload_bytes": PAYLOAD_BYTES,
            "events": count,
            "rounds": rounds,
            "flooding_tasks": PARALLELISM[FLOODING],
            "flood_events_per_s": round(rate),
            "baseline": "the same operators, while the four tasks are silent",
        }
        return Figure("neighbour_flood", "µs", samples, baseline, params)

    with this_thread_on(CORES[0]):
        return [asyncio.run(measure())]
