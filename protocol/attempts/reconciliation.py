# SPDX-License-Identifier: Apache-2.0

"""What Spark's word means for what was decided: answers from its own records (H19), and successes that must not count.

If facts are lost or late, Spark's own records are asked: what to ask, and what an answer means. A success must not
count if the coordinator has given the attempt up, because its results could count twice.

The functions read what is known and return findings. ``OperatorLedger`` carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.attempts import FailureKind, LedgerConfig
from protocol.attempts.records import (
    AttemptRecord,
    AttemptState,
    EngineRecords,
    HeldRegistration,
    OperatorRecord,
    RunRecord,
    Seen,
    StageRecord,
    WaitsFor,
)
from protocol.facts import StatusReported, TaskOutcome, TaskState


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask about. ``asked`` are the registrations that came before this query, so that its answer counts.

    ``run_is_over``: the run's jobs were never known, nothing of it runs any more, and a later run waits.
    ``has_a_job``: whether the run has a job at all. Every answer is preceded by the starts of all active jobs.
    """

    tasks: frozenset[int]
    jobs: frozenset[int]
    asked: tuple[HeldRegistration, ...]
    run_is_over: bool
    has_a_job: bool


@dataclass(frozen=True, slots=True)
class HasEnded:
    """The task is over. ``reason``: None keeps the known reason."""

    outcome: TaskOutcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The attempt is over, as inferred from other facts than its own end. ``claim``: Spark never confirmed it."""

    kind: FailureKind
    text: str
    kill: bool = False
    claim: bool = False


@dataclass(frozen=True, slots=True)
class RunsBeside:
    """The attempt is running, although these registrations of its subtask have come."""

    waiting: tuple[HeldRegistration, ...]


@dataclass(frozen=True, slots=True)
class StillWaits:
    """The task of a waiting registration was seen running."""

    seen: Seen


Finding = HasEnded | GiveUp | RunsBeside | StillWaits | None

_SAYS_ENDED = "Spark's status says that the task has ended"


# --- asking -------------------------------------------------------------------------------------------------


def questions(known: OperatorRecord, engine: EngineRecords, config: LedgerConfig, now: float) -> Questions:
    """What the query that is due asks about.

    A job is asked about only after it has been known for a while, because Spark's own records can lag behind the bus.
    """
    run = known.run
    tasks = frozenset(known.held)
    if run is None:
        return Questions(tasks, frozenset(), (), run_is_over=False, has_a_job=False)
    living = frozenset(entry.task_attempt_id for entry in run.living())
    active = engine.active_jobs(run.run_id)
    jobs = frozenset(job for job in active if now >= engine.job_seen_at[job] + config.heal_after_s)
    unasked = [held for held in known.held.values() if held.seen is Seen.NOTHING and now >= held.ask_at]
    asked = tuple(held for held in unasked if jobs or held.waits_for is WaitsFor.RIVAL or not active)
    jobless = is_jobless(known, engine)
    run_is_over = jobless and _any_confirmed(engine, _of_other_runs((*asked, *_were_asked(known))))
    return Questions(tasks | living, jobs, asked, run_is_over, has_a_job=jobless)


def _were_asked(known: OperatorRecord) -> list[HeldRegistration]:
    """The registrations about which Spark was asked after they came, so that its answer counts."""
    return [held for held in known.held.values() if held.seen >= Seen.ASKED]


def _of_other_runs(registrations: Iterable[HeldRegistration]) -> tuple[HeldRegistration, ...]:
    return tuple(held for held in registrations if held.waits_for is WaitsFor.OTHER_RUN)


def confirmed(engine: EngineRecords, held: HeldRegistration) -> bool:
    """Whether Spark has said that the task of a registration exists (H75)."""
    return engine.is_confirmed(held.message.run_id, held.task_attempt_id)


def _any_confirmed(engine: EngineRecords, registrations: Iterable[HeldRegistration]) -> bool:
    return any(confirmed(engine, held) for held in registrations)


def is_jobless(known: OperatorRecord, engine: EngineRecords) -> bool:
    """Whether nothing of the run is known to go on: no attempt, and no job, whose start must have been lost."""
    run = known.run
    return run is not None and not run.living() and not engine.active_jobs(run.run_id)


# --- answers ------------------------------------------------------------------------------------------------


def task_reported(
    known: OperatorRecord,
    engine: EngineRecords,
    config: LedgerConfig,
    now: float,
    task_attempt_id: int,
    state: TaskState,
) -> Finding:
    """What Spark's own records mean for a live attempt or a waiting registration."""
    run = known.run
    assert run is not None
    held = known.held.get(task_attempt_id)
    if held is not None:
        return _held_reported(run, held, engine, config, now, state) if confirmed(engine, held) else None
    entry = run.by_task.get(task_attempt_id)
    task = engine.task(run.run_id, task_attempt_id)
    if entry is None or not entry.alive or task is None:
        return None
    if not task.confirmed:
        return _claim_reported(known, engine, entry)
    return _attempt_reported(known, run, engine, entry, state)


def _attempt_reported(
    known: OperatorRecord, run: RunRecord, engine: EngineRecords, entry: AttemptRecord, state: TaskState
) -> Finding:
    """A live attempt of a task that Spark has confirmed."""
    contenders = _contenders(known, entry.attempt.subtask)
    match state:
        case TaskState.SUCCEEDED:
            return HasEnded(TaskOutcome.SUCCESS)
        case TaskState.ENDED:
            superseded = run.finished(entry.attempt.subtask) is not None
            return GiveUp(FailureKind.SUPERSEDED if superseded else FailureKind.LOST_FACT, _SAYS_ENDED)
        case TaskState.RUNNING:
            return RunsBeside(contenders)
        case TaskState.UNKNOWN:
            later = [other for other in contenders if other.task_attempt_id > entry.task_attempt_id]
            if not _any_confirmed(engine, later):
                return None
            return GiveUp(
                _given_up(entry), "Spark knows nothing of the task any more, and a later attempt has come", kill=True
            )


def _claim_reported(known: OperatorRecord, engine: EngineRecords, entry: AttemptRecord) -> Finding:
    """An accepted task that Spark has never confirmed, and does not now: it yields to one that Spark confirms (H75)."""
    waiting = (*_contenders(known, entry.attempt.subtask), *_of_other_runs(known.held.values()))
    if not _any_confirmed(engine, waiting):
        return None
    return GiveUp(_given_up(entry), "Spark does not know the task, and knows another one that waits", claim=True)


def _given_up(entry: AttemptRecord) -> FailureKind:
    """Why an attempt of which Spark does not know is over: it may have succeeded if it has said that it ended well."""
    return FailureKind.REVOKED if entry.state is AttemptState.ENDING else FailureKind.LOST_FACT


def _contenders(known: OperatorRecord, subtask: int) -> tuple[HeldRegistration, ...]:
    """The registrations that were asked about and wait for the fate of an attempt of this subtask."""
    rivals = (held for held in _were_asked(known) if held.waits_for is WaitsFor.RIVAL)
    return tuple(held for held in rivals if held.message.subtask == subtask)


def _held_reported(
    run: RunRecord,
    held: HeldRegistration,
    engine: EngineRecords,
    config: LedgerConfig,
    now: float,
    state: TaskState,
) -> Finding:
    task = engine.task(held.message.run_id, held.task_attempt_id)
    if state in (TaskState.ENDED, TaskState.SUCCEEDED) and task is not None:
        outcome = TaskOutcome.FAILED if state is TaskState.ENDED else TaskOutcome.SUCCESS
        return HasEnded(outcome, _SAYS_ENDED)
    if held.seen is Seen.NOTHING or state is TaskState.UNKNOWN:
        return None
    if run.run_id == held.message.run_id:
        finished = run.finished(held.message.subtask)
        if finished is not None and now >= finished.finished_at + config.heal_after_s:
            return StillWaits(Seen.OUTLIVED_A_SUCCESS)
    return StillWaits(max(held.seen, Seen.RUNNING))


@dataclass(frozen=True, slots=True)
class Conflict:
    """Registrations of a second run were asked about. ``goes_on``: the first run continues; otherwise it is over."""

    waiting: tuple[HeldRegistration, ...]
    goes_on: bool


def conflict_reported(known: OperatorRecord, engine: EngineRecords, fact: StatusReported) -> Conflict | None:
    """Whether the first of two runs is still in progress; None if the answer does not tell.

    Jobs that are over were handled before.
    """
    run = known.run
    waiting = _of_other_runs(_were_asked(known))
    if run is None or not waiting:
        return None
    # Only tasks that Spark confirms make a run, or end another (H75).
    claimed = engine.only_claimed(run)
    if not claimed and _goes_on(run, engine, fact):
        return Conflict(waiting, goes_on=True)
    may_be_over = (claimed or not engine.active_jobs(run.run_id)) and not run.living()
    return Conflict(waiting, goes_on=False) if may_be_over and _any_confirmed(engine, waiting) else None


def _goes_on(run: RunRecord, engine: EngineRecords, fact: StatusReported) -> bool:
    """Whether a job of the run is active or, if none is known, an attempt of it runs."""
    if active := engine.active_jobs(run.run_id):
        return any(fact.jobs.get(job) for job in active)
    return any(fact.tasks.get(entry.task_attempt_id) is TaskState.RUNNING for entry in run.living())


def looks_whole(known: OperatorRecord, engine: EngineRecords) -> bool:
    """Whether every partition that Spark has made of the run seems to have succeeded, although no fact says so.

    A partition without any fact may not have begun, or the fact of its start may be the lost one.
    """
    run = known.run
    assert run is not None
    return run.looks_whole(engine.stages[run.run_id].task_count or known.parallelism)


# --- successes that must not count ------------------------------------------------------------------------------------

_GIVEN_UP_BY_US = (
    FailureKind.CONFIRMATION_TIMEOUT,
    FailureKind.HEARTBEAT_TIMEOUT,
    FailureKind.CONNECTION_LOST,
    FailureKind.UNUSABLE,
    FailureKind.SUPERSEDED,
    FailureKind.GLOBAL_FAILURE,
    FailureKind.LOST_FACT,
)


def why_unwanted(what: object) -> str:
    return (
        f"Spark counts {what} as a success after the coordinator gave it up and took back what it had handed out, so "
        "the output could count twice: run the action again"
    )


def is_unwanted(run: RunRecord, stage: StageRecord, entry: AttemptRecord) -> bool:
    """Whether we gave the attempt up, but Spark took its output.

    This cannot happen to a task that waits for the confirmation of its last word. If Spark launched a plain task of the
    subtask after the success, the output has been lost, so there is no problem; a zombie's rival does not show that.
    If a barrier stage attempt failed, Spark has discarded the results from before the failure, and keeps later ones.
    """
    if entry.failure not in _GIVEN_UP_BY_US:
        return False
    task = stage.tasks[entry.task_attempt_id]
    own = task.stage_attempt
    if run.barrier_failed is not None and own is not None and own <= run.barrier_failed:
        return stage.outlived_its_stage_attempt(task)
    newer = any(
        other.confirmed
        and other.partition == entry.attempt.subtask
        and other.task_attempt_id > entry.task_attempt_id
        and not other.speculative
        and not other.launched_before_end_of(task)
        for other in stage.tasks.values()
    )
    return not newer and run.finished(entry.attempt.subtask) is None


def possible_later_attempts(run: RunRecord, stage: StageRecord, failed: int) -> list[AttemptRecord]:
    """The attempts that ended well and may belong to a later attempt of the barrier stage than ``failed``.

    The failure became known late. If the facts of their starts were lost too, Spark may count them.
    """
    ended_well = (AttemptState.ENDING, AttemptState.FINISHED)
    candidates = [entry for entry in run.entries() if entry.state in ended_well]
    of = {entry.task_attempt_id: stage.tasks[entry.task_attempt_id].stage_attempt for entry in candidates}
    return [entry for entry in candidates if (own := of[entry.task_attempt_id]) is None or own > failed]


def doubtful_success(run: RunRecord, stage: StageRecord) -> str:
    """Why a job may have succeeded with results that the coordinator does not know; empty if there is no doubt.

    An attempt that succeeds has said before that it ended well. If no attempt of a subtask has said so, and each is
    over, or one that was given up has succeeded or its end is not known, Spark may have counted that one.
    """
    for subtask in run.subtasks.values():
        if subtask.finished is not None or any(entry.state is AttemptState.ENDING for entry in subtask.living):
            continue
        for entry in subtask.attempts.values():
            given_up = entry.failure in _GIVEN_UP_BY_US or entry.failure is FailureKind.REVOKED
            may_count = stage.tasks[entry.task_attempt_id].end in (None, TaskOutcome.SUCCESS)
            if given_up and (not subtask.living or may_count):
                return (
                    f"Spark's job has succeeded, possibly with the output of {entry.attempt}, which the coordinator "
                    "had given up: run the action again"
                )
    return ""


def unwanted_winner(run: RunRecord, stage: StageRecord, loser: AttemptRecord) -> AttemptRecord | None:
    """The attempt that ``loser`` lost to, if we had given that one up.

    This happens if a copy whose start was lost and whose kill took long was taken for a rerun of the success (H17).
    """
    subtask = run.subtasks[loser.attempt.subtask]
    if not subtask.vacant:
        return None
    for other in subtask.attempts.values():
        if stage.tasks[other.task_attempt_id].end is TaskOutcome.SUCCESS:
            return other
    return None
