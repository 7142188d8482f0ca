# SPDX-License-Identifier: Apache-2.0

"""A hostile task that has everything a task has, and claims to be another one (H75).

It knows the operator's key, its id, the run, the subtasks, and task ids. A claim that Spark does not confirm reaches
nothing that belongs to a living attempt: neither its state, nor its place in a checkpoint, nor its coordinator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import SubtaskGateway
from protocol.attempts import LedgerConfig
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.relay import RelayKind
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from spark_bridge.subtask.runner import run_subtask
from spark_bridge.task_entry import SubtaskTask, current_task
from tests.spark.actions import one_task_each
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark

QUICK = LedgerConfig(heal_after_s=0.5, query_every_s=0.5, give_up_after_s=4.0)
FORGED, ITSELF = 10**12, -1
"""A task id that Spark has never given out; the id of the hostile task itself, which computes partition 0."""


class Faithful(Listening):
    """Its state says who wrote it."""

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"faithful"

    def final_state(self) -> bytes:
        return b"faithful"


class Forger(SubtaskOperator):
    """Takes the place of another subtask, and writes its own state. A coordinator that has let it in stops it."""

    stopping = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        context.send_event(["forged", state])

    def handle_event(self, event: Any) -> None:
        self.stopping = event == "stop"

    def process(self, records: Iterator[Any]) -> None:
        while not self.stopping:
            self.context.wait_for_event()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"forged"


def forge(endpoint: TaskEndpoint, identity: TaskIdentity) -> str:
    """Run a forger until it is refused or given up; return what it was told."""
    try:
        for _ in run_subtask(Forger, endpoint, identity, ()):
            pass
    except Exception as error:
        return repr(error)
    return "it ended well"


def forge_in_child(endpoint: TaskEndpoint, identity: TaskIdentity) -> str:
    """Run ``forge`` in a forked process: in one process, a second registration closes the first connection."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, forge(endpoint, identity).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


class Hostile(Faithful):
    """A task that registers as itself, and at the coordinator's word a second time, as another one of subtask 1."""

    def __init__(self, endpoint: TaskEndpoint, claimed: int) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._claimed = claimed

    def handle_event(self, event: Any) -> None:
        if event != "forge":
            super().handle_event(event)
            return
        own = current_task()
        task_attempt_id = own.task_attempt_id if self._claimed == ITSELF else self._claimed
        identity = replace(own, subtask=1, task_attempt_id=task_attempt_id, attempt_number=1)
        self.context.send_event(["over", forge_in_child(self._endpoint, identity)])


class Overseer(Script):
    """Has subtask 0 forge when both are ready, and stops both when the forger is over.

    A third attempt that becomes ready is the forger, or the successor of one that it has displaced. It is stopped, so
    that the job ends in this case too.
    """

    def __init__(self) -> None:
        super().__init__({}, [])
        self.attempts: list[SubtaskGateway] = []

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await super().subtask_ready(subtask, gateway)
        self.attempts.append(gateway)
        if len(self.attempts) == 2:
            await self.gateways[0].send_event("forge")
        elif len(self.attempts) > 2:
            await gateway.send_event("stop")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        await super().handle_event_from_operator(subtask, attempt, event)
        if event[0] == "over":
            for gateway in self.attempts:
                await gateway.send_event("stop")


class Either:
    """Runs ``hostile`` as partition 0 and ``faithful`` as any other."""

    def __init__(self, hostile: SubtaskTask, faithful: SubtaskTask) -> None:
        self.hostile = hostile
        self.faithful = faithful

    def __call__(self, records: Iterable[Any]) -> Any:
        return (self.faithful if current_task().subtask else self.hostile)(records)


@pytest.mark.parametrize("claimed", [FORGED, ITSELF])
@pytest.mark.parametrize("mode", [RestoreMode.STREAMING, pytest.param(RestoreMode.BATCH, marks=pytest.mark.long)])
@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_a_claim_displaces_no_living_attempt(
    spark: SparkSession, relay: RelayKind, mode: RestoreMode, claimed: int
) -> None:
    script = Overseer()
    with Sidecar(spark, SidecarConfig(relay=relay, ledger=QUICK)) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2, mode=mode)
        hostile = handle.subtask(Hostile, handle.endpoint, claimed)
        both = Either(hostile, handle.subtask(Faithful))
        results = sidecar.run(one_task_each(spark, 2).mapPartitions(both).collect)

    ready = [callback[1] for callback in script.named("ready")]
    assert sorted(ready) == [0, 1], f"the claim was accepted, or displaced an attempt: {script.story}"
    assert not script.named("failed"), script.story
    assert sorted(results) == [(0, 0, []), (1, 0, [])], "the first attempts, undisturbed"
    events = [callback[3] for callback in script.named("event")]
    assert [event[0] for event in events] == ["over"], events
    assert "RegistrationRefused" in events[0][1]


class ClaimFirst:
    """Partition 0 takes the place of subtask 1 and says so in a file; partition 1 registers only then."""

    def __init__(self, faithful: SubtaskTask, endpoint: TaskEndpoint, accepted: Path) -> None:
        self.faithful = faithful
        self.endpoint = endpoint
        self.accepted = accepted

    def __call__(self, records: Iterable[Any]) -> Any:
        own = current_task()
        if own.subtask == 0:
            identity = replace(own, subtask=1, task_attempt_id=FORGED)
            return iter([forge(self.endpoint, identity)])
        while not self.accepted.exists():
            time.sleep(0.05)  # in a task, and for a fact of the driver
        return self.faithful(records)


class Doorkeeper(Script):
    """Says in a file that the forger was accepted, and stops every later task."""

    def __init__(self, accepted: Path) -> None:
        super().__init__({}, [])
        self.accepted = accepted

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await super().subtask_ready(subtask, gateway)
        if self.accepted.exists():
            await gateway.send_event("stop")
        self.accepted.touch()


@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_a_real_task_takes_its_place_back_from_a_claim_that_came_first(
    spark: SparkSession, relay: RelayKind, tmp_path: Path
) -> None:
    script = Doorkeeper(tmp_path / "accepted")
    with Sidecar(spark, SidecarConfig(relay=relay, ledger=QUICK)) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        tasks = ClaimFirst(handle.subtask(Faithful), handle.endpoint, script.accepted)
        told, real = sidecar.run(one_task_each(spark, 2).mapPartitions(tasks).collect)

    assert real == (1, 1, []), "the second attempt is Spark's"
    assert "AttemptOver" in told
    assert [callback[0] for callback in script.of_subtask(1, "ready", "failed")] == ["ready", "failed", "ready"]
