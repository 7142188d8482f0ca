# SPDX-License-Identifier: Apache-2.0

"""``tunnel_...``: a Spark Connect client with a tunnel, beside one that the server's tasks dial directly, in one run.

Both are clients of one server on this machine, and are measured in turn. ``tunnel_request``: milliseconds of a task's
request. ``tunnel_event_flood``: microseconds for each of the small events that a task sends one after the other, until
the coordinator has all. ``tunnel_large_reply``: milliseconds for each mebibyte of a reply of 8 MiB.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from pyspark import cloudpickle

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.connect import START_S, STOP, remote_session
from benchmarks.harness import Figure, Progress, interleave_async
from spark_bridge.driver.config import Addresses, SidecarConfig, Way
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator

REPLY_MIB = 8
FLOOD = 20_000


class AskingOperator(SubtaskOperator):
    """Asks, or floods, when it is told to, and tells how long each took."""

    def __init__(self) -> None:
        self._stopped = False
        self._context: SubtaskContext
        self._todo: list[Any] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def handle_event(self, event: Any) -> None:
        if event == STOP:
            self._stopped = True
        else:
            self._todo.append(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while not self._stopped:
            if not self._todo:
                self._context.wait_for_event()
                continue
            what, count = self._todo.pop()
            took = []
            for number in range(count):
                began = time.perf_counter_ns()
                if what == "flood":
                    self._context.send_event(number)
                else:
                    self._context.request(what)
                took.append(time.perf_counter_ns() - began)
            self._context.send_event([what, [] if what == "flood" else took])
        yield from ()


class AnsweringCoordinator(OperatorCoordinator):
    """Answers, and hands over what the task tells."""

    def __init__(self) -> None:
        self.gateway: SubtaskGateway
        self.ready = asyncio.Event()
        self.told: asyncio.Future[list[int]]
        self.reply = bytes(REPLY_MIB * 2**20)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway
        self.ready.set()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return self.reply if request == "large" else b""

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if isinstance(event, list):
            self.told.set_result(event[1])

    async def measure(self, what: str, count: int) -> list[int]:
        """Nanoseconds of each."""
        self.told = asyncio.get_running_loop().create_future()
        began = time.perf_counter_ns()
        await self.gateway.send_event([what, count])
        return await self.told or [(time.perf_counter_ns() - began) // count]


@asynccontextmanager
async def _asking(session: Any, way: Way) -> AsyncIterator[AnsweringCoordinator]:
    coordinator = AnsweringCoordinator()
    config = SidecarConfig(addresses=Addresses(way=way))
    async with asyncio.TaskGroup() as group, Sidecar(session, config) as sidecar:
        handle = await sidecar.coordinate("bench", lambda: coordinator, parallelism=1)
        job = group.create_task(asyncio.to_thread(_run, session, handle))
        async with asyncio.timeout(START_S):
            await coordinator.ready.wait()
        yield coordinator
        await (await coordinator.gateway.send_event(STOP))
        await job


def _run(session: Any, handle: OperatorHandle) -> None:
    session.range(0, 1, 1, 1).mapInArrow(handle.subtask(AskingOperator), "nothing long").collect()


PLANS = {
    "tunnel_request": ("ms", "small", 300, 1e6),
    "tunnel_event_flood": ("µs", "flood", FLOOD, 1e3),
    "tunnel_large_reply": ("ms", "large", 4, 1e6 * REPLY_MIB),
}
_measured: dict[bool, dict[str, list[Figure]]] = {}
"""All figures of a run, by whether it was a quick one: the two clients are started once for all."""


async def _compare(session: Any, quick: bool, progress: Progress) -> dict[str, list[Figure]]:
    figures = {}
    async with _asking(session, "direct") as direct, _asking(session, "tunnel") as tunnel:
        for name, (unit, what, count, scale) in PLANS.items():

            async def times(
                one: AnsweringCoordinator,
                what: str = what,
                count: int = 2 if quick else count,
                scale: float = scale,
            ) -> list[float]:
                return [took / scale for took in await one.measure(what, count)]

            samples, baseline = await interleave_async(
                1 if quick else 10,
                partial(times, direct),
                partial(times, tunnel),
                lambda text, name=name: progress(f"{name}: {text}"),  # type: ignore[misc]
            )
            figures[name] = [Figure(name, unit, samples, baseline, {"baseline": "the same client, dialled directly"})]
    return figures


def _measure(name: str, quick: bool, progress: Progress) -> list[Figure]:
    if quick not in _measured:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
        with remote_session() as session:
            _measured[quick] = asyncio.run(_compare(session, quick, progress))
    return _measured[quick][name]


def tunnel_request(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a request."""
    return _measure("tunnel_request", quick, progress)


def tunnel_event_flood(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for each of many small events."""
    return _measure("tunnel_event_flood", quick, progress)


def tunnel_large_reply(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds for each mebibyte of a large reply."""
    return _measure("tunnel_large_reply", quick, progress)
