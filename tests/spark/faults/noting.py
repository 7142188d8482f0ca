# SPDX-License-Identifier: Apache-2.0

"""A coordinator that notes who read which split, and readers that wait for their gates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from actors.coordination import SourceCoordinator, StaticSplitEnumerator, SubtaskGateway
from protocol.attempts import FailureReason
from spark_bridge.subtask import SplitReader
from tests.spark.faults.directing import Life
from tests.spark.faults.file_gates import wait_for_files
from tests.spark.recorder import Recorder

ROWS_OF_A_SPLIT = 3


class _Noting(StaticSplitEnumerator):
    def __init__(self, splits: Iterable[int], state: bytes | None, notes: Recorder) -> None:
        super().__init__(splits, state)
        self._notes = notes

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        self._notes.record("read", subtask, attempt, event)


class NotingSource(SourceCoordinator):
    """``notes`` holds its callbacks, and ``("read", subtask, attempt, split)`` for each split that a reader begins."""

    def __init__(self, splits: Iterable[int]) -> None:
        self.notes = Recorder()
        self.tasks: dict[Life, int] = {}
        self.ends: list[tuple[Any, ...]] = []  # how attempts and the run ended, in order
        listed = list(splits)
        super().__init__(lambda state: _Noting(listed, state, self.notes))

    def read_by(self, life: Life) -> list[int]:
        return [split for name, *of, split in self.notes.named("read") if tuple(of) == life]

    def wait_until_read(self, lives: Iterable[Life]) -> None:
        """Wait until each of these attempts has begun a split."""
        wanted = set(lives)
        self.notes.wait_for(lambda story: wanted <= {(c[1], c[2]) for c in story if c[0] == "read"})

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.tasks[subtask, gateway.attempt.attempt] = gateway.attempt.task_attempt_id
        await self.notes.subtask_ready(subtask, gateway)
        await super().subtask_ready(subtask, gateway)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.ends.append(("failed", subtask, attempt, reason.kind.name))
        await self.notes.subtask_failed(subtask, attempt, reason)
        await super().subtask_failed(subtask, attempt, reason)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self.ends.append(("finished", subtask, attempt))
        await super().subtask_finished(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await self.notes.subtask_reset(subtask, checkpoint_id)
        await super().subtask_reset(subtask, checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await self.notes.reset_to_checkpoint(checkpoint_id, state)
        await super().reset_to_checkpoint(checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.ends.append(("run ended", succeeded))
        await self.notes.run_ended(run_id, succeeded, reason)
        await super().run_ended(run_id, succeeded, reason)


class GatedReader(SplitReader):
    """Yields the rows of each split; first it reports the split and waits until its subtask's gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def read_split(self, split: int) -> Iterator[tuple[int, int]]:
        self.context.send_event(split)
        wait_for_files(self._folder, f"open-{self.context.subtask}", 1)
        yield from rows_of([split])


def rows_of(splits: Iterable[int]) -> list[tuple[int, int]]:
    return [(split, row) for split in splits for row in range(ROWS_OF_A_SPLIT)]
