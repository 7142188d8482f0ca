# SPDX-License-Identifier: Apache-2.0

"""A sidecar is left, also by Ctrl-C, while user code hangs: within its limits, and the hanging code is named (H70).

``settle_timeout_s`` is long enough that a test which waits for it fails by its own time limit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from headgate.testing import RecordingCoordinator
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import OutputNotCommitted, SidecarError
from spark_bridge.driver.config import SidecarConfig, SidecarLimits, Watching
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from tests.spark.actions import Action, one_task_each
from tests.spark.leftovers import nothing_left

pytestmark = pytest.mark.spark

CONFIG = SidecarConfig(
    limits=SidecarLimits(shutdown_timeout_s=2.0, settle_timeout_s=1000.0), watching=Watching(method_report_s=0.5)
)


@pytest.fixture(autouse=True)
def _leaves_nothing(spark: SparkSession) -> Iterator[None]:
    with nothing_left():
        yield


class Asking(SubtaskOperator):
    """Sends an event, asks a question, and then ends."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        self.context.send_event("an event")
        self.context.request("a request", timeout_s=300.0)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b""


# --- how user code hangs ----------------------------------------------------------------------------------------------


async def waits(release: threading.Event) -> None:
    await anyio.sleep_forever()


async def swallows_its_cancellation_once(release: threading.Event) -> None:
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        await anyio.sleep_forever()


async def swallows_its_cancellation_forever(release: threading.Event) -> None:
    while True:
        try:
            await anyio.sleep(1.0)
        except anyio.get_cancelled_exc_class():
            pass


async def waits_for_a_thread(release: threading.Event) -> None:
    await anyio.to_thread.run_sync(release.wait)


HOW: list[Callable[[threading.Event], Awaitable[None]]] = [
    waits,
    swallows_its_cancellation_once,
    swallows_its_cancellation_forever,
    waits_for_a_thread,
]

METHODS = [
    "start",
    "subtask_ready",
    "handle_event_from_operator",
    "handle_request",
    "checkpoint_coordinator",
    "notify_checkpoint_complete",
    "run_ended",
    "close",
]


class Hanging(RecordingCoordinator):
    """Hangs in one of its methods. ``hangs`` is set once it does; ``release`` ends the hang when nothing else can."""

    def __init__(self, method: str, how: Callable[[threading.Event], Awaitable[None]], *, press: bool) -> None:
        super().__init__(**{"handle_request": self._answer, method: self._hang})
        self.method = method
        self.press = press
        self.hangs, self.release = threading.Event(), threading.Event()
        self._how = how

    async def _hang(self, *arguments: Any) -> Any:
        self.hangs.set()
        if self.press:
            os.kill(os.getpid(), signal.SIGINT)
        await self._how(self.release)
        return b""

    async def _answer(self, *arguments: Any) -> Any:
        return "an answer"


def enter_and_leave(spark: SparkSession, coordinator: Hanging) -> list[Action]:
    """Leave a ``with`` block as soon as the coordinator hangs, or by the Ctrl-C that it then raises."""
    actions: list[Action] = []
    with Sidecar(spark, CONFIG) as sidecar:
        if coordinator.method == "start":
            actions.append(Action(lambda: sidecar.coordinate("op", coordinator, parallelism=1)))
        else:
            handle = sidecar.coordinate("op", coordinator, parallelism=1, mode=RestoreMode.STREAMING)
            rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Asking))
            actions.append(Action(rdd.collect))
        if coordinator.method != "close":
            assert coordinator.hangs.wait(300.0)
            if coordinator.press:
                threading.Event().wait(300.0)  # for the Ctrl-C
    return actions


def told(logged: list[Any], *events: str) -> list[Any]:
    return [line for line in logged if line["event"] in events]


AFTER_THE_RUN = ("checkpoint_coordinator", "notify_checkpoint_complete", "run_ended")

CASES = [
    ("start", waits, "its end"),
    ("handle_request", waits, "ctrl-c"),
    ("run_ended", waits, "its end"),
]
MORE_CASES = [
    *[(method, waits, left_by) for method in METHODS for left_by in ("its end", "ctrl-c")],
    *[("handle_request", how, "its end") for how in HOW[1:]],
    *[("close", how, "ctrl-c") for how in HOW[1:]],
]
EVERY_CASE = [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_CASES if case not in CASES)]


@pytest.mark.parametrize(("method", "how", "left_by"), EVERY_CASE, ids=lambda value: getattr(value, "__name__", value))
def test_a_sidecar_is_left_while_a_method_hangs(
    spark: SparkSession, method: str, how: Callable[[threading.Event], Awaitable[None]], left_by: str
) -> None:
    coordinator = Hanging(method, how, press=left_by == "ctrl-c")
    with capture_logs() as logged:
        try:
            if left_by == "ctrl-c":
                with pytest.raises(KeyboardInterrupt):
                    enter_and_leave(spark, coordinator)
            elif method in AFTER_THE_RUN:  # its last output is not committed (H71)
                with pytest.raises(OutputNotCommitted, match=rf"the coordinator has been in {method}\("):
                    enter_and_leave(spark, coordinator)
            else:
                enter_and_leave(spark, coordinator)
        finally:
            coordinator.release.set()
    named = told(logged, "coordinator method cancelled", "coordinator method abandoned")
    assert [(line["method"], how.__name__ in line["waiting_at"]) for line in named] == [(method, True)], logged
    assert len(coordinator.calls_of("close")) == (0 if method != "close" and how in HOW[2:] else 1)


def blocks_the_loop(release: threading.Event) -> None:
    release.wait(600.0)


async def blocks_its_loop(release: threading.Event) -> None:
    blocks_the_loop(release)


@pytest.mark.long
@pytest.mark.parametrize("raising", [False, True])
def test_a_sidecar_whose_loop_is_blocked_is_left_and_the_code_is_named(spark: SparkSession, raising: bool) -> None:
    coordinator = Hanging("handle_request", blocks_its_loop, press=False)
    sidecar_threads = {thread for thread in threading.enumerate() if thread.name.startswith("headgate")}

    def body() -> None:
        enter_and_leave(spark, coordinator)

    def body_that_raises() -> None:
        with Sidecar(spark, CONFIG) as sidecar:
            handle = sidecar.coordinate("op", coordinator, parallelism=1)
            Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Asking)).collect)
            assert coordinator.hangs.wait(300.0)
            raise ZeroDivisionError

    with capture_logs() as logged:
        try:
            if raising:
                with pytest.raises(ZeroDivisionError):
                    body_that_raises()
            else:
                with pytest.raises(SidecarError, match=r"its event loop has been blocked .* in blocks_the_loop"):
                    body()
        finally:
            coordinator.release.set()
    (line,) = told(logged, "event loop abandoned")
    assert "blocks_the_loop" in line["why"]
    for thread in set(threading.enumerate()) - sidecar_threads:
        if thread.name.startswith("headgate"):
            thread.join(300.0)
