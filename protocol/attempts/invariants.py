"""What must always be true of one operator's part of the ledger."""

from __future__ import annotations

from protocol.attempts.entries import ALIVE, AttemptState
from protocol.attempts.kills import SPARK_TASK_FAILURES_MAX
from protocol.attempts.operator import OperatorLedger


def check_operator(operator: OperatorLedger) -> None:
    """Raises AssertionError when the state is impossible."""
    run = operator.run
    for task_attempt_id, held in operator.held.items():
        assert held.task_attempt_id == task_attempt_id
        assert held.message.run_id not in operator.ended_runs, "held for a run that is over"
        assert run is not None or not operator.held, "held although nothing runs"
        assert operator.look_at is not None, "held without a deadline"
        assert run is None or run.find(task_attempt_id) is None, "held and accepted"
    if run is None:
        return
    assert run.run_id not in operator.ended_runs
    assert {id(entry) for entry in run.entries()} == {id(entry) for entry in run.by_task.values()}
    if operator.reset_due is not None or run.failed_cause is not None:
        assert not run.living(), "alive across a global failover"
    for index, subtask in run.subtasks.items():
        numbers = [entry.attempt.attempt for entry in subtask.attempts.values()]
        assert numbers == sorted(set(numbers)), "attempt numbers do not rise (H2)"
        assert all(number < operator.next_attempt[index] for number in numbers)
        assert 0 <= index < operator.parallelism
        living = subtask.living
        assert not (living and subtask.finished), "alive beside a success"
        for position, entry in enumerate(living):
            older = {other.task_attempt_id for other in living[:position]}
            assert older <= entry.beside, "two alive that are no copies of one another (H10)"
        limit = operator.config.attempts_max or SPARK_TASK_FAILURES_MAX
        assert subtask.killed <= limit, "killed too often (H69)"
        assert subtask.killed < limit or run.failed_cause is not None, "killed often enough, and no failure (H69)"
        assert not subtask.owes_reset or living or subtask.finished, "a reset is owed (H10)"
        for entry in subtask.attempts.values():
            assert (entry.failure is not None) == (entry.state is AttemptState.OVER)
            assert entry.alive == (entry.state in ALIVE)
