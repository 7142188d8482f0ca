# SPDX-License-Identifier: Apache-2.0

"""Finds successes that Spark counts although the coordinator gave up on the attempt: their results could count twice.

The functions read what is known. ``OperatorLedger`` fails the run if they find such a success.
"""

from __future__ import annotations

from protocol.attempts import FailureKind
from protocol.attempts.records import AttemptRecord, AttemptState, RunRecord, StageRecord
from protocol.facts import TaskOutcome

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
