# SPDX-License-Identifier: Apache-2.0

"""A model of an operator with a sink: the guarantees of the protocol around the two halves of the sink.

The model covers the valves (what a subtask sends between the close and its snapshot is held and is part of it),
checkpoints from the cut to the completion, their abort, attempts that fail, copies, global failures, and drivers that
die. A row is a subtask and a number; a subtask's position is the number of its next row.

A storage's answer to a write may be wrong: a checkpoint that is reported as failed may exist, or appear later. It is
*in doubt* until its discard succeeds or a later one completes. A new driver starts from the newest checkpoint that
exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from actors.coordination.host.alone import HostAlone
from actors.coordination.host.gateway import AttemptSends, SendEvent
from actors.coordination.store import CoordinatorStore
from actors.logs import get_logger
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.sinks.two_phase.driver import SinkCommits

Row = tuple[int, int]


@dataclass
class Part:
    """A subtask's part of a checkpoint."""

    position: int = 0
    state: bytes | None = None
    held: tuple[bytes, ...] = ()
    finished: bool = False


@dataclass
class Checkpoint:
    """A complete checkpoint: the state of the driver's half, and the parts of all subtasks."""

    checkpoint_id: int
    state: bytes | None
    parts: dict[int, Part]

    @property
    def rows(self) -> set[Row]:
        """The rows that it covers."""
        return {(subtask, number) for subtask, part in self.parts.items() for number in range(part.position)}


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


class ModelAttempt(ABC):
    """One attempt of a subtask in a ``SinkModel``: its half of the sink, and its end of the upward channel."""

    def __init__(self, subtask: int, number: int, part: Part) -> None:
        self.subtask, self.number = subtask, number
        self.channel: deque[Any] = deque(part.held)
        self.closed_for: int | None = None
        self.finished = False

    @property
    @abstractmethod
    def position(self) -> int:
        """The number of its next row."""

    @abstractmethod
    def prepare(self, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT) -> bytes | None:
        """Prepare what was written, send what the driver's half has to know, and return the state."""

    def final_state(self) -> bytes | None:
        """The state of an attempt that has finished."""
        return None

    def snapshot(self, checkpoint_id: int) -> Part:
        state = self.prepare(checkpoint_id)
        self.closed_for = None
        return Part(self.position, state, tuple(self.channel))


def _refused(send: SendEvent) -> None:
    raise AssertionError("the driver's half of a sink sends nothing to its tasks")


A = TypeVar("A", bound=ModelAttempt)
C = TypeVar("C", bound=SinkCommits)


class SinkModel(ABC, Generic[A, C]):
    """Consecutive applications with one sink. Each method is a step and leaves a valid state.

    A subclass has the two halves of the sink: attempts of its tasks, and ``commits``, which is the driver's half.
    """

    host: HostAlone
    """Where the driver's half has its context."""

    def __init__(self, subtasks: Sequence[int], rows: int, name: str) -> None:
        self.rows = rows
        self.name = name
        self.subtasks = tuple(subtasks)
        self.completed = Checkpoint(VIRTUAL_EMPTY_CHECKPOINT, None, {subtask: Part() for subtask in self.subtasks})
        self.covered = [self.completed.rows]
        """What each checkpoint covers that was ever complete."""
        self.next_id = 1
        self.commits: C
        self.attempts: dict[int, list[A]] = {}
        self.pending: Pending | None = None
        self.in_doubt: dict[int, Pending] = {}

    # --- the halves of the sink ---------------------------------------------------------------------------

    @abstractmethod
    def new_commits(self) -> C:
        """Return the half of a new driver."""

    def new_host(self) -> HostAlone:
        """Return the host of a new driver."""
        log = get_logger("headgate.testing")
        return HostAlone(self.name, CoordinatorStore(), log, len(self.subtasks), RestoreMode.STREAMING)

    @abstractmethod
    def new_attempt(self, subtask: int, number: int) -> A:
        """Begin an attempt of a subtask from ``completed``."""

    @abstractmethod
    def write_row(self, attempt: A) -> None:
        """Write the next row of the attempt."""

    @abstractmethod
    async def receive(self, attempt: A, event: Any) -> None:
        """The driver's half receives an event of an attempt."""

    def kill(self, attempt: A) -> None:
        """The attempt's process has died."""

    async def boot(self) -> None:
        """Start a driver, and everything else with it, from the newest checkpoint that exists.

        Whatever its predecessor was writing never counts if it is not there by now.
        """
        for attempts in self.attempts.values():
            for attempt in attempts:
                self.kill(attempt)
        newest = self._newest()
        if newest is not None:
            self.completed = newest.checkpoint()
            self.covered.append(self.completed.rows)
        self._attempts_begun: Counter[int] = Counter()
        self.attempts = {}
        self.pending = None
        self.in_doubt.clear()
        self.commits = self.new_commits()
        if self.completed.checkpoint_id != VIRTUAL_EMPTY_CHECKPOINT:
            await self.commits.restore(self.completed.checkpoint_id, self.completed.state)
        self.host = self.new_host()
        await self.commits.start(self.host.context)
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}

    # --- subtasks -----------------------------------------------------------------------------------------

    def write(self, subtask: int) -> None:
        for attempt in self.attempts[subtask]:
            if attempt.position < self.rows and not attempt.finished:
                self.write_row(attempt)

    async def deliver(self, subtask: int, most: int = 100) -> None:
        """The coordinator receives events that are in transit."""
        for attempt in self.attempts[subtask]:
            for _ in range(min(most, len(attempt.channel) if attempt.closed_for is None else 0)):
                await self.receive(attempt, attempt.channel.popleft())

    async def finish(self, subtask: int) -> None:
        """Send the last list and, unless a valve is closed, the completion message; a copy is killed."""
        attempt, *others = self.attempts[subtask]
        if attempt.finished or attempt.position < self.rows:
            return
        attempt.prepare()
        if attempt.closed_for is not None:
            return  # the list is held, and the completion message waits
        await self.deliver(subtask)
        attempt.finished = True
        self.kill(attempt)  # the process ends
        for other in others:
            self.kill(other)
            self.commits.subtask_failed(subtask, other.number)
        self.attempts[subtask] = [attempt]

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
        await self.commits.subtask_reset(subtask, self.completed.checkpoint_id)

    async def copy(self, subtask: int) -> None:
        """Start a second attempt beside the first; this aborts any pending checkpoint."""
        if len(self.attempts[subtask]) == 1 and not self.attempts[subtask][0].finished:
            await self._notify_or_abort()
            self.attempts[subtask].append(self._begin(subtask))

    def lose_copy(self, subtask: int, which: int) -> None:
        """One of two attempts dies; there is no reset."""
        if len(self.attempts[subtask]) == 2:
            lost = self.attempts[subtask].pop(which)
            self.kill(lost)
            self.commits.subtask_failed(subtask, lost.number)

    async def fail_job(self) -> None:
        """A global failure: the same driver rolls everything back; only live attempts are reported failed."""
        for attempts in self.attempts.values():
            self._report_failed([attempt for attempt in attempts if not attempt.finished])
        await self._notify_or_abort()
        self.commits.run_ended(False)
        self.attempts = {subtask: [self._begin(subtask)] for subtask in self.subtasks}
        self.write(self.subtasks[0])
        await self.commits.restore(self.completed.checkpoint_id, self.completed.state)

    # --- checkpoints --------------------------------------------------------------------------------------

    async def cut(self, deliver_most: int = 100) -> None:
        """Close the valves, then take the coordinator's snapshot. Undelivered events are held."""
        if self.pending is not None or any(len(attempts) > 1 for attempts in self.attempts.values()):
            return
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        for subtask in self.subtasks:
            await self.deliver(subtask, deliver_most)
            self.attempts[subtask][0].closed_for = checkpoint_id
        self._show_gateways()
        self.pending = Pending(checkpoint_id, self.commits.snapshot(checkpoint_id))
        for (attempt,) in self.attempts.values():
            if attempt.finished:
                attempt.closed_for = None
                self.pending.parts[attempt.subtask] = Part(attempt.position, attempt.final_state(), finished=True)

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
            # Whether or not the notification succeeds, the checkpoint is complete.
            self.covered.append(pending.checkpoint().rows)
            await self.commits.complete(pending.checkpoint_id)
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
            self.host.checkpoints_in_doubt = frozenset(self.in_doubt)
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
        self.commits.run_ended(True)
        await self.cut()
        self.store()
        await self.notify()
        await self.commits.close()

    # --- parts of the steps -------------------------------------------------------------------------------

    def _begin(self, subtask: int) -> A:
        number = self._attempts_begun[subtask]
        self._attempts_begun[subtask] += 1
        return self.new_attempt(subtask, number)

    def _unanswered(self) -> list[Pending]:
        """The checkpoints whose write has no answer yet, or was given up."""
        waiting = list(self.in_doubt.values())
        if self.pending is not None and self.pending.written is not Written.NOT_BEGUN:
            waiting.append(self.pending)
        return waiting

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
        self.host.checkpoints_in_doubt = frozenset(self.in_doubt)
        await self.commits.discarded(checkpoint_id)

    def _show_gateways(self) -> None:
        """The context shows which attempts are alive."""
        table = self.host.gateways
        table.clear()
        for attempts in self.attempts.values():
            for one in attempts:
                if not one.finished:
                    attempt = ExecutionAttempt(self.name, one.subtask, one.number, len(table.by_subtask) + 1)
                    table.add(AttemptSends(attempt, _refused, (1, 1), self.host.clock.now, table.limits))

    def _report_failed(self, attempts: list[A]) -> None:
        for attempt in attempts:
            self.kill(attempt)
            self.commits.subtask_failed(attempt.subtask, attempt.number)

    async def _notify_or_abort(self) -> None:
        """Before a reset, notify a checkpoint reported as durable, and abort any other."""
        await self.notify()
        await self.abort()
