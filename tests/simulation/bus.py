# SPDX-License-Identifier: Apache-2.0

"""The simulated Spark's listener bus, relay and records, whose facts can be late, duplicated, dropped or outdated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.facts import (
    EngineFact,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
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
class HeldFacts:
    """What the relay in the JVM keeps of stages that nobody watches; see ``HeldFacts`` in ``TaskEventRelay.java``."""

    holding: bool
    _stages: dict[int, dict[object, EngineFact]] = field(default_factory=dict)
    _jobs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _watched: set[int] = field(default_factory=set)
    _claimed: set[int] = field(default_factory=set)

    def keep(self, fact: EngineFact) -> bool:
        """Whether the fact is held back."""
        match fact:
            case JobStarted(job_id, stage_ids):
                self._jobs[job_id] = stage_ids
            case JobEnded(job_id=job_id):
                for stage_id in self._jobs.pop(job_id, ()):
                    if not any(stage_id in stages for stages in self._jobs.values()):
                        self._watched.discard(stage_id)
                        self._stages.pop(stage_id, None)
            case StageCompleted(stage_id=stage_id, failure=None):
                self._stages.pop(stage_id, None)
            case ExecutorLost():
                for held in self._stages.values():
                    held[fact.executor_id] = fact
            case TaskStarted() | TaskEnded():
                return self.holding and self._keep(fact)
        return False

    def _keep(self, fact: TaskStarted | TaskEnded) -> bool:
        tid = fact.task_attempt_id
        if tid in self._claimed or fact.stage_id in self._watched:
            self._claimed.discard(tid)
            return False
        held = self._stages.setdefault(fact.stage_id, {})
        if isinstance(fact, TaskStarted):
            held[tid] = fact
        elif fact.outcome is TaskOutcome.SUCCESS:
            held.pop(tid, None)
        else:
            held["end", tid] = fact
        return True

    def watch(self, stage_id: int, tid: int) -> list[EngineFact]:
        """Return what was held of the stage, and of the task."""
        released = self._stages.pop(stage_id, {})
        self._watched.add(stage_id)
        elsewhere = [held[key] for held in self._stages.values() for key in (tid, ("end", tid)) if key in held]
        if tid not in released and not elsewhere:
            self._claimed.add(tid)
        return [*released.values(), *elsewhere]


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
