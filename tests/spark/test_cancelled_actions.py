# SPDX-License-Identifier: Apache-2.0

"""What was cancelled does not happen later: actions whose jobs are queued, or not submitted yet (H160)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from actors.coordination import SourceCoordinator
from actors.threads import DRIVER
from headgate import OperatorCoordinator, Sidecar
from headgate.sources import DiscoveringSplitEnumerator
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.driver.actions import ActionMarks
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.subtask import SplitReader
from tests.spark.leftovers import nothing_left

pytestmark = pytest.mark.spark
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _leaves_nothing(spark: SparkSession) -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def sc(spark: SparkSession) -> SparkContext:
    return spark.sparkContext


@pytest.fixture(params=["jvm", "py4j"])
def config(request: pytest.FixtureRequest) -> SidecarConfig:
    return SidecarConfig(relay=request.param)


class Busy:
    """A job that holds both slots until it is released."""

    def __init__(self, sc: SparkContext, folder: Path) -> None:
        self._sc = sc
        self._folder = folder
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        folder = str(self._folder)

        def hold(records: Iterable[int]) -> Iterator[int]:
            import pathlib
            import time

            for record in records:
                pathlib.Path(folder, f"held {record}").touch()
            while not pathlib.Path(folder, "release").exists():
                time.sleep(0.02)
            return iter(())

        self._sc.parallelize(range(2), 2).mapPartitions(hold).collect()

    def start(self) -> Busy:
        self._thread.start()
        while len(list(self._folder.glob("held *"))) < 2:
            self._thread.join(0.02)
        return self

    def __enter__(self) -> Busy:
        return self

    def release(self) -> None:
        (self._folder / "release").touch()
        self._thread.join(PATIENCE_S)

    def __exit__(self, *exc: object) -> None:
        self.release()


def mark(folder: Path) -> Callable[[Any, Iterator[int]], Iterator[int]]:
    """A function for tasks, each of which leaves a file."""
    place = str(folder)

    def work(context: Any, records: Iterator[int]) -> Iterator[int]:
        import pathlib

        for record in records:
            pathlib.Path(place, f"ran {record}").touch()
            yield record

    return work


def ran(folder: Path) -> list[Path]:
    return list(folder.glob("ran *"))


def plain_mark(folder: Path) -> Callable[[Iterable[int]], Iterator[int]]:
    marking = mark(folder)
    return lambda records: marking(None, iter(records))


async def cancelled(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it is about Spark
            await asyncio.sleep(0.01)


async def active_jobs(sc: SparkContext, beyond: int) -> None:
    await until(lambda: len(sc.statusTracker().getActiveJobsIds()) >= beyond)


async def test_action_that_is_cancelled_while_its_job_is_queued_never_starts(
    sc: SparkContext, config: SidecarConfig, tmp_path: Path
) -> None:  # H160
    loop = asyncio.get_running_loop()
    async with Sidecar(sc, config) as sidecar:
        job = await sidecar.coordinate("a", OperatorCoordinator, parallelism=2)
        with await DRIVER.run(Busy(sc, tmp_path).start):

            def action() -> list[int]:
                return sc.parallelize(range(4), 2).mapPartitions(job.subtask(mark(tmp_path))).collect()

            running = loop.create_task(sidecar.run(action))
            await active_jobs(sc, 2)
            await cancelled(running)
            await until(lambda: len(sc.statusTracker().getActiveJobsIds()) == 1)
        assert not ran(tmp_path)
        assert await sidecar.run(action) == [0, 1, 2, 3]  # the name works


async def test_cancelled_action_submits_no_further_job(
    sc: SparkContext, config: SidecarConfig, tmp_path: Path
) -> None:  # H160
    """The thread has not called Spark yet, and catches what its first job raises."""
    loop = asyncio.get_running_loop()
    go, over = threading.Event(), threading.Event()
    errors: list[Exception] = []
    async with Sidecar(sc, config) as sidecar:

        def action() -> None:
            go.wait(PATIENCE_S)
            for number in range(3):
                try:
                    sc.parallelize([number], 1).mapPartitions(plain_mark(tmp_path)).collect()
                except Exception as error:
                    errors.append(error)
            over.set()

        running = loop.create_task(sidecar.run(action))
        await asyncio.sleep(0)
        await until(lambda: len(threading.enumerate()) > 1)
        group = sc.getLocalProperty("spark.jobGroup.id")
        await until(lambda: sidecar._driver._marks._properties != {})  # type: ignore[attr-defined]
        await cancelled(running)
        go.set()
        assert await DRIVER.run(over.wait, PATIENCE_S)
        assert len(errors) == 3
        assert not ran(tmp_path)
        assert sc.getLocalProperty("spark.jobGroup.id") == group
        assert await sidecar.run(lambda: sc.parallelize([1], 1).collect()) == [1]


@pytest.mark.parametrize("group", [None, "the user's"])
def test_a_thread_whose_action_was_stopped_twice_starts_jobs_again_afterwards(
    sc: SparkContext, group: str | None
) -> None:  # H160
    """By two changes of the parallelism before its first job has ended, or one and the end of the sidecar."""
    before = sc.getLocalProperty("spark.jobGroup.id")
    sc.setLocalProperty("spark.jobGroup.id", group)  # type: ignore[arg-type]  # None removes it
    try:
        marks = ActionMarks(sc)
        with marks.marked("stopped twice"):
            for reason in ("first", "second"):
                marks.forbid("stopped twice", reason)
                with pytest.raises(Exception, match="cancelled job group headgate-cancelled-stopped twice"):
                    sc.parallelize([1], 1).count()
        assert sc.getLocalProperty("spark.jobGroup.id") == group
        assert sc.parallelize([1], 1).count() == 1
    finally:
        sc.setLocalProperty("spark.jobGroup.id", before)  # type: ignore[arg-type]


def test_leaving_ends_queued_jobs_and_the_thread_that_waits_learns_that_the_sidecar_is_closed(
    sc: SparkContext, config: SidecarConfig, tmp_path: Path
) -> None:  # H160
    errors: list[BaseException] = []
    with Busy(sc, tmp_path).start() as busy, Sidecar(sc, config) as sidecar:
        job = sidecar.coordinate("a", OperatorCoordinator, parallelism=2)

        def run() -> None:
            try:
                sidecar.run(lambda: sc.parallelize(range(4), 2).mapPartitions(job.subtask(mark(tmp_path))).collect())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while len(sc.statusTracker().getActiveJobsIds()) < 2:
            thread.join(0.02)
        sidecar.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        busy.release()
    assert [type(error) for error in errors] == [SidecarNotRunning]
    assert not ran(tmp_path)
    assert sc.parallelize(range(10), 2).sum() == 45


class Reader(SplitReader):
    def read_split(self, split: Any) -> Iterator[Any]:
        yield split


@pytest.mark.parametrize("many", [48, pytest.param(200, marks=pytest.mark.long)])
async def test_concurrent_runs_whose_tasks_need_an_enumerator_finish(sc: SparkContext, many: int) -> None:  # H161
    async with Sidecar(sc) as sidecar:

        async def one(runtime: SidecarRuntime, number: int) -> list[str]:
            source = SourceCoordinator(lambda state: DiscoveringSplitEnumerator(lambda: ["a", "b"], state))
            job = await runtime.coordinate(f"op{number}", source, parallelism=1)
            return await runtime.run(lambda: sc.parallelize([0], 1).mapPartitions(job.subtask(Reader)).collect())

        loop = asyncio.get_running_loop()
        runs = [loop.create_task(one(sidecar, number)) for number in range(many)]
        assert await asyncio.gather(*runs) == [["a", "b"]] * many
