# SPDX-License-Identifier: Apache-2.0

"""What `make spark` kills and cuts, and what works without RDDs, for a client of a Spark Connect server.

The server has two executors in separate JVMs, whose Python has neither Headgate nor msgpack.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest

from headgate import (
    Addresses,
    CheckpointConfig,
    CheckpointFile,
    FixedDelay,
    Sidecar,
    SidecarConfig,
    chain,
    concurrently,
)
from headgate.sinks import FileSink
from tests.spark.cluster import parent
from tests.spark.connect.conftest import WAIT_S
from tests.spark.connect.jobs import CountInArrow, Numbers, NumberSource, read, write_lines
from tests.spark.connect.server import ConnectServer
from tests.spark.counting import CountingCoordinator
from tests.spark.faults.network import SIDECARS_HOST, Line
from tests.spark.faults.own_process import free_ports

pytestmark = [pytest.mark.spark, pytest.mark.long]

COUNT = "subtask long, last long"


@pytest.fixture(scope="module")
def server() -> Iterator[ConnectServer]:
    home = str(Path(pyspark.__file__).parent)  # from which a local cluster starts its executors
    server = ConnectServer(
        master="local-cluster[2,1,1024]", environment={"SPARK_HOME": home, "SPARK_SCALA_VERSION": "2.13"}
    )
    server.start()
    yield server
    server.stop()


class Ending(CountingCoordinator):
    """Knows the process of each subtask, so that a test can end it."""

    def pid_of(self, subtask: int) -> int:
        def told() -> list[int]:
            return [event[1] for *_, event in self.of_subtask(subtask, "event") if event[0] == "process"]

        before = len(told())
        self.tell(subtask, "process")
        self.wait_for(lambda story: len(told()) > before)
        return told()[-1]

    def exchange(self, number: int, count: int, subtasks: tuple[int, ...] = (0, 1)) -> None:
        """Send so many numbers to each subtask, and wait until it has seen them, up to ``number``."""
        for subtask in subtasks:
            self.send_numbers(subtask, count)
        for subtask in subtasks:
            self.wait_for(lambda story, subtask=subtask: self.seen.get(subtask) == number)  # type: ignore[misc]

    def lost(self) -> list[int]:
        return sorted(callback[1] for callback in self.named("failed"))


def wait_ready(coordinator: Ending, subtask: int, times: int) -> None:
    coordinator.wait_for(lambda story: len(coordinator.of_subtask(subtask, "ready")) >= times)


def test_events_survive_a_cut_network_and_killed_workers_and_executors(server: ConnectServer, tmp_path: Path) -> None:
    """H10, H24, H30 over Connect: both sides' counts match after each fault, and after a savepoint's restore."""
    session = server.session()
    [port] = free_ports(1)
    coordinator = Ending()
    with Line() as line:
        line.leads_to = SIDECARS_HOST, port
        config = SidecarConfig(
            host="0.0.0.0",
            port=port,
            storage=tmp_path / "checkpoints",
            addresses=Addresses(advertised_host="127.0.0.1", advertised_port=line.port),
        )
        with Sidecar(session, config) as sidecar, ThreadPoolExecutor(1) as client:
            handle = sidecar.coordinate("counting", lambda: coordinator, parallelism=2, mode="streaming")
            tasks = session.range(0, 2, 1, 2).mapInArrow(handle.subtask(CountInArrow), COUNT)
            job = client.submit(sidecar.run, tasks.collect)
            for subtask in (0, 1):
                wait_ready(coordinator, subtask, 1)
            coordinator.exchange(number=5, count=5)
            sidecar.checkpoint("counting")

            line.cut()  # nobody is told, and nothing is lost
            for subtask in (0, 1):
                coordinator.send_numbers(subtask, 2)
            line.heal()
            coordinator.exchange(number=7, count=0)
            line.break_off()
            line.heal()
            coordinator.exchange(number=9, count=2)
            assert coordinator.lost() == []

            os.kill(coordinator.pid_of(0), signal.SIGKILL)  # a Python worker
            wait_ready(coordinator, 0, 2)
            coordinator.exchange(number=9, count=4, subtasks=(0,))  # from 6 again
            assert coordinator.lost() == [0]
            sidecar.checkpoint("counting")

            executor = executor_of(coordinator.pid_of(1))
            os.kill(executor, signal.SIGKILL)
            wait_ready(coordinator, 1, 2)
            coordinator.exchange(number=10, count=1)
            assert coordinator.lost() == [0, 1]
            savepoint = sidecar.savepoint("counting", directory=str(tmp_path / "savepoints"))
            coordinator.stop_all()
            assert sorted(map(tuple, job.result(WAIT_S))) == [(0, 10), (1, 10)]
            assert coordinator.wrong == []

            restored = Ending()
            handle = sidecar.coordinate(
                "counting",
                lambda: restored,
                parallelism=2,
                mode="streaming",
                replace=True,
                restore=CheckpointFile(savepoint),
            )
            tasks = session.range(0, 2, 1, 2).mapInArrow(handle.subtask(CountInArrow), COUNT)
            job = client.submit(sidecar.run, tasks.collect)
            for subtask in (0, 1):
                wait_ready(restored, subtask, 1)
            restored.exchange(number=12, count=2)
            restored.stop_all()
            assert sorted(map(tuple, job.result(WAIT_S))) == [(0, 12), (1, 12)]
            assert restored.wrong == []
    session.stop()


def executor_of(worker: int) -> int:
    """The JVM that has started a Python worker: its daemon's parent."""
    daemon = parent(worker)
    assert daemon is not None
    jvm = parent(daemon)
    assert jvm is not None
    assert Path(f"/proc/{jvm}/comm").read_text().strip() == "java"
    return jvm


def test_a_pipeline_commits_each_row_once_although_its_worker_dies(server: ConnectServer, tmp_path: Path) -> None:
    """A chain of a source, a function and a sink of files, with checkpoints, in a ``foreachPartition``."""
    session = server.session()
    marker, out = tmp_path / "killed", tmp_path / "out"
    stages = chain(
        source=NumberSource(200),
        transform=partial(write_lines, str(marker), 150),
        sink=FileSink(str(out), suffix=".jsonl"),
    )
    with Sidecar(session, SidecarConfig(storage=tmp_path / "checkpoints")) as sidecar:
        often = CheckpointConfig(interval_s=0.2, tolerated_failures=100)
        job = sidecar.coordinate("pipeline", stages, parallelism=2, mode="streaming", checkpoint=often)
        tasks = session.range(0, 2, 1, 2)
        sidecar.run(lambda: tasks.foreachPartition(job.subtask()), restart=FixedDelay(3, 0.1))
        assert job.statistics()["failures"] >= 1
    session.stop()

    lines = [line for file in out.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert marker.exists()
    assert sorted(json.loads(line)["number"] for line in lines) == list(range(200))


def test_the_primitives_and_a_shuffle_in_one_job(server: ConnectServer) -> None:
    """A group that meets, permits, a shared value, a work queue and counters; and a grouping behind the operator."""
    session = server.session()
    with Sidecar(session) as sidecar:
        group = sidecar.group("together", 2)
        permits = sidecar.permits("one at a time", concurrency=1)
        factor = sidecar.shared("factor", 3)
        queue = sidecar.work_queue("todo", list(range(20)))
        job = sidecar.coordinate("workers", parallelism=2, uses=[group, permits, factor, queue])

        def work(context: Any, batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow

            with group as member:
                ranks = member.all_gather(member.rank)
            done = []
            for item in queue:
                with permits:
                    context.count("items")
                    done.append(item * factor.get())
            yield pyarrow.RecordBatch.from_pydict({"rank": [sum(ranks)] * len(done), "done": done})

        rows = session.range(0, 2, 1, 2).mapInArrow(job.subtask(work), "rank long, done long")
        [total] = sidecar.run(rows.groupBy("rank").agg({"done": "sum", "*": "count"}).collect)

        assert (total["rank"], total["sum(done)"], total["count(1)"]) == (1, 3 * sum(range(20)), 20)
        assert job.counters() == {"items": 20}
    session.stop()


def test_a_budget_and_a_cache_serve_the_coroutines_of_a_client(server: ConnectServer) -> None:
    """H182 H183: each question is asked and paid for once, in the tasks of a server."""
    import pyarrow

    session = server.session()
    with Sidecar(session) as sidecar:
        cache, budget = sidecar.cache("answers"), sidecar.budget("usd", 1.0)
        job = sidecar.coordinate("paid", parallelism=2, uses=[cache, budget])

        async def pay(question: int) -> int:
            async with budget.reserve(0.02) as spent:
                await asyncio.sleep(0.01)
                spent.settle(0.01)
            return question * question

        async def ask(row: dict[str, Any]) -> dict[str, Any]:
            question = row["id"] % 10
            answer = await cache.get_async(question, lambda: pay(question))
            return {"id": row["id"], "answer": answer}

        schema = pyarrow.schema([("id", pyarrow.int64()), ("answer", pyarrow.int64())])
        stage = concurrently(ask, limit=20, rows=True, schema=schema)
        rows = session.range(0, 200, 1, 2).mapInArrow(job.subtask(stage), "id long, answer long")
        answers = {row.id: row.answer for row in sidecar.run(rows.collect)}
        assert answers == {number: (number % 10) ** 2 for number in range(200)}
        assert float(budget.spent) == pytest.approx(0.1)
        assert cache.figures()["entries"] == 10
    session.stop()


def test_two_concurrent_actions_of_one_client_are_two_runs(server: ConnectServer) -> None:
    """H65: each has a separate operator, and what fails in one does not touch the other."""
    session = server.session()
    failing = threading.Event()

    def fail_once(split: int) -> str:
        if split == 3 and not failing.is_set():
            failing.set()
            return "die"
        return "go on"

    with Sidecar(session) as sidecar, ThreadPoolExecutor(2) as client:
        numbers = [Numbers(range(6), fail_once), Numbers(range(10, 16))]
        handles = [
            sidecar.coordinate(f"numbers {index}", partial(lambda one: one, n), parallelism=1)
            for index, n in enumerate(numbers)
        ]
        results = list(client.map(lambda handle: sidecar.run(lambda: read(session, handle)), handles))
    session.stop()

    assert results == [list(range(6)), list(range(10, 16))]
    assert [one.lost for one in numbers] == [["FAILED"], []]
