# SPDX-License-Identifier: Apache-2.0

"""The job fails if Spark keeps a success that the coordinator was told is void (H15, H17)."""

from __future__ import annotations

from protocol.facts import StageCompleted, TaskOutcome, TaskState
from protocol.wire.messages import RestoreMode
from tests.protocol.attempts_kit import (
    Playbook,
    a_running_barrier_stage,
    end,
    goodbye,
    job,
    job_end,
    opened,
    reg,
    stage,
    start,
    status,
)

OK = TaskOutcome.SUCCESS
STREAMING = RestoreMode.STREAMING


def test_a_success_after_the_failure_of_its_barrier_stage_attempt_fails_the_job() -> None:
    """The invariant: the coordinator was reset, and Spark does not run that partition again."""
    book = a_running_barrier_stage()
    assert book.feed(goodbye(11), end(10, 0)) == ["failed 0#0 FAILED", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(end(11, 1, OK)) == ["cancel [0]"]


def test_a_success_before_the_failure_is_discarded_by_spark_however_late_it_is_known() -> None:
    """H15: the task itself reported the failure to the coordinator, before the bus reported either end."""
    book = a_running_barrier_stage()
    book.feed(goodbye(11), goodbye(10, "ValueError"))
    assert book.feed(end(11, 1, OK), end(10, 0)) == []
    assert book.feed(stage(attempt=1, tasks=2, barrier=True)) == []


def test_a_barrier_stage_of_which_only_a_part_runs_again_fails_the_job() -> None:
    """The same, but the fact of the success was lost (H19)."""
    book = a_running_barrier_stage()
    book.feed(goodbye(11), end(10, 0))
    assert book.feed(stage(attempt=1, tasks=1, barrier=True)) == ["cancel [0]"]


def test_a_success_of_an_unknown_stage_attempt_fails_the_job_when_an_earlier_failure_comes_to_light() -> None:
    """H15, H19. Found by the simulation: the facts of a barrier stage's second attempt were lost. Its tasks were
    accepted after a look, and succeeded. Then the stage's end revealed a failure in between, the coordinator was
    reset, and the run succeeded with nothing in it."""
    book = Playbook(parallelism=1)
    book.feed(job(), stage(tasks=1, barrier=True), reg(20, 0))
    book.wait(book.config.heal_after_s)
    book.feed(status({20: (TaskState.RUNNING, 0)}), opened(20), goodbye(20))
    answers = book.feed(StageCompleted(1, 1))
    assert answers == ["failed 0#0 GLOBAL_FAILURE", "cancel [0]"]
    assert "end run 1 badly" in book.feed(job_end())


def test_a_successor_is_refused_when_the_end_of_its_predecessor_fails_the_job() -> None:
    """H15. Found by the simulation: it was accepted anyway, and survived the global failure."""
    book = Playbook(parallelism=2)
    book.feed(job(), stage(tasks=2, barrier=True), reg(20, 0), reg(21, 1))
    book.wait(book.config.heal_after_s)
    book.feed(status({20: (TaskState.RUNNING, 0), 21: (TaskState.RUNNING, 1)}))
    book.feed(opened(20), opened(21), goodbye(20), goodbye(21), start(30, 0))
    answers = book.feed(reg(30, 0))
    assert answers[-1] == "refuse task 30 COORDINATOR_FAILED"
    assert "cancel [0]" in answers


def test_the_success_of_a_zombie_that_its_rival_had_superseded_fails_the_job() -> None:
    """H12, spark-facts 13. Found by the simulation: Spark counted the zombie and killed its rival. The coordinator
    believed that the rival had succeeded, and the last checkpoint waited for it without success."""
    book = Playbook()
    zombie, rival = reg(10, 1, mode=STREAMING), reg(20, 1, mode=STREAMING)
    book.feed(job(), stage(), start(10, 1), zombie, opened(10))
    assert "failed 1#0 SUPERSEDED" in book.feed(start(20, 1, stage_attempt=1), rival)
    assert "cancel [0]" in book.feed(end(10, 1, OK))


def test_a_job_that_perhaps_succeeded_with_an_attempt_that_was_given_up_has_not_ended_well() -> None:
    """H12, H19. Found by the simulation: the copy had taken over, but Spark killed it because the original succeeded.
    The facts of both ends were lost, and the ledger told the coordinator that the copy had succeeded."""
    book = Playbook()
    book.feed(job(), stage(), start(10, 1), reg(10, 1, mode=STREAMING), opened(10))
    book.feed(start(20, 1, number=1, speculative=True), reg(20, 1, number=1, mode=STREAMING), opened(20))
    assert book.feed(job_end()) == ["failed 1#1 RUN_ENDED", "end run 1 badly"]


def test_a_job_that_succeeded_although_a_subtask_was_revoked_and_never_ran_again_has_not_ended_well() -> None:
    """H15, H19. Found by the simulation: a task of a barrier stage succeeded after another one had failed. Spark kept
    its result and ran only the other one again, and every fact about that was lost."""
    book = a_running_barrier_stage()
    book.feed(goodbye(11), end(10, 0))
    book.feed(start(20, 0, stage_attempt=1), reg(20, 0), opened(20), goodbye(20))
    assert book.feed(job_end()) == ["failed 0#1 RUN_ENDED", "end run 1 badly"]


def test_a_copy_that_was_taken_for_a_rerun_and_lost_to_the_first_attempt_fails_the_job() -> None:
    """H17: the copy's start was lost and its kill takes long, so the success was revoked without need."""
    book = Playbook()
    book.feed(job(), stage())
    book.ready(10, 1)
    book.feed(goodbye(10), end(10, 1, OK), reg(20, 1))
    book.wait(book.config.heal_after_s)
    accepted = book.feed(status({20: (TaskState.RUNNING, 1)}))
    assert accepted == ["failed 1#0 REVOKED", "reset 1", "accept 1#1 task 20"]
    lost = end(20, 1, TaskOutcome.KILLED, reason="another attempt succeeded")
    assert book.feed(lost) == ["failed 1#1 SUPERSEDED", "reset 1", "cancel [0]"]


def test_a_copy_that_dies_after_the_winners_output_was_lost_fails_nothing() -> None:
    """H17: Spark itself revoked the success, and runs the partition again."""
    book = Playbook()
    book.feed(job(), stage())
    book.ready(10, 1)
    book.feed(start(20, 1, number=1, speculative=True), reg(20, 1, number=1))
    book.feed(end(10, 1, OK), end(10, 1, TaskOutcome.RESUBMITTED))
    assert book.feed(end(20, 1, TaskOutcome.KILLED, reason="another attempt succeeded")) == []
