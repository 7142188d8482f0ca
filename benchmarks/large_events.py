# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.large_events``: weights for eight real Spark tasks, and what others notice of it.

The driver sends an array of 128 MiB to each of eight tasks, 1 GiB in all, and waits until each says that it has it.
Beside it, in the same run, asyncio writes as many bytes to eight processes that only read. Meanwhile, and before, the
coordinator of another operator exchanges small events with its task. Printed are seconds, MiB per second, and the round
trips in milliseconds.

``--mebibytes`` is the size of one array.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.spark_session import spark_session
from spark_bridge.driver.config import SidecarConfig, SidecarLimits
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator

TASKS = 8
ROUNDS = 3
PART_BYTES = 256 * 1024


class Weights(OperatorCoordinator):
    """Sends the array to all tasks when it is asked, and notes when each has it."""

    def __init__(self, mebibytes: int) -> None:
        self.array = np.ones(mebibytes * 2**17)
        self.ready = threading.Semaphore(0)
        self.came = 0
        self.all_came = threading.Semaphore(0)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def start(self, context: Any) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.ready.release()

    async def send(self, what: Any) -> None:
        await self.context.gateways.broadcast(what)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came += 1
        if self.came % TASKS == 0:
            self.all_came.release()

    def tell(self, what: Any) -> None:
        self.context.call_soon_threadsafe(lambda: self.send(what))


class Taker(SubtaskOperator):
    """Says of each array that it has come."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.over = False

    def handle_event(self, event: Any) -> None:
        if isinstance(event, str):
            self.over = True
        else:
            self.context.send_event(float(event[-1]))

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while not self.over:
            self.context.wait_for_event(1.0)
        yield from ()


class Small(OperatorCoordinator):
    """Exchanges small events with its task, one at a time."""

    def __init__(self) -> None:
        self.trips_ms: list[float] = []
        self.over = False
        self.ready = threading.Event()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway
        self.ready.set()
        await self.next()

    async def next(self) -> None:
        self.began = time.perf_counter()
        await self.gateway.send_event("over" if self.over else 1)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.trips_ms.append((time.perf_counter() - self.began) * 1e3)
        await self.next()


class Echo(Taker):
    """Sends back what comes."""

    def handle_event(self, event: Any) -> None:
        if event == "over":
            self.over = True
        else:
            self.context.send_event(event)


def headgate(mebibytes: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each round; round trips before, and meanwhile."""
    config = SidecarConfig(limits=SidecarLimits(event_bytes_max=mebibytes * 2**20 + 2**20))
    with spark_session(f"local[{TASKS + 1}]") as spark, Sidecar(spark, config) as sidecar:
        weights, small = Weights(mebibytes), Small()

        def act(name: str, coordinator: OperatorCoordinator, operator: type, count: int) -> threading.Thread:
            handle = sidecar.coordinate(name, coordinator, parallelism=count)
            rdd = spark.sparkContext.parallelize(range(count), count).mapPartitions(handle.subtask(operator))
            thread = threading.Thread(target=rdd.collect)
            thread.start()
            return thread

        threads = [act("weights", weights, Taker, TASKS), act("small", small, Echo, 1)]
        small.ready.wait()
        for _ in range(TASKS):
            weights.ready.acquire()
        small.trips_ms.clear()
        time.sleep(2)
        quiet = small.trips_ms[:]
        seconds: list[float] = []
        meanwhile: list[float] = []
        for _ in range(ROUNDS):
            small.trips_ms.clear()
            began = time.perf_counter()
            weights.tell(weights.array)
            weights.all_came.acquire()
            seconds.append(time.perf_counter() - began)
            meanwhile += small.trips_ms
        small.over = True
        weights.tell("over")
        for thread in threads:
            thread.join()
    return seconds, quiet, meanwhile


def _read(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        view = memoryview(bytearray(PART_BYTES))
        for _ in range(ROUNDS):
            left = size
            while left:
                left -= connection.recv_into(view, min(left, PART_BYTES))
            connection.sendall(b"x")


def raw(mebibytes: int) -> list[float]:
    """The same bytes over bare connections of asyncio."""
    size = mebibytes * 2**20
    data = memoryview(bytes(np.ones(size // 8)))

    async def serve() -> list[float]:
        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_read, args=(port, size)) for _ in range(TASKS)]
        for process in processes:
            process.start()
        ends = [await accepted.get() for _ in processes]

        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for start in range(0, size, PART_BYTES):
                writer.write(data[start : start + PART_BYTES])
                await writer.drain()
            await reader.readexactly(1)

        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(send(*end) for end in ends))
            seconds.append(time.perf_counter() - began)
        for _, writer in ends:
            writer.close()
        server.close()
        for process in processes:
            process.join()
        return seconds

    return asyncio.run(serve())


def _describe(name: str, seconds: list[float], mebibytes: int) -> None:
    best = min(seconds)
    print(f"{name:<12}{best:8.2f} s   {TASKS * mebibytes / best:8.0f} MiB/s   (rounds: {seconds})", flush=True)


def _percentiles(name: str, trips_ms: list[float]) -> None:
    ordered = sorted(trips_ms)
    p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    print(f"{name:<12}{len(ordered)} round trips: p50 {p50:.2f}, p99 {p99:.1f}, longest {ordered[-1]:.1f} ms")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    arguments.add_argument("--mebibytes", type=int, default=128)
    mebibytes = arguments.parse_args().mebibytes
    _describe("raw TCP", raw(mebibytes), mebibytes)
    seconds, quiet, meanwhile = headgate(mebibytes)
    _describe("headgate", seconds, mebibytes)
    _percentiles("quiet", quiet)
    _percentiles("meanwhile", meanwhile)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
