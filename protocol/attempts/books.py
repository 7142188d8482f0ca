"""What the engine has said so far, by stage, whatever order it came in (H1, H19).

Facts name no operator. They are kept by stage until the stage is known to host one, because a task's
registration and the facts about it race (a registration overtakes ``TaskStarted`` under load, and the fact of
a task's death may come before the first registration of its stage). Memory is bounded: a stage is forgotten
when all of its jobs have ended, one that hosts no operator when it completes well, and there is a cap for stages
whose end was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from protocol.facts import JobStarted, StageCompleted, StageSubmitted, TaskEnded, TaskOutcome, TaskStarted
from protocol.wire.messages import Register

STRANGE_STAGES_MAX = 512
"""How many stages without an operator are kept at most; the oldest goes first."""
REMEMBERED_MAX = 4096
"""How many ended jobs and stages are remembered, so that late facts about them are known as late."""


class RecentIds:
    """The last ids that were added, at most ``size_max`` of them."""

    def __init__(self, size_max: int = REMEMBERED_MAX) -> None:
        self._size_max = size_max
        self._ids: dict[int, None] = {}

    def add(self, id: int) -> None:
        self._ids.pop(id, None)
        self._ids[id] = None
        if len(self._ids) > self._size_max:
            del self._ids[next(iter(self._ids))]

    def discard(self, id: int) -> None:
        self._ids.pop(id, None)

    def __contains__(self, id: int) -> bool:
        return id in self._ids

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(slots=True)
class TaskRecord:
    """One task attempt, from facts, its registration, or both."""

    task_attempt_id: int
    stage_id: int
    partition: int
    attempt_number: int
    stage_attempt: int | None = None  # unknown until a fact says it: the task itself does not know (spark-facts 14)
    started: bool = False  # TaskStarted has come, so ``speculative`` and ``executor_id`` are known
    speculative: bool = False
    executor_id: str = ""
    end: TaskOutcome | None = None
    end_reason: str = ""
    start_order: int | None = None  # place of its start and its end among the facts of the bus, if they came that way
    end_order: int | None = None

    def launched_before_end_of(self, other: TaskRecord) -> bool:
        """Known by the order on the bus: it was launched while ``other`` still ran, so it replaces nothing."""
        return self.start_order is not None and other.end_order is not None and self.start_order < other.end_order


class Relation(Enum):
    """How two task attempts of one subtask stand to each other."""

    SUCCESSION = "the older one was over before the newer one started"
    BESIDE = "both may run at the same time"
    UNDECIDED = "a fact is missing"


def relate(older: TaskRecord, newer: TaskRecord, *, barrier: bool) -> Relation:
    """Tell a retry from a copy. ``older`` has the smaller task id: Spark counts ids up as it launches.

    Spark launches a plain (not speculative) task of a task set only when no copy of it runs, and posts the end
    of that copy before the new start (spark-facts 7). So nothing is said before the newer one's start has come:
    the older one's end may be on its way. After it, only a dropped end can mislead.
    """
    if newer.stage_attempt is None:
        return Relation.UNDECIDED
    if barrier:  # no copies and no zombies there: the whole stage attempt fails first
        return Relation.SUCCESSION
    if not newer.started:
        return Relation.UNDECIDED
    if newer.speculative or newer.attempt_number <= older.attempt_number:  # numbers rise in one stage attempt
        return Relation.BESIDE
    if older.stage_attempt is None:
        return Relation.SUCCESSION if newer.stage_attempt == 0 else Relation.UNDECIDED
    return Relation.SUCCESSION if older.stage_attempt == newer.stage_attempt else Relation.BESIDE


@dataclass(slots=True)
class StageRecord:
    stage_id: int
    barrier: bool = False
    task_count: int = 0  # of the first stage attempt that we heard of
    partitions: int = 0  # of the stage's RDD; 0 if not known
    latest_attempt: int = 0
    completed_well: bool = False
    failed_attempt: int = -1  # the last attempt of the stage that is known to have failed
    hosts_operator: bool = False
    jobs: dict[int, bool] = field(default_factory=dict)  # job id -> it has ended
    failures: list[str] = field(default_factory=list)  # reasons of those of its jobs that ended badly
    tasks: dict[int, TaskRecord] = field(default_factory=dict)

    @property
    def active_jobs(self) -> tuple[int, ...]:
        return tuple(sorted(job for job, ended in self.jobs.items() if not ended))

    def outlived_its_stage_attempt(self, task: TaskRecord) -> bool:
        """Of a barrier stage: its end was posted behind that of a task which had failed the stage attempt.

        Spark throws away what was there at the failure, and keeps what comes later (4.3's ``DAGScheduler``).
        """
        return task.end_order is not None and any(
            other.stage_attempt == task.stage_attempt
            and other.end not in (None, TaskOutcome.SUCCESS, TaskOutcome.RESUBMITTED)
            and other.end_order is not None
            and other.end_order < task.end_order
            for other in self.tasks.values()
        )

    @property
    def over(self) -> bool:
        """All of its jobs are known to have ended. False while none is known."""
        return bool(self.jobs) and all(self.jobs.values())


class EngineBooks:
    """Records facts; decides nothing."""

    def __init__(self) -> None:
        self.stages: dict[int, StageRecord] = {}
        self.job_stages: dict[int, tuple[int, ...]] = {}
        self.job_seen_at: dict[int, float] = {}
        self.job_over_since: dict[int, float] = {}  # a look said that it is over, and its end has not come
        self.ended_jobs = RecentIds()
        self.ended_stages = RecentIds()
        self._order = 0  # counts facts about tasks, in the order in which the bus brought them

    def stage(self, stage_id: int) -> StageRecord:
        """The record of a stage, made if there is none."""
        record = self.stages.get(stage_id)
        if record is None:
            record = self.stages[stage_id] = StageRecord(stage_id)
            for job, stages in self.job_stages.items():
                if stage_id in stages:
                    record.jobs[job] = False
            self._drop_strange_stages()
        return record

    def _drop_strange_stages(self) -> None:
        strange = [s.stage_id for s in self.stages.values() if not s.hosts_operator]
        for stage_id in strange[:-STRANGE_STAGES_MAX]:
            del self.stages[stage_id]

    def task(self, stage_id: int, task_attempt_id: int) -> TaskRecord | None:
        stage = self.stages.get(stage_id)
        return None if stage is None else stage.tasks.get(task_attempt_id)

    # --- facts ----------------------------------------------------------------------------------------------

    def job_started(self, fact: JobStarted, now: float) -> bool:
        """False for a job that has ended already, or that is known."""
        if fact.job_id in self.ended_jobs or fact.job_id in self.job_stages:
            return False
        self.job_stages[fact.job_id] = tuple(dict.fromkeys(fact.stage_ids))
        self.job_seen_at[fact.job_id] = now
        for stage_id in fact.stage_ids:
            if stage_id in self.stages:
                self.stages[stage_id].jobs[fact.job_id] = False
        return True

    def job_ended(self, job_id: int, failure: str | None) -> list[int]:
        """Returns the stages that are over by it.

        The caller forgets them when it has drawn its conclusions.
        """
        self.ended_jobs.add(job_id)
        self.job_seen_at.pop(job_id, None)
        self.job_over_since.pop(job_id, None)
        over: list[int] = []
        for stage_id in self.job_stages.pop(job_id, ()):
            stage = self.stages.get(stage_id)
            if stage is None:
                if not any(stage_id in stages for stages in self.job_stages.values()):
                    self.ended_stages.add(stage_id)  # a task of it may still register
                continue
            stage.jobs[job_id] = True
            if failure is not None:
                stage.failures.append(failure)
            if stage.over:
                over.append(stage_id)
        return over

    def forget_stage(self, stage_id: int) -> None:
        self.stages.pop(stage_id, None)
        self.ended_stages.add(stage_id)

    def stage_submitted(self, fact: StageSubmitted) -> None:
        """A late fact of an ended stage is dropped."""
        if fact.stage_id in self.ended_stages:
            return
        stage = self.stage(fact.stage_id)
        stage.barrier = stage.barrier or fact.barrier
        stage.partitions = max(stage.partitions, fact.partitions)
        if fact.stage_attempt == 0 or stage.task_count == 0:
            stage.task_count = max(stage.task_count, fact.task_count)
        if fact.stage_attempt > stage.latest_attempt:
            stage.latest_attempt = fact.stage_attempt
            stage.completed_well = False

    def stage_completed(self, fact: StageCompleted) -> None:
        stage = self.stages.get(fact.stage_id)
        if stage is None:
            return
        if not stage.hosts_operator and fact.failure is None:
            del self.stages[fact.stage_id]  # not remembered as ended: it may be run again, and host one then
        elif fact.stage_attempt >= stage.latest_attempt:
            stage.latest_attempt = fact.stage_attempt
            stage.completed_well = fact.failure is None
            if fact.failure is not None:
                stage.failed_attempt = fact.stage_attempt

    def task_started(self, fact: TaskStarted) -> TaskRecord | None:
        """The record, or None for a late fact of an ended stage."""
        if fact.stage_id in self.ended_stages:
            return None
        stage = self.stage(fact.stage_id)
        stage.latest_attempt = max(stage.latest_attempt, fact.stage_attempt)
        record = stage.tasks.get(fact.task_attempt_id)
        if record is None:
            record = TaskRecord(fact.task_attempt_id, fact.stage_id, fact.partition, fact.attempt_number)
            stage.tasks[fact.task_attempt_id] = record
        record.stage_attempt = fact.stage_attempt
        record.started = True
        if record.start_order is None:
            self._order += 1
            record.start_order = self._order
        record.speculative = fact.speculative
        record.executor_id = fact.executor_id
        return record

    def task_ended(self, fact: TaskEnded) -> TaskRecord | None:
        """The record if the fact is news; a doubled one and one of an ended or unknown stage are not.

        The first end stands, but that a success can still be revoked (H17).
        """
        stage = self.stages.get(fact.stage_id)
        if stage is None:
            return None
        record = stage.tasks.get(fact.task_attempt_id)
        if record is None:
            record = TaskRecord(fact.task_attempt_id, fact.stage_id, fact.partition, fact.attempt_number)
            stage.tasks[fact.task_attempt_id] = record
        record.stage_attempt = fact.stage_attempt
        if record.end_order is None:  # also of an end that a look has told before
            self._order += 1
            record.end_order = self._order
        revoked = record.end is TaskOutcome.SUCCESS and fact.outcome is TaskOutcome.RESUBMITTED
        if record.end is not None and not revoked:
            return None
        record.end = fact.outcome
        record.end_reason = fact.reason
        if not stage.hosts_operator and fact.outcome is TaskOutcome.SUCCESS:
            del stage.tasks[fact.task_attempt_id]  # it never needed a coordinator
        return record

    def task_registered(self, message: Register) -> TaskRecord:
        stage = self.stage(message.run_id)
        stage.hosts_operator = True
        record = stage.tasks.get(message.task_attempt_id)
        if record is None:
            record = TaskRecord(message.task_attempt_id, message.run_id, message.subtask, message.attempt_number)
            stage.tasks[message.task_attempt_id] = record
        return record
