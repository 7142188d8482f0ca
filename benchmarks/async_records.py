# SPDX-License-Identifier: Apache-2.0

"""What an async stage costs, in real Spark tasks, with 1,000 calls in flight in each of two tasks.

``async_records``: the processor time of one record in microseconds. The call lets others run once, and does nothing
else. The time is that of the whole worker process: the task's thread, the loop's thread and the I/O thread. There are
two baselines of asyncio alone, in the same kind of task: a fixed number of workers that take the records from one
iterator, which is the least that can be written, and a task for each record behind a semaphore.

``async_http``: the same with requests over HTTP to a server on loopback in another process, by a session of aiohttp
with 100 connections. The baseline is the first of these two, with the same client.

``async_wall``: the time of a whole job of calls that wait 0.1 s, in milliseconds, compared with ``mapInPandas`` and a
thread for each of 1,000 calls in flight in each task.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress, interleave, interleave_floors_async
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask.coroutines.concurrently import Concurrently, concurrently

TASKS = 2
RECORDS = 20_000
IN_FLIGHT = 1_000
HTTP_RECORDS = 1_500
HTTP_IN_FLIGHT = 100
CALL_S = 0.1
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n42"

Lifespan = Callable[[], Any]
"""Makes an async context manager, which gives what a call gets before its record."""


async def let_others_run(_: None, record: int) -> int:
    await asyncio.sleep(0)
    return record


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def session() -> AsyncIterator[Any]:
    from aiohttp import ClientSession, TCPConnector

    async with ClientSession(connector=TCPConnector(limit=HTTP_IN_FLIGHT)) as opened:
        yield opened


async def get(url: str, opened: Any, record: int) -> int:
    async with opened.get(f"{url}/{record}") as response:
        return int(await response.json())


# --- processor time --------------------------------------------------------------------------------------------------


def of_process(skipped: int, results: Iterable[Any]) -> Iterator[float]:
    """The processor time that this process takes for each result in microseconds, after the first ones."""
    iterator = iter(results)
    for _ in range(skipped):
        next(iterator)
    began = time.process_time()
    results_seen = sum(1 for _ in iterator)
    yield (time.process_time() - began) / results_seen * 1e6


def by_workers(call: Any, lifespan: Lifespan, in_flight: int, records: Iterable[int]) -> Iterator[float]:
    """What the least code does with asyncio."""
    results: list[Any] = []
    shared = iter(records)  # Spark gives a range, of which each worker would begin again

    async def work(given: Any) -> None:
        for record in shared:
            results.append(await call(given, record))

    async def work_together() -> float:
        async with lifespan() as given:
            began = time.process_time()
            await asyncio.gather(*(work(given) for _ in range(in_flight)))
            return time.process_time() - began

    yield asyncio.run(work_together()) / len(results) * 1e6


def by_tasks(call: Any, in_flight: int, records: Iterable[int]) -> Iterator[float]:
    """A task for each record, of which the loop itself keeps none alive."""
    results: list[Any] = []

    async def start_all() -> float:
        places, tasks = asyncio.Semaphore(in_flight), set[asyncio.Task[None]]()

        async def one(record: int) -> None:
            results.append(await call(None, record))
            places.release()

        began = time.process_time()
        for record in records:
            await places.acquire()
            task = asyncio.create_task(one(record))  # noqa: TID251 - what a program would write
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return time.process_time() - began

    yield asyncio.run(start_all()) / len(results) * 1e6


def _stage_times(spark: SparkSession, name: str, stage: Concurrently, records: int) -> list[float]:
    inputs = spark.sparkContext.parallelize(range(TASKS * records), TASKS)
    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate(name, parallelism=TASKS)
        results = inputs.mapPartitions(job.subtask(stage)).mapPartitions(partial(of_process, stage.limit))
        times: list[float] = sidecar.run(results.collect)
        return times


def async_records(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds of processor time for one record, compared with asyncio alone."""
    rounds, records = (1, 3_000) if quick else (7, RECORDS)
    names = (f"async-{number}" for number in count())
    stage = concurrently(let_others_run, lifespan=nothing, limit=IN_FLIGHT, ordered=False)
    with spark_session(f"local[{TASKS}]") as spark:
        inputs = spark.sparkContext.parallelize(range(TASKS * records), TASKS)

        async def workers() -> list[float]:
            return inputs.mapPartitions(partial(by_workers, let_others_run, nothing, IN_FLIGHT)).collect()

        async def tasks() -> list[float]:
            return inputs.mapPartitions(partial(by_tasks, let_others_run, IN_FLIGHT)).collect()

        async def subject() -> list[float]:
            return await asyncio.to_thread(_stage_times, spark, next(names), stage, records)

        samples, floors = asyncio.run(interleave_floors_async(rounds, [workers, tasks], subject, progress))
    params = {"records": records, "in_flight": IN_FLIGHT, "tasks": TASKS, "baseline": "asyncio alone"}
    cases = ("workers", "a task for each record")
    return [
        Figure("async_records", "µs", samples, floor, {"case": {"floor": case}, **params})
        for case, floor in zip(cases, floors, strict=True)
    ]


def _serve(ports: Any) -> None:
    """The body of another process: answers each request."""

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport, self._read = transport, b""

        def data_received(self, data: bytes) -> None:
            *requests, self._read = (self._read + data).split(b"\r\n\r\n")
            self._transport.write(ANSWER * len(requests))

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=1024)
        ports.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def _server() -> Iterator[str]:
    """The URL of a server in another process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def async_http(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds of processor time for one request over HTTP, compared with asyncio alone and the same client."""
    rounds, records = (1, 300) if quick else (7, HTTP_RECORDS)
    names = (f"http-{number}" for number in count())
    with _server() as url, spark_session(f"local[{TASKS}]") as spark:
        call = partial(get, url)
        stage = concurrently(call, lifespan=session, limit=HTTP_IN_FLIGHT, ordered=False)
        inputs = spark.sparkContext.parallelize(range(TASKS * records), TASKS)
        samples, baseline = interleave(
            rounds,
            lambda: inputs.mapPartitions(partial(by_workers, call, session, HTTP_IN_FLIGHT)).collect(),
            lambda: _stage_times(spark, next(names), stage, records),
            progress,
        )
    params = {"records": records, "in_flight": HTTP_IN_FLIGHT, "tasks": TASKS, "baseline": "asyncio with aiohttp"}
    return [Figure("async_http", "µs", samples, baseline, params)]


# --- wall time -------------------------------------------------------------------------------------------------------


class InFlightNow:
    """How many calls are in flight in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def change(self, by: int) -> int:
        with self._lock:
            self._count += by
            return self._count


now = InFlightNow()


async def wait(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with how many calls were in flight as this one began."""
    in_flight = now.change(1)
    await asyncio.sleep(CALL_S)
    now.change(-1)
    return {"id": row["id"], "in_flight": in_flight}


def wait_in_thread(row: int) -> tuple[int, int]:
    in_flight = now.change(1)
    time.sleep(CALL_S)
    now.change(-1)
    return row, in_flight


def with_threads(batches: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """The plain way: a pool of threads for the rows of each batch."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for batch in batches:
            yield pd.DataFrame([*pool.map(wait_in_thread, batch["id"])], columns=["id", "in_flight"])


def async_wall(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a job of calls that wait, compared with ``mapInPandas`` and threads."""
    rounds, rows = (1, 4_000) if quick else (5, 20_000)
    names = (f"wall-{number}" for number in count())
    stage = concurrently(wait, limit=IN_FLIGHT, ordered=False, rows=True)
    most = {"stage": 0, "threads": 0}

    def timed(what: str, job: Callable[[], list[Any]]) -> list[float]:
        began = time.perf_counter()
        found = job()
        took_ms = (time.perf_counter() - began) * 1e3
        if sorted(row["id"] for row in found) != list(range(rows)):
            raise RuntimeError(f"of {rows} rows, {len(found)} came back, or others")
        most[what] = max(most[what], *(row["in_flight"] for row in found))
        return [took_ms]

    with spark_session(f"local[{TASKS}]") as spark, Sidecar(spark) as sidecar:
        frame = spark.range(rows, numPartitions=TASKS)
        schema = "id long, in_flight long"

        def subject() -> list[float]:
            results = frame.mapInPandas(sidecar.coordinate(next(names), parallelism=TASKS).subtask(stage), schema)
            return timed("stage", lambda: sidecar.run(results.collect))

        def baseline() -> list[float]:
            return timed("threads", frame.mapInPandas(with_threads, schema).collect)

        samples, baseline_samples = interleave(rounds, baseline, subject, progress)
    params = {"rows": rows, "tasks": TASKS, "call_s": CALL_S, "limit": IN_FLIGHT, "most_in_flight": most}
    return [Figure("async_wall", "ms", samples, baseline_samples, params | {"baseline": "mapInPandas with threads"})]
