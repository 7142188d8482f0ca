# SPDX-License-Identifier: Apache-2.0

"""Two operators of one sidecar, each in its own thread's action: neither is affected by failures of the other (H65)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator, SubtaskGateway
from protocol.restart import FixedDelay
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.config import SidecarConfig, SidecarLimits
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action
from tests.spark.operators import Asking

pytestmark = pytest.mark.spark

PATIENCE_S = 60.0
QUICKLY = FixedDelay(restarts_max=2, delay_s=0.0)
IMPATIENT = SidecarConfig(limits=SidecarLimits(settle_timeout_s=10.0))
"""With this limit, a wait for the neighbour's end fails soon, as ``NotSettled``."""

ESCAPES: list[BaseException] = [
    SystemExit(3),
    KeyboardInterrupt("by hand"),
    GeneratorExit("by hand"),
    MemoryError("by hand"),
    RecursionError("by hand"),
    asyncio.CancelledError("by hand"),
]


class Answering(OperatorCoordinator):
    """Answers each question and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return "yes"

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.runs += 1


class Neighbour(Answering):
    """``reached`` is set when it is in the state that the test is about, and ``over`` ends that state."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.over = threading.Event()

    async def _wait(self) -> None:
        self.reached.set()
        await asyncio.to_thread(self.over.wait, PATIENCE_S)


class Failing(Neighbour):
    """Fails every run except the one that begins after ``over``."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if not self.over.is_set():
            raise_failure(self)
        return "yes"

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        if self.runs == 2:
            self.reached.set()


def raise_failure(coordinator: Failing) -> None:
    raise MemoryError("the neighbour's own")


class Hanging(Neighbour):
    """Leaves its task without an answer."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self._wait()
        return "yes"


class SlowToCommit(Neighbour):
    """Commits its last output long after its run has ended."""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await self._wait()


class Finished(Neighbour):
    """Has nothing left to do."""

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        self.reached.set()


def action_of(spark: SparkSession, handle: Any) -> Callable[[], list[Any]]:
    rdd = spark.sparkContext.parallelize([0], 1)
    return lambda: rdd.mapPartitions(handle.subtask(Asking)).collect()


class Counted:
    """A healthy action that waits halfway until the neighbour is in its state."""

    def __init__(self, action: Callable[[], list[Any]], reached: threading.Event) -> None:
        self._action = action
        self._reached = reached
        self.calls = 0

    def __call__(self) -> list[Any]:
        self.calls += 1
        assert self._reached.wait(PATIENCE_S)
        return self._action()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (Failing, RestoreMode.BATCH),
        (SlowToCommit, RestoreMode.STREAMING),  # batch mode commits nothing
        *(pytest.param(kind, mode, marks=pytest.mark.long) for kind, mode in product((Hanging, Finished), RestoreMode)),
        pytest.param(Failing, RestoreMode.STREAMING, marks=pytest.mark.long),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, RestoreMode) else value.__name__,
)
def test_an_action_is_not_affected_by_another_actions_failure(  # H65
    spark: SparkSession, kind: type[Neighbour], mode: RestoreMode
) -> None:
    neighbour, healthy = kind(), Answering()
    with Sidecar(spark, IMPATIENT) as sidecar:
        its_action = action_of(spark, sidecar.coordinate("neighbour", neighbour, parallelism=1, mode=mode))
        counted = Counted(
            action_of(spark, sidecar.coordinate("healthy", healthy, parallelism=1, mode=mode)), neighbour.reached
        )
        other = Action(lambda: sidecar.run(its_action, restart=FixedDelay(restarts_max=None, delay_s=0.05)))
        try:
            assert sidecar.run(counted, restart=QUICKLY) == [0, "yes"]
            assert (counted.calls, healthy.runs) == (1, 1)
        finally:
            neighbour.over.set()
        assert other.result() == [0, "yes"]


@pytest.mark.parametrize(
    "error",
    [ESCAPES[0], *(pytest.param(error, marks=pytest.mark.long) for error in ESCAPES[1:])],
    ids=[type(error).__name__ for error in ESCAPES],
)
def test_an_exit_of_one_coordinator_fails_its_own_job_and_no_other(  # H65
    spark: SparkSession, error: BaseException
) -> None:
    healthy, hanging = Answering(), Hanging()

    class Leaving(Answering):
        async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
            raise error

        async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
            raise error

    with Sidecar(spark, IMPATIENT) as sidecar:
        # The neighbour's job runs while the other one fails.
        other = Action(action_of(spark, sidecar.coordinate("hanging", hanging, parallelism=1)))
        assert hanging.reached.wait(PATIENCE_S)
        leaving = sidecar.coordinate("leaving", Leaving(), parallelism=1)
        with pytest.raises(Exception, match=type(error).__name__.replace("CancelledError", "cancelled")):
            action_of(spark, leaving)()
        assert error in (leaving.failure, leaving.failure and leaving.failure.__cause__)
        hanging.over.set()
        assert other.result() == [0, "yes"]
        handle = sidecar.coordinate("healthy", healthy, parallelism=1)
        assert action_of(spark, handle)() == [0, "yes"]  # the sidecar takes new operators, too


async def test_a_cancelled_run_leaves_the_job_of_another_run_alone(spark: SparkSession) -> None:  # H65
    cancelled, healthy = Hanging(), Hanging()
    async with Sidecar(spark, IMPATIENT) as sidecar:
        its_action = action_of(spark, await sidecar.coordinate("cancelled", cancelled, parallelism=1))
        action = action_of(spark, await sidecar.coordinate("healthy", healthy, parallelism=1))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(sidecar.run(its_action, restart=QUICKLY))
            second = tasks.create_task(sidecar.run(action, restart=QUICKLY))
            assert await asyncio.to_thread(cancelled.reached.wait, PATIENCE_S)
            assert await asyncio.to_thread(healthy.reached.wait, PATIENCE_S)
            first.cancel()
            await asyncio.wait([first])
            cancelled.over.set()
            healthy.over.set()
        assert second.result() == [0, "yes"]
        assert healthy.runs == 1


class FailsOnce(Answering):
    """Fails its first run after the last answer, when the job may have succeeded already."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if not self.failures:
            self.failures += 1
            raise MemoryError("once")
        return "yes"


@pytest.mark.parametrize("thread", [pytest.param(InheritableThread, marks=pytest.mark.long), threading.Thread])
def test_an_action_owns_what_its_own_threads_run(spark: SparkSession, thread: type[threading.Thread]) -> None:
    """A failure is followed by a restart, whether or not threads inherit Spark's properties."""
    coordinator = FailsOnce()
    with Sidecar(spark, IMPATIENT) as sidecar:
        action = action_of(spark, sidecar.coordinate("op", coordinator, parallelism=1))
        results: list[list[Any]] = []

        def collect() -> None:
            with suppress(Exception):
                results.append(action())

        def in_a_thread() -> None:
            worker = thread(target=collect)
            worker.start()
            worker.join()
            if not results:
                raise RuntimeError("the thread has failed")

        sidecar.run(in_a_thread, restart=QUICKLY)
        assert results == [[0, "yes"]]


def test_the_mark_of_an_action_leaves_the_users_job_group_and_properties_alone(spark: SparkSession) -> None:
    context = spark.sparkContext
    with Sidecar(spark, IMPATIENT) as sidecar:
        action = action_of(spark, sidecar.coordinate("op", Answering(), parallelism=1))
        context.setJobGroup("mine", "a group of the user's")
        try:
            sidecar.run(action)
            assert context.getLocalProperty("spark.jobGroup.id") == "mine"
            assert context.getLocalProperty("headgate.action") is None
            assert context.statusTracker().getJobIdsForGroup("mine")
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
