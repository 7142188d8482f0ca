# SPDX-License-Identifier: Apache-2.0

"""The state of the simulated Spark: jobs, the attempts of their stages, the attempts of their tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from protocol.facts import TaskEnded, TaskOutcome


@dataclass
class Faults:
    """How unkind this world is. Probabilities are per chance, budgets per world."""

    drop: float
    double: float
    break_connection: float
    crash: float
    lose_driver: float
    budget: int

    def spend(self, random: Random, probability: float) -> bool:
        if self.budget > 0 and random.random() < probability:
            self.budget -= 1
            return True
        return False


class TaskSet:
    """One attempt of a stage. A *zombie* starts no more tasks, but its running tasks continue.

    ``successful`` are the partitions that need no further task here, ``numbers`` the last attempt number of each,
    ``failures`` how often each has failed.
    """

    def __init__(self, stage_attempt: int, partitions: Iterable[int]) -> None:
        self.stage_attempt = stage_attempt
        self.partitions = tuple(partitions)
        self.zombie = False
        self.successful: set[int] = set()
        self.numbers = dict.fromkeys(self.partitions, -1)
        self.failures = dict.fromkeys(self.partitions, 0)

    def succeed(self, partition: int) -> None:
        """Record a success, even one in an older attempt of the stage. A set that has everything is a zombie, too."""
        if partition in self.numbers:
            self.successful.add(partition)
            self.zombie = self.zombie or len(self.successful) == len(self.partitions)


class Phase(Enum):
    RUNNING = "the stage with our operator runs"
    FAILED = "it will be submitted again in a moment"
    DOWNSTREAM = "its outputs are read"
    OVER = "the job has ended"


@dataclass
class Job:
    """One action: perhaps a stage whose outputs ours reads, our stage, and perhaps one that reads ours.

    ``finished`` holds, for each partition, the task whose output counts. ``pending`` are those that the stage waits
    for. ``failed_attempts`` and ``downstream_failures`` count attempts of a stage; Spark gives up at the fourth.
    """

    job_id: int
    stage_id: int
    reads: bool
    shuffles: bool
    barrier: bool
    phase: Phase = Phase.RUNNING
    sets: list[TaskSet] = field(default_factory=list)
    finished: dict[int, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    failed_attempts: int = 0
    downstream_failures: int = 0

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages of the job."""
        upstream = (self.upstream_id,) if self.reads else ()
        return *upstream, self.stage_id, *((self.downstream_id,) if self.shuffles else ())

    @property
    def upstream_id(self) -> int:
        return self.stage_id + 10_000

    @property
    def downstream_id(self) -> int:
        return self.stage_id + 20_000

    @property
    def latest(self) -> TaskSet:
        return self.sets[-1]

    def forget_outputs(self, tasks: Collection[int]) -> int:
        """Forget the outputs of ``tasks``; return how many there were."""
        gone = [partition for partition, tid in self.finished.items() if tid in tasks]
        for partition in gone:
            del self.finished[partition]
        return len(gone)

    @property
    def active(self) -> bool:
        return self.phase is not Phase.OVER


@dataclass
class EngineTask:
    """One attempt of a task. ``loser``: another attempt of its set succeeded, so this one is to be killed."""

    task_attempt_id: int
    stage_id: int
    partition: int
    attempt_number: int
    speculative: bool
    executor_id: str
    stage_attempt: int
    job: Job = field(repr=False)
    of: TaskSet = field(repr=False)
    outcome: TaskOutcome | None = None
    loser: bool = False

    def end_fact(self, outcome: TaskOutcome, reason: str) -> TaskEnded:
        tid, number = self.task_attempt_id, self.attempt_number
        return TaskEnded(tid, self.stage_id, self.stage_attempt, self.partition, number, outcome, reason)
