"""The fact that a job has started was lost: what ends its run (H19, H57)."""

from __future__ import annotations

from protocol.facts import StageCompleted
from tests.protocol.attempts_kit import Playbook, end, job_end, stage


def a_run_whose_attempt_failed() -> Playbook:
    book = Playbook()
    book.feed(stage())
    book.ready(10, 1)
    book.feed(end(10, 1))
    return book


def test_an_unknown_job_that_fails_behind_the_failure_of_the_stage_ends_the_run() -> None:
    book = a_run_whose_attempt_failed()
    book.feed(StageCompleted(1, 0, "task 1 failed 4 times"))
    assert book.feed(job_end(0, succeeded=False, reason="too many failures")) == ["end run 1 badly"]


def test_an_unknown_job_that_fails_while_the_stage_goes_on_is_somebody_elses() -> None:
    book = a_run_whose_attempt_failed()
    assert book.feed(job_end(7, succeeded=False)) == []
    book.feed(StageCompleted(1, 0, "fetch failed"), stage(attempt=1))
    assert book.feed(job_end(8, succeeded=False)) == [], "it was submitted again"


def test_an_unknown_job_that_ends_well_does_not_end_a_run_whose_stage_failed() -> None:
    book = a_run_whose_attempt_failed()
    book.feed(StageCompleted(1, 0, "fetch failed"))
    assert book.feed(job_end(7)) == []
