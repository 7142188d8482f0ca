# SPDX-License-Identifier: Apache-2.0

"""What the ledger knows of one operator at one moment, for people: ``AttemptLedger.view_run`` and ``view_attempts``.

Nothing in the protocol depends on these values. Times are readings of the clock of ``now``.
"""

from __future__ import annotations

from itertools import islice, repeat
from operator import attrgetter
from typing import NamedTuple

from protocol.attempts import FailureKind
from protocol.attempts.records import (
    AttemptRecord,
    AttemptState,
    EngineRecords,
    OperatorRecord,
    RunRecord,
    TaskRecord,
    WaitsFor,
)
from protocol.ids import ExecutionAttempt


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
    lacking = len(run.subtasks) < record.parallelism
    absent = (subtask for subtask in range(record.parallelism if lacking else 0) if subtask not in run.subtasks)
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
_STATE = attrgetter("state")
_EXECUTOR = attrgetter("executor_id")


class _Slice(NamedTuple):
    entries: list[AttemptRecord]
    states: list[AttemptState]
    executors: list[str]
    views: list[AttemptView]


_NOTHING = _Slice([], [], [], [])


class KnownAttempts:
    """What ``view_attempts`` has shown of one operator, to compare with and to use again.

    Looking often at many attempts in which nothing changes makes no garbage, and the comparison runs in C.
    """

    __slots__ = ("entries", "ids", "run", "slices")

    def __init__(self) -> None:
        self.run: RunRecord | None = None
        self.ids: list[int] = []
        self.entries: list[AttemptRecord] = []
        self.slices: dict[int, _Slice] = {}

    def begin(self, run: RunRecord | None) -> None:
        """Look at the attempts that this run has now."""
        if self.run is not run:
            self.slices.clear()
        self.run = run
        by_task = {} if run is None else run.by_task
        self.ids, self.entries = list(by_task), list(by_task.values())


def view_attempts(
    record: OperatorRecord, engine: EngineRecords, first: int, count: int, known: KnownAttempts
) -> list[AttemptView]:
    """At most ``count`` attempts of the current run, from number ``first`` on, in the order of their acceptance.

    A look begins with ``first`` of 0, and shows the attempts that there were then. If nothing has changed since the
    last look with the same ``first``, the result is the same list, which must not be changed. An unchanged view is the
    same value.
    """
    run = record.run
    if first == 0 or run is not known.run:
        known.begin(run)
    stage = None if run is None else engine.stages.get(run.run_id)
    tasks = {} if stage is None else stage.tasks
    ids, entries = known.ids[first : first + count], known.entries[first : first + count]
    states = list(map(_STATE, entries))
    before = known.slices.get(first, _NOTHING)
    if before.entries == entries and "" not in before.executors:
        executors = before.executors  # they do not change
    else:
        executors = list(map(_EXECUTOR, map(tasks.get, ids, repeat(_NO_TASK))))
    if (before.entries, before.states, before.executors) == (entries, states, executors):
        return before.views
    views = []
    for index, (entry, state, executor_id) in enumerate(zip(entries, states, executors, strict=True)):
        if (
            index < len(before.entries)
            and before.entries[index] is entry
            and before.states[index] is state
            and before.executors[index] == executor_id
        ):
            views.append(before.views[index])
        else:
            host = tasks.get(ids[index], _NO_TASK).host
            views.append(AttemptView(entry.attempt, state, entry.accepted_at, entry.failure, executor_id, host))
    known.slices[first] = _Slice(entries, states, executors, views)
    return views
