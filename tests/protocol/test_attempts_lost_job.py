# SPDX-License-Identifier: Apache-2.0

"""How a run ends if the fact that its job started was lost (H19, H57)."""

from __future__ import annotations

from protocol.facts import StageCompleted, TaskOutcome
from tests.protocol.attempts_kit import Playbook, end, job_end, opened, reg, stage, start


def a_run_whose_attempt_failed() -> Playbook:
    book = Playbook()
    book.feed(stage())
    book.ready(10, 1)
    book.feed(end(10, 1))
    return book


def test_an_unknown_job_that_fails_after_the_stage_failed_ends_the_run() -> None:
    book = a_run_whose_attempt_failed()
    book.feed(StageCompleted(1, 0, "task 1 failed 4 times"))
    assert book.feed(job_end(0, succeeded=False, reason="too many failures")) == ["end run 1 badly"]


def test_an_unknown_job_that_fails_while_the_stage_goes_on_is_ignored() -> None:
    book = a_run_whose_attempt_failed()
    assert book.feed(job_end(7, succeeded=False)) == []
    book.feed(StageCompleted(1, 0, "fetch failed"), stage(attempt=1))
    assert book.feed(job_end(8, succeeded=False)) == [], "it was submitted again"


def test_an_unknown_job_that_ends_well_does_not_end_a_run_whose_stage_failed() -> None:
    book = a_run_whose_attempt_failed()
    book.feed(StageCompleted(1, 0, "fetch failed"))
    assert book.feed(job_end(7)) == []


def test_a_run_with_a_task_that_never_reported_does_not_count_as_complete() -> None:
    """H19, H55. Found by the simulation: a job's start fact and one task's facts were lost. The other tasks had
    succeeded. When a second job came, the ledger told the coordinator that the first one had succeeded."""
    book = Playbook()
    book.feed(stage(tasks=2))
    book.ready(10, 1)
    book.feed(end(10, 1, TaskOutcome.SUCCESS), start(20, 1, stage=2), reg(20, 1, run=2))
    assert "end run 1 badly" in book.wait(10)


def test_a_run_whose_tasks_all_ended_well_counts_as_complete() -> None:  # H19, H55
    book = Playbook()
    book.feed(stage(tasks=1))
    book.ready(10, 1)
    book.feed(end(10, 1, TaskOutcome.SUCCESS), start(20, 1, stage=2), reg(20, 1, run=2))
    assert "end run 1 well" in book.wait(10)


def test_a_run_of_an_unknown_job_is_looked_up_soon() -> None:  # H19
    book = Playbook()
    book.feed(reg(10, 1), opened(10))
    assert book.wait(book.config.heal_after_s) == ["query tasks [10] jobs []"]
