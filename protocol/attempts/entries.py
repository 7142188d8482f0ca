"""The state that the ledger keeps of one operator: its run, the subtasks of the run, their attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from protocol.attempts.types import FailureKind
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Register


class AttemptState(Enum):
    ACCEPTED = "accepted"  # has a gateway and restores its state
    READY = "ready"  # announced to the coordinator
    ENDING = "ending"  # has said that it ended well; only Spark's word can end it now
    FINISHED = "finished"  # Spark counts it as a success; revocable
    OVER = "over"  # announced failed; deaf and mute


ALIVE = (AttemptState.ACCEPTED, AttemptState.READY, AttemptState.ENDING)


@dataclass(slots=True)
class AttemptEntry:
    """One attempt that was accepted.

    Entries stay until their run ends, so that its late words are known as stale.
    """

    attempt: ExecutionAttempt
    beside: frozenset[int]  # task ids of the attempts that were alive when this one was accepted (H13)
    accepted_at: float = 0.0
    streaming: bool = False
    state: AttemptState = AttemptState.ACCEPTED
    failure: FailureKind | None = None  # why it is OVER
    finished_at: float = 0.0

    @property
    def task_attempt_id(self) -> int:
        return self.attempt.task_attempt_id

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


@dataclass(slots=True)
class SubtaskEntry:
    """One subtask in one run. ``owes_reset``: a failure was announced and no reset has followed yet."""

    attempts: dict[int, AttemptEntry] = field(default_factory=dict)  # by task id, in the order of acceptance
    owes_reset: bool = False
    killed: int = 0  # how often an attempt was killed for its own fault (H69)

    @property
    def living(self) -> list[AttemptEntry]:
        return [entry for entry in self.attempts.values() if entry.alive]

    @property
    def finished(self) -> AttemptEntry | None:
        for entry in self.attempts.values():
            if entry.state is AttemptState.FINISHED:
                return entry
        return None


@dataclass(slots=True)
class Run:
    """One Spark action over the operator's tasks (H55)."""

    run_id: int
    subtasks: dict[int, SubtaskEntry] = field(default_factory=dict)
    by_task: dict[int, AttemptEntry] = field(default_factory=dict)  # the same entries, for look-ups
    told: set[int] = field(default_factory=set)  # tasks without an entry of which no failure is to be told (again)
    failed_cause: str | None = None  # a global failure is latched (H8)
    barrier_failed: int | None = None  # the last attempt of the barrier stage that is known to have failed

    def subtask(self, subtask: int) -> SubtaskEntry:
        return self.subtasks.setdefault(subtask, SubtaskEntry())

    def find(self, task_attempt_id: int) -> AttemptEntry | None:
        return self.by_task.get(task_attempt_id)

    def entries(self) -> Iterator[AttemptEntry]:
        for index in sorted(self.subtasks):
            yield from self.subtasks[index].attempts.values()

    def living(self) -> list[AttemptEntry]:
        return [entry for entry in self.entries() if entry.alive]

    def looks_whole(self, subtasks: int) -> bool:
        """So many ``subtasks`` have an attempt that ended well. A guess, for a run whose job's end was lost."""
        well = (AttemptState.ENDING, AttemptState.FINISHED)
        done = [any(entry.state in well for entry in known.attempts.values()) for known in self.subtasks.values()]
        return all(done) and len(done) >= subtasks


@dataclass(slots=True)
class HeldRegistration:
    """A task that waits for its answer, because a fact is missing that says what it is."""

    connection_id: int
    message: Register
    since: float
    asked: bool = False  # the engine's books were asked since it is held
    hurried: bool = False  # an early look was ordered
    conflict: bool = False  # another run of the operator is going on
    beside: set[int] = field(default_factory=set)  # rivals that were seen running although this one runs
    seen_running: bool = False  # the engine was asked, and did not say that it is over
    outlived_finish: bool = False  # the same, when a rival had finished for long: so it is no mere copy of it

    @property
    def task_attempt_id(self) -> int:
        return self.message.task_attempt_id
