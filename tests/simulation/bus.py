# SPDX-License-Identifier: Apache-2.0

"""The simulated Spark's listener bus and records, whose facts can be late, duplicated, dropped or outdated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.facts import EngineFact, FactsDropped, StatusReported, TaskOutcome, TaskPlace, TaskState
from tests.simulation.jobs import EngineTask, Faults


@dataclass
class Bus:
    """Keeps the order of posting, except for late facts. ``happen`` counts what was done to a fact."""

    random: Random
    faults: Faults
    happen: Callable[[str], None]
    queue: deque[EngineFact] = field(default_factory=deque)
    late: list[EngineFact] = field(default_factory=list)  # arrives when the queue is empty
    dropped: int = 0
    full: int = 0  # how many more facts are dropped

    def post(self, fact: EngineFact) -> None:
        if self.full or self.faults.spend(self.random, self.faults.drop):
            self.full = self.full - 1 if self.full else self.random.choice([0, 0, 0, 2, 10])
            self.dropped += 1
            self.happen("fact dropped")
            return
        if self.dropped and self.random.random() < 0.3:
            self.queue.append(FactsDropped(self.dropped))
            self.dropped = 0
            self.happen("dropped facts are reported")
        self.queue.append(fact)
        if self.faults.spend(self.random, self.faults.double):
            self.happen("fact doubled")
            self.queue.append(fact)


@dataclass
class Books:
    """The records that a look reads. A listener also keeps the engine's own records, so a look may find old ones."""

    tasks: dict[int, EngineTask]
    jobs: dict[int, bool]  # whether it is active
    shown: dict[int, TaskState] = field(default_factory=dict)  # at the last look
    shown_jobs: dict[int, bool] = field(default_factory=dict)

    def look(self, task_ids: frozenset[int], job_ids: frozenset[int], *, outdated: bool) -> StatusReported:
        """Return the states; if ``outdated``, as of the last look, without anything newer."""
        if not outdated:
            self.shown = {tid: _state_of(task) for tid, task in self.tasks.items()}
            self.shown_jobs = dict(self.jobs)
        states = {tid: self.shown.get(tid, TaskState.UNKNOWN) for tid in sorted(task_ids)}
        jobs = {job: self.shown_jobs.get(job, self.jobs.get(job, False)) for job in sorted(job_ids)}
        known = [tid for tid, state in states.items() if state is not TaskState.UNKNOWN]
        places = {tid: TaskPlace(self.tasks[tid].stage_id, self.tasks[tid].partition) for tid in known}
        return StatusReported(jobs, states, places)


def _state_of(task: EngineTask) -> TaskState:
    if task.outcome is None:
        return TaskState.RUNNING
    return TaskState.SUCCEEDED if task.outcome is TaskOutcome.SUCCESS else TaskState.ENDED
