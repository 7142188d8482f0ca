# SPDX-License-Identifier: Apache-2.0

"""Decides whether a registration is accepted, refused, or held until a fact or a query of Spark decides.

``decide`` reads what is known and returns a verdict. ``OperatorLedger`` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.attempts import LedgerConfig
from protocol.attempts.records import (
    AttemptRecord,
    AttemptState,
    EngineRecords,
    HeldRegistration,
    OperatorRecord,
    Relation,
    RunRecord,
    Seen,
    StageRecord,
    SubtaskRecord,
    TaskRecord,
    WaitsFor,
    relate,
)
from protocol.facts import TaskPlace
from protocol.wire.messages import RefusalCode, RestoreMode


@dataclass(frozen=True, slots=True)
class Wait:
    """A fact is missing. ``hurry``: it is probably lost, so Spark should be asked soon."""

    waits_for: WaitsFor
    hurry: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The task is refused. ``kill``: otherwise Spark would let the task continue, or count its failure."""

    code: RefusalCode
    text: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class BeginRun:
    """No run is in progress: the registration begins one, and is then decided on again."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The task is accepted.

    ``predecessors`` must be over, although no fact says so: they fail first. ``superseded`` still run, and must not.
    """

    predecessors: tuple[AttemptRecord, ...] = ()
    superseded: tuple[AttemptRecord, ...] = ()


Verdict = Wait | Refusal | BeginRun | Acceptance

_WAIT_FOR_RIVAL = Wait(WaitsFor.RIVAL)


def why_incomplete(known: OperatorRecord, stage: StageRecord) -> str:
    """Why the stage cannot have all subtasks of this operator (H58); empty if it can, as far as is known."""
    if known.allow_fewer:
        return ""
    if 0 < stage.partitions < known.parallelism:
        return _too_few(known, stage)
    return _why_divided(known, stage) if stage.may_be_divided else ""


def _too_few(known: OperatorRecord, stage: StageRecord) -> str:
    """The error text if there are too few partitions for the subtasks.

    The number of tasks in a stage attempt does not matter, because ``take`` and a retry run only some of the
    partitions.
    """
    partitions = "1 partition" if stage.partitions == 1 else f"{stage.partitions} partitions"
    return (
        f"operator {known.operator_id!r} has parallelism={known.parallelism}, but the RDD of stage {stage.stage_id} "
        f"has only {partitions}: coordinate it with parallelism={stage.partitions}, call "
        f"repartition({known.parallelism}) before its subtasks, or pass allow_fewer=True to coordinate() if some "
        "subtasks may be missing. Without repartition, adaptive execution chooses a number for each run. After its "
        "subtasks, use repartition() in place of coalesce(), which puts several subtasks into one task"
    )


def _why_divided(known: OperatorRecord, stage: StageRecord) -> str:
    """Why other tasks of the stage belong to another operator; empty if they do not, as far as is known.

    ``union`` does that. If several operators follow each other in a lineage, or are zipped, a task has all of them, and
    the first of these tasks to register for a second one shows it. What only a registration claims proves nothing.
    Goes through all tasks of the stage, so ask only if it ``may_be_divided``.
    """
    name, mine, others = known.operator_id, False, set[str]()
    for task in stage.tasks.values():
        if task.confirmed and task.operators:
            mine = mine or name in task.operators
            others.update(task.operators)
    others.discard(name)
    if not (mine and others):
        return ""
    return (
        f"stage {stage.stage_id} runs operator {name!r} in some of its tasks and {', '.join(map(repr, sorted(others)))}"
        " in others, so none of them has all of its subtasks: union() has put two RDDs into one stage. Call "
        f"repartition({known.parallelism}) on each of them after its subtasks and before the union(), or use one "
        "operator, whose subtasks come after the union()"
    )


def why_not_both(task: TaskRecord) -> str:
    """Why the operators of a task cannot restore together: each would skip what another one has not output (H174).

    Empty if at most one is in streaming mode. What only a registration claims proves nothing (H75).
    """
    if len(task.streaming) < 2 or not task.confirmed:
        return ""
    names = " and ".join(map(repr, sorted(task.streaming)))
    return (
        f"operators {names} are in streaming mode and run in the same tasks, one after the other or zipped. After a"
        " retry, the first one continues from its own checkpoint, and the other one would take its outputs for those"
        " from the beginning, and lose rows. Make one operator of them, coordinate(..., chain(first=..., second=...)),"
        ' whose checkpoints hold both; or coordinate all but the last one with mode="batch", if they yield the same'
        " outputs in the same order again"
    )


def decide(
    known: OperatorRecord, held: HeldRegistration, engine: EngineRecords, config: LedgerConfig, now: float
) -> Verdict:
    """Decide about one registration with what is known now: the first line that applies.

    ======================================================  ==========================================================
    its run has ended, or its task is over                  refused
    nothing has decided for ``give_up_after_s``             refused
    its stage cannot have all subtasks of the operator      refused
    no run is in progress                                   begins one, and is then decided on again
    another run is in progress                              waits for its end, or is refused
    its run has failed globally                             refused
    its attempt of a barrier stage has failed, or may have  refused, or waits for its start
    its subtask has had an attempt in this run              as ``_beside_rivals`` says
    it is not known how many partitions its input has       waits for that, if the operator's positions depend on it
    otherwise                                               accepted
    ======================================================  ==========================================================
    """
    message, run = held.message, known.run
    stage = engine.stages.get(message.run_id)
    if stage is None or (task := stage.tasks.get(message.task_attempt_id)) is None:
        return Refusal(RefusalCode.ATTEMPT_OVER, run_has_ended(known, message.run_id))
    if task.end is not None:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"task {task.task_attempt_id} is over: {task.end_reason}")
    if now >= held.since + config.give_up_after_s:
        return _give_up(known, held, engine, config)
    if incomplete := why_incomplete(known, stage):
        return Refusal(RefusalCode.TOO_FEW_PARTITIONS, incomplete)
    if run is None:
        return BeginRun()
    if run.run_id != message.run_id:
        return _beside_another_run(known, run, stage, engine)
    if run.failed_cause is not None:
        return Refusal(
            RefusalCode.COORDINATOR_FAILED, f"the coordinator of {known.operator_id!r} failed: {run.failed_cause}"
        )
    if stage.barrier and (verdict := _in_barrier_stage(held, run, task)):
        return verdict
    if subtask := run.subtasks.get(message.subtask):
        return _beside_rivals(held, subtask, stage, task)
    if known.allow_fewer and message.mode == RestoreMode.STREAMING and not stage.partitions:  # H174
        return Wait(WaitsFor.PARTITIONS)
    return Acceptance()


def _in_barrier_stage(held: HeldRegistration, run: RunRecord, task: TaskRecord) -> Wait | Refusal | None:
    """The verdict on a task of a barrier stage whose attempt has failed, or is not known; None if neither is so."""
    if task.stage_attempt is None:  # only its start says whether its stage attempt has just failed
        return _WAIT_FOR_RIVAL if held.seen < Seen.RUNNING else None
    if run.barrier_failed is None or task.stage_attempt > run.barrier_failed:
        return None
    failed = f"attempt {task.stage_attempt} of barrier stage {run.run_id} failed"
    return Refusal(RefusalCode.ATTEMPT_OVER, failed)


def runs_elsewhere(task_attempt_id: int, place: TaskPlace) -> str:
    """Why a task cannot be what it claims to be (H75)."""
    return f"Spark runs task {task_attempt_id} in stage {place.stage_id}, partition {place.partition}"


def run_has_ended(known: OperatorRecord, run_id: int) -> str:
    return f"run {run_id} of operator {known.operator_id!r} has ended"


def _give_up(known: OperatorRecord, held: HeldRegistration, engine: EngineRecords, config: LedgerConfig) -> Refusal:
    waited = f"no answer came from Spark within {config.give_up_after_s:g} s"
    if held.waits_for is WaitsFor.OTHER_RUN and known.run is not None:
        return Refusal(RefusalCode.CONCURRENT_RUN, f"{in_use(known, known.run, engine)} ({waited})")
    if held.waits_for is WaitsFor.PARTITIONS:
        text = f"Spark did not report how many partitions stage {held.message.run_id} has, and {waited}: run it again"
        return Refusal(RefusalCode.ATTEMPT_OVER, text)
    return Refusal(
        RefusalCode.ATTEMPT_OVER,
        f"another attempt of subtask {held.message.subtask} stands in the way, and {waited}",
    )


# --- the attempts of one subtask ----------------------------------------------------------------------------


def _beside_rivals(held: HeldRegistration, subtask: SubtaskRecord, stage: StageRecord, task: TaskRecord) -> Verdict:
    one_at_a_time = held.message.mode == RestoreMode.STREAMING
    predecessors: list[AttemptRecord] = []
    superseded: list[AttemptRecord] = []
    must_wait = False
    for entry in subtask.attempts.values():
        if entry.state is AttemptState.OVER:
            continue
        must_wait = must_wait or not task.confirmed  # H75: a claim displaces nothing
        rival = stage.tasks[entry.task_attempt_id]
        if rival.task_attempt_id > task.task_attempt_id:
            verdict = _beside_newer(held, stage, task, entry, one_at_a_time)
            if isinstance(verdict, Refusal):
                return verdict
            must_wait = must_wait or verdict is not None
            continue
        relation = _relate_to_older(held, stage, task, entry)
        if relation is Relation.SUCCESSION:
            predecessors.append(entry)  # H17: a success runs again only if its output is lost
        elif relation is Relation.UNDECIDED or (one_at_a_time and entry.state is AttemptState.ENDING):
            must_wait = True
        else:
            must_wait = must_wait or not rival.confirmed  # H75: a look tells whether there are two at all
            if one_at_a_time:
                superseded.append(entry)
    return _WAIT_FOR_RIVAL if must_wait else Acceptance(tuple(predecessors), tuple(superseded))


def _beside_newer(
    held: HeldRegistration, stage: StageRecord, task: TaskRecord, entry: AttemptRecord, one_at_a_time: bool
) -> Wait | Refusal | None:
    """The verdict on a task beside an accepted attempt of a newer task; None if both may run."""
    relation = relate(task, stage.tasks[entry.task_attempt_id], barrier=stage.barrier)
    if relation is Relation.SUCCESSION:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"Spark has started {entry.attempt} since")
    undecided = relation is Relation.UNDECIDED and entry.task_attempt_id not in held.beside
    if undecided or entry.state is AttemptState.FINISHED:
        return _WAIT_FOR_RIVAL  # after a success an older copy is not needed: it waits until Spark ends it
    if one_at_a_time and task.confirmed:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"{entry.attempt} has taken over", kill=True)
    return None


def _relate_to_older(held: HeldRegistration, stage: StageRecord, task: TaskRecord, entry: AttemptRecord) -> Relation:
    """The task's relation to the accepted attempt of an older one."""
    rival = stage.tasks[entry.task_attempt_id]
    relation = relate(rival, task, barrier=stage.barrier)
    if relation is Relation.UNDECIDED and entry.task_attempt_id in held.beside:
        relation = Relation.BESIDE
    if entry.state is AttemptState.FINISHED:
        relation = _relate_to_success(relation, held, task, rival)
    return relation


def _relate_to_success(relation: Relation, held: HeldRegistration, task: TaskRecord, rival: TaskRecord) -> Relation:
    """Whether a newer task reruns a success (H17), or is an unneeded copy of it (UNDECIDED)."""
    if relation is Relation.BESIDE:
        if task.speculative or task.launched_before_end_of(rival):
            return Relation.UNDECIDED
        relation = Relation.UNDECIDED if rival.end_order is None else Relation.SUCCESSION
    if relation is Relation.UNDECIDED and held.seen is Seen.OUTLIVED_A_SUCCESS:
        return Relation.SUCCESSION  # Spark would have killed a copy long ago
    return relation


# --- two runs -----------------------------------------------------------------------------------------------


def in_use(known: OperatorRecord, run: RunRecord, engine: EngineRecords) -> str:
    """The error text for a second run while the first one continues."""
    jobs = engine.active_jobs(run.run_id)
    of_job = f" of job {jobs[0]}" if jobs else ""
    return (
        f"operator {known.operator_id!r} is in use by stage {run.run_id}{of_job}; "
        "run the two actions one after the other, or coordinate two operators"
    )


def _beside_another_run(known: OperatorRecord, run: RunRecord, new: StageRecord, engine: EngineRecords) -> Verdict:
    """Refuse a second run if one job has the operator in two stages; otherwise the first may just have ended (H55)."""
    old = engine.stages[run.run_id]
    common = sorted(set(old.active_jobs) & set(new.active_jobs))
    if common and not engine.only_claimed(run):  # H75: otherwise a look tells whether the first one exists
        return Refusal(
            RefusalCode.CONCURRENT_RUN,
            f"operator {known.operator_id!r} is in two stages ({run.run_id} and {new.stage_id}) of job "
            f"{common[0]}; coordinate two operators, or cache what the two stages share",
        )
    # According to the bus's order the old job still runs, unless the fact of its end was dropped.
    return Wait(WaitsFor.OTHER_RUN, hurry=bool(old.active_jobs and new.active_jobs))
