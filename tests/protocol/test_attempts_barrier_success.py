"""What Spark keeps of a barrier stage attempt that has failed: whatever succeeds behind the failure."""

from __future__ import annotations

from protocol.facts import TaskOutcome
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, stage

OK = TaskOutcome.SUCCESS


def a_running_barrier_stage() -> Playbook:
    book = Playbook(parallelism=2)
    book.feed(job(), stage(tasks=2, barrier=True))
    book.ready(10, 0)
    book.ready(11, 1)
    return book


def test_a_success_behind_the_failure_of_its_barrier_stage_attempt_fails_the_job() -> None:
    """The invariant: the coordinator was reset, and Spark will not run that partition again."""
    book = a_running_barrier_stage()
    assert book.feed(goodbye(11), end(10, 0)) == ["failed 0#0 FAILED", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(end(11, 1, OK)) == ["cancel [0]"]


def test_a_success_ahead_of_the_failure_is_thrown_away_by_spark_however_late_it_is_known() -> None:
    """H15: the coordinator heard of the failure from the task itself, before the bus told of either end."""
    book = a_running_barrier_stage()
    book.feed(goodbye(11), goodbye(10, "ValueError"))
    assert book.feed(end(11, 1, OK), end(10, 0)) == []
    assert book.feed(stage(attempt=1, tasks=2, barrier=True)) == []


def test_a_barrier_stage_of_which_only_a_part_runs_again_fails_the_job() -> None:
    """The same, where the fact of the success was lost (H19)."""
    book = a_running_barrier_stage()
    book.feed(goodbye(11), end(10, 0))
    assert book.feed(stage(attempt=1, tasks=1, barrier=True)) == ["cancel [0]"]
