# SPDX-License-Identifier: Apache-2.0

"""The file sink in a ``SinkModel`` (H31, H64): real writers and committers over one directory.

Rows are ``subtask:number``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from headgate.testing._sink_model import Checkpoint, ModelAttempt, SinkModel
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import SinkCommits
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable, PartName, prepared_events
from tests.spark_bridge.sinks.files.kit import (
    SinkTask,
    rows_of,
    staged,
    take_visible,
    visible,
)


class Attempt(ModelAttempt):
    """One attempt of a subtask, with its writer."""

    def __init__(self, url: str, subtask: int, number: int, restored: Checkpoint) -> None:
        part = restored.parts[subtask]
        super().__init__(subtask, number, part)
        self.task = SinkTask(
            FileSink(url, roll_bytes=8), subtask=subtask, attempt=number, checkpoint_id=restored.checkpoint_id
        )
        self._position = part.position

    @property
    def position(self) -> int:
        return self._position

    def write(self) -> None:
        self.task.write(f"{self.subtask}:{self._position:03d}")
        self._position += 1

    def prepare(self, checkpoint_id: int = -1) -> None:
        self.task.context.sent.clear()
        self.task.operator.snapshot_state(checkpoint_id)
        self.channel.extend(self.task.context.sent)


class World(SinkModel[Attempt, SinkCommits]):
    """Consecutive applications over one directory."""

    def __init__(self, url: str, *, subtasks: int = 2, rows: int = 6) -> None:
        super().__init__(range(subtasks), rows, "out")
        self.url = url
        self.taken_away: dict[str, bytes] = {}

    def new_commits(self) -> SinkCommits:
        return SinkCommits(FileSink(self.url), retry_delays_s=())

    def new_attempt(self, subtask: int, number: int) -> Attempt:
        return Attempt(self.url, subtask, number, self.completed)

    def write_row(self, attempt: Attempt) -> None:
        attempt.write()

    async def receive(self, attempt: Attempt, event: Any) -> None:
        await self.commits.prepared(attempt.subtask, attempt.number, event)

    async def steal(self, subtask: int) -> None:
        """The subtask lists every part that others are writing or have sealed, as if it had written them (H83)."""
        attempt = self.attempts[subtask][0]
        for path in staged(self.url):
            name = path.rpartition("/")[2]
            part = PartName.parse(name)
            if part is None or (part.subtask, part.attempt) == (subtask, attempt.number):
                continue
            for checkpoint_id in (-1, part.after, part.after + 1, self.completed.checkpoint_id):
                (event,) = prepared_events(
                    "out",
                    attempt.task.operator.sink.target,
                    attempt.task.operator._names.proof,
                    checkpoint_id,
                    [Committable(name, [1, 1])],
                )
                with suppress(SinkMisused):
                    await self.commits.prepared(subtask, attempt.number, event)

    def read(self) -> None:
        """A reader takes away all visible files."""
        self.taken_away |= take_visible(self.url)

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """No row is visible twice, or is both visible and due to be written again after a restore."""
        rows = rows_of(self.taken_away) + rows_of(visible(self.url))
        assert len(set(rows)) == len(rows), f"doubled: {rows}"
        durable = self._newest() or self.completed
        for row in rows:
            subtask, number = map(int, row.split(":"))
            assert number < durable.parts[subtask].position, f"{row} is visible too early"

    def check_end(self) -> None:
        """Every row is visible once, each subtask's in order, and nothing else is left."""
        files = self.taken_away | visible(self.url)
        assert rows_of(files) == [f"{s}:{number:03d}" for s in self.subtasks for number in range(self.rows)]
        assert staged(self.url) == []
