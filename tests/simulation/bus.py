"""The pretended Spark's listener bus and its books: late, doubled, dropped, and outdated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.facts import EngineFact, FactsDropped, StatusReported, TaskOutcome, TaskState
from tests.simulation.jobs import EngineTask, Faults


@dataclass
class Bus:
    """Keeps the order of posting, but for what is posted late. ``happen`` counts what was done to a fact."""

    random: Random
    faults: Faults
    happen: Callable[[str], None]
    queue: deque[EngineFact] = field(default_factory=deque)
    late: list[EngineFact] = field(default_factory=list)  # whatever comes when the queue is empty
    dropped: int = 0
    full: int = 0  # so many facts more are dropped

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
    """What a look finds. The engine's own books are kept by a listener, too: a look may find them of yesterday."""

    tasks: dict[int, EngineTask]
    jobs: dict[int, bool]  # -> it is active
    shown: dict[int, TaskState] = field(default_factory=dict)  # at the last look
    shown_jobs: dict[int, bool] = field(default_factory=dict)

    def look(self, task_ids: frozenset[int], job_ids: frozenset[int], *, outdated: bool) -> StatusReported:
        """``outdated``: as the books were at the last look; what is younger than that look, they do not know."""
        if not outdated:
            self.shown = {tid: _state_of(task) for tid, task in self.tasks.items()}
            self.shown_jobs = dict(self.jobs)
        states = {tid: self.shown.get(tid, TaskState.UNKNOWN) for tid in sorted(task_ids)}
        jobs = {job: self.shown_jobs.get(job, self.jobs.get(job, False)) for job in sorted(job_ids)}
        return StatusReported(jobs, states)


def _state_of(task: EngineTask) -> TaskState:
    if task.outcome is None:
        return TaskState.RUNNING
    return TaskState.SUCCEEDED if task.outcome is TaskOutcome.SUCCESS else TaskState.ENDED
