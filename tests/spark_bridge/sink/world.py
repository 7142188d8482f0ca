"""A small model of an operator with a sink: real writer and committer, and what the protocol promises around them.

What is modelled: the valves (what a subtask sends between the close and its snapshot is held and is part of it, H31),
checkpoints from the cut to the completion, their abort, attempts that fail, copies, global failures, and drivers that
die. Rows are ``subtask:number``; a subtask's position is the number of its next row.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from spark_bridge.sink import SinkCommitter, SinkWriter
from tests.spark_bridge.sink.kit import TaskContext, a_driver, as_context, rows_of, staged, take_visible, visible


@dataclass
class Part:
    """A subtask's part of a checkpoint."""

    position: int = 0
    held: tuple[Any, ...] = ()
    finished: bool = False


@dataclass
class Checkpoint:
    checkpoint_id: int
    state: bytes | None
    parts: dict[int, Part]


class Attempt:
    """One life of a subtask: its writer, and its end of the channel up."""

    def __init__(self, url: str, subtask: int, attempt: int, restored: Checkpoint) -> None:
        part = restored.parts[subtask]
        self.context = TaskContext(subtask=subtask, attempt=attempt, checkpoint_id=restored.checkpoint_id)
        self.subtask, self.number = subtask, attempt
        self.writer = SinkWriter.for_subtask(as_context(self.context), url, roll_bytes=8)
        self.position = part.position
        self.channel = deque(part.held)
        self.closed_for: int | None = None
        self.finished = False

    def write(self) -> None:
        self.writer.write(f"{self.subtask}:{self.position:03d}")
        self.position += 1

    def seal(self, checkpoint_id: int = -1) -> None:
        self.context.sent.clear()
        self.writer.send_sealed(as_context(self.context), checkpoint_id)
        self.channel.extend(self.context.sent)

    def snapshot(self, checkpoint_id: int) -> Part:
        self.seal(checkpoint_id)
        self.closed_for = None
        return Part(self.position, tuple(self.channel))


@dataclass
class Pending:
    checkpoint_id: int
    state: bytes
    parts: dict[int, Part] = field(default_factory=dict)
    stored: bool = False


class World:
    """One application after the other over one directory. The methods are the steps; each leaves a lawful state."""

    def __init__(self, url: str, *, subtasks: int = 2, rows: int = 6) -> None:
        self.url = url
        self.rows = rows
        self.subtasks = range(subtasks)
        self.completed = Checkpoint(-1, None, {subtask: Part() for subtask in self.subtasks})
        self.next_id = 1
        self.committer: SinkCommitter
        self.attempts: dict[int, list[Attempt]]
        self.pending: Pending | None = None
        self.taken_away: dict[str, bytes] = {}

    async def boot(self) -> None:
        """A driver starts, and with it everything else, from the last checkpoint that is durable."""
        if self.pending is not None and self.pending.stored:
            self._become(self.pending)
        self._attempts_begun: Counter[int] = Counter()
        self.pending = None
        self.committer = SinkCommitter(self.url, retry_delays_s=())
        if self.completed.checkpoint_id != -1:
            await self.committer.restore(self.completed.checkpoint_id, self.completed.state)
        await self.committer.start(a_driver())
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}

    # --- subtasks -----------------------------------------------------------------------------------------

    def write(self, subtask: int) -> None:
        for attempt in self.attempts[subtask]:
            if attempt.position < self.rows and not attempt.finished:
                attempt.write()

    async def deliver(self, subtask: int, most: int = 100) -> None:
        """The coordinator takes what is on its way."""
        for attempt in self.attempts[subtask]:
            for _ in range(min(most, len(attempt.channel) if attempt.closed_for is None else 0)):
                await self.committer.sealed(subtask, attempt.number, attempt.channel.popleft())

    async def finish(self, subtask: int) -> None:
        """The last list is sent, and where nothing is closed the goodbye follows; a copy is killed."""
        attempt, *others = self.attempts[subtask]
        if attempt.finished or attempt.position < self.rows:
            return
        attempt.seal()
        if attempt.closed_for is not None:
            return  # the list is held, and the goodbye waits
        await self.deliver(subtask)
        attempt.finished = True
        for other in others:
            self.committer.subtask_failed(subtask, other.number)
        self.attempts[subtask] = [attempt]

    async def fail(self, subtask: int, *, told_first: bool = False) -> None:
        """Every attempt of the subtask dies (a success is revoked), and a new one begins before the reset is told.

        ``told_first``: whether the coordinator hears of a durable checkpoint before the failure, or behind it.
        """
        if told_first:
            await self.notify()
        self._report_failed(self.attempts[subtask])
        await self._notify_or_abort()
        self.attempts[subtask] = [self._begin(subtask)]
        self.write(subtask)
        await self.committer.subtask_reset(subtask, self.completed.checkpoint_id)

    async def copy(self, subtask: int) -> None:
        """A second attempt beside the first; nothing pending survives that."""
        if len(self.attempts[subtask]) == 1 and not self.attempts[subtask][0].finished:
            await self._notify_or_abort()
            self.attempts[subtask].append(self._begin(subtask))

    def lose_copy(self, subtask: int, which: int) -> None:
        """One of two attempts dies; there is no reset."""
        if len(self.attempts[subtask]) == 2:
            lost = self.attempts[subtask].pop(which)
            self.committer.subtask_failed(subtask, lost.number)

    async def fail_job(self) -> None:
        """A global failure: everything goes back under the same driver; only who lives is reported failed (H15)."""
        for attempts in self.attempts.values():
            self._report_failed([attempt for attempt in attempts if not attempt.finished])
        await self._notify_or_abort()
        self.committer.run_ended(False)
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}
        self.write(0)
        await self.committer.restore(self.completed.checkpoint_id, self.completed.state)

    # --- checkpoints --------------------------------------------------------------------------------------

    async def cut(self, deliver_most: int = 100) -> None:
        """Close, then the coordinator's snapshot. What was not taken before is held."""
        if self.pending is not None or any(len(attempts) > 1 for attempts in self.attempts.values()):
            return
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        for subtask in self.subtasks:
            await self.deliver(subtask, deliver_most)
            self.attempts[subtask][0].closed_for = checkpoint_id
        self.pending = Pending(checkpoint_id, self.committer.snapshot(checkpoint_id))
        for (attempt,) in self.attempts.values():
            if attempt.finished:
                attempt.closed_for = None
                self.pending.parts[attempt.subtask] = Part(attempt.position, finished=True)

    def snapshot(self, subtask: int) -> None:
        """The barrier reaches the subtask; its valve reopens."""
        if self.pending is not None and subtask not in self.pending.parts:
            (attempt,) = self.attempts[subtask]
            self.pending.parts[subtask] = attempt.snapshot(self.pending.checkpoint_id)

    def store(self) -> None:
        """Everybody has acknowledged: the checkpoint becomes durable."""
        if self.pending is not None and len(self.pending.parts) == len(self.subtasks):
            self.pending.stored = True

    async def notify(self) -> None:
        """Tell the coordinator of what is durable."""
        if (pending := self.pending) is not None and pending.stored:
            await self.committer.complete(pending.checkpoint_id)
            self._become(pending)
            self.pending = None

    async def abort(self) -> None:
        """Give up what is not durable yet."""
        if self.pending is not None and not self.pending.stored:
            self.pending = None
            for attempts in self.attempts.values():
                for attempt in attempts:
                    attempt.closed_for = None

    async def end(self) -> None:
        """Every subtask ends well, the run too, and a final checkpoint completes."""
        await self.abort()
        await self.notify()
        for subtask in self.subtasks:
            self.lose_copy(subtask, 0)
            while any(attempt.position < self.rows for attempt in self.attempts[subtask]):
                self.write(subtask)
            await self.finish(subtask)
        self.committer.run_ended(True)
        await self.cut()
        self.store()
        await self.notify()
        await self.committer.close()

    def read(self) -> None:
        """A reader takes away what it sees."""
        self.taken_away |= take_visible(self.url)

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """No visible row twice, none that a restore would write again."""
        rows = rows_of(self.taken_away) + rows_of(visible(self.url))
        assert len(set(rows)) == len(rows), f"doubled: {rows}"
        durable = self.pending if self.pending is not None and self.pending.stored else self.completed
        for row in rows:
            subtask, number = map(int, row.split(":"))
            assert number < durable.parts[subtask].position, f"{row} is visible too early"

    def check_end(self) -> None:
        """Every row once, each subtask's in order, nothing left behind."""
        files = self.taken_away | visible(self.url)
        assert rows_of(files) == [f"{s}:{number:03d}" for s in self.subtasks for number in range(self.rows)]
        assert staged(self.url) == []

    # --- parts of the steps -------------------------------------------------------------------------------

    def _begin(self, subtask: int) -> Attempt:
        attempt = Attempt(self.url, subtask, self._attempts_begun[subtask], self.completed)
        self._attempts_begun[subtask] += 1
        return attempt

    def _become(self, pending: Pending) -> None:
        self.completed = Checkpoint(pending.checkpoint_id, pending.state, pending.parts)

    def _report_failed(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self.committer.subtask_failed(attempt.subtask, attempt.number)

    async def _notify_or_abort(self) -> None:
        """Before a reset, what is durable is told, and what is not is aborted (H16, H18)."""
        await self.notify()
        await self.abort()
