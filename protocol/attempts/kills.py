"""Kills by the framework, counted for each subtask, so that no sequence of them goes on for ever (H69).

Spark counts a failure against ``spark.task.maxFailures``, but never a kill. So without a count of our own, an attempt
that is killed here, and whose successors end in the same way, would be run again without end.

What counts: the attempt's event was not confirmed in time, its connection did not come back, or a later attempt took
over from it. What does not: a copy that lost to the success of another, what dies with a run that fails anyway, and a
task whose connection was lost while its registration was held. That one fails by itself, which Spark counts, or is dead
already; the kill is only to make sure.

The count is that of a subtask in one run. Spark counts in the same way, for a task of one task set: neither a good
attempt in between nor a success that is revoked later starts the count again, and the next action begins at 0. A
barrier stage that is run again keeps its count. In streaming mode a run may last for months, and each attempt goes on
from a checkpoint: there an attempt that was accepted ``kills_forgotten_after_s`` ago starts the count again when it is
killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.attempts.entries import AttemptEntry, SubtaskEntry
from protocol.attempts.types import KillTask

if TYPE_CHECKING:
    from protocol.attempts.operator import OperatorLedger

SPARK_TASK_FAILURES_MAX = 4
"""What ``spark.task.maxFailures`` is if nobody sets it."""


def kill_attempt(operator: OperatorLedger, subtask: SubtaskEntry, entry: AttemptEntry, reason: str) -> str:
    """Have Spark kill an attempt for its own fault. Returns why the run has to fail for it, or nothing.

    The caller reports the end of the attempt before it fails the run.
    """
    if entry.streaming and operator.now >= entry.accepted_at + operator.config.kills_forgotten_after_s:
        subtask.killed = 0
    attempt = entry.attempt
    return _kill(
        operator, subtask, attempt.subtask, attempt.task_attempt_id, reason, number=attempt.attempt, who=str(attempt)
    )


def kill_unaccepted(
    operator: OperatorLedger, subtask: SubtaskEntry, index: int, task_attempt_id: int, reason: str
) -> str:
    """The same for a task that was never accepted, because a later attempt of subtask ``index`` has taken over."""
    return _kill(operator, subtask, index, task_attempt_id, reason, number=None, who=f"task {task_attempt_id}")


def _kill(
    operator: OperatorLedger,
    subtask: SubtaskEntry,
    index: int,
    task_attempt_id: int,
    reason: str,
    *,
    number: int | None,
    who: str,
) -> str:
    subtask.killed += 1
    count, limit = subtask.killed, operator.config.attempts_max or SPARK_TASK_FAILURES_MAX
    operator.out.append(KillTask(task_attempt_id, reason, operator.operator_id, index, number, count, limit))
    if count < limit:
        return ""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"Headgate has killed subtask {index} of operator {operator.operator_id!r} {times}, which is the limit "
        f"(attempts_max={limit}). The last kill was that of {who}: {reason}"
    )
