# SPDX-License-Identifier: Apache-2.0

"""A coordinator that only commits files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.coordination import CoordinatorContext, OperatorCoordinator
from protocol.attempts import FailureReason
from spark_bridge.sink.committer import SinkCommitter
from spark_bridge.sink.errors import SinkMisused

__all__ = ["FileSinkCoordinator"]


class FileSinkCoordinator(OperatorCoordinator):
    """Commits the files of ``FileSinkOperator``, and of other operators whose only events come from a ``SinkWriter``.

    The arguments are those of ``SinkCommitter``. A coordinator with further tasks contains a ``SinkCommitter`` and
    calls it as this class does. It is for streaming mode: in batch mode, ``start`` raises ``SinkMisused``, and so
    ``coordinate`` raises ``CoordinatorStartError``.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0),
    ) -> None:
        self.committer = SinkCommitter(url, name=name, options=options, retry_delays_s=retry_delays_s)

    async def start(self, context: CoordinatorContext) -> None:
        await self.committer.start(context)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if not await self.committer.sealed(subtask, attempt, event):
            raise SinkMisused(
                f"subtask {subtask} sent {event!r}, which is not a file list of this sink: give the writer and the "
                "coordinator the same name, or handle the event in a subclass"
            )

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.committer.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await self.committer.subtask_reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return self.committer.snapshot(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await self.committer.complete(checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await self.committer.discarded(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await self.committer.restore(checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.committer.run_ended(succeeded)

    async def close(self) -> None:
        await self.committer.close()
