"""A small Spark that launches, retries, copies, loses and kills tasks, in virtual time and from one seed.

It is written from what Spark does, not from what the ledger does. Facts go over a bus that keeps their order, lags,
and may drop or double them; what the tasks say themselves goes another way, with lags of its own. The ledger's
effects act back: a refused task fails, a kill takes its time, a look at the status is answered truthfully.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.attempts import (
    AttemptAccepted,
    AttemptCondemned,
    AttemptLedger,
    CancelJobs,
    ConnectionExpired,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
)
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
from protocol.machine import TimePassed
from protocol.wire.messages import Register, RestoreMode

OPERATOR = "words"


@dataclass(frozen=True)
class Chances:
    """How often which misfortune strikes."""

    drop: float = 0.0
    double: float = 0.0
    task_fails: float = 0.15
    speculates: float = 0.1
    condemned: float = 0.03
    attempts_max: int | None = None
    executor_lost: float = 0.25  # per stage
    fetch_fails: float = 0.25  # per stage
    job_cancelled: float = 0.15
    coordinator_fails: float = 0.0  # per job
    overlaps: float = 0.0  # the next job does not wait for this one
    barrier: bool = False


@dataclass
class Task:
    id: int
    partition: int
    number: int
    stage_attempt: int
    executor: str
    speculative: bool
    state: TaskState = TaskState.RUNNING
    revoked: bool = False
    started_at: float = 0.0
    ended_at: float | None = None
    answered: bool = False
    superseded: bool = False  # Spark has ordered its death because a copy succeeded; a success of it counts no more


@dataclass
class Stage:
    id: int
    job: int
    partitions: int
    attempt: int = 0
    tasks: dict[int, Task] = field(default_factory=dict)
    winners: dict[int, int] = field(default_factory=dict)  # partition -> task whose output counts
    over: bool = False
    failures: int = 0

    def running(self, partition: int | None = None, attempt: int | None = None) -> list[Task]:
        return [
            task
            for task in self.tasks.values()
            if task.state is TaskState.RUNNING
            and (partition is None or task.partition == partition)
            and (attempt is None or task.stage_attempt == attempt)
        ]


class Simulation:
    """``observe`` is called for each effect, in order, and ``after_step`` after each input."""

    def __init__(
        self,
        seed: int,
        chances: Chances,
        observe: Callable[[LedgerEffect], None],
        after_step: Callable[[Simulation], None],
    ) -> None:
        self.dice = random.Random(seed)
        self.chances = chances
        self.observe = observe
        self.after_step = after_step
        self.now = 0.0
        self.parallelism = self.dice.randint(1, 4)
        self.ledger = AttemptLedger(LedgerConfig(attempts_max=chances.attempts_max))
        self.stages: dict[int, Stage] = {}
        self.story: list[str] = []
        self.delivered_ends: set[int] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._task_ids = itertools.count(1)
        self._bus_free_at = 0.0
        self._word_free_at: dict[int, float] = {}
        self._said_goodbye: set[int] = set()
        self._next_run_at: Callable[[], None] | None = None
        self.feed(OperatorAdded(OPERATOR, self.parallelism))

    # --- virtual time -------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def run(self, jobs: int, until: float = 2000.0) -> None:
        self._start_job(jobs)
        while self.now < until:
            deadline = self.ledger.next_deadline()
            if self._heap and (deadline is None or self._heap[0][0] <= deadline):
                self.now, _, action = heapq.heappop(self._heap)
                action()
            elif deadline is not None and deadline <= until:
                self.now = max(self.now, deadline)
                self.feed(TimePassed())
            else:
                self.now = until

    def feed(self, input: LedgerInput) -> None:
        self.story.append(f"{self.now:8.3f} <- {input}")
        effects = self.ledger.handle(input, self.now)
        for effect in effects:
            self.story.append(f"{self.now:8.3f}      -> {effect}")
        for effect in effects:
            self.observe(effect)
            self._carry_out(effect)
        self.ledger.check_invariants()
        self.after_step(self)

    # --- the bus and the sockets --------------------------------------------------------------------------

    def post(self, fact: EngineFact) -> None:
        """Over the listener bus: in order, late, sometimes not at all or twice."""
        self._bus_free_at = max(self._bus_free_at, self.now + self.dice.choice((0.001, 0.01, 0.3)))
        if self.dice.random() < self.chances.drop:
            self.at(self._bus_free_at + 1.0 - self.now, lambda: self.feed(FactsDropped(1)))
            return
        self.at(self._bus_free_at - self.now, lambda: self._deliver(fact))
        if self.dice.random() < self.chances.double:
            self.at(self._bus_free_at - self.now + self.dice.choice((0.0, 0.5, 4.0)), lambda: self.feed(fact))

    def _deliver(self, fact: EngineFact) -> None:
        if isinstance(fact, TaskEnded):
            self.delivered_ends.add(fact.task_attempt_id)
        self.feed(fact)

    def say(self, task: Task, word: LedgerInput) -> None:
        """From the task's own socket: in the order of the task, with any lag against the bus."""
        free_at = max(self._word_free_at.get(task.id, 0.0), self.now + self.dice.choice((0.001, 0.02, 0.6)))
        self._word_free_at[task.id] = free_at
        self.at(free_at - self.now, lambda: self.feed(word))

    # --- the scheduler ------------------------------------------------------------------------------------

    def _start_job(self, left: int) -> None:
        number = len(self.stages)
        stage = Stage(id=number * 3 + 1, job=number, partitions=self.parallelism)
        self.stages[stage.id] = stage
        self._next_run_at = (lambda: self._start_job(left - 1)) if left > 1 else None
        self.post(JobStarted(stage.job, (stage.id, stage.id + 1)))
        self.post(StageSubmitted(stage.id, 0, stage.partitions, self.chances.barrier, stage.partitions))
        for partition in range(stage.partitions):
            self._launch(stage, partition)
        dice, chances = self.dice, self.chances
        if dice.random() < chances.executor_lost and not chances.barrier:
            self.at(dice.uniform(0.5, 8.0), lambda: self._lose_executor(stage, f"e{dice.randint(0, 1)}"))
        if dice.random() < chances.fetch_fails and not chances.barrier:
            self.at(dice.uniform(0.5, 6.0), lambda: self._fail_fetch(stage))
        if dice.random() < chances.coordinator_fails:
            self.at(dice.uniform(0.1, 8.0), lambda: self.feed(GlobalFailureRaised(OPERATOR, "it raised")))
        if dice.random() < chances.overlaps and self._next_run_at is not None:
            self.at(dice.uniform(0.1, 12.0), self._next_run_at)
            self._next_run_at = None
        if dice.random() < chances.job_cancelled:
            self.at(dice.uniform(0.1, 8.0), lambda: self._end_job(stage, False, "cancelled"))

    def _launch(self, stage: Stage, partition: int, speculative: bool = False) -> None:
        if stage.over or partition in stage.winners:
            return
        number = sum(t.partition == partition and t.stage_attempt == stage.attempt for t in stage.tasks.values())
        executor = f"e{self.dice.randint(0, 2)}"
        task = Task(next(self._task_ids), partition, number, stage.attempt, executor, speculative)
        task.started_at = self.now
        stage.tasks[task.id] = task
        self.post(TaskStarted(task.id, stage.id, stage.attempt, partition, number, speculative, executor, "h"))
        register = Register(task.id, OPERATOR, partition, stage.id, number, RestoreMode.BATCH, 4, "h", "3")
        self.at(self.dice.choice((0.0, 0.2, 1.5)), lambda: self._speak(stage, task, register))
        if not speculative and not self.chances.barrier and self.dice.random() < self.chances.speculates:
            self.at(self.dice.uniform(0.1, 3.0), lambda: self._speculate(stage, task))
        if self.dice.random() < self.chances.task_fails / 3:
            self.at(self.dice.uniform(0.0, 1.0), lambda: self.end(stage, task, TaskOutcome.FAILED, "early"))

    def _speak(self, stage: Stage, task: Task, register: Register) -> None:
        if task.state is TaskState.RUNNING:
            self.say(task, RegistrationArrived(task.id, register))

    def _speculate(self, stage: Stage, task: Task) -> None:
        if task.state is TaskState.RUNNING and task.stage_attempt == stage.attempt:
            self._launch(stage, task.partition, speculative=True)

    def _work(self, stage: Stage, task: Task) -> None:
        if task.state is not TaskState.RUNNING:
            return
        self.say(task, OperatorOpened(OPERATOR, task.id))
        seconds = self.dice.choice((0.01, 1.0, 5.0, 15.0))
        if self.dice.random() < self.chances.condemned:
            word = self.dice.choice((AttemptCondemned(OPERATOR, task.id, "deaf"), ConnectionExpired(OPERATOR, task.id)))
            self.at(self.dice.uniform(0, 2), lambda: self._speak_word(task, word))
        if self.dice.random() < self.chances.task_fails:
            told = self.dice.random() < 0.5
            self.at(seconds, lambda: self._raise(stage, task, told))
        else:
            self.at(seconds, lambda: self._speak_word(task, OperatorEnded(OPERATOR, task.id, "")))

    def _speak_word(self, task: Task, word: LedgerInput) -> None:
        if task.state is TaskState.RUNNING:
            if isinstance(word, OperatorEnded):
                self._said_goodbye.add(task.id)
                stage = next(s for s in self.stages.values() if task.id in s.tasks)
                self.at(2.0, lambda: self._succeed(stage, task))  # the confirmation of the goodbye has come
            self.say(task, word)

    def _raise(self, stage: Stage, task: Task, told: bool) -> None:
        if task.state is TaskState.RUNNING:
            if told:
                self.say(task, OperatorEnded(OPERATOR, task.id, "ValueError"))
            self.end(stage, task, TaskOutcome.FAILED, "ValueError")

    def _succeed(self, stage: Stage, task: Task) -> None:
        if task.state is not TaskState.RUNNING or task.id not in self._said_goodbye:
            return  # the goodbye was stale: the task is about to fail for it
        if task.superseded:
            self.end(stage, task, TaskOutcome.KILLED, "did not commit: another attempt succeeded")
            return
        self.end(stage, task, TaskOutcome.SUCCESS)
        if stage.over:
            return
        stage.winners[task.partition] = task.id
        for copy in stage.running(task.partition):
            if copy.stage_attempt == task.stage_attempt:
                copy.superseded = True
                self._kill(stage, copy, "another attempt succeeded")
        if len(stage.winners) == stage.partitions:
            self.at(self.dice.choice((0.0, 0.5, 2.0)), lambda: self._end_job(stage, True, ""))

    def end(self, stage: Stage, task: Task, outcome: TaskOutcome, reason: str = "") -> None:
        if task.state is not TaskState.RUNNING:
            return
        task.state = TaskState.SUCCEEDED if outcome is TaskOutcome.SUCCESS else TaskState.ENDED
        task.ended_at = self.now
        self.post(TaskEnded(task.id, stage.id, task.stage_attempt, task.partition, task.number, outcome, reason))
        if task.state is TaskState.SUCCEEDED or stage.over:
            return
        stage.failures += outcome is TaskOutcome.FAILED
        if stage.failures >= 4 * stage.partitions:
            self._end_job(stage, False, "a task failed too often")
        elif self.chances.barrier:
            self._restart_barrier(stage, task.stage_attempt)
        elif task.stage_attempt == stage.attempt and not stage.running(task.partition, stage.attempt):
            self._launch(stage, task.partition)

    def _kill(self, stage: Stage, task: Task, reason: str) -> None:
        self.at(self.dice.choice((0.01, 1.2, 3.0)), lambda: self.end(stage, task, TaskOutcome.KILLED, reason))

    def _restart_barrier(self, stage: Stage, failed: int) -> None:
        if failed != stage.attempt:
            return
        stage.attempt += 1
        stage.winners.clear()
        self.post(StageCompleted(stage.id, failed, "a barrier task failed"))
        for task in stage.running():
            self.end(stage, task, TaskOutcome.KILLED, "barrier stage failed")
        self.at(0.5, lambda: self._submit_again(stage))

    def _submit_again(self, stage: Stage) -> None:
        if not stage.over:
            self.post(StageSubmitted(stage.id, stage.attempt, stage.partitions, self.chances.barrier, stage.partitions))
            for partition in range(stage.partitions):
                self._launch(stage, partition)

    def _lose_executor(self, stage: Stage, executor: str) -> None:
        if stage.over:
            return
        lost = [t for t in stage.tasks.values() if t.executor == executor]
        for task in lost:
            if task.state is TaskState.SUCCEEDED and stage.winners.get(task.partition) == task.id:
                if task.stage_attempt != stage.attempt:
                    continue
                task.revoked = True
                del stage.winners[task.partition]
                args = (task.id, stage.id, task.stage_attempt, task.partition, task.number)
                self.post(TaskEnded(*args, TaskOutcome.RESUBMITTED, "resubmitted"))
                if not stage.running(task.partition, stage.attempt):
                    self._launch(stage, task.partition)
        for task in lost:
            self.end(stage, task, TaskOutcome.EXECUTOR_LOST, "executor lost")
        self.post(ExecutorLost(executor, "gone"))

    def _fail_fetch(self, stage: Stage) -> None:
        """One task fails to fetch: its stage attempt becomes a zombie, and lost partitions run again."""
        running = stage.running(attempt=stage.attempt)
        if stage.over or not running:
            return
        zombie = stage.attempt
        stage.attempt += 1
        self.end(stage, running[0], TaskOutcome.FETCH_FAILED, "fetch failed")
        self.post(StageCompleted(stage.id, zombie, "fetch failed"))
        for partition, winner in list(stage.winners.items()):
            if self.dice.random() < 0.3:
                stage.tasks[winner].revoked = True
                del stage.winners[partition]
        self.at(0.5, lambda: self._submit_again(stage))

    def _end_job(self, stage: Stage, succeeded: bool, reason: str) -> None:
        if stage.over or (succeeded and len(stage.winners) < stage.partitions):
            return
        stage.over = True
        self.post(StageCompleted(stage.id, stage.attempt, None if succeeded else reason))
        self.post(JobEnded(stage.job, succeeded, reason))
        for task in stage.running():
            self._kill(stage, task, "stage cancelled")
        if self._next_run_at is not None:
            self.at(self.dice.choice((0.0, 0.1, 3.0)), self._next_run_at)
            self._next_run_at = None

    # --- what the ledger wants ----------------------------------------------------------------------------

    def _find(self, task_attempt_id: int) -> tuple[Stage, Task]:
        stage = next(s for s in self.stages.values() if task_attempt_id in s.tasks)
        return stage, stage.tasks[task_attempt_id]

    def _carry_out(self, effect: LedgerEffect) -> None:
        match effect:
            case AttemptAccepted(attempt=attempt):
                stage, task = self._find(attempt.task_attempt_id)
                task.answered = True
                self.at(self.dice.choice((0.001, 0.3)), lambda: self._work(stage, task))
            case RefuseRegistration(task_attempt_id=task_attempt_id):
                stage, task = self._find(task_attempt_id)
                task.answered = True
                self.at(0.01, lambda: self.end(stage, task, TaskOutcome.FAILED, "refused"))
            case ReportStale(what="OperatorEnded", task_attempt_id=task_attempt_id):
                stage, task = self._find(task_attempt_id)
                self._said_goodbye.discard(task.id)
                self.at(0.01, lambda: self.end(stage, task, TaskOutcome.FAILED, "its goodbye was refused"))
            case KillTask(task_attempt_id=task_attempt_id, reason=reason):
                stage, task = self._find(task_attempt_id)
                self._kill(stage, task, reason)
            case CancelJobs(job_ids=jobs):
                for stage in list(self.stages.values()):
                    if stage.job in jobs:
                        self._end_job(stage, False, "cancelled by the ledger")
            case QueryStatus():
                if self.dice.random() < 0.8:
                    self.at(self.dice.choice((0.001, 0.5)), lambda: self._answer(effect))
            case _:
                pass

    def _answer(self, query: QueryStatus) -> None:
        tasks = {id: self._find(id)[1].state for id in query.task_attempt_ids}
        jobs = {s.job: not s.over for s in self.stages.values() if s.job in query.job_ids}
        self.feed(StatusReported(jobs, tasks))
