# SPDX-License-Identifier: Apache-2.0

"""A driver without Spark for a ``SidecarRuntime``: its relay reports what the test says, and records commands."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol.facts import EngineFact, JobEnded, StageLook, StatusReported, TaskPlace
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, KeyRing
from spark_bridge.bridge.relay import OnFact, OnLost
from spark_bridge.bridge.relay.interface import RelayStatistics
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.bridge.takeover import InheritedRuns
from spark_bridge.certificates import Encryption
from spark_bridge.driver.config import SidecarConfig


class SimulatedRelay:
    """A ``Relay``. ``hear`` delivers a fact."""

    kind = "simulated"

    def __init__(self, on_fact: OnFact) -> None:
        self.statistics = RelayStatistics()
        self.cancelled: list[tuple[int, str]] = []
        """The jobs that were cancelled, with the reasons."""
        self.opened = self.closed = 0
        self._on_fact = on_fact

    def hear(self, fact: EngineFact) -> None:
        self._on_fact(RelayedFact(fact, time.time_ns() // 1000))

    async def start(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        pass

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self.cancelled.append((job_id, reason))
        self.hear(JobEnded(job_id, False, reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        return StatusReported()

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        pass

    async def look_at_stage(self, stage_id: int) -> StageLook:
        return StageLook()


class SimulatedSession:
    """A session as far as ``source`` needs it."""

    def __init__(self) -> None:
        self.formats: list[str] = []
        self.dataSource = self

    def register(self, source: Any) -> None:
        self.formats.append(source.name())


class SimulatedDriver:
    """A ``SparkDriver``."""

    is_here = True
    identity = NO_IDENTITY
    spark_context = None
    inherited: InheritedRuns | None = None

    def __init__(self) -> None:
        self.keys = KeyRing(secrets.token_bytes(KEY_BYTES))
        self.session: Any = SimulatedSession()
        self.relay: SimulatedRelay
        self.marked_actions: list[str] = []
        self.forbidden: list[str] = []

    async def hosts(self, config: SidecarConfig) -> tuple[str, str]:
        return "127.0.0.1", "127.0.0.1"

    async def task_failures_max(self) -> int | None:
        return 4

    async def cores(self) -> int | None:
        return 2

    async def encrypts_files(self) -> bool:
        return False

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: tuple[str, int],
    ) -> SimulatedRelay:
        self.relay = SimulatedRelay(on_fact)
        return self.relay

    async def equip(self) -> None:
        pass

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        self.marked_actions.append(action_id)
        yield

    async def forbid(self, action_id: str, reason: str) -> None:
        self.forbidden.append(action_id)
