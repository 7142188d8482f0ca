# SPDX-License-Identifier: Apache-2.0

"""What the ledger knows of one operator at one moment, for people: ``AttemptLedger.view_run`` and ``view_attempts``.

Nothing in the protocol depends on these values. Times are readings of the clock of ``now``.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from protocol.attempts.records import EngineRecords, OperatorRecord, TaskRecord, WaitsFor
from protocol.attempts.table import AttemptState
from protocol.attempts.types import FailureKind
from protocol.ids import ExecutionAttempt

__all__ = ["AttemptState", "AttemptView", "HeldView", "RunView", "view_attempts", "view_run"]


class AttemptView(NamedTuple):
    """One attempt of the current run. ``failure`` says why it is over. Host and executor are empty if not known."""

    attempt: ExecutionAttempt
    state: AttemptState
    accepted_at: float
    failure: FailureKind | None
    executor_id: str
    host: str


class HeldView(NamedTuple):
    """A task that has registered and waits for the answer."""

    subtask: int
    task_attempt_id: int
    since: float
    waits_for: WaitsFor


MISSING_MAX = 20
"""How many of the subtasks that no task has registered for are named."""


class RunView(NamedTuple):
    """The current run of an operator.

    ``stage_id``: None if there is no run. ``attempts``: how many the run has had, of so many ``subtasks``.
    ``tasks_started``: how many of the stage's tasks Spark has started. ``task_count``: how many the action runs in the
    stage, which are fewer than its partitions for ``take``; 0 if not known.
    ``missing``: the first subtasks that have had no attempt, at most ``MISSING_MAX``.
    """

    stage_id: int | None
    failed_cause: str | None
    attempts: int
    subtasks: int
    tasks_started: int
    task_count: int
    missing: tuple[int, ...]
    held: tuple[HeldView, ...]


def view_run(record: OperatorRecord, engine: EngineRecords) -> RunView:
    """The run of one operator at this moment."""
    held = tuple(
        HeldView(waiting.message.subtask, waiting.task_attempt_id, waiting.since, waiting.waits_for)
        for waiting in record.held.values()
    )
    run = record.run
    if run is None:
        return RunView(None, None, 0, 0, 0, 0, (), held)
    stage = engine.stages.get(run.run_id)
    absent = (subtask for subtask in range(record.parallelism) if subtask not in run.subtasks)
    return RunView(
        run.run_id,
        run.failed_cause,
        len(run.by_task),
        len(run.subtasks),
        0 if stage is None else len(stage.tasks),
        0 if stage is None else stage.task_count or stage.partitions,
        tuple(islice(absent, MISSING_MAX)),
        held,
    )


_NO_TASK = TaskRecord(-1, -1, -1, -1)


def view_attempts(
    record: OperatorRecord, engine: EngineRecords, first: int, count: int, known: dict[int, AttemptView]
) -> list[AttemptView]:
    """At most ``count`` attempts of the current run, from number ``first`` on, in the order of their acceptance.

    ``known``: views of earlier calls, by task attempt id, which this keeps up to date. One in which nothing has changed
    is returned again, so that looking often at many attempts makes no garbage.
    """
    run = record.run
    if run is None:
        known.clear()
        return []
    stage = engine.stages.get(run.run_id)
    tasks = {} if stage is None else stage.tasks
    views = []
    for task_attempt_id, entry in islice(run.by_task.items(), first, first + count):
        task = tasks.get(task_attempt_id, _NO_TASK)
        view = known.get(task_attempt_id)
        if view is None or view[0] is not entry.attempt or view[1] is not entry.state or view[4] != task.executor_id:
            view = AttemptView(
                entry.attempt, entry.state, entry.accepted_at, entry.failure, task.executor_id, task.host
            )
            known[task_attempt_id] = view
        views.append(view)
    return views
