# SPDX-License-Identifier: Apache-2.0

"""What somebody who looks sees of an operator's attempts, and that looking often makes nothing new."""

from __future__ import annotations

from protocol.attempts.views import AttemptView, KnownAttempts
from protocol.facts import TaskOutcome
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, job_end, opened, reg, stage, start


def running(subtasks: int = 4) -> Playbook:
    book = Playbook(subtasks)
    book.feed(job(), stage(tasks=subtasks))
    for subtask in range(subtasks):
        book.feed(start(10 + subtask, subtask), reg(10 + subtask, subtask))
    return book


def look(book: Playbook, known: KnownAttempts, slices: int = 2) -> list[list[AttemptView]]:
    """Two attempts at a time."""
    return [book.ledger.view_attempts("words", 2 * number, 2, known) for number in range(slices)]


def states(views: list[list[AttemptView]]) -> list[str]:
    return [view.state.value for slice_ in views for view in slice_]


def test_what_has_not_changed_is_the_same_value() -> None:
    book, known = running(), KnownAttempts()
    first = look(book, known)
    again = look(book, known)
    assert all(one is other for one, other in zip(first, again, strict=True))
    book.feed(opened(13))
    later = look(book, known)
    assert later[0] is first[0]
    assert later[1][0] is first[1][0]
    assert later[1][1] is not first[1][1]
    assert states(later) == ["accepted", "accepted", "accepted", "ready"]
    assert states(first) == ["accepted"] * 4, "a view that was given out does not change"


def test_the_place_of_a_task_is_shown_when_spark_has_told_it() -> None:
    book, known = Playbook(1), KnownAttempts()
    book.feed(job(), stage(tasks=1), reg(10, 0))
    ((before,),) = look(book, known, 1)
    book.feed(start(10, 0))
    ((after,),) = look(book, known, 1)
    assert (before.executor_id, after.executor_id, after.attempt) == ("", "e1", before.attempt)


def test_a_lost_attempt_stays_and_the_next_one_is_added() -> None:
    book, known = running(2), KnownAttempts()
    look(book, known)
    book.feed(end(10, 0), start(20, 0, number=1), reg(20, 0, number=1))
    views = look(book, known)
    assert [[view.attempt.task_attempt_id for view in slice_] for slice_ in views] == [[10, 11], [20]]
    assert states(views) == ["over", "accepted", "accepted"]
    assert views[0][0].failure is not None


def test_the_next_run_shares_nothing_with_the_one_before() -> None:
    book, known = running(1), KnownAttempts()
    look(book, known)
    book.feed(opened(10), goodbye(10), end(10, 0, TaskOutcome.SUCCESS), job_end())
    known.begin(None)
    assert not known.slices, "nothing of a run is kept after its end"
    assert look(book, known) == [[], []]
    book.feed(job(1, (2,)), stage(2, tasks=1), start(30, 0, stage=2), reg(30, 0, run=2))
    ((view,), _) = look(book, known)
    assert view.attempt.task_attempt_id == 30
