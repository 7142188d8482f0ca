# SPDX-License-Identifier: Apache-2.0

"""Commands to Spark are repeated if they fail (H19), on actors with a virtual clock."""

from __future__ import annotations

from typing import Any, cast

import pytest

from actors import Actor, ActorContext
from actors.logs import LimitedLog
from actors.testing import deterministic_system
from protocol.attempts import CancelJobs, KillTask, LedgerConfig, QueryStatus
from protocol.facts import TaskPlace
from spark_bridge.bridge.actor import BridgeActor, SparkCommands
from spark_bridge.bridge.messages import (
    CancelCommand,
    CommandFailed,
    KillCommand,
    UnknownAttemptResumed,
    WatchCommand,
)
from spark_bridge.bridge.relay import Relay, RelayError, RelayStopped


class Spark:
    """A relay whose commands fail as often as a test requests: a real Spark does not do that on demand."""

    def __init__(self, *errors: RelayError) -> None:
        self.errors = list(errors)
        self.asked: list[str] = []

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        self._answer(f"kill {task_attempt_id}: {reason}")

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self._answer(f"cancel {job_id}: {reason}")

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        self._answer(f"watch stage {stage_id} and task {task_attempt_id}")

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> Any:
        self._answer("look")

    def _answer(self, what: str) -> None:
        self.asked.append(what)
        if self.errors:
            raise self.errors.pop(0)


class Asker(Actor[Any]):
    """The part of the bridge that commands concern."""

    def __init__(self, spark: Spark) -> None:
        self._spark = spark

    async def started(self, context: ActorContext[Any]) -> None:
        log = LimitedLog(context.log, context.clock)
        self._commands = SparkCommands(lambda: cast(Relay, self._spark), context, log)

    async def receive(self, context: ActorContext[Any], message: Any) -> None:
        match message:
            case KillTask() | CancelJobs() | QueryStatus():
                self._commands.ask(message)
            case (stage_id, task_attempt_id):
                self._commands.watch(stage_id, task_attempt_id)
            case CommandFailed() | KillCommand() | CancelCommand() | WatchCommand():
                self._commands.handle(message)


async def asked_of(
    spark: Spark, effect: KillTask | CancelJobs | QueryStatus | tuple[int, int], *, within_s: float
) -> list[str]:
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: Asker(spark)).tell(effect)
        await kit.run_until_idle()
        await kit.advance(within_s)
    return spark.asked


@pytest.mark.asyncio
async def test_a_failed_kill_is_repeated_until_spark_accepts_it() -> None:
    """H19, H25: an unresponsive task was never killed if one answer of the relay was lost. Found by the simulation."""
    spark = Spark(RelayError("no answer"), RelayError("no answer"))
    assert await asked_of(spark, KillTask(7, "unresponsive"), within_s=3600.0) == ["kill 7: unresponsive"] * 3


@pytest.mark.asyncio
async def test_each_job_is_cancelled_and_only_failures_are_repeated() -> None:  # H15, H19
    spark = Spark(RelayError("no answer"))
    asked = await asked_of(spark, CancelJobs((1, 2), "failed"), within_s=3600.0)
    assert asked == ["cancel 1: failed", "cancel 2: failed", "cancel 1: failed"]


@pytest.mark.asyncio
async def test_a_stage_is_named_again_until_the_relay_has_taken_note() -> None:
    """H19: without its facts, each decision about the stage's tasks would wait for a look at Spark's records."""
    spark = Spark(RelayError("no answer"))
    assert await asked_of(spark, (3, 7), within_s=3600.0) == ["watch stage 3 and task 7"] * 2


@pytest.mark.asyncio
async def test_the_pause_between_two_tries_grows_and_is_bounded() -> None:  # H48
    spark = Spark(*[RelayError("no answer")] * 1000)
    asked = await asked_of(spark, KillTask(7, "unresponsive"), within_s=600.0)
    assert 60 <= len(asked) <= 70


@pytest.mark.asyncio
async def test_nothing_is_repeated_when_spark_is_gone() -> None:  # H57
    spark = Spark(RelayStopped("stopped"))
    assert await asked_of(spark, KillTask(7, "unresponsive"), within_s=3600.0) == ["kill 7: unresponsive"]


@pytest.mark.asyncio
async def test_a_query_is_not_repeated_because_the_ledger_repeats_it() -> None:  # H19
    spark = Spark(RelayError("no answer"))
    assert await asked_of(spark, QueryStatus(frozenset({7}), frozenset()), within_s=3600.0) == ["look"]


@pytest.mark.asyncio
async def test_the_bridge_repeats_what_has_failed() -> None:  # H19, H61
    spark = Spark(RelayError("no answer"))
    async with deterministic_system() as kit:
        bridge = kit.system.spawn(lambda: BridgeActor(LedgerConfig(), lambda: cast(Relay, spark)))
        bridge.tell(UnknownAttemptResumed(7))
        await kit.advance(3600.0)
    assert spark.asked == ["kill 7: the sidecar was started again: the attempt's coordinator is gone"] * 2
