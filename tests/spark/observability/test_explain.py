# SPDX-License-Identifier: Apache-2.0

"""Each situation that the diagnosis has a sentence for, on a real Spark."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from pyspark.sql import SparkSession

from headgate import GatewayLimits, OperatorCoordinator, Sidecar, SidecarConfig, SubtaskContext, SubtaskOperator
from tests.spark.actions import Action, one_task_each
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

WAITING_S = 0.3


def until_said(sidecar: Sidecar, pattern: str) -> str:
    """Ask until a sentence matches; the test's timeout is the limit."""
    while True:
        sentences = sidecar.explain(waiting_s=WAITING_S)
        found = [sentence for sentence in sentences if re.search(pattern, sentence)]
        if found:
            return found[0]


class Asking(SubtaskOperator):
    """Asks the coordinator one question."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        yield self.context.request("a question")


class Slow(OperatorCoordinator):
    """Answers questions, and takes snapshots, only when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    def let(self, sidecar: Sidecar) -> None:
        """Let it, from another thread."""
        sidecar._entered()[1].loop.call_soon_threadsafe(self.may_answer.set)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self.may_answer.wait()
        return subtask

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        await self.may_answer.wait()
        return b""


class Computing(SubtaskOperator):
    """Computes in Python, without a look at its mailbox, until a file appears."""

    def __init__(self, file: str) -> None:
        self.file = file

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        while not os.path.exists(self.file):
            sum(range(1000))


def test_a_question_waits_for_a_coordinator_that_is_busy_with_another_and_for_a_slot(spark: SparkSession) -> None:
    slow: list[Slow] = []

    def make() -> Slow:
        slow.append(Slow())
        return slow[-1]

    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("crawl", make, parallelism=4)
        action = Action(one_task_each(spark, 4).mapPartitions(handle.subtask(Asking)).collect)
        sentence = until_said(sidecar, "1 .*subtask_ready")
        assert re.match(r"subtask [01] has waited \d+ s for an answer to a request; subtask [01] has waited", sentence)
        assert "the coordinator of 'crawl' has been in handle_request(subtask=" in sentence
        assert "awaiting at" in sentence
        assert "in Slow.handle_request" in sentence
        missing = until_said(sidecar, "slot")
        assert missing == "2 of 4 subtasks of 'crawl' are ready; 2 have no slot: the application has 2 cores"
        slow[-1].let(sidecar)
        assert sorted(action.result()) == sorted([0, 1, 2, 3, 0, 1, 2, 3])
        assert sidecar.explain(waiting_s=WAITING_S) == ()


def test_a_checkpoint_waits_for_a_subtask_that_computes(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", OperatorCoordinator, parallelism=1, mode="streaming")
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Computing, str(file))).collect)
        while not sidecar.status().operators["op"].ready:
            continue
        checkpoint = Action(lambda: sidecar.checkpoint("op"))
        sentence = until_said(sidecar, "checkpoint")
        assert re.fullmatch(
            r"checkpoint \d+ of 'op' waits for subtask 0, which has computed for \d+ s without looking at its mailbox",
            sentence,
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
        sentence = until_said(sidecar, "^checkpoint")
        assert sentence.endswith("for the coordinator: checkpoint_coordinator has not returned")
        assert until_said(sidecar, "has been in checkpoint_coordinator").startswith("the coordinator of 'op'")
        slow.let(sidecar)
        assert checkpoint.result() >= 0


def test_a_stopped_process_has_not_confirmed_an_event_and_the_log_says_so_unasked(spark: SparkSession) -> None:
    script = Script({}, [])
    config = SidecarConfig(gateway=GatewayLimits(confirm_timeout_s=60.0), stalled_report_s=1.0)
    with structlog.testing.capture_logs() as lines, Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Telling)).collect)
        while not script.named("event"):
            sidecar.status()
        process = script.named("event")[0][3]
        os.kill(process, signal.SIGSTOP)
        try:
            script.say(["are you there"])
            sentence = until_said(sidecar, "confirmed")
            while not any(line["event"] == "nothing moves" for line in lines):
                sidecar.status()
        finally:
            os.kill(process, signal.SIGCONT)
        assert sentence.startswith("subtask 0 has not confirmed an event for ")
        said = [line for line in lines if line["event"] == "nothing moves"]
        assert said[0]["log_level"] == "warning"
        assert said[0]["why"].startswith("subtask 0 has not confirmed an event for ")
        script.say(["stop"])
        action.result()


class Telling(Listening):
    """Tells the coordinator which process it runs in."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        context.send_event(os.getpid())
