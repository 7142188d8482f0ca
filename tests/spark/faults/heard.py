# SPDX-License-Identifier: Apache-2.0

"""Record what Spark itself reports during a fault, through a relay alongside the sidecar's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from protocol.facts import EngineFact, JobEnded, JobStarted, TaskEnded, TaskOutcome, TaskStarted
from spark_bridge.bridge.relay import Relay, open_relay
from spark_bridge.bridge.relay.records import RelayedFact

FactT = TypeVar("FactT")

WAIT_S = 300.0


class Heard:
    """Every fact since it began to listen. Thread-safe."""

    def __init__(self) -> None:
        self.facts: list[EngineFact] = []
        self._changed = threading.Condition()

    def receive(self, relayed: RelayedFact) -> None:
        with self._changed:
            self.facts.append(relayed.fact)
            self._changed.notify_all()

    def forget_a_job(self) -> None:
        """Wait for the end of a job, and forget all facts so far."""
        self.wait_for(JobEnded)
        with self._changed:
            self.facts.clear()

    def of(self, kind: type[FactT], where: Callable[[FactT], bool] = lambda _: True) -> list[FactT]:
        """The matching facts of a kind, in the order of Spark's bus."""
        with self._changed:
            return [fact for fact in self.facts if isinstance(fact, kind) and where(fact)]

    def wait_for(
        self, kind: type[FactT], where: Callable[[FactT], bool] = lambda _: True, timeout_s: float = WAIT_S
    ) -> FactT:
        """Return the first matching fact of a kind; wait for it if it has not come yet."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.of(kind, where), timeout_s):
                raise AssertionError(f"no such {kind.__name__} within {timeout_s:g} s, but: {self.facts}")
            return self.of(kind, where)[0]

    def start_of(self, task_attempt_id: int) -> TaskStarted:
        return self.wait_for(TaskStarted, lambda fact: fact.task_attempt_id == task_attempt_id)

    def end_of(self, task_attempt_id: int) -> TaskEnded:
        return self.wait_for(TaskEnded, lambda fact: fact.task_attempt_id == task_attempt_id)

    def outcomes(self, partition: int) -> list[TaskOutcome]:
        """How the attempts of one partition ended, in the order of Spark's bus.

        Covers only jobs that began after it started to listen: a cancelled task of an earlier job may end during this
        one.
        """
        stages = {stage_id for fact in self.of(JobStarted) for stage_id in fact.stage_ids}
        ends = self.of(TaskEnded, lambda fact: fact.partition == partition and fact.stage_id in stages)
        return [fact.outcome for fact in ends]


async def _start(spark: Any, heard: Heard) -> Relay:
    relay = open_relay(spark, heard.receive)
    await relay.start()
    return relay


@contextmanager
def listening_to(spark: Any) -> Iterator[Heard]:
    """Record what Spark posts within the block."""
    heard = Heard()
    with start_blocking_portal("asyncio", name="heard") as portal:
        relay = portal.call(partial(_start, spark, heard))
        try:
            yield heard
        finally:
            portal.call(relay.close)
