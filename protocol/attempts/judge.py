"""What becomes of a registration: accepted, refused, or held until a fact (or a look) decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.attempts import kills
from protocol.attempts.books import Relation, StageRecord, TaskRecord, relate
from protocol.attempts.entries import AttemptEntry, AttemptState, HeldRegistration, Run
from protocol.attempts.operator import OperatorLedger
from protocol.attempts.types import FailureKind
from protocol.facts import StatusReported, TaskOutcome, TaskState
from protocol.wire.messages import RefusalCode, RestoreMode


class Wait(Enum):
    WAIT = "a fact is missing"


@dataclass(frozen=True, slots=True)
class Refusal:
    code: RefusalCode
    text: str
    kill: bool = False  # Spark would let it run on, or count its failure


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``predecessors`` are not known to be over, but must be: they fail first. ``superseded`` run beside it, and may
    not."""

    predecessors: tuple[AttemptEntry, ...] = ()
    superseded: tuple[AttemptEntry, ...] = ()


Verdict = Wait | Refusal | Acceptance


def settle(operator: OperatorLedger, now: float) -> None:
    """Decide on each held registration that can be decided on, the oldest task first."""
    progress = True
    while progress and operator.held:
        progress = False
        for task_attempt_id in sorted(operator.held):
            held = operator.held.get(task_attempt_id)
            if held is None:
                continue
            verdict = _judge(operator, held, now)
            if isinstance(verdict, Refusal):
                too_many = ""
                if verdict.kill and operator.run is not None:
                    index = held.message.subtask
                    subtask = operator.run.subtask(index)
                    too_many = kills.kill_unaccepted(operator, subtask, index, task_attempt_id, verdict.text)
                operator.refuse(task_attempt_id, verdict.code, verdict.text)
                if too_many:
                    operator.fail_globally(too_many)
            elif isinstance(verdict, Acceptance):
                _make_room(operator, verdict)
                if operator.run is not None and operator.run.failed_cause is None:
                    operator.accept(held, now)  # else what had to go has failed the whole job, and it is refused next
            progress = progress or verdict is not Wait.WAIT


def _make_room(operator: OperatorLedger, acceptance: Acceptance) -> None:
    for entry in acceptance.superseded:
        if entry.alive:
            operator.fail(entry, FailureKind.SUPERSEDED, "a later attempt has taken over", kill=True)
    for entry in acceptance.predecessors:
        if entry.state in (AttemptState.ENDING, AttemptState.FINISHED):
            operator.fail(entry, FailureKind.REVOKED, "Spark runs the partition again")
        elif entry.alive:
            operator.fail(entry, FailureKind.LOST_FACT, "Spark has started a later attempt of the partition")


def _judge(operator: OperatorLedger, held: HeldRegistration, now: float) -> Verdict:
    run_id = held.message.run_id
    task = operator.books.task(run_id, held.task_attempt_id)
    if run_id in operator.ended_runs or run_id in operator.books.ended_stages or task is None:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"run {run_id} of operator {operator.operator_id!r} has ended")
    if task.end is not None:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"task {task.task_attempt_id} is over: {task.end_reason}")
    if now >= held.since + operator.config.give_up_after_s:
        return _give_up(operator, held)
    if too_few := operator.why_too_few(run_id):
        return Refusal(RefusalCode.TOO_FEW_PARTITIONS, too_few)
    if operator.run is None:
        operator.open_run(run_id, now)
    run = operator.run
    assert run is not None
    if run.run_id != run_id:
        return _judge_second_run(operator, held, run, now)
    held.conflict = False  # it may have waited for another run, which has ended since
    if run.failed_cause is not None:
        return Refusal(
            RefusalCode.COORDINATOR_FAILED,
            f"the coordinator of {operator.operator_id!r} failed: {run.failed_cause}",
        )
    if task.stage_attempt is None:
        if operator.books.stage(run_id).barrier and not held.seen_running:
            return Wait.WAIT  # only its start says whether its stage attempt is the one that has just failed
    elif run.barrier_failed is not None and task.stage_attempt <= run.barrier_failed:
        return Refusal(RefusalCode.ATTEMPT_OVER, f"attempt {task.stage_attempt} of barrier stage {run_id} failed")
    return _judge_rivals(operator, held, run, task)


def _give_up(operator: OperatorLedger, held: HeldRegistration) -> Refusal:
    waited = f"no answer came from Spark within {operator.config.give_up_after_s:g} s"
    if held.conflict and operator.run is not None:
        return Refusal(RefusalCode.CONCURRENT_RUN, f"{_conflict_text(operator, operator.run)} ({waited})")
    return Refusal(
        RefusalCode.ATTEMPT_OVER,
        f"another attempt of subtask {held.message.subtask} stands in the way, and {waited}",
    )


# --- the attempts of one subtask ----------------------------------------------------------------------------


def _judge_rivals(operator: OperatorLedger, held: HeldRegistration, run: Run, task: TaskRecord) -> Verdict:
    stage = operator.books.stage(run.run_id)
    one_at_a_time = held.message.mode == RestoreMode.STREAMING
    predecessors: list[AttemptEntry] = []
    superseded: list[AttemptEntry] = []
    verdict: Verdict = Acceptance()
    for entry in run.subtask(held.message.subtask).attempts.values():
        if entry.state is AttemptState.OVER:
            continue
        rival = stage.tasks[entry.task_attempt_id]
        finished = entry.state is AttemptState.FINISHED
        if rival.task_attempt_id > task.task_attempt_id:
            relation = relate(task, rival, barrier=stage.barrier)
            if relation is Relation.SUCCESSION:
                return Refusal(RefusalCode.ATTEMPT_OVER, f"Spark has started {entry.attempt} since")
            if relation is Relation.UNDECIDED and entry.task_attempt_id in held.beside:
                relation = Relation.BESIDE
            if relation is Relation.UNDECIDED or finished:
                verdict = Wait.WAIT  # after a success an older copy is of no use: it waits until Spark ends it
            elif one_at_a_time:
                return Refusal(RefusalCode.ATTEMPT_OVER, f"{entry.attempt} has taken over", kill=True)
            continue
        relation = relate(rival, task, barrier=stage.barrier)
        if relation is Relation.UNDECIDED and entry.task_attempt_id in held.beside:
            relation = Relation.BESIDE
        if finished:
            relation = _relate_to_success(relation, held, task, rival)
        if relation is Relation.SUCCESSION:
            predecessors.append(entry)  # H17: what has succeeded runs again only when its output is lost
        elif relation is Relation.UNDECIDED or (one_at_a_time and entry.state is AttemptState.ENDING):
            verdict = Wait.WAIT
        elif one_at_a_time:
            superseded.append(entry)
    return verdict if verdict is Wait.WAIT else Acceptance(tuple(predecessors), tuple(superseded))


def _relate_to_success(relation: Relation, held: HeldRegistration, task: TaskRecord, rival: TaskRecord) -> Relation:
    """Whether a newer task reruns what has succeeded (H17), or is a copy of it, which is of no use (UNDECIDED)."""
    if relation is Relation.BESIDE:
        if task.speculative or task.launched_before_end_of(rival):
            return Relation.UNDECIDED
        relation = Relation.UNDECIDED if rival.end_order is None else Relation.SUCCESSION
    if relation is Relation.UNDECIDED and held.outlived_finish:
        return Relation.SUCCESSION  # Spark would have killed a mere copy long ago
    return relation


# --- two runs -----------------------------------------------------------------------------------------------


def _conflict_text(operator: OperatorLedger, run: Run) -> str:
    stage = operator.books.stages.get(run.run_id)
    jobs = () if stage is None else stage.active_jobs
    of_job = f" of job {jobs[0]}" if jobs else ""
    return (
        f"operator {operator.operator_id!r} is in use by stage {run.run_id}{of_job}; "
        "run the two actions one after the other, or coordinate two operators"
    )


def _judge_second_run(operator: OperatorLedger, held: HeldRegistration, run: Run, now: float) -> Verdict:
    """H55.

    One job with the operator in two stages is told at once; else the first run may just have ended.
    """
    old = operator.books.stages.get(run.run_id)
    new = operator.books.stage(held.message.run_id)
    held.conflict = True
    if old is None:
        return Wait.WAIT
    common = sorted(set(old.active_jobs) & set(new.active_jobs))
    if common:
        return Refusal(
            RefusalCode.CONCURRENT_RUN,
            f"operator {operator.operator_id!r} is in two stages ({run.run_id} and {new.stage_id}) of job "
            f"{common[0]}; coordinate two operators, or cache what the two stages share",
        )
    if old.active_jobs and new.active_jobs and not held.hurried:
        # By their order on the bus the old job still runs, unless the fact of its end was dropped.
        held.hurried = True
        operator.want_look(now + operator.config.conflict_wait_s)
    return Wait.WAIT


def _end_run_without_facts(operator: OperatorLedger, run: Run) -> None:
    """The run's jobs were never known, and nothing of it runs any more: a later run shows that it is over."""
    whole = operator.looks_whole(run)
    operator.end_run(whole, "" if whole else f"run {run.run_id} is over, but how it ended was lost")


# --- looks at the engine's books (H19) ----------------------------------------------------------------------


def _known_jobs(operator: OperatorLedger, run: Run) -> tuple[StageRecord | None, tuple[int, ...]]:
    stage = operator.books.stages.get(run.run_id)
    return stage, () if stage is None else stage.active_jobs


def look(operator: OperatorLedger, now: float) -> tuple[set[int], set[int]]:
    """The look that is due: which tasks and which jobs to ask about. Sets the time of the next one.

    A job is asked about only when it is known for a while: the engine's own books lag behind the bus, too.
    """
    config = operator.config
    run = operator.run
    tasks = set(operator.held)
    jobs: set[int] = set()
    operator.look_at = None
    if run is not None:
        living = {entry.task_attempt_id for entry in run.living()}
        tasks |= living
        _, known = _known_jobs(operator, run)
        jobs = {job for job in known if now >= operator.books.job_seen_at[job] + config.heal_after_s}
        for held in operator.held.values():
            patience = config.conflict_wait_s if held.hurried else config.heal_after_s
            in_time = now >= held.since + patience
            held.asked = held.asked or (in_time and (bool(jobs) or not held.conflict or not known))
        if not known and not living and any(held.conflict and held.asked for held in operator.held.values()):
            _end_run_without_facts(operator, run)
    if tasks or jobs:
        operator.asked_again_at = now + config.query_every_s
        operator.want_look(operator.asked_again_at)
    else:
        want_audit(operator)
    return tasks, jobs


def want_audit(operator: OperatorLedger) -> None:
    """The next look without cause, as long as there is something that could have ended unnoticed."""
    run = operator.run
    if run is not None and (run.living() or _known_jobs(operator, run)[1]):
        operator.want_look(operator.now + operator.config.audit_every_s)


def answered(operator: OperatorLedger) -> None:
    """There is no hurry to ask again, unless something is undecided still."""
    if operator.asked_again_at is not None and operator.look_at == operator.asked_again_at and not operator.held:
        operator.look_at = None
        want_audit(operator)
    operator.asked_again_at = None


def tasks_reported(operator: OperatorLedger, fact: StatusReported) -> None:
    """What the engine's books say of attempts that are alive for us, and of those that wait."""
    if operator.run is not None:
        for task_attempt_id in sorted(fact.tasks):
            _task_reported(operator, operator.run, task_attempt_id, fact.tasks[task_attempt_id])


def conflicts_reported(operator: OperatorLedger, fact: StatusReported) -> None:
    """Whether the first of two runs is really still going on. Jobs that are over have been dealt with before."""
    run = operator.run
    if run is None:
        return
    conflicts = [held for held in operator.held.values() if held.conflict and held.asked]
    if conflicts and operator.run is run:
        _, known = _known_jobs(operator, run)
        living = run.living()
        if any(fact.jobs.get(job) for job in known) or (
            not known and any(fact.tasks.get(e.task_attempt_id) is TaskState.RUNNING for e in living)
        ):
            for held in conflicts:
                text = _conflict_text(operator, run)
                operator.refuse(held.task_attempt_id, RefusalCode.CONCURRENT_RUN, text)
        elif not known and not living:
            _end_run_without_facts(operator, run)


def _task_reported(operator: OperatorLedger, run: Run, task_attempt_id: int, state: TaskState) -> None:
    held = operator.held.get(task_attempt_id)
    if held is not None:
        _held_reported(operator, held, state)
        return
    entry = run.find(task_attempt_id)
    task = operator.task_of(task_attempt_id)
    if entry is None or task is None or not entry.alive:
        return
    contenders = [
        held
        for held in operator.held.values()
        if held.asked and not held.conflict and held.message.subtask == entry.attempt.subtask
    ]
    match state:
        case TaskState.SUCCEEDED:
            task.end = TaskOutcome.SUCCESS
            operator.task_ended(task)
        case TaskState.ENDED:
            superseded = run.subtask(entry.attempt.subtask).finished is not None
            kind = FailureKind.SUPERSEDED if superseded else FailureKind.LOST_FACT
            operator.fail(entry, kind, "Spark's status says that the task has ended")
        case TaskState.RUNNING:
            for held in contenders:
                held.beside.add(task_attempt_id)
        case TaskState.UNKNOWN:
            if any(held.task_attempt_id > task_attempt_id for held in contenders):
                kind = FailureKind.REVOKED if entry.state is AttemptState.ENDING else FailureKind.LOST_FACT
                text = "Spark knows nothing of the task any more, and a later attempt has come"
                operator.fail(entry, kind, text, kill=True)


def _held_reported(operator: OperatorLedger, held: HeldRegistration, state: TaskState) -> None:
    task = operator.books.task(held.message.run_id, held.task_attempt_id)
    if state in (TaskState.ENDED, TaskState.SUCCEEDED) and task is not None:
        task.end = TaskOutcome.FAILED if state is TaskState.ENDED else TaskOutcome.SUCCESS
        task.end_reason = "Spark's status says that the task has ended"
        run = operator.run
        if run is not None and run.run_id == held.message.run_id:
            operator.task_ended(task)
    elif held.asked:
        held.seen_running = True  # it is connected, and the engine does not say that it is over
        run = operator.run
        if run is not None and run.run_id == held.message.run_id:
            finished = run.subtask(held.message.subtask).finished
            if finished is not None and operator.now >= finished.finished_at + operator.config.heal_after_s:
                held.outlived_finish = True
