# SPDX-License-Identifier: Apache-2.0

"""How long one waits until a sidecar, a task and a new Python worker can begin.

``sidecar_start``: milliseconds from ``with Sidecar(spark)`` to the first line of the block, after the first sidecar of
this JVM, whose time is in ``details``. The baseline is the least that it has to do: a thread with an event loop, a
listening socket, and a call of the JVM through Py4J.

``first_record``: milliseconds from the start of a task's function to its operator's first record, in a worker that has
run such a task before. Meanwhile the task connects, the two ends prove to each other who they are, the driver finds
the attempt in what Spark has reported, and the operator is opened. The baseline is a bare connection from the same
task, with one message and its answer.

``worker_import``: milliseconds that a new Python process takes to import what a task imports, from the archive that a
sidecar ships. It has imported PySpark's worker before, as Spark's processes have. The baseline is ``import asyncio`` in
such a process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from benchmarks.harness import Figure, Progress, interleave
from benchmarks.plain_tasks import BareExchange, note_the_start
from benchmarks.spark_session import spark_session
from benchmarks.spark_tasks import SinceTheStart
from spark_bridge.driver.shipping import write_archive
from spark_bridge.driver.sidecar import Sidecar

MASTER = "local[2]"
TASKS = 2
IMPORTS = {
    "archive": "sys.path.insert(0, sys.argv[1]); import spark_bridge.task_entry, spark_bridge.common.endpoint",
    "asyncio": "import asyncio",
}
"""What each process imports, between two looks at its clock."""


def sidecar_start(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds until a sidecar is ready, compared with a bare event loop in a thread."""
    rounds, each = (1, 1) if quick else (5, 6)
    with spark_session(MASTER) as spark:
        first_ms = _start_ms(spark)
        samples, baseline = interleave(
            rounds,
            lambda: [_bare_start_ms(spark) for _ in range(each)],
            lambda: [_start_ms(spark) for _ in range(each)],
            progress,
        )
    params = {"baseline": "a thread with an event loop and a listening socket, and one call through Py4J"}
    return [Figure("sidecar_start", "ms", samples, baseline, params, {"first_of_the_jvm_ms": round(first_ms, 1)})]


def _start_ms(spark: SparkSession) -> float:
    began = time.perf_counter()
    with Sidecar(spark):
        return (time.perf_counter() - began) * 1e3


def _bare_start_ms(spark: SparkSession) -> float:
    began = time.perf_counter()
    with _bare_server():
        spark.sparkContext.defaultParallelism  # noqa: B018 - a call of the JVM
        return (time.perf_counter() - began) * 1e3


@contextmanager
def _bare_server() -> Iterator[int]:
    """A thread with an event loop that answers each message on a loopback port, which is yielded."""
    loop, opened, ports = asyncio.new_event_loop(), threading.Event(), list[int]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while message := await reader.read(1024):
            writer.write(message)
        writer.close()

    def run() -> None:
        server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
        ports.append(server.sockets[0].getsockname()[1])
        opened.set()
        loop.run_forever()
        server.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    opened.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def first_record(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the start of a task to its operator's first record, compared with a bare connection."""
    rounds, each = (1, 1) if quick else (5, 10)
    with spark_session(MASTER) as spark, Sidecar(spark) as sidecar, _bare_server() as port:
        handle = sidecar.coordinate("first", OperatorCoordinator, parallelism=TASKS)

        def of_tasks(task: Callable[[Iterable[float]], Iterable[float]]) -> list[float]:
            numbers = spark.sparkContext.parallelize(range(TASKS), TASKS).mapPartitions(note_the_start)
            return [ms for _ in range(each) for ms in numbers.mapPartitions(task).collect()]

        samples, baseline = interleave(
            rounds, lambda: of_tasks(BareExchange(port)), lambda: of_tasks(handle.subtask(SinceTheStart)), progress
        )
    params = {"tasks": TASKS, "baseline": "a bare connection with one message and its answer"}
    return [Figure("first_record", "ms", samples, baseline, params)]


def worker_import(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds to import what a task imports in a new Python process, compared with asyncio."""
    rounds, each = (1, 1) if quick else (5, 4)
    with tempfile.TemporaryDirectory(prefix="headgate-benchmark-") as folder:
        archive = write_archive(Path(folder))
        samples, baseline = interleave(
            rounds,
            lambda: [_import_ms("asyncio", archive) for _ in range(each)],
            lambda: [_import_ms("archive", archive) for _ in range(each)],
            progress,
        )
    return [Figure("worker_import", "ms", samples, baseline, {"baseline": "import asyncio in such a process"})]


def _import_ms(what: str, archive: Path) -> float:
    program = (
        "import sys, time, pyspark.worker; began = time.perf_counter(); "
        f"{IMPORTS[what]}; print((time.perf_counter() - began) * 1e3)"
    )
    command = [sys.executable, "-c", program, str(archive)]
    # Elsewhere, so that it does not find the packages of this folder.
    ended = subprocess.run(command, cwd=archive.parent, capture_output=True, text=True, check=True)
    return float(ended.stdout)
