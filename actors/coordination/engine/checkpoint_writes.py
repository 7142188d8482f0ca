# SPDX-License-Identifier: Apache-2.0

"""The durable writes of an operator's checkpoints; several may be in progress concurrently (H43)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors import ActorContext, Background
from actors.coordination.engine.messages import TrackerMessage
from actors.coordination.engine.operator_config import DiscardRefused
from protocol.barrier_tracker import CheckpointDiscarded, CheckpointStored, CheckpointStoreFailed, CompletedCheckpoint
from protocol.describing import describe

Discard = Callable[[int], Awaitable[None]]

_FIRST_RETRY_S = 1.0
_RETRY_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class _Write:
    work: Background
    discard: Discard


class CheckpointWrites:
    """Writes and discards checkpoints concurrently with the tracker's actor, which gets each outcome as a message.

    A discard that fails is tried again, with growing delays. That ends when it succeeds, when the storage says that no
    try can succeed (``DiscardRefused``), when the doubt ends in another way (``no_doubt``), or when the actor ends.
    Nothing waits for it. Loop only.
    """

    def __init__(self, context: ActorContext[TrackerMessage]) -> None:
        self._context = context
        self._writes: dict[int, _Write] = {}
        self._in_doubt: set[int] = set()

    def __contains__(self, checkpoint_id: int) -> bool:
        """Whether the write of this checkpoint has begun, and its fate is not decided yet."""
        return checkpoint_id in self._writes

    def start(
        self,
        checkpoint: CompletedCheckpoint,
        write: Callable[[CompletedCheckpoint], Awaitable[None]],
        discard: Discard,
    ) -> None:
        """Begin the write. ``CheckpointStored`` or ``CheckpointStoreFailed`` follows, unless it is taken back first.

        ``discard``: how to remove what it wrote.
        """
        checkpoint_id = checkpoint.checkpoint_id
        work = self._context.run(
            write,
            checkpoint,
            on_result=lambda _: CheckpointStored(checkpoint_id),
            on_error=lambda error: CheckpointStoreFailed(checkpoint_id, describe(error)),
        )
        self._writes[checkpoint_id] = _Write(work, discard)

    def kept(self, checkpoint_id: int) -> None:
        """The checkpoint is durable, and stays."""
        del self._writes[checkpoint_id]

    def take_back(self, checkpoint_id: int) -> None:
        """Cancel the write if it still runs, and discard the checkpoint; ``CheckpointDiscarded`` follows.

        Work that the write began in a thread continues. Only the storage knows whether the checkpoint still appears.
        """
        write = self._writes.pop(checkpoint_id)
        write.work.cancel()
        self._in_doubt.add(checkpoint_id)
        self._context.run(self._discard, checkpoint_id, write.discard)

    def no_doubt(self, checkpoint_id: int) -> None:
        """The checkpoint's fate is known, so a failed discard is not tried again."""
        self._in_doubt.discard(checkpoint_id)

    async def _discard(self, checkpoint_id: int, discard: Discard) -> None:
        log, delay_s = self._context.log.bind(checkpoint_id=checkpoint_id), _FIRST_RETRY_S
        while True:
            try:
                await discard(checkpoint_id)
            except DiscardRefused as error:
                log.warning("checkpoint stays in doubt", error=str(error))
                return
            except Exception as error:  # it fails nothing (H48)
                log.warning("checkpoint discard failed", error=describe(error), retry_s=delay_s)
            else:
                self._in_doubt.discard(checkpoint_id)
                self._context.self_ref.tell(CheckpointDiscarded(checkpoint_id))
                return
            if checkpoint_id in self._in_doubt:
                await self._context.clock.sleep(delay_s)
            if checkpoint_id not in self._in_doubt:
                return
            delay_s = min(2 * delay_s, _RETRY_S_MAX)


__all__ = ["CheckpointWrites"]
