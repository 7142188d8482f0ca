"""A coordinator that does nothing but commit files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.coordination import CoordinatorContext, OperatorCoordinator
from protocol.attempts import FailureReason
from spark_bridge.sink.committer import SinkCommitter
from spark_bridge.sink.errors import SinkMisused

__all__ = ["FileSinkCoordinator"]


class FileSinkCoordinator(OperatorCoordinator):
    """For ``FileSinkOperator`` and other operators whose only events are the lists of a ``SinkWriter``.

    A coordinator with more to do has a ``SinkCommitter`` of its own and calls it as this class does. The arguments are
    the committer's. ``start`` raises ``SinkMisused`` in batch mode.
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
                f"subtask {subtask} sent {event!r}, which is no list of this sink: give writer and coordinator the "
                "same name, or derive a coordinator that understands the event"
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
