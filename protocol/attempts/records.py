# SPDX-License-Identifier: Apache-2.0

"""The ledger's records: what Spark has said, by stage, and the state of each operator's attempts.

**Spark's side** (``EngineRecords``). Facts do not name an operator. They are kept by stage until the stage is known to
host one, because a task's registration and the facts about it race: under load a registration arrives before
``TaskStarted``, and the fact of a task's end may come before the first registration of its stage (H1, H19). Memory is
bounded. A stage is forgotten when all of its jobs have ended; one without an operator, when it succeeds. There is a cap
for stages whose end was lost.

**Our side** (``OperatorRecord``): the run of one operator, the subtasks of the run, their attempts, and the waiting
registrations. Only ``OperatorLedger`` changes it. All others read. ``TABLE`` says which news of an attempt may come in
which of its states, and what it leads to: the ledger dispatches on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from protocol.attempts import FailureKind
from protocol.facts import JobStarted, StageCompleted, StageSubmitted, TaskEnded, TaskOutcome, TaskPlace, TaskStarted
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Register, RestoreMode


class AttemptState(Enum):
    """The state of an accepted attempt."""

    ACCEPTED = "accepted"  # has a gateway and restores its state
    READY = "ready"  # announced to the coordinator
    ENDING = "ending"  # has said that it ended well; only Spark's word can end it now
    FINISHED = "finished"  # Spark counts it as a success; revocable
    OVER = "over"  # reported failed; later words are ignored


ALIVE = (AttemptState.ACCEPTED, AttemptState.READY, AttemptState.ENDING)


class News(Enum):
    """News of an attempt: the columns. The first four come from the task or are about its connection."""

    OPENED = "opened"
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    GIVEN_UP = "expired, condemned"
    SPARK_SUCCESS = "Spark: success"
    SPARK_END = "Spark: other end"


class Outcome(Enum):
    """What news leads to: the cells."""

    READY = "READY"
    ENDING = "ENDING"
    FINISHED = "FINISHED"
    FAILED = "OVER"
    KILLED = "OVER, killed"  # for its own fault, which counts towards ``attempts_max``
    REVOKED = "OVER, revoked"
    STALE = "-"  # nothing changes


_READY, _ENDING, _FINISHED, _FAILED, _KILLED, _REVOKED, _STALE = Outcome

_ROWS: dict[AttemptState, tuple[Outcome, ...]] = {
    #                        opened  ended well  ended badly  given up  success  other end
    AttemptState.ACCEPTED: (_READY, _ENDING, _FAILED, _KILLED, _FINISHED, _FAILED),
    AttemptState.READY: (_STALE, _ENDING, _FAILED, _KILLED, _FINISHED, _FAILED),
    # The operator has ended, so its connection may close, and unconfirmed events are not a failure (H25). Spark may
    # have counted its success already: giving the attempt up now could count its output twice.
    AttemptState.ENDING: (_STALE, _STALE, _STALE, _STALE, _FINISHED, _FAILED),
    AttemptState.FINISHED: (_STALE, _STALE, _STALE, _STALE, _STALE, _REVOKED),
    AttemptState.OVER: (_STALE, _STALE, _STALE, _STALE, _STALE, _STALE),
}

TABLE: dict[AttemptState, dict[News, Outcome]] = {
    state: dict(zip(News, row, strict=True)) for state, row in _ROWS.items()
}

STRANGE_STAGES_MAX = 512
"""The maximum number of stages without an operator that are kept; the oldest is dropped first."""
REMEMBERED_MAX = 4096
"""How many ended jobs and stages are remembered, so that late facts about them are recognised."""


Remembered = dict[int, None]
"""The most recently added ids, in order."""


def remember(ids: Remembered, id: int) -> None:
    """Add an id. If there are more than ``REMEMBERED_MAX``, drop the oldest."""
    ids.pop(id, None)
    ids[id] = None
    if len(ids) > REMEMBERED_MAX:
        del ids[next(iter(ids))]


@dataclass(slots=True)
class TaskRecord:
    """One task attempt, from facts, its registration, or both.

    Until Spark has confirmed it, ``partition`` and ``attempt_number`` are only what its registration claims (H75).
    """

    task_attempt_id: int
    stage_id: int
    partition: int
    attempt_number: int
    confirmed: bool = False  # Spark has said that it is in this stage and partition
    stage_attempt: int | None = None  # unknown until a fact tells it: the task does not know (spark-facts 14)
    started: bool = False  # TaskStarted has come, so ``speculative`` and ``executor_id`` are known
    speculative: bool = False
    executor_id: str = ""
    host: str = ""
    operators: tuple[str, ...] = ()  # that it has registered for
    streaming: tuple[str, ...] = ()  # of these, the ones in streaming mode
    end: TaskOutcome | None = None
    end_reason: str = ""
    start_order: int | None = None  # positions of its start and end in the order of the bus, if they came that way
    end_order: int | None = None

    def launched_before_end_of(self, other: TaskRecord) -> bool:
        """Whether the bus's order shows that it was launched while ``other`` still ran, so it is not a replacement."""
        return self.start_order is not None and other.end_order is not None and self.start_order < other.end_order

    @property
    def lost_to_another(self) -> bool:
        """Whether Spark's message says that it was killed because another attempt of its task set succeeded."""
        return self.end is TaskOutcome.KILLED and "another attempt succeeded" in self.end_reason.lower()


class Relation(Enum):
    """The relation of two task attempts of one subtask."""

    SUCCESSION = "the older one was over before the newer one started"
    BESIDE = "both may run at the same time"
    UNDECIDED = "a fact is missing"


def relate(older: TaskRecord, newer: TaskRecord, *, barrier: bool) -> Relation:
    """Distinguish a retry from a copy. ``older`` has the smaller task id: Spark assigns ids in the order of launches.

    Spark launches a plain (not speculative) task of a task set only if no copy of it runs, and posts the end of that
    copy before the new start (spark-facts 7). So the relation is undecided until the newer one's start has come: the
    older one's end may be on its way. After that, only a dropped end can mislead.
    """
    if newer.stage_attempt is None:
        return Relation.UNDECIDED
    if barrier:  # a barrier stage has no copies or zombies: the whole stage attempt fails first
        return Relation.SUCCESSION
    if not newer.started:
        return Relation.UNDECIDED
    if newer.speculative or newer.attempt_number <= older.attempt_number:  # numbers increase within one stage attempt
        return Relation.BESIDE
    if older.stage_attempt is None:
        return Relation.SUCCESSION if newer.stage_attempt == 0 else Relation.UNDECIDED
    return Relation.SUCCESSION if older.stage_attempt == newer.stage_attempt else Relation.BESIDE


@dataclass(slots=True)
class StageRecord:
    """One stage, its tasks, and the jobs that name it."""

    stage_id: int
    barrier: bool = False
    task_count: int = 0  # of the first known stage attempt
    partitions: int = 0  # of the stage's RDD; 0 if not known
    latest_attempt: int = 0
    completed_well: bool = False
    failed_attempt: int = -1  # the last attempt of the stage that is known to have failed
    hosts_operator: bool = False
    operators: set[str] = field(default_factory=set)  # that its tasks have registered for
    in_one_task: bool = False  # one of its tasks has registered for several operators
    may_be_divided: bool = False  # it has several, each in some of its tasks, as far as is known
    jobs: dict[int, bool] = field(default_factory=dict)  # job id -> it has ended
    failures: list[str] = field(default_factory=list)  # reasons of its failed jobs
    tasks: dict[int, TaskRecord] = field(default_factory=dict)

    @property
    def active_jobs(self) -> tuple[int, ...]:
        return tuple(sorted(job for job, ended in self.jobs.items() if not ended))

    def outlived_its_stage_attempt(self, task: TaskRecord) -> bool:
        """Whether a barrier task's end was posted after that of the task that failed the stage attempt.

        Spark discards results from before the failure, and keeps later ones (4.3's ``DAGScheduler``).
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
        """Whether all of its jobs are known to have ended. False while none is known."""
        return bool(self.jobs) and all(self.jobs.values())


class EngineRecords:
    """The facts from Spark. This class records them and decides nothing."""

    def __init__(self) -> None:
        self.stages: dict[int, StageRecord] = {}
        self.job_stages: dict[int, tuple[int, ...]] = {}
        self.job_seen_at: dict[int, float] = {}
        self.job_over_since: dict[int, float] = {}  # over according to an answer of Spark, without the fact of its end
        self.ended_jobs: Remembered = {}
        self.ended_stages: Remembered = {}
        self._order = 0  # counts facts about tasks, in the bus's order

    def stage(self, stage_id: int) -> StageRecord:
        """Return the record of a stage; create it if there is none."""
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

    def is_confirmed(self, stage_id: int, task_attempt_id: int) -> bool:
        """Whether Spark has said that this task exists in this stage (H75)."""
        task = self.task(stage_id, task_attempt_id)
        return task is not None and task.confirmed

    def only_claimed(self, run: RunRecord) -> bool:
        """Whether Spark has confirmed none of the attempts of a run (H75)."""
        return not any(self.is_confirmed(run.run_id, entry.task_attempt_id) for entry in run.entries())

    def active_jobs(self, stage_id: int) -> tuple[int, ...]:
        """The known jobs that name a stage and have not ended."""
        stage = self.stages.get(stage_id)
        return () if stage is None else stage.active_jobs

    def is_barrier(self, stage_id: int) -> bool:
        stage = self.stages.get(stage_id)
        return stage is not None and stage.barrier

    # --- facts ----------------------------------------------------------------------------------------------

    def job_started(self, fact: JobStarted, now: float) -> bool:
        """Record the start of a job. False if it is already known or has ended."""
        if fact.job_id in self.ended_jobs or fact.job_id in self.job_stages:
            return False
        self.job_stages[fact.job_id] = tuple(dict.fromkeys(fact.stage_ids))
        self.job_seen_at[fact.job_id] = now
        for stage_id in fact.stage_ids:
            if stage_id in self.stages:
                self.stages[stage_id].jobs[fact.job_id] = False
        return True

    def job_ended(self, job_id: int, failure: str | None) -> list[int]:
        """Record the end of a job and return the stages that it ends. The caller handles and then forgets them."""
        remember(self.ended_jobs, job_id)
        self.job_seen_at.pop(job_id, None)
        self.job_over_since.pop(job_id, None)
        over: list[int] = []
        for stage_id in self.job_stages.pop(job_id, ()):
            stage = self.stages.get(stage_id)
            if stage is None:
                if not any(stage_id in stages for stages in self.job_stages.values()):
                    remember(self.ended_stages, stage_id)  # one of its tasks may still register
                continue
            stage.jobs[job_id] = True
            if failure is not None:
                stage.failures.append(failure)
            if stage.over:
                over.append(stage_id)
        return over

    def forget_stage(self, stage_id: int) -> None:
        self.stages.pop(stage_id, None)
        remember(self.ended_stages, stage_id)

    def stage_submitted(self, fact: StageSubmitted) -> None:
        """Record the submission of a stage. A late fact about an ended stage is dropped."""
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
            del self.stages[fact.stage_id]  # not remembered as ended: it may run again and then host an operator
        elif fact.stage_attempt >= stage.latest_attempt:
            stage.latest_attempt = fact.stage_attempt
            stage.completed_well = fact.failure is None
            if fact.failure is not None:
                stage.failed_attempt = fact.stage_attempt

    def task_started(self, fact: TaskStarted) -> TaskRecord | None:
        """Record the start of a task and return its record; None for a late fact about an ended stage."""
        if fact.stage_id in self.ended_stages:
            return None
        stage = self.stage(fact.stage_id)
        stage.latest_attempt = max(stage.latest_attempt, fact.stage_attempt)
        record = stage.tasks.get(fact.task_attempt_id)
        if record is None or not record.confirmed:
            record = self._confirm(stage, fact)
        record.stage_attempt = fact.stage_attempt
        record.started = True
        if record.start_order is None:
            self._order += 1
            record.start_order = self._order
        record.speculative = fact.speculative
        record.executor_id = fact.executor_id
        record.host = fact.host
        return record

    def task_ended(self, fact: TaskEnded) -> TaskRecord | None:
        """Record the end of a task. Returns its record, or None for a duplicate or an ended or unknown stage.

        The first end stays, except that a success can still be revoked (H17).
        """
        stage = self.stages.get(fact.stage_id)
        if stage is None:
            return None
        record = stage.tasks.get(fact.task_attempt_id)
        if record is None or not record.confirmed:
            record = self._confirm(stage, fact)
        record.stage_attempt = fact.stage_attempt
        if record.end_order is None:  # even if an answer of Spark has already told the end
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

    @staticmethod
    def _confirm(stage: StageRecord, fact: TaskStarted | TaskEnded) -> TaskRecord:
        """Return the record of the fact's task. The first fact overrides what a registration has claimed."""
        record = stage.tasks.get(fact.task_attempt_id)
        if record is None:
            record = TaskRecord(fact.task_attempt_id, fact.stage_id, fact.partition, fact.attempt_number)
            stage.tasks[fact.task_attempt_id] = record
        if fact.partition >= 0:  # -1: Spark has forgotten the partition
            record.partition = fact.partition
            record.attempt_number = fact.attempt_number
            record.confirmed = True
        return record

    def place_reported(self, task_attempt_id: int, place: TaskPlace) -> None:
        """Record that Spark's own records have a task in this place, whatever a registration has claimed."""
        task = self.task(place.stage_id, task_attempt_id)
        if task is not None and not task.confirmed and place.partition >= 0:
            task.partition = place.partition
            task.confirmed = True

    def forget_claim(self, stage_id: int, task_attempt_id: int) -> None:
        """Forget a task that only a registration has named."""
        if not self.is_confirmed(stage_id, task_attempt_id):
            self.stages[stage_id].tasks.pop(task_attempt_id, None)

    def report_end(self, stage_id: int, task_attempt_id: int, outcome: TaskOutcome, reason: str | None) -> TaskRecord:
        """Record that a known task is over, as Spark's own records say. ``reason``: None keeps the known one."""
        record = self.stages[stage_id].tasks[task_attempt_id]
        record.end = outcome
        if reason is not None:
            record.end_reason = reason
        return record

    def task_registered(self, message: Register) -> TaskPlace | None:
        """Record what a registration claims. If Spark has the task in another place, only return that place (H75)."""
        for known in self.stages.values():
            task = known.tasks.get(message.task_attempt_id)
            if task is not None and task.confirmed:
                place = TaskPlace(known.stage_id, task.partition)
                if place != TaskPlace(message.run_id, message.subtask):
                    return place
        stage = self.stage(message.run_id)
        stage.hosts_operator = True
        if message.task_attempt_id not in stage.tasks:
            record = TaskRecord(message.task_attempt_id, message.run_id, message.subtask, message.attempt_number)
            stage.tasks[message.task_attempt_id] = record
        task = stage.tasks[message.task_attempt_id]
        if message.operator_id not in task.operators:
            task.operators += (message.operator_id,)
            if message.mode == RestoreMode.STREAMING:
                task.streaming += (message.operator_id,)
            stage.operators.add(message.operator_id)
            stage.in_one_task = stage.in_one_task or len(task.operators) > 1
            stage.may_be_divided = len(stage.operators) > 1 and not stage.in_one_task
        return None


# --- one operator ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AttemptRecord:
    """One accepted attempt. The record stays until the run ends, so that late words are recognised as stale."""

    attempt: ExecutionAttempt
    beside: frozenset[int]  # task ids of the attempts that were alive at its acceptance (H13)
    accepted_at: float = 0.0
    streaming: bool = False
    state: AttemptState = AttemptState.ACCEPTED
    failure: FailureKind | None = None  # why it is OVER
    finished_at: float = 0.0

    @property
    def task_attempt_id(self) -> int:
        return self.attempt.task_attempt_id

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


@dataclass(slots=True)
class SubtaskRecord:
    """One subtask in one run."""

    attempts: dict[int, AttemptRecord] = field(default_factory=dict)  # by task id, in the order of acceptance
    owes_reset: bool = False  # a failure was reported, and no reset has followed yet
    killed: int = 0  # how often an attempt was killed for its own fault (H69)

    @property
    def living(self) -> list[AttemptRecord]:
        return [entry for entry in self.attempts.values() if entry.state in ALIVE]

    @property
    def finished(self) -> AttemptRecord | None:
        for entry in self.attempts.values():
            if entry.state is AttemptState.FINISHED:
                return entry
        return None

    @property
    def vacant(self) -> bool:
        """Whether no attempt is alive and none has finished."""
        return all(entry.state is AttemptState.OVER for entry in self.attempts.values())


@dataclass(slots=True)
class RunRecord:
    """One Spark action over the operator's tasks (H55)."""

    run_id: int
    subtasks: dict[int, SubtaskRecord] = field(default_factory=dict)
    by_task: dict[int, AttemptRecord] = field(default_factory=dict)  # the same records, for look-ups
    told: set[int] = field(default_factory=set)  # tasks without a record whose failure must not be reported (again)
    failed_cause: str | None = None  # a global failure is latched (H8)
    barrier_failed: int | None = None  # the last attempt of the barrier stage that is known to have failed
    jobless_since: float | None = None  # when an answer first knew no job of it, and nothing of it lived

    def finished(self, subtask: int) -> AttemptRecord | None:
        known = self.subtasks.get(subtask)
        return None if known is None else known.finished

    def entries(self) -> Iterator[AttemptRecord]:
        for index in sorted(self.subtasks):
            yield from self.subtasks[index].attempts.values()

    def living(self) -> list[AttemptRecord]:
        return [entry for entry in self.entries() if entry.state in ALIVE]

    def looks_whole(self, subtasks: int) -> bool:
        """Whether this many ``subtasks`` have an attempt that ended well: a guess, if the end of the job was lost."""
        well = (AttemptState.ENDING, AttemptState.FINISHED)
        done = [any(entry.state in well for entry in known.attempts.values()) for known in self.subtasks.values()]
        return all(done) and len(done) >= subtasks


class WaitsFor(Enum):
    """What a registration waits for."""

    RIVAL = "what becomes of another attempt of its subtask"
    OTHER_RUN = "the end of another run of the operator"
    PARTITIONS = "the number of partitions of its stage"


class Seen(IntEnum):
    """What Spark's own records have shown about a waiting registration. Each value includes those above it."""

    NOTHING = 0  # Spark was not asked yet
    ASKED = 1  # Spark was asked after the registration came
    RUNNING = 2  # Spark says that it runs, in the stage and partition that it claims (H75)
    OUTLIVED_A_SUCCESS = 3  # the same long after a rival had finished, so it is not a copy of that rival


@dataclass(slots=True)
class HeldRegistration:
    """A task that waits for its answer, because the fact that identifies it is missing."""

    connection_id: int
    message: Register
    since: float
    ask_at: float  # the earliest time to ask Spark about it
    waits_for: WaitsFor = WaitsFor.RIVAL
    seen: Seen = Seen.NOTHING
    beside: set[int] = field(default_factory=set)  # rivals that were seen running although this one runs

    @property
    def task_attempt_id(self) -> int:
        return self.message.task_attempt_id


@dataclass(slots=True)
class OperatorRecord:
    """The ledger's record of one operator."""

    operator_id: str
    parallelism: int
    allow_fewer: bool = False  # a run may have fewer partitions than subtasks
    run: RunRecord | None = None
    held: dict[int, HeldRegistration] = field(default_factory=dict)  # by task id
    next_attempt: dict[int, int] = field(default_factory=dict)  # for the life of the operator, across runs (H2)
    reset_due: str | None = None  # the first cause for which the coordinator must be reset before an accept
    ended_runs: Remembered = field(default_factory=dict)
    look_at: float | None = None  # when to ask Spark
    asked_again_at: float | None = None  # an answer is awaited, and this is when to ask again
