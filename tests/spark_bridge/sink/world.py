# SPDX-License-Identifier: Apache-2.0

"""A small model of an operator with a sink: real writer and committer, and the guarantees of the protocol around them.

The model covers the valves (what a subtask sends between the close and its snapshot is held and is part of it, H31),
checkpoints from the cut to the completion, their abort, attempts that fail, copies, global failures, and drivers that
die. Rows are ``subtask:number``; a subtask's position is the number of its next row.

A storage's answer to a write may be wrong: a checkpoint that is reported as failed may exist, or appear later. It is
*in doubt* until its discard succeeds or a later one completes (H64). A new driver starts from the newest checkpoint
that exists.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spark_bridge.sink.committer import SinkCommitter
from spark_bridge.sink.errors import SinkMisused
from spark_bridge.sink.files import PartName, SealedFile, sealed_events
from spark_bridge.sink.writer import SinkWriter
from tests.spark_bridge.sink.kit import (
    DriverContext,
    TaskContext,
    as_context,
    as_driver,
    rows_of,
    staged,
    take_visible,
    visible,
)


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
    """One attempt of a subtask: its writer, and its end of the upward channel."""

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


class Written(Enum):
    """How far the write of a checkpoint has come."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    TOLD = "there, and reported as written"


@dataclass
class Pending:
    """A checkpoint that has not completed. ``there``: a new driver would find it."""

    checkpoint_id: int
    state: bytes
    parts: dict[int, Part] = field(default_factory=dict)
    written: Written = Written.NOT_BEGUN
    there: bool = False

    @property
    def told(self) -> bool:
        return self.written is Written.TOLD

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.checkpoint_id, self.state, self.parts)


class World:
    """Consecutive applications over one directory. Each method is a step and leaves a valid state."""

    def __init__(self, url: str, *, subtasks: int = 2, rows: int = 6) -> None:
        self.url = url
        self.rows = rows
        self.subtasks = range(subtasks)
        self.completed = Checkpoint(-1, None, {subtask: Part() for subtask in self.subtasks})
        self.next_id = 1
        self.committer: SinkCommitter
        self.attempts: dict[int, list[Attempt]]
        self.pending: Pending | None = None
        self.in_doubt: dict[int, Pending] = {}
        self.taken_away: dict[str, bytes] = {}

    async def boot(self) -> None:
        """Start a driver, and everything else with it, from the newest checkpoint that exists.

        Whatever its predecessor was writing never counts if it is not there by now.
        """
        newest = self._newest()
        if newest is not None:
            self.completed = newest.checkpoint()
        self._attempts_begun: Counter[int] = Counter()
        self.pending = None
        self.in_doubt.clear()
        self.committer = SinkCommitter(self.url, retry_delays_s=())
        if self.completed.checkpoint_id != -1:
            await self.committer.restore(self.completed.checkpoint_id, self.completed.state)
        self.context = DriverContext()
        await self.committer.start(as_driver(self.context))
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}

    # --- subtasks -----------------------------------------------------------------------------------------

    def write(self, subtask: int) -> None:
        for attempt in self.attempts[subtask]:
            if attempt.position < self.rows and not attempt.finished:
                attempt.write()

    async def deliver(self, subtask: int, most: int = 100) -> None:
        """The coordinator receives events that are in transit."""
        for attempt in self.attempts[subtask]:
            for _ in range(min(most, len(attempt.channel) if attempt.closed_for is None else 0)):
                await self.committer.sealed(subtask, attempt.number, attempt.channel.popleft())

    async def finish(self, subtask: int) -> None:
        """Send the last list and, unless a valve is closed, the completion message; a copy is killed."""
        attempt, *others = self.attempts[subtask]
        if attempt.finished or attempt.position < self.rows:
            return
        attempt.seal()
        if attempt.closed_for is not None:
            return  # the list is held, and the completion message waits
        await self.deliver(subtask)
        attempt.finished = True
        for other in others:
            self.committer.subtask_failed(subtask, other.number)
        self.attempts[subtask] = [attempt]

    async def steal(self, subtask: int) -> None:
        """The subtask lists every part that others are writing or have sealed, as if it had written them (H83)."""
        attempt = self.attempts[subtask][0]
        for path in staged(self.url):
            name = path.rpartition("/")[2]
            part = PartName.parse(name)
            if part is None or (part.subtask, part.attempt) == (subtask, attempt.number):
                continue
            for checkpoint_id in (-1, part.after, part.after + 1, self.completed.checkpoint_id):
                file = SealedFile(name, 1, 1, checkpoint_id)
                (event,) = sealed_events("out", attempt.writer._directory.address, attempt.writer._proof, [file])
                with suppress(SinkMisused):
                    await self.committer.sealed(subtask, attempt.number, event)

    async def fail(self, subtask: int, *, told_first: bool = False) -> None:
        """Every attempt of the subtask dies (a success is revoked), and a new one begins before the reset is reported.

        ``told_first``: whether the coordinator is notified of a durable checkpoint before or after the failure.
        """
        if told_first:
            await self.notify()
        self._report_failed(self.attempts[subtask])
        await self._notify_or_abort()
        self.attempts[subtask] = [self._begin(subtask)]
        self.write(subtask)
        await self.committer.subtask_reset(subtask, self.completed.checkpoint_id)

    async def copy(self, subtask: int) -> None:
        """Start a second attempt beside the first; this aborts any pending checkpoint."""
        if len(self.attempts[subtask]) == 1 and not self.attempts[subtask][0].finished:
            await self._notify_or_abort()
            self.attempts[subtask].append(self._begin(subtask))

    def lose_copy(self, subtask: int, which: int) -> None:
        """One of two attempts dies; there is no reset."""
        if len(self.attempts[subtask]) == 2:
            lost = self.attempts[subtask].pop(which)
            self.committer.subtask_failed(subtask, lost.number)

    async def fail_job(self) -> None:
        """A global failure: the same driver rolls everything back; only live attempts are reported failed (H15)."""
        for attempts in self.attempts.values():
            self._report_failed([attempt for attempt in attempts if not attempt.finished])
        await self._notify_or_abort()
        self.committer.run_ended(False)
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}
        self.write(0)
        await self.committer.restore(self.completed.checkpoint_id, self.completed.state)

    # --- checkpoints --------------------------------------------------------------------------------------

    async def cut(self, deliver_most: int = 100) -> None:
        """Close the valves, then take the coordinator's snapshot. Undelivered events are held."""
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
        """Every subtask has acknowledged: the checkpoint is written, and the storage reports that."""
        if self._begin_write():
            assert self.pending is not None
            self.pending.written, self.pending.there = Written.TOLD, True

    async def store_and_fail(self, *, there: bool) -> None:
        """The storage reports a failure. ``there``: the checkpoint is durable even so; otherwise it may be later."""
        if self._begin_write():
            assert self.pending is not None
            self.pending.there = there
            await self.abort()

    def hang(self) -> None:
        """The write takes long and has not been answered."""
        self._begin_write()

    def appear(self, which: int = 0) -> None:
        """A write that was given up, or has no answer, takes effect after all."""
        open_ones = [one for one in self._unanswered() if not one.there]
        if open_ones:
            open_ones[which % len(open_ones)].there = True

    async def discard(self, which: int = 0) -> None:
        """The storage promises that no driver will start from a checkpoint in doubt."""
        if self.in_doubt:
            await self._discarded(sorted(self.in_doubt)[which % len(self.in_doubt)])

    async def notify(self) -> None:
        """Tell the coordinator about a checkpoint reported as durable; earlier ones are then no longer in doubt."""
        if (pending := self.pending) is not None and pending.told:
            await self.committer.complete(pending.checkpoint_id)
            self.completed, self.pending = pending.checkpoint(), None
            for checkpoint_id in sorted(self.in_doubt):
                await self._discarded(checkpoint_id)

    async def abort(self) -> None:
        """Give up a checkpoint that is not reported as durable yet; if its write has begun, it is in doubt."""
        if (pending := self.pending) is None or pending.told:
            return
        self.pending = None
        if pending.written is Written.UNDER_WAY:
            self.in_doubt[pending.checkpoint_id] = pending
            self.context.checkpoints_in_doubt = frozenset(self.in_doubt)
        for attempts in self.attempts.values():
            for attempt in attempts:
                attempt.closed_for = None

    async def end(self) -> None:
        """Every subtask and the run end successfully, and a final checkpoint completes."""
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

    # --- parts of the steps -------------------------------------------------------------------------------

    def _begin(self, subtask: int) -> Attempt:
        attempt = Attempt(self.url, subtask, self._attempts_begun[subtask], self.completed)
        self._attempts_begun[subtask] += 1
        return attempt

    def _unanswered(self) -> list[Pending]:
        """The checkpoints whose write has no answer yet, or was given up."""
        pending = [] if self.pending is None or self.pending.written is Written.NOT_BEGUN else [self.pending]
        return [*self.in_doubt.values(), *pending]

    def _newest(self) -> Pending | None:
        """The checkpoint that a new driver would start from; None for the completed one."""
        there = [one for one in self._unanswered() if one.there]
        return max(there, key=lambda one: one.checkpoint_id, default=None)

    def _begin_write(self) -> bool:
        pending = self.pending
        if pending is None or len(pending.parts) < len(self.subtasks) or pending.told:
            return False
        pending.written = Written.UNDER_WAY
        return True

    async def _discarded(self, checkpoint_id: int) -> None:
        del self.in_doubt[checkpoint_id]
        self.context.checkpoints_in_doubt = frozenset(self.in_doubt)
        await self.committer.discarded(checkpoint_id)

    def _report_failed(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self.committer.subtask_failed(attempt.subtask, attempt.number)

    async def _notify_or_abort(self) -> None:
        """Before a reset, notify a checkpoint reported as durable, and abort any other (H16, H18)."""
        await self.notify()
        await self.abort()
