"""A pretended Spark: one stage a job, retries, copies, kills, lost executors, and a bus that loses facts.

It is truthful about order as measured: the end of an attempt is posted before the start of the next one of the
same partition; ends of killed tasks may come after the end of their job. Between posting and delivery a fact may
be dropped or doubled.
"""

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
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
    TaskState,
)

FAILURES_MAX = 12
"""How often tasks of a job may fail; killed ones do not count."""


@dataclass
class EngineTask:
    task_attempt_id: int
    stage_id: int
    partition: int
    attempt_number: int
    speculative: bool
    executor_id: str
    stage_attempt: int = 0
    outcome: TaskOutcome | None = None
    kill_reason: str | None = None


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


@dataclass
class Engine:
    random: Random
    partitions: int
    faults: Faults
    launch: Callable[[EngineTask], None]
    kill_process: Callable[[int], None]
    copies: bool
    barrier: bool = False  # a stage that fails and is started again as a whole (spark-facts 19)
    stage_attempt: int = 0
    tasks: dict[int, EngineTask] = field(default_factory=dict)
    bus: deque[EngineFact] = field(default_factory=deque)
    late: list[TaskEnded] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    finished: dict[int, int] = field(default_factory=dict)  # partition -> the task that succeeded
    job_id: int = -1
    active: bool = False
    attempt_numbers: dict[int, int] = field(default_factory=dict)
    jobs: dict[int, bool] = field(default_factory=dict)  # -> it is active
    results: dict[int, bool] = field(default_factory=dict)
    next_task: int = 100
    failures: int = 0
    dropped: int = 0

    @property
    def stage_id(self) -> int:
        return 10 + self.job_id

    # --- jobs ---

    def start_job(self) -> None:
        self.job_id += 1
        self.active = True
        self.jobs[self.job_id] = True
        self.finished.clear()
        self.failures = 0
        self.stage_attempt = -1
        self.post(JobStarted(self.job_id, (self.stage_id,)))
        self._start_stage()

    def _start_stage(self) -> None:
        self.stage_attempt += 1
        self.attempt_numbers = dict.fromkeys(range(self.partitions), -1)
        self.post(StageSubmitted(self.stage_id, self.stage_attempt, self.partitions, self.barrier))
        for partition in range(self.partitions):
            self._launch(partition)

    def _restart_stage(self) -> None:
        """All or none: the others are killed, and what had succeeded is thrown away."""
        for task in self.running():
            self._process_gone(task, TaskOutcome.KILLED, "the barrier stage failed", late=True)
        self.finished.clear()
        self.post(StageCompleted(self.stage_id, self.stage_attempt, "a task failed"))
        self._start_stage()

    def _end_job(self, succeeded: bool, reason: str = "") -> None:
        self.active = False
        self.jobs[self.job_id] = False
        self.results[self.job_id] = succeeded
        for task in self.running():
            task.kill_reason = reason or "the job has ended"
            self._process_gone(task, TaskOutcome.KILLED, task.kill_reason, late=True)
        self.post(StageCompleted(self.stage_id, self.stage_attempt, None if succeeded else reason))
        self.post(JobEnded(self.job_id, succeeded, reason))

    def cancel(self, job_ids: tuple[int, ...], reason: str) -> None:
        if self.active and self.job_id in job_ids:
            self._end_job(False, f"cancelled: {reason}")

    def running(self) -> list[EngineTask]:
        return [task for task in self.tasks.values() if task.outcome is None]

    # --- tasks ---

    def _launch(self, partition: int, *, speculative: bool = False) -> None:
        self.attempt_numbers[partition] += 1
        executor = f"executor-{self.random.randrange(2)}"
        number = self.attempt_numbers[partition]
        tid, stage, stage_attempt = self.next_task, self.stage_id, self.stage_attempt
        task = EngineTask(tid, stage, partition, number, speculative, executor, stage_attempt)
        self.next_task += 1
        self.tasks[tid] = task
        self.post(TaskStarted(tid, stage, stage_attempt, partition, number, speculative, executor, "host"))
        self.launch(task)

    def _post_end(self, task: EngineTask, outcome: TaskOutcome, reason: str, *, late: bool = False) -> None:
        tid, stage, stage_attempt = task.task_attempt_id, task.stage_id, task.stage_attempt
        fact = TaskEnded(tid, stage, stage_attempt, task.partition, task.attempt_number, outcome, reason)
        if late and self.random.random() < 0.5:
            self.late.append(fact)
        else:
            self.post(fact)

    def _process_gone(self, task: EngineTask, outcome: TaskOutcome, reason: str, *, late: bool = False) -> None:
        task.outcome = outcome
        self.kill_process(task.task_attempt_id)
        self._post_end(task, outcome, reason, late=late)

    def exited(self, task_attempt_id: int, failure: str) -> None:
        """The task's process has ended by itself."""
        task = self.tasks[task_attempt_id]
        if task.outcome is not None:
            return
        if failure:
            self._process_gone(task, TaskOutcome.FAILED, failure)
            self.failures += 1
            if self.failures > FAILURES_MAX and self.active:
                self._end_job(False, f"too many failures, the last one: {failure}")
            self._retry(task.partition)
            return
        task.outcome = TaskOutcome.SUCCESS
        self._post_end(task, TaskOutcome.SUCCESS, "")
        self.finished[task.partition] = task_attempt_id
        for other in self.running():
            if other.partition == task.partition:
                self._process_gone(other, TaskOutcome.KILLED, "another attempt succeeded")
        if len(self.finished) == self.partitions:
            self._end_job(True)

    def _retry(self, partition: int) -> None:
        if self.barrier:
            if self.active:
                self._restart_stage()
            return
        alive = any(task.partition == partition for task in self.running())
        if self.active and not alive and partition not in self.finished:
            self._launch(partition)

    def request_kill(self, task_attempt_id: int, reason: str) -> None:
        """The driver's wish; the engine takes its time (spark-facts 16)."""
        task = self.tasks[task_attempt_id]
        if task.outcome is None:
            task.kill_reason = reason
            self.kills.append(task_attempt_id)

    def carry_out_kill(self) -> None:
        task = self.tasks[self.kills.pop(self.random.randrange(len(self.kills)))]
        if task.outcome is None:
            self._process_gone(task, TaskOutcome.KILLED, task.kill_reason or "")
            self._retry(task.partition)

    # --- misfortune ---

    def copy_one(self) -> None:
        """Speculation: a second attempt of a partition that runs."""
        plain = [task for task in self.running() if sum(t.partition == task.partition for t in self.running()) == 1]
        if self.active and plain:
            self._launch(self.random.choice(plain).partition, speculative=True)

    def lose_executor(self) -> None:
        """Its running tasks end, and the output of its finished ones is lost (H17)."""
        if not self.active:
            return
        executor = f"executor-{self.random.randrange(2)}"
        victims = [task for task in self.running() if task.executor_id == executor]
        for task in victims:
            self._process_gone(task, TaskOutcome.EXECUTOR_LOST, f"{executor} is gone")
        if self.random.random() < 0.7:
            self.post(ExecutorLost(executor, "gone"))
        if self.barrier:
            if victims:
                self._retry(victims[0].partition)
            return
        lost = [tid for tid in self.finished.values() if self.tasks[tid].executor_id == executor]
        for tid in lost:
            task = self.tasks[tid]
            del self.finished[task.partition]
            self._post_end(task, TaskOutcome.RESUBMITTED, "its output is lost")
        for partition in sorted({self.tasks[tid].partition for tid in lost} | {task.partition for task in victims}):
            self._retry(partition)

    # --- the bus and the books ---

    def post(self, fact: EngineFact) -> None:
        if self.faults.spend(self.random, self.faults.drop):
            self.dropped += 1
            return
        self.bus.append(fact)
        if self.faults.spend(self.random, self.faults.double):
            self.bus.append(fact)

    def report_drops(self) -> None:
        if self.dropped:
            self.bus.append(FactsDropped(self.dropped))
            self.dropped = 0

    def status(self, task_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        tasks: dict[int, TaskState] = {}
        for tid in sorted(task_ids):
            task = self.tasks.get(tid)
            if task is None:
                tasks[tid] = TaskState.UNKNOWN
            elif task.outcome is None:
                tasks[tid] = TaskState.RUNNING
            else:
                succeeded = task.outcome is TaskOutcome.SUCCESS
                tasks[tid] = TaskState.SUCCEEDED if succeeded else TaskState.ENDED
        return StatusReported({job: self.jobs.get(job, False) for job in sorted(job_ids)}, tasks)
