# SPDX-License-Identifier: Apache-2.0

"""The sidecar's commands to the listener in the driver's JVM, as bytes on the relay's connection."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from protocol.facts import StageLook, StatusReported, TaskPlace
from spark_bridge.bridge.relay.interface import RelayError
from spark_bridge.bridge.relay.jvm_link import RelayServer
from spark_bridge.bridge.relay.records import shorten
from spark_bridge.bridge.runs import ActiveStage

_KILL_TASK, _CANCEL_JOB, _QUERY_STATUS, _PING, _ACTIVE_STAGES, _LOOK_AT_STAGE = range(1, 7)
_WATCH, _HOLD_BACK, _GOODBYE = range(7, 10)


class JvmCommands:
    """The commands of a ``Relay`` whose listener is in a JVM at the other end of ``server``."""

    def __init__(self, server: RelayServer) -> None:
        self._server = server

    async def ping(self) -> None:
        """Return when the JVM has answered. Raises as ``Relay.kill_task`` does."""
        await self._server.command(_PING, b"")

    async def hold_back(self) -> None:
        """Have the JVM hold back the facts of the tasks of every stage, until ``watch`` names it."""
        await self._server.command(_HOLD_BACK, b"")

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """See ``Relay.watch``."""
        await self._server.command(_WATCH, struct.pack(">iq", stage_id, task_attempt_id))

    async def goodbye(self) -> None:
        """Have the listener leave the bus and end. Raises as ``Relay.kill_task`` does."""
        await self._server.command(_GOODBYE, b"")

    async def active_stages(self) -> tuple[ActiveStage, ...]:
        """Return every stage of each running job. Raises as ``Relay.kill_task`` does."""
        answered = await self._server.command(_ACTIVE_STAGES, b"")
        if answered.stages is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected its active stages"
                ". Use one release of Headgate on both sides"
            )
        return answered.stages

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        """See ``Relay.kill_task``."""
        stage_id, partition = (-1, -1) if place is None else (place.stage_id, place.partition)
        arguments = struct.pack(">qii", task_attempt_id, stage_id, partition)
        await self._server.command(_KILL_TASK, arguments + _text(reason))

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """See ``Relay.cancel_job``."""
        await self._server.command(_CANCEL_JOB, struct.pack(">i", job_id) + _text(reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        """See ``Relay.query_status``."""
        arguments = _ids("i", job_ids) + _ids("q", task_attempt_ids)
        answered = await self._server.command(_QUERY_STATUS, arguments)
        if answered.status is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected a status. Use one release of Headgate on both sides"
            )
        return answered.status

    async def look_at_stage(self, stage_id: int) -> StageLook:
        """See ``Relay.look_at_stage``."""
        answered = await self._server.command(_LOOK_AT_STAGE, struct.pack(">i", stage_id))
        if answered.look is None:
            raise RelayError(
                "unexpected answer from the driver's JVM: expected the state of a stage"
                ". Use one release of Headgate on both sides"
            )
        return answered.look


def _text(text: str) -> bytes:
    encoded = shorten(text).encode("utf-8", errors="replace")
    return struct.pack(">H", len(encoded)) + encoded


def _ids(layout: str, ids: Iterable[int]) -> bytes:
    ordered = sorted(ids)
    return struct.pack(f">I{len(ordered)}{layout}", len(ordered), *ordered)
