# SPDX-License-Identifier: Apache-2.0

"""Helpers for tests of the attempt ledger: a playbook that feeds it inputs and checks its effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protocol.attempts import (
    AttemptAccepted,
    CancelJobs,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    OperatorReset,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.attempts.ledger import AttemptLedger
from protocol.facts import (
    JobEnded,
    JobStarted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.machine import TimePassed
from protocol.wire.messages import Register, RestoreMode


def short(effect: LedgerEffect) -> str:
    """Format an effect as one line with only the fields that the tests check."""
    match effect:
        case AttemptAccepted(attempt=a):
            return f"accept {a.subtask}#{a.attempt} task {a.task_attempt_id}"
        case RefuseRegistration(task_attempt_id=task, code=code):
            return f"refuse task {task} {code.name}"
        case SubtaskReady(attempt=a):
            return f"ready {a.subtask}#{a.attempt}"
        case SubtaskFailed(attempt=a, reason=reason):
            return f"failed {a.subtask}#{a.attempt} {reason.kind.name}"
        case SubtaskFinished(attempt=a):
            return f"finish {a.subtask}#{a.attempt}"
        case SubtaskReset(subtask=subtask):
            return f"reset {subtask}"
        case OperatorReset():
            return "reset all"
        case RunStarted(run_id=run):
            return f"start run {run}"
        case RunEnded(run_id=run, succeeded=succeeded):
            return f"end run {run} {'well' if succeeded else 'badly'}"
        case KillTask(task_attempt_id=task):
            return f"kill {task}"
        case CancelJobs(job_ids=jobs):
            return f"cancel {list(jobs)}"
        case QueryStatus(task_attempt_ids=tasks, job_ids=jobs):
            return f"query tasks {sorted(tasks)} jobs {sorted(jobs)}"
        case ReportStale(what=what, task_attempt_id=task):
            return f"stale {what} task {task}"


class Playbook:
    """Feeds one ledger, advances its clock, and records every effect. It checks the invariants after each step."""

    def __init__(
        self, parallelism: int = 4, operators: Iterable[str] = ("words",), *, attempts_max: int | None = None
    ) -> None:
        self.config = LedgerConfig(attempts_max=attempts_max)
        self.ledger = AttemptLedger(self.config)
        self.now = 100.0
        self.effects: list[LedgerEffect] = []
        for operator_id in operators:
            assert self.feed(OperatorAdded(operator_id, parallelism)) == []

    def feed(self, *inputs: LedgerInput) -> list[str]:
        """Handle the inputs in turn and return their effects in short form."""
        answers: list[LedgerEffect] = []
        for input in inputs:
            answers.extend(self.ledger.handle(input, self.now))
            self.ledger.check_invariants()
        self.effects.extend(answers)
        return [short(effect) for effect in answers]

    def wait(self, seconds: float) -> list[str]:
        """Advance the clock, with ``TimePassed`` at each deadline of the ledger."""
        until = self.now + seconds
        answers: list[str] = []
        while (deadline := self.ledger.next_deadline()) is not None and deadline <= until:
            assert deadline > self.now or self.ledger.handle(TimePassed(), self.now) == ()
            self.now = max(self.now, deadline)
            answers += self.feed(TimePassed())
        self.now = until
        return answers

    @property
    def last(self) -> LedgerEffect:
        return self.effects[-1]

    @property
    def refusal(self) -> str:
        """The message of the last effect, which is a refusal."""
        assert isinstance(self.last, RefuseRegistration)
        return self.last.message

    def ready(self, task: int, subtask: int, *, number: int = 0, run: int = 1) -> list[str]:
        """Bring up a task in the simplest way: started, registered, opened."""
        return self.feed(start(task, subtask, number=number, stage=run), reg(task, subtask, number=number, run=run)) + (
            self.feed(OperatorOpened("words", task))
        )


def a_running_barrier_stage() -> Playbook:
    """Return a run of two subtasks, tasks 10 and 11, in a barrier stage."""
    book = Playbook(parallelism=2)
    book.feed(job(), stage(tasks=2, barrier=True))
    book.ready(10, 0)
    book.ready(11, 1)
    return book


def job(job_id: int = 0, stages: tuple[int, ...] = (1,)) -> JobStarted:
    return JobStarted(job_id, stages)


def job_end(job_id: int = 0, succeeded: bool = True, reason: str = "") -> JobEnded:
    return JobEnded(job_id, succeeded, reason)


def stage(
    stage_id: int = 1, attempt: int = 0, tasks: int = 4, barrier: bool = False, partitions: int = 0
) -> StageSubmitted:
    return StageSubmitted(stage_id, attempt, tasks, barrier, partitions)


def start(
    task: int,
    subtask: int,
    *,
    number: int = 0,
    stage: int = 1,
    stage_attempt: int = 0,
    speculative: bool = False,
    executor: str = "e1",
) -> TaskStarted:
    return TaskStarted(task, stage, stage_attempt, subtask, number, speculative, executor, "host")


def end(
    task: int,
    subtask: int,
    outcome: TaskOutcome = TaskOutcome.FAILED,
    *,
    number: int = 0,
    stage: int = 1,
    stage_attempt: int = 0,
    reason: str = "",
) -> TaskEnded:
    return TaskEnded(task, stage, stage_attempt, subtask, number, outcome, reason)


def reg(
    task: int,
    subtask: int,
    *,
    number: int = 0,
    run: int = 1,
    operator: str = "words",
    mode: int = RestoreMode.BATCH,
) -> RegistrationArrived:
    message = Register(task, operator, subtask, run, number, mode, 4, "host/1", "3.11")
    return RegistrationArrived(1000 + task, message)


def opened(task: int, operator: str = "words") -> OperatorOpened:
    return OperatorOpened(operator, task)


def goodbye(task: int, failure: str = "", operator: str = "words") -> OperatorEnded:
    return OperatorEnded(operator, task, failure)


def status(
    tasks: Mapping[int, tuple[TaskState, int]],
    *,
    asked: Iterable[int] = (),
    stage: int = 1,
    jobs: Mapping[int, bool] | None = None,
) -> StatusReported:
    """Build an answer of Spark: the state and the partition of each task; others in ``asked`` are unknown."""
    states = dict.fromkeys(asked, TaskState.UNKNOWN) | {task: state for task, (state, _) in tasks.items()}
    places = {task: TaskPlace(stage, partition) for task, (state, partition) in tasks.items()}
    known = {task: place for task, place in places.items() if states[task] is not TaskState.UNKNOWN}
    return StatusReported({0: True} if jobs is None else dict(jobs), states, known)
