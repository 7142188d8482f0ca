# SPDX-License-Identifier: Apache-2.0

"""A simulated Spark: jobs of up to three stages, retries, copies, zombies, slow kills, lost executors.

It follows Spark's own schedulers. A *task set* is one attempt of a stage. It starts attempts of its tasks, never two of
a partition except for a speculative copy, and posts the end of one before the start of the next (spark-facts 7). A
fetch failure makes it a zombie: its tasks run on alongside those of the next stage attempt, whose numbers start at 0
again (13), and every success counts. Of two successes, Spark uses the first for a result, the last for a shuffle's
output. A kill takes effect later, and until then the task talks (16, 17); so tasks can end after their job (8). A
barrier stage fails and starts again as a whole (19). Lost executors never come back under their old name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from protocol.facts import (
    EngineFact,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
)
from tests.simulation.bus import Books, Bus
from tests.simulation.jobs import EngineTask, Faults, Job, Phase, TaskSet
from tests.simulation.pending_actions import PAUSE_S, PendingAction, PendingActions

STAGE_ATTEMPTS_MAX = 4
"""How many attempts of a stage may fail in a row (spark.stage.maxConsecutiveAttempts)."""
LOSER = "another attempt succeeded"
RIVALS = 500
"""Job ids of actions that the user starts while another one runs."""


class Engine:
    """``launch`` starts the process of a task, ``kill_process`` ends it without a message.

    ``copies``: several attempts of a task may be alive at the same time. ``barrier``: our stage is a barrier stage.
    ``happen`` is called with the name of each event that affects the tasks.
    """

    def __init__(
        self,
        random: Random,
        partitions: int,
        faults: Faults,
        launch: Callable[[EngineTask], None],
        kill_process: Callable[[int], None],
        copies: bool,
        barrier: bool = False,
        happen: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.random = random
        self.partitions = partitions
        self.faults = faults
        self.launch = launch
        self.kill_process = kill_process
        self.copies = copies
        self.barrier = barrier
        self.happen = happen
        self.failures_max = random.choice([4, 4, 4, 1, 2])  # of one task (spark.task.maxFailures)
        self.tasks: dict[int, EngineTask] = {}
        self.succeeded: set[int] = set()  # partitions of which a task has ever succeeded
        self.jobs: dict[int, bool] = {}  # whether it is active
        self.results: dict[int, bool] = {}
        self.facts = Bus(random, faults, lambda what: self.happen(what))  # noqa: PLW0108 - it is reassigned
        self.books = Books(self.tasks, self.jobs)
        self.pending = PendingActions(random, faults)
        self.executors = ["executor-0", "executor-1"]
        self.executor_count = 2
        self.job_id = -1
        self.job: Job | None = None
        self.rival: Job | None = None
        self.next_task = 100

    # --- view for the world ---

    @property
    def stage_id(self) -> int:
        """The stage of the user's newest job, or of the job before the first."""
        return 10 + self.job_id

    @property
    def active(self) -> bool:
        job, rival = self.job, self.rival
        return (job is not None and job.active) or (rival is not None and rival.active)

    @property
    def bus(self) -> deque[EngineFact]:
        return self.facts.queue

    @property
    def late(self) -> list[EngineFact]:
        return self.facts.late

    @property
    def finished(self) -> dict[int, int]:
        """The tasks whose output counts in the user's newest job, by partition."""
        return {} if self.job is None else self.job.finished

    @property
    def kills(self) -> list[PendingAction]:
        """The pending actions, mainly kills."""
        return self.pending.open

    def carry_out_kill(self) -> None:
        """Carry out a pending action, or postpone it."""
        self.pending.do_one()

    def active_jobs(self) -> list[Job]:
        return [job for job in (self.job, self.rival) if job is not None and job.active]

    def running(self, job: Job | None = None, of: TaskSet | None = None) -> list[EngineTask]:
        """Return the tasks that have not ended for the engine: of all jobs, one job, or one attempt of its stage."""
        return [
            task
            for task in self.tasks.values()
            if task.outcome is None and (job is None or task.job is job) and (of is None or task.of is of)
        ]

    # --- jobs ---

    def start_job(self) -> None:
        random = self.random
        self.job_id += 1
        # If facts are lost, an ended task appears to run alongside the next stage attempt.
        reruns = self.copies or self.barrier or self.faults.drop == 0
        shuffles = random.random() >= 0.1 if self.barrier else random.random() < 0.5 and reruns
        reads = random.random() < 0.4 and reruns
        self.job = Job(self.job_id, self.stage_id, reads, shuffles, self.barrier)
        self._begin(self.job)

    def start_rival(self) -> None:
        """Start a second action, as the user, while the first one runs (H55)."""
        job_id = RIVALS + len(self.jobs)
        self.rival = Job(job_id, self.rival_stage_id, False, False, False)
        self._begin(self.rival)

    @property
    def rival_stage_id(self) -> int:
        """The id of the next rival's stage."""
        return RIVALS + 10 + len(self.jobs)

    def _begin(self, job: Job) -> None:
        self.jobs[job.job_id] = True
        self.post(JobStarted(job.job_id, job.stages))
        if job.reads:
            self._pass_foreign_stage(job.upstream_id, 0)
        self._submit(job)

    def _pass_foreign_stage(self, stage_id: int, attempt: int, failure: str | None = None) -> None:
        """Run a stage without our operator."""
        tid = self._next_task_id()
        outcome = TaskOutcome.SUCCESS if failure is None else TaskOutcome.FETCH_FAILED
        self.post(StageSubmitted(stage_id, attempt, 1))
        self.post(TaskStarted(tid, stage_id, attempt, 0, 0, False, self.executors[0], "host"))
        self.post(TaskEnded(tid, stage_id, attempt, 0, 0, outcome, failure or ""))
        self.post(StageCompleted(stage_id, attempt, failure))

    def _submit(self, job: Job) -> None:
        """Submit an attempt of our stage for the missing partitions."""
        missing = [partition for partition in range(self.partitions) if partition not in job.finished]
        job.sets.append(TaskSet(len(job.sets), missing))
        job.pending = set(missing)
        job.phase = Phase.RUNNING
        self.post(StageSubmitted(job.stage_id, job.latest.stage_attempt, len(missing), job.barrier, self.partitions))
        for partition in missing:
            self.start_task(job, partition)
        if not missing:  # the zombies have completed it
            self._complete_stage(job)

    def _complete_stage(self, job: Job) -> None:
        """Complete a stage that has nothing pending. Some outputs may be lost nevertheless."""
        self.post(StageCompleted(job.stage_id, job.latest.stage_attempt))
        if len(job.finished) < self.partitions:
            self._submit(job)
            return
        job.failed_attempts = 0
        job.phase = Phase.DOWNSTREAM
        self.pending.add(partial(self._read_outputs, job))

    def _read_outputs(self, job: Job) -> None:
        if job.phase is not Phase.DOWNSTREAM:
            return
        lost = len(job.finished) < self.partitions  # with an executor
        if lost or self.faults.spend(self.random, 0.1):
            self.fail_downstream(job)
        else:
            self._pass_foreign_stage(job.downstream_id, job.downstream_failures)
            self.end_job(job, True)

    def fail_stage(self, job: Job, reason: str) -> None:
        """Make the latest attempt of a stage a zombie. The stage is soon submitted again, or given up."""
        job.latest.zombie = True
        job.failed_attempts += 1
        if job.phase is Phase.RUNNING:
            self.post(StageCompleted(job.stage_id, job.latest.stage_attempt, reason))
        job.phase = Phase.FAILED
        if job.failed_attempts >= STAGE_ATTEMPTS_MAX:
            self.happen("stage given up")
            self.end_job(job, False, f"the stage has failed {job.failed_attempts} times: {reason}")
        elif job.barrier and not job.shuffles:
            self.end_job(job, False, f"could not recover from a failed barrier stage: {reason}")
        else:
            self.pending.add(partial(self._resubmit, job))

    def _resubmit(self, job: Job) -> None:
        if job.phase is not Phase.FAILED:
            return
        self.happen("stage resubmitted")
        zombies = self.running(job)
        if job.reads and not job.barrier:
            self._pass_foreign_stage(job.upstream_id, len(job.sets))
        self._submit(job)
        new = {(task.partition, task.attempt_number) for task in self.running(job, job.latest)}
        if any((task.partition, task.attempt_number) in new for task in zombies):
            self.happen("two of one number")  # spark-facts 13

    def fail_downstream(self, job: Job) -> None:
        """Fail a stage that could not fetch some of our outputs; the tasks that wrote them run again (H17)."""
        if len(job.finished) == self.partitions:
            lost = self.random.choice(sorted(job.finished))
            executor = self.tasks[job.finished[lost]].executor_id
            whole = self.random.random() < 0.5
            if whole:
                job.forget_outputs({tid for tid, task in self.tasks.items() if task.executor_id == executor})
            job.finished.pop(lost, None)
        if job.barrier:
            job.finished.clear()
        self.happen("downstream fetch failure")
        self._pass_foreign_stage(job.downstream_id, job.downstream_failures, "fetch failed")
        job.downstream_failures += 1
        if job.downstream_failures >= STAGE_ATTEMPTS_MAX:
            self.end_job(job, False, "the stage downstream has failed too often")
            return
        job.phase = Phase.FAILED
        self.pending.add(partial(self._resubmit, job))

    def end_job(self, job: Job, succeeded: bool, reason: str = "") -> None:
        was_running = job.phase is Phase.RUNNING
        job.phase = Phase.OVER
        self.jobs[job.job_id] = False
        self.results[job.job_id] = succeeded
        for task in self.running(job):
            self._kill(task, reason or "Stage finished")
        if was_running:
            failure = None if succeeded else reason
            self.post(StageCompleted(job.stage_id, job.latest.stage_attempt, failure))
        self.post(JobEnded(job.job_id, succeeded, reason))

    def cancel(self, job_ids: tuple[int, ...], reason: str) -> None:
        for job in self.active_jobs():
            if job.job_id in job_ids:
                self.happen("job cancelled")
                self.end_job(job, False, f"cancelled: {reason}")

    # --- tasks ---

    def _next_task_id(self) -> int:
        self.next_task += 1
        return self.next_task - 1

    def start_task(self, job: Job, partition: int, *, speculative: bool = False) -> None:
        tasks = job.latest
        tasks.numbers[partition] += 1
        tid, number, executor = self._next_task_id(), tasks.numbers[partition], self.random.choice(self.executors)
        stage, attempt = job.stage_id, tasks.stage_attempt
        task = EngineTask(tid, stage, partition, number, speculative, executor, attempt, job, tasks)
        self.tasks[tid] = task
        self.post(TaskStarted(tid, stage, attempt, partition, number, speculative, executor, "host"))
        self.launch(task)

    def launch_again(self, task: EngineTask) -> None:
        """Start a task again, unless its set starts nothing more, has the partition, or runs another attempt of it."""
        same = [other for other in self.running(task.job, task.of) if other.partition == task.partition]
        of = task.of
        if task.job.phase is Phase.RUNNING and not of.zombie and task.partition not in of.successful and not same:
            self.start_task(task.job, task.partition)

    def exited(self, task_attempt_id: int, failure: str) -> None:
        """Record that the task's process ended by itself. A kill that was under way may have come first."""
        task = self.tasks[task_attempt_id]
        if task.outcome is not None:
            return
        if self.pending.kills(task_attempt_id):
            self.pending.forget_kill(task_attempt_id)
            if self.random.random() < 0.5:
                self._end_killed(task, "killed as it ended")
                return
            self.happen("kill too late")
        if failure:
            self.end(task, TaskOutcome.FAILED, failure)
            self.task_failed(task, failure, counts=True)
        elif task.loser and task.partition in task.of.successful:
            self.happen("loser ends well")
            self._end_killed(task, "finished but did not commit: " + LOSER)
        else:
            self.end(task, TaskOutcome.SUCCESS, "")
            self._task_succeeded(task)

    def end(self, task: EngineTask, outcome: TaskOutcome, reason: str, *, ghost: bool = False) -> None:
        """End the task for the engine, and its process with it, unless that lives on for a while as a ghost."""
        task.outcome = outcome
        if ghost:
            self.happen("ghost")
            self._kill(task, reason)
        else:
            self.kill_process(task.task_attempt_id)
        fact = task.end_fact(outcome, reason)
        if not task.job.active:
            self.happen("end after its job")
            if self.random.random() < 0.3:
                self.late.append(fact)
                return
        self.post(fact)

    def _end_killed(self, task: EngineTask, reason: str) -> None:
        self.end(task, TaskOutcome.KILLED, reason)
        self.task_failed(task, reason, counts=False)

    def task_failed(self, task: EngineTask, reason: str, *, counts: bool) -> None:
        """Handle the consequences of an end that is posted already. Kills do not count as failures."""
        job, of = task.job, task.of
        if job.barrier:
            if job.phase is Phase.RUNNING and of is job.latest:
                self.happen("barrier stage fails")
                for other in self.running(job):
                    self._kill(other, "the barrier stage failed")
                job.finished.clear()
                self.fail_stage(job, reason)
            return
        if counts and not of.zombie and job.active:
            of.failures[task.partition] += 1
            if of.failures[task.partition] >= self.failures_max:
                self.happen("too many failures")
                self.end_job(job, False, f"task {task.partition} failed {self.failures_max} times: {reason}")
                return
        self.launch_again(task)

    def _task_succeeded(self, task: EngineTask) -> None:
        job, tid, partition = task.job, task.task_attempt_id, task.partition
        for other in self.running(job, task.of):
            if other.partition == partition:
                other.loser = True
                self._kill(other, LOSER)
        task.of.succeed(partition)
        self.succeeded.add(partition)
        if not job.active:
            return
        if task.of is not job.latest or job.phase is Phase.FAILED:
            self.happen("barrier zombie succeeds" if job.barrier else "zombie succeeds")
            job.latest.succeed(partition)
        if not job.shuffles:
            job.finished.setdefault(partition, tid)
            if len(job.finished) == self.partitions:
                self.end_job(job, True)
            return
        if partition in job.finished:
            self.happen("second success")
        job.finished[partition] = tid
        job.pending.discard(partition)
        if job.phase is Phase.RUNNING and not job.pending:
            self._complete_stage(job)

    # --- kills ---

    def request_kill(self, task_attempt_id: int, reason: str) -> None:
        """Kill a task on the driver's request. A task that Spark does not know is ignored."""
        task = self.tasks.get(task_attempt_id)
        if task is not None and task.outcome is None:
            self._kill(task, reason)

    def _kill(self, task: EngineTask, reason: str) -> None:
        tid = task.task_attempt_id
        if not self.pending.kills(tid) and self.pending.add(partial(self._kill_now, task, reason), victim=tid):
            self.happen("slow kill")

    def _kill_now(self, task: EngineTask, reason: str) -> None:
        if task.outcome is None:
            self._end_killed(task, reason)
        else:
            self.kill_process(task.task_attempt_id)

    # --- the bus and the records ---

    def post(self, fact: EngineFact) -> None:
        self.facts.post(fact)

    def starts_of_jobs(self) -> list[JobStarted]:
        """What every look tells first: the active jobs, which are in the scheduler's own tables and never outdated."""
        return [JobStarted(job.job_id, job.stages) for job in self.active_jobs()]

    def status(self, task_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        outdated = self.faults.spend(self.random, 0.1)
        if outdated:
            self.happen("outdated look")
        return self.books.look(task_ids, job_ids, outdated=outdated)


__all__ = ["PAUSE_S", "Engine", "EngineTask", "Faults"]
