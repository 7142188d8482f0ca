"""Successes that the engine counts and the coordinator gave up: rather no result than one that is counted twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.attempts.books import TaskRecord
from protocol.attempts.entries import AttemptEntry, AttemptState, Run
from protocol.attempts.types import FailureKind
from protocol.facts import TaskOutcome

if TYPE_CHECKING:
    from protocol.attempts.operator import OperatorLedger

_GIVEN_UP_BY_US = (
    FailureKind.CONFIRMATION_TIMEOUT,
    FailureKind.CONNECTION_LOST,
    FailureKind.SUPERSEDED,
    FailureKind.GLOBAL_FAILURE,
    FailureKind.LOST_FACT,
)


def lost_to_another(task: TaskRecord) -> bool:
    """Whether it was killed because another attempt of its task set succeeded; Spark's own words say so."""
    return task.end is TaskOutcome.KILLED and "another attempt succeeded" in task.end_reason.lower()


def fail_for_success(operator: OperatorLedger, what: str) -> None:
    operator.fail_globally(
        f"Spark counts {what} as a success after the coordinator gave it up and took back what it had handed out"
    )


def check_success(operator: OperatorLedger, run: Run, entry: AttemptEntry) -> None:
    """We gave the attempt up, and Spark took its output all the same: fail loudly.

    It cannot happen to a task that waits for the confirmation of its goodbye. A plain task of the subtask that Spark
    launched behind the success shows that the output is lost since, and all is well; a zombie's rival does not. Of a
    barrier stage attempt that failed, Spark has thrown away what was there at the failure; what succeeded behind it, it
    keeps.
    """
    if entry.failure not in _GIVEN_UP_BY_US:
        return
    stage = operator.books.stage(run.run_id)
    task = stage.tasks[entry.task_attempt_id]
    own = task.stage_attempt
    if run.barrier_failed is not None and own is not None and own <= run.barrier_failed:
        if stage.outlived_its_stage_attempt(task):
            fail_for_success(operator, str(entry.attempt))
        return
    newer = any(
        other.partition == entry.attempt.subtask
        and other.task_attempt_id > entry.task_attempt_id
        and not other.speculative
        and not other.launched_before_end_of(task)
        for other in stage.tasks.values()
    )
    if not newer and run.subtask(entry.attempt.subtask).finished is None:
        fail_for_success(operator, str(entry.attempt))


def perhaps_of_a_later_stage_attempt(operator: OperatorLedger, run: Run, failed: int) -> list[AttemptEntry]:
    """The failure of barrier stage attempt ``failed`` is known late, and these have ended well.

    Where the facts of their starts were lost, too, they may be of an attempt that Spark counts.
    """
    tasks = operator.books.stage(run.run_id).tasks
    ended_well = (AttemptState.ENDING, AttemptState.FINISHED)
    candidates = [entry for entry in run.entries() if entry.state in ended_well]
    of = {entry.task_attempt_id: tasks[entry.task_attempt_id].stage_attempt for entry in candidates}
    return [entry for entry in candidates if (own := of[entry.task_attempt_id]) is None or own > failed]


def doubtful_success(operator: OperatorLedger, run: Run) -> str:
    """Why a job that succeeded did perhaps not succeed with what the coordinator knows; empty where there is no doubt.

    A success has said goodbye first. Where none of a subtask's attempts has, and each is over, or the end of one that
    was given up is not known, Spark may have counted that one.
    """
    tasks = operator.books.stage(run.run_id).tasks
    for subtask in run.subtasks.values():
        if subtask.finished is not None or any(entry.state is AttemptState.ENDING for entry in subtask.living):
            continue
        for entry in subtask.attempts.values():
            given_up = entry.failure in _GIVEN_UP_BY_US or entry.failure is FailureKind.REVOKED
            if given_up and (not subtask.living or tasks[entry.task_attempt_id].end is None):
                return f"Spark's job has succeeded, perhaps with {entry.attempt}, which the coordinator had given up"
    return ""


def check_winner(operator: OperatorLedger, run: Run, entry: AttemptEntry) -> None:
    """``entry`` lost to another attempt, and has been told as failed. That other one must not be given up.

    It can be: a copy whose start was lost and whose kill took long was taken for a rerun of the success (H17).
    """
    subtask, tasks = run.subtask(entry.attempt.subtask), operator.books.stage(run.run_id).tasks
    if subtask.living or subtask.finished is not None or not lost_to_another(tasks[entry.task_attempt_id]):
        return
    for other in subtask.attempts.values():
        if tasks[other.task_attempt_id].end is TaskOutcome.SUCCESS:
            fail_for_success(operator, str(other.attempt))
            return
