# SPDX-License-Identifier: Apache-2.0

"""A driver without Spark for a ``SidecarRuntime``: its relay reports what the test says, and records commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.no_spark import PretendedDriver
from protocol.facts import JobEnded


class SimulatedSession:
    """A session as far as ``source`` needs it."""

    def __init__(self) -> None:
        self.formats: list[str] = []
        self.dataSource = self

    def register(self, source: Any) -> None:
        self.formats.append(source.name())


class SimulatedDriver(PretendedDriver):
    """A driver with a session. ``cancelled``: the jobs that were cancelled, with the reasons."""

    def __init__(self) -> None:
        super().__init__()
        self._session = SimulatedSession()
        self.cancelled: list[tuple[int, str]] = []
        self.opened = self.closed = 0
        self.marked_actions: list[str] = []
        self.forbidden: list[str] = []

    @property
    def session(self) -> Any:
        return self._session

    async def start(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self.cancelled.append((job_id, reason))
        self.say(JobEnded(job_id, False, reason))

    async def task_failures_max(self) -> int | None:
        return 4

    async def cores(self) -> int | None:
        return 2

    async def encrypts_files(self) -> bool:
        return False

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        self.marked_actions.append(action_id)
        yield

    async def forbid(self, action_id: str, reason: str) -> None:
        self.forbidden.append(action_id)
