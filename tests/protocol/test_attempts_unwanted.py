# SPDX-License-Identifier: Apache-2.0

"""Successes of attempts that the coordinator gave up: when they must not be reported, as nothing counts twice (H12)."""

from __future__ import annotations

import pytest

from protocol.attempts import AttemptCondemned, OperatorEnded
from protocol.facts import TaskOutcome, TaskState
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, job_end, opened, reg, stage, start, status

OK = TaskOutcome.SUCCESS


def a_given_up_attempt() -> Playbook:
    """Subtask 1 was attempt 0, task 10, which did not confirm in time; Spark has not said how it ended."""
    book = Playbook()
    book.feed(job(), stage())
    book.ready(10, 1)
    assert book.feed(AttemptCondemned("words", 10, "late")) == ["kill 10", "failed 1#0 CONFIRMATION_TIMEOUT", "reset 1"]
    return book


def test_a_retry_that_said_it_ended_well_is_the_one_that_a_successful_job_counts() -> None:
    book = a_given_up_attempt()
    book.feed(start(11, 1, number=1), reg(11, 1, number=1), opened(11), goodbye(11))
    assert book.feed(job_end()) == ["finish 1#1", "end run 1 well"]


def test_a_retry_that_spark_has_counted_is_the_one_that_a_successful_job_counts() -> None:
    book = a_given_up_attempt()
    book.ready(11, 1, number=1)
    book.feed(goodbye(11), end(11, 1, OK, number=1))
    assert book.feed(job_end()) == ["end run 1 well"]


def test_a_retry_that_still_runs_does_not_accuse_an_attempt_whose_end_is_known() -> None:
    book = a_given_up_attempt()
    book.feed(end(10, 1, TaskOutcome.KILLED))
    book.ready(11, 1, number=1)
    assert book.feed(job_end()) == ["finish 1#1", "end run 1 well"]


@pytest.mark.parametrize(
    ("last_word", "ends"),
    [((), ["failed 1#1 RUN_ENDED", "end run 1 badly"]), ((goodbye(11),), ["finish 1#1", "end run 1 well"])],
    ids=["in the middle", "ended well"],
)
def test_a_job_that_ends_well_while_a_rerun_is_in_the_middle_may_count_the_success_before_it(
    last_word: tuple[OperatorEnded, ...], ends: list[str]
) -> None:
    book = Playbook()  # found by simulation: a copy looked like a rerun, and its half work was called a success
    book.feed(job(), stage())
    book.ready(10, 1)
    book.feed(goodbye(10), end(10, 1, OK), stage(attempt=1, tasks=1), start(11, 1, stage_attempt=1))
    assert book.feed(reg(11, 1), opened(11)) == ["failed 1#0 REVOKED", "reset 1", "accept 1#1 task 11", "ready 1#1"]
    book.feed(*last_word)
    assert book.feed(job_end()) == ends


@pytest.mark.parametrize(
    ("number", "subtask", "known_by", "alarm"),
    [
        (11, 1, "registration", False),  # Spark runs the partition again, so it has lost the output
        (11, 1, "start", True),  # it was launched while the attempt ran, so it does not replace it
        (11, 2, "registration", True),
        (9, 1, "registration", True),
    ],
    ids=["a-later-task", "a-rival", "of-another-subtask", "an-earlier-task"],
)
def test_a_success_whose_output_spark_has_lost_since_fails_nothing(
    number: int, subtask: int, known_by: str, alarm: bool
) -> None:
    book = a_given_up_attempt()
    if known_by == "start":
        book.feed(start(number, subtask, number=1))
    book.feed(reg(number, subtask, number=1))
    book.wait(book.config.heal_after_s)
    book.feed(status({number: (TaskState.RUNNING, subtask), 10: (TaskState.RUNNING, 1)}))
    answers = book.feed(end(10, 1, OK))
    assert ("cancel [0]" in answers) is alarm, answers
