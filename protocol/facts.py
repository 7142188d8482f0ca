"""What an engine says about its tasks, as past-tense facts.

The names are Spark's, because Spark is the engine that we have; nothing here imports it. Facts can be missing,
doubled or late (H19), and they may come in another order than the tasks' own words. Ids: ``stage_id`` and
``job_id`` are unique in an application; ``task_attempt_id`` is too (H1); ``partition`` is the partition, never
the place in a task set.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum

from protocol.values import value


class TaskOutcome(Enum):
    """How a task attempt ended, as the engine classifies it."""

    SUCCESS = "success"
    FAILED = "failed"
    KILLED = "killed"
    RESUBMITTED = "resubmitted"  # a success revoked: its output is lost (H17)
    EXECUTOR_LOST = "executor_lost"
    FETCH_FAILED = "fetch_failed"
    COMMIT_DENIED = "commit_denied"


class TaskState(Enum):
    """What a look at the engine's own books says of a task attempt."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    ENDED = "ended"  # failed, killed, lost
    UNKNOWN = "unknown"  # the engine has no entry (any more)


@value
class JobStarted:
    job_id: int
    stage_ids: tuple[int, ...]


@value
class JobEnded:
    job_id: int
    succeeded: bool
    reason: str = ""


@value
class StageSubmitted:
    stage_id: int
    stage_attempt: int
    task_count: int
    barrier: bool = False  # Spark's barrier execution mode: the stage fails and is retried as a whole
    partitions: int = 0  # of the stage's RDD; 0 if not known. An action or a retry may run tasks for a part of them


@value
class StageCompleted:
    stage_id: int
    stage_attempt: int
    failure: str | None = None  # None: every task of the attempt succeeded


@value
class TaskStarted:
    task_attempt_id: int
    stage_id: int
    stage_attempt: int
    partition: int
    attempt_number: int
    speculative: bool = False
    executor_id: str = ""
    host: str = ""


@value
class TaskEnded:
    task_attempt_id: int
    stage_id: int
    stage_attempt: int
    partition: int
    attempt_number: int
    outcome: TaskOutcome
    reason: str = ""


@value
class ExecutorLost:
    executor_id: str
    reason: str = ""


@value
class FactsDropped:
    """The engine's bus, or our own buffer behind it, has lost this many facts since the last such report."""

    count: int


@value
class ApplicationEnded:
    """The engine is stopping; no fact follows."""


@value
class StatusReported:
    """The answer to a look at the engine's own books (H19): what is true now, whatever the bus said.

    ``jobs`` tells for each job that was asked about whether it is still active; ``tasks`` the state of each task
    attempt that was asked about.
    """

    jobs: dict[int, bool] = field(default_factory=dict)
    tasks: dict[int, TaskState] = field(default_factory=dict)


@value
class StageLook:
    """What the engine computes in a stage, and what it has kept, at the moment of the look. No fact of the bus.

    ``partitions`` are those that it computes, of ``partition_count``; 0 for a stage that it does not know any more.
    ``outputs`` name what it may keep of the stage's results beyond the job: a persisted RDD by its id, the output of
    shuffle n by -1 - n. ``kept`` are those of them of which it has a part: the stage computes the rest.
    """

    partitions: frozenset[int] = frozenset()
    partition_count: int = 0
    outputs: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


EngineFact = (
    JobStarted
    | JobEnded
    | StageSubmitted
    | StageCompleted
    | TaskStarted
    | TaskEnded
    | ExecutorLost
    | FactsDropped
    | ApplicationEnded
    | StatusReported
)
