# SPDX-License-Identifier: Apache-2.0

"""A driver and a relay without Spark, for benchmarks and tests: nothing happens unless a subclass says it does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from protocol.facts import EngineFact, StageLook, StatusReported, TaskPlace
from protocol.wire.keys import KEY_BYTES, KeyRing
from spark_bridge.bridge.relay import OnFact, OnLost, Relay
from spark_bridge.bridge.relay.interface import RelayStatistics
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.common.certificates import Encryption
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.spark_driver import SparkDriver


class QuietRelay:
    """A ``Relay`` that has nothing to attach to. Every command is accepted and has no effect."""

    kind = "simulated"

    def __init__(self) -> None:
        self.statistics = RelayStatistics()

    async def start(self) -> None:
        """Nothing to do: there is no bus to attach to."""

    async def close(self) -> None:
        """Nothing to do: nothing is open."""

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        """Nothing to do."""

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """Nothing to do."""

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Nothing to do: every fact is delivered."""

    async def look_at_stage(self, stage_id: int) -> StageLook:
        return StageLook()

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        return StatusReported()


class PretendedDriver(SparkDriver, QuietRelay):
    """A driver that is its own relay. ``say`` reports a fact."""

    _on_fact: OnFact

    def __init__(self) -> None:
        super().__init__()
        self.secret = secrets.token_bytes(KEY_BYTES)
        self.keys = KeyRing(self.secret)

    def say(self, fact: EngineFact) -> None:
        """Report a fact to the sidecar, as the relay of a real driver would."""
        self._on_fact(RelayedFact(fact, time.time_ns() // 1000))

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        return "127.0.0.1", "127.0.0.1"

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
    ) -> Relay:
        self._on_fact = on_fact
        return self
