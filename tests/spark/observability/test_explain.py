# SPDX-License-Identifier: Apache-2.0

"""Each situation that the diagnosis has a sentence for, on a real Spark."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import structlog.testing
from pyspark.sql import SparkSession

from headgate import (
    CheckpointConfig,
    CoordinatorContext,
    GatewayLimits,
    OperatorCoordinator,
    Reply,
    Sidecar,
    SidecarConfig,
    SidecarLimits,
    SubtaskContext,
    SubtaskOperator,
    Watching,
)
from headgate.errors import CheckpointFailed
from tests.spark.actions import Action, one_task_each
from tests.spark.faults.network import Line
from tests.spark.operators import Asking, Listening
from tests.spark.script import Script
from tests.spark_bridge.storage.checkpoints import HookedFileSystem, hooked

pytestmark = pytest.mark.spark

HELD = CheckpointConfig(hold_events=True)
WAITING_S = 0.3
LIMIT_S = 180.0
PATIENT = SidecarConfig(gateway=GatewayLimits(confirm_timeout_s=600.0))
"""A process that is stopped for a while has not failed."""


def until_said(sidecar: Sidecar, pattern: str) -> str:
    """Ask until a whole sentence matches.

    On a busy machine, each step on the way may take so long that another true sentence comes first.
    """
    give_up = time.monotonic() + LIMIT_S
    while True:
        sentences = sidecar.explain(waiting_s=WAITING_S)
        found = [sentence for sentence in sentences if re.fullmatch(pattern, sentence)]
        if found:
            return found[0]
        assert time.monotonic() < give_up, f"never said: {pattern}; but {sentences}, while {sidecar.status()}"


def nothing_waits(sidecar: Sidecar) -> bool:
    """Whether nothing is said, except that the machine is too busy for the sidecar's loop."""
    blocked = "the sidecar's event loop was blocked"
    return all(sentence.startswith(blocked) for sentence in sidecar.explain(waiting_s=WAITING_S))


class Slow(OperatorCoordinator):
    """Answers questions, and takes snapshots, only when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.context: CoordinatorContext

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    def let(self, sidecar: Sidecar) -> None:
        """Let it, from another thread."""
        sidecar._entered()[1]._loop.call_soon_threadsafe(self.may_answer.set)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self.may_answer.wait()
        return subtask

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        await self.may_answer.wait()
        return b""


class Computing(SubtaskOperator):
    """Computes in Python, without a look at its mailbox, until a file appears. Makes another one when it begins."""

    def __init__(self, file: str) -> None:
        self.file = file

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        Path(f"{self.file}.{os.getpid()}").touch()
        while not os.path.exists(self.file):
            sum(range(1000))


class Blocking(OperatorCoordinator):
    """Does not let the event loop turn while it answers."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        time.sleep(1.0)  # noqa: ASYNC251 - the fault
        return subtask


class Telling(Listening):
    """Tells the coordinator which process it runs in."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        context.send_event(os.getpid())


class StopsAtItsSnapshot(Script):
    """Stops the task's process while it takes its first snapshot, and sends it one more event."""

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        if not self.named("checkpoint"):
            stop(self.named("event")[0][3])
            await self.gateways[0].send_event("one more")
        return await super().checkpoint_coordinator(checkpoint_id)


def until_ready(sidecar: Sidecar, count: int) -> None:
    """Wait until so many subtasks of ``op`` are ready."""
    give_up = time.monotonic() + LIMIT_S
    while sidecar.status().operators["op"].ready < count:
        assert time.monotonic() < give_up, f"not ready: {sidecar.status()}"


def until_computing(file: Path, count: int) -> None:
    """Wait until so many tasks that are ``Computing`` have begun."""
    while len(list(file.parent.glob(f"{file.name}.*"))) < count:
        continue


def process_of(script: Script) -> int:
    """The process of the one task, which is ``Telling``."""
    script.wait_for(lambda story: any(one[0] == "event" for one in story))
    process: int = script.named("event")[0][3]
    return process


def stop(process: int) -> None:
    """Stop it, and wait until each of its threads stands still: a signal takes a moment."""
    os.kill(process, signal.SIGSTOP)
    while any(
        task.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "T"
        for task in Path(f"/proc/{process}/task").glob("*/stat")
    ):
        continue


@contextmanager
def stopped(process: int) -> Iterator[None]:
    stop(process)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_question_waits_for_a_coordinator_that_is_busy_with_another_and_for_a_slot(spark: SparkSession) -> None:
    slow: list[Slow] = []

    def make() -> Slow:
        slow.append(Slow())
        return slow[-1]

    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("crawl", make, parallelism=4)
        action = Action(one_task_each(spark, 4).mapPartitions(handle.subtask(Asking)).collect)
        # The other one waits for its answer as well, or still for subtask_ready.
        until_said(
            sidecar,
            r"subtasks? .* waited \d+ s for an answer to a request; .*the coordinator of 'crawl' has been in "
            r"handle_request\(subtask=.* for \d+ s, awaiting at .* in Slow\.handle_request.*",
        )
        until_said(sidecar, "2 of 4 subtasks of 'crawl' are ready; 2 have no slot: the application has 2 cores")
        slow[-1].let(sidecar)
        assert sorted(action.result()) == sorted([0, 1, 2, 3, 0, 1, 2, 3])
        assert nothing_waits(sidecar)


class Deferring(OperatorCoordinator):
    """Answers all questions when it is let."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        self.replies.append(Reply())
        return self.replies[-1]

    async def handle_client_request(self, request: Any) -> None:
        for reply in self.replies:
            reply.answer(request)


def test_a_question_waits_for_a_reply_that_the_coordinator_has_deferred(spark: SparkSession) -> None:  # H84
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("crawl", Deferring, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Asking)).collect)
        until_said(
            sidecar,
            r"subtasks 0, 1 have waited \d+ s for an answer that the coordinator of 'crawl' has deferred: it has not "
            "settled the Reply yet",
        )
        attempts = sidecar.status().operators["crawl"].attempts
        assert {one.waits_for for one in attempts} == {"the coordinator to settle its Reply"}
        sidecar.request("crawl", "go on")
        assert sorted(map(str, action.result())) == ["0", "1", "go on", "go on"]
        assert nothing_waits(sidecar)


def test_a_checkpoint_waits_for_a_subtask_that_computes(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", OperatorCoordinator, parallelism=1, mode="streaming", checkpoint=HELD)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Computing, str(file))).collect)
        until_computing(file, 1)
        checkpoint = Action(lambda: sidecar.checkpoint("op"))
        until_said(
            sidecar,
            r"checkpoint \d+ of 'op' waits for subtask 0, which has computed for \d+ s without looking at its mailbox",
        )
        (progress,) = sidecar.status().operators["op"].checkpoints
        assert (progress.phase, progress.awaited) == ("acknowledging", (0,))
        file.touch()
        assert checkpoint.result() == progress.checkpoint_id
        assert action.result() == [0]
        (record, *_) = sidecar.status().operators["op"].checkpoint_history
        assert (record.checkpoint_id, record.outcome) == (progress.checkpoint_id, "completed")
        assert record.phases_s["acknowledging"] >= WAITING_S


def test_a_checkpoint_waits_for_the_coordinators_own_snapshot(spark: SparkSession) -> None:
    slow = Slow()
    with Sidecar(spark) as sidecar:
        sidecar.coordinate("op", slow, parallelism=1, mode="streaming")
        checkpoint = Action(lambda: sidecar.checkpoint("op"))
        until_said(sidecar, "checkpoint .* for the coordinator: checkpoint_coordinator has not returned")
        until_said(sidecar, "the coordinator of 'op' has been in checkpoint_coordinator.*")
        slow.let(sidecar)
        assert checkpoint.result() >= 0


def test_a_checkpoint_waits_for_the_coordinators_snapshot_of_an_earlier_one(spark: SparkSession) -> None:
    slow = Slow()
    with Sidecar(spark) as sidecar:
        two = CheckpointConfig(concurrent_max=2)
        sidecar.coordinate("op", slow, parallelism=1, mode="streaming", checkpoint=two)
        checkpoints = [Action(lambda: sidecar.checkpoint("op")) for _ in range(2)]
        until_said(sidecar, r"checkpoint \d+ of 'op' has waited \d+ s for the coordinator's snapshot of an earlier one")
        slow.let(sidecar)
        for checkpoint in checkpoints:
            with suppress(CheckpointFailed):  # the earlier one may be subsumed
                checkpoint.result()


def test_a_checkpoint_waits_for_a_storage_that_does_not_answer(spark: SparkSession, tmp_path: Path) -> None:
    fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)
    may_write = threading.Event()

    def hook(call: str, path: str) -> None:
        if call == "mv" and path.endswith(".hgc"):
            may_write.wait()

    with hooked(hook), Sidecar(spark, SidecarConfig(storage=f"hooked://{tmp_path}")) as sidecar:
        sidecar.coordinate("op", OperatorCoordinator, parallelism=1, mode="streaming")
        checkpoint = Action(lambda: sidecar.checkpoint("op"))
        until_said(sidecar, r"checkpoint \d+ of 'op' has waited \d+ s for the storage to write it")
        may_write.set()
        checkpoint.result()


@pytest.mark.parametrize("hold_events", [True, False])
def test_a_checkpoint_waits_for_a_stopped_process(spark: SparkSession, hold_events: bool) -> None:
    script, config = Script({}, []), CheckpointConfig(hold_events=hold_events)
    with Sidecar(spark, PATIENT) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1, mode="streaming", checkpoint=config)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Telling)).collect)
        which = r"whose process has not answered for \d+ s"
        if not hold_events:
            which = (
                r"which has not answered for \d+ s: its task computes without looking at the mailbox, or the process "
                "does not answer at all"
            )
        with stopped(process_of(script)):
            checkpoint = Action(lambda: sidecar.checkpoint("op"))
            until_said(sidecar, rf"checkpoint \d+ of 'op' waits for subtask 0, {which}")
        checkpoint.result()
        script.say(["stop"])
        action.result()


def test_a_checkpoint_waits_for_the_confirmation_of_an_event_before_it(spark: SparkSession) -> None:
    script = StopsAtItsSnapshot({}, [])
    with Sidecar(spark, PATIENT) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1, mode="streaming")
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Telling)).collect)
        process = process_of(script)
        checkpoint = Action(lambda: sidecar.checkpoint("op"))
        try:
            until_said(
                sidecar, r"checkpoint \d+ of 'op' has waited \d+ s for subtask 0 to confirm every event sent before it"
            )
        finally:
            os.kill(process, signal.SIGCONT)
        checkpoint.result()
        script.say(["stop"])
        action.result()


def test_a_task_has_lost_its_connection(spark: SparkSession) -> None:
    script = Script({}, [])
    with Line() as line, Sidecar(spark, line.config()) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect)
        until_ready(sidecar, 1)
        line.break_off()
        until_said(sidecar, "subtask 0 has had no connection to the sidecar for up to .*")
        line.heal()
        script.say(["stop"])
        action.result()


def test_a_task_waits_for_the_end_of_another_run_of_its_operator(spark: SparkSession) -> None:
    script = Script({}, [])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1)
        tasks = one_task_each(spark, 1).mapPartitions(handle.subtask(Listening))
        first = Action(tasks.collect)
        until_ready(sidecar, 1)
        second = Action(tasks.collect)
        until_said(
            sidecar,
            r"a task of subtask 0 of 'op' has waited \d+ s to be accepted: it waits for the end of another run of the "
            "operator",
        )
        script.say(["stop"])
        first.result()
        script.wait_for(lambda story: sum(one[0] == "ready" for one in story) == 2)
        script.say(["stop"])
        second.result()


def test_a_task_that_cannot_reach_the_sidecar_has_not_registered(spark: SparkSession, tmp_path: Path) -> None:
    file = str(tmp_path / "go on")
    script = Script({}, [])
    with Line() as line, Sidecar(spark, line.config(limits=SidecarLimits(connect_timeout_s=600.0))) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        with occupied_core(spark, file):
            action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
            until_said(
                sidecar, "1 of 2 subtasks of 'op' is ready; 1 has no slot, because Spark has not started its task yet"
            )
            line.break_off()
        until_said(
            sidecar,
            r"\d of 2 subtasks of 'op' (is|are) ready; 1 task that Spark has started has not registered yet: "
            rf"it is still starting, or cannot reach 127.0.0.1:{line.port}",
        )
        line.heal()
        script.wait_for(lambda story: sum(one[0] == "ready" for one in story) == 2)
        script.say(["stop"])
        action.result()


@contextmanager
def occupied_core(spark: SparkSession, file: str) -> Iterator[None]:
    """A job without Headgate computes meanwhile."""
    compute: Any = Computing(file).process
    other = Action(one_task_each(spark, 1).mapPartitions(compute).collect)
    while not spark.sparkContext.statusTracker().getActiveJobsIds():
        continue
    yield
    Path(file).touch()
    other.result()


def test_a_question_waits_behind_many_short_calls(spark: SparkSession) -> None:
    coordinator = Slow()
    coordinator.may_answer.set()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1)
        asked_enough = threading.Event()

        async def a_short_call() -> None:
            await asyncio.sleep(WAITING_S / 10)
            if not asked_enough.is_set():
                coordinator.context.call_soon_threadsafe(a_short_call)

        for _ in range(100):
            coordinator.context.call_soon_threadsafe(a_short_call)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Asking)).collect)
        until_said(
            sidecar,
            r"subtask 0 has waited \d+ s for (an answer to a request|the coordinator's subtask_ready); .*"
            r"\d+ messages wait in the mailbox of the coordinator of 'op'",
        )
        asked_enough.set()
        assert action.result() == [0, 0]


def test_a_coordinator_blocks_the_event_loop(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Blocking, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Asking)).collect)
        until_said(sidecar, r"the sidecar's event loop was blocked for up to \d+\.\d s in the last minute: .*")
        action.result()


def test_a_stopped_process_has_not_confirmed_an_event_and_the_log_says_so_unasked(spark: SparkSession) -> None:
    script = Script({}, [])
    config = replace(PATIENT, watching=Watching(stalled_report_s=1.0))
    with structlog.testing.capture_logs() as lines, Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Telling)).collect)
        with stopped(process_of(script)):
            script.say(["are you there"])
            unconfirmed = "subtask 0 has not confirmed an event for "
            until_said(sidecar, f"{unconfirmed}.*")
            while not (said := [line for line in lines if unconfirmed in line.get("why", "")]):
                sidecar.status()
        assert (said[0]["event"], said[0]["log_level"]) == ("no progress", "warning")
        script.say(["stop"])
        action.result()
