"""The durable writes of an operator's checkpoints, several at once where several are under way (H43)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors import ActorContext, Background
from actors.coordination.messages import TrackerMessage
from protocol.barrier_tracker import CheckpointStored, CheckpointStoreFailed, CompletedCheckpoint

Discard = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Write:
    work: Background
    discard: Discard | None


class CheckpointWrites:
    """Runs beside the tracker's actor; what became of a write comes back as a message. Loop only."""

    def __init__(self, context: ActorContext[TrackerMessage]) -> None:
        self._context = context
        self._writes: dict[int, _Write] = {}

    def start(
        self,
        checkpoint: CompletedCheckpoint,
        write: Callable[[CompletedCheckpoint], Awaitable[None]],
        discard: Discard | None,
    ) -> None:
        """``CheckpointStored`` or ``CheckpointStoreFailed`` follows, unless it is taken back before.

        ``discard``: how to take away what it wrote; None where that may stay.
        """
        checkpoint_id = checkpoint.checkpoint_id
        work = self._context.run(
            write,
            checkpoint,
            on_result=lambda _: CheckpointStored(checkpoint_id),
            on_error=lambda error: CheckpointStoreFailed(checkpoint_id, f"{type(error).__name__}: {error}"),
        )
        self._writes[checkpoint_id] = _Write(work, discard)

    def kept(self, checkpoint_id: int) -> None:
        """It is durable, and stays."""
        del self._writes[checkpoint_id]

    def take_back(self, checkpoint_id: int) -> None:
        """Cancel the write, if it still runs, and have what it wrote taken away.

        What it began in a thread goes on; that nothing of it appears afterwards is the storage's care.
        """
        write = self._writes.pop(checkpoint_id)
        write.work.cancel()
        if write.discard is not None:
            self._context.run(self._discard, checkpoint_id, write.discard)

    async def _discard(self, checkpoint_id: int, discard: Discard) -> None:
        try:
            await discard(checkpoint_id)
        except Exception:  # what is left over is refused or overwritten by the storage; nobody fails for it (H48)
            self._context.log.exception("discarding a checkpoint failed", checkpoint_id=checkpoint_id)


__all__ = ["CheckpointWrites"]
