# SPDX-License-Identifier: Apache-2.0

"""A driver and a task of a real Spark job, joined by a sidecar and by the bare sockets of the baseline.

The sidecar is entered on the loop that measures, the job runs in a thread of the driver, and its one task in a Python
worker of ``local[2]``. Both connections stay open for the whole measurement, so that they alternate between the same
two processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.cores import this_thread_on, two_cores
from benchmarks.raw_frames import RawProtocol
from benchmarks.task_side import STOP, BusyOperator, EchoOperator, endless
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.sidecar import Sidecar

MASTER = "local[2]"
READY_TIMEOUT_S = 60.0
PLAIN = SidecarConfig()


class BenchCoordinator(OperatorCoordinator):
    """Provides its gateway, and passes each event to the code that waits for it."""

    def __init__(self) -> None:
        self.gateway: asyncio.Future[SubtaskGateway] = asyncio.get_running_loop().create_future()
        self.answers: dict[int, asyncio.Future[None]] = {}

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway.set_result(gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        answer = self.answers.pop(event[1], None)  # of a flood, only the last event is awaited
        if answer is not None:
            answer.set_result(None)


class Pair:
    """Both ends, connected and ready.

    ``raw`` is the baseline's connection: a thread of the task sleeps in its read, or a busy task polls it between its
    records. ``other`` is a second one: a thread reads it that stays awake for a while; if the task is busy, one that
    sleeps.
    """

    def __init__(
        self,
        raw: RawProtocol,
        other: RawProtocol,
        coordinator: BenchCoordinator,
        gateway: SubtaskGateway,
        sidecar: SidecarRuntime,
    ) -> None:
        self.raw = raw
        self.sidecar = sidecar
        self.other = other
        self.gateway = gateway
        self._coordinator = coordinator
        self._numbers = itertools.count(1)

    def awaited(self, number: int) -> asyncio.Future[None]:
        """A future that resolves when the event with this number has arrived."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coordinator.answers[number] = answer
        return answer

    async def confirm(self, kind: int, payload: Any) -> None:
        """Send an event and wait until it is in the operator's mailbox."""
        await (await self.gateway.send_event([kind, next(self._numbers), payload]))

    async def echo(self, kind: int, payload: Any) -> None:
        """Send an event and wait until the operator's answer is in the coordinator's method."""
        number = next(self._numbers)
        answer = self.awaited(number)
        await self.gateway.send_event([kind, number, payload])
        await answer


@asynccontextmanager
async def running_pair(
    spark: SparkSession, *, busy: bool = False, config: SidecarConfig = PLAIN
) -> AsyncIterator[Pair]:
    """``busy``: the task computes pure Python all the time, and checks its mailbox between records.

    ``config`` is the sidecar's; the bare connections are always plain.
    """
    coordinator = BenchCoordinator()
    raw_ends = [RawProtocol(), RawProtocol()]
    driver_core, task_core = two_cores() or (None, None)
    async with (
        asyncio.TaskGroup() as group,
        Sidecar(spark, config) as sidecar,
        _listening(raw_ends) as ports,
    ):
        handle = await sidecar.coordinate("bench", coordinator, parallelism=1)
        job = group.create_task(asyncio.to_thread(_run_job, spark, handle, ports, busy, task_core))
        async with asyncio.timeout(READY_TIMEOUT_S):
            for end in raw_ends:
                await end.connected
            gateway = await coordinator.gateway
        with this_thread_on(driver_core):
            yield Pair(raw_ends[0], raw_ends[1], coordinator, gateway, sidecar)
        await (await gateway.send_event(STOP))
        await job


def _run_job(spark: SparkSession, handle: OperatorHandle, ports: list[int], busy: bool, task_core: int | None) -> None:
    records = spark.sparkContext.parallelize([0], 1)
    if busy:
        records = records.mapPartitions(endless)
    records.mapPartitions(
        handle.subtask(BusyOperator if busy else EchoOperator, ports, task_core, handle.endpoint.spin_s)
    ).count()


@asynccontextmanager
async def _listening(ends: list[RawProtocol]) -> AsyncIterator[list[int]]:
    """A port for each of them, for one connection."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda end=end: end, "127.0.0.1", 0) for end in ends]  # type: ignore[misc]
    try:
        yield [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()
        for end in ends:
            end.close()
