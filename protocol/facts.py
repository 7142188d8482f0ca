# SPDX-License-Identifier: Apache-2.0

"""Facts that the engine reports about its jobs, stages and tasks.

The names are Spark's; nothing here imports it. Facts can be missing, duplicated or late (H19), and they may arrive in
another order than the tasks' own messages. ``stage_id``, ``job_id`` and ``task_attempt_id`` are unique in an
application (H1). ``partition`` is the number of the partition, not the position in a task set.
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
    """The state of a task attempt in the engine's own records."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    ENDED = "ended"  # failed, killed, lost
    UNKNOWN = "unknown"  # the engine has no record of it, or none any more


@value
class JobStarted:
    job_id: int
    stage_ids: tuple[int, ...]
    action: str = ""  # the driver's call that the job belongs to; empty if it belongs to none


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
    partitions: int = 0  # of the stage's RDD; 0 if unknown. An action or a retry may run tasks for only some of them


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
    """The engine's bus, or the buffer after it, has lost this many facts since the last such report."""

    count: int


@value
class ApplicationEnded:
    """The engine is stopping; no fact follows."""


@value
class TaskPlace:
    """The stage and the partition that a task attempt computes. ``partition`` is negative if the engine forgot it."""

    stage_id: int
    partition: int


@value
class StatusReported:
    """The answer to a query of the engine's own records (H19): what is true now, whatever the bus said.

    ``jobs``: for each job in the query, whether it is still active. ``tasks``: the state of each task attempt in the
    query. ``places``: where each of these is that the engine knows. A state confirms nothing without its place (H75).
    """

    jobs: dict[int, bool] = field(default_factory=dict)
    tasks: dict[int, TaskState] = field(default_factory=dict)
    places: dict[int, TaskPlace] = field(default_factory=dict)


@value
class StageLook:
    """What the engine computes in a stage, and what it has kept, at one moment. It is not a fact of the bus.

    ``partitions`` are computed now, out of ``partition_count``, which is 0 for a stage that the engine has forgotten.
    ``outputs`` identify results of the stage that may outlive the job: a persisted RDD by its id, the output of
    shuffle n by -1 - n. ``kept`` are the outputs that exist in part: the stage computes the rest.
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
