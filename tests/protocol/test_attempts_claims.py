# SPDX-License-Identifier: Apache-2.0

"""The attempt ledger and hostile tasks: a claim that Spark does not confirm displaces nothing (H75).

Tasks 10 to 19 are Spark's. A forger knows all that a task knows: the operator, the run, the subtask, and task ids. Its
own ids are 900 and above, or small, and Spark has never given them out.
"""

from __future__ import annotations

import random

import pytest

from protocol.attempts import (
    AttemptAccepted,
    ConnectionExpired,
    GlobalFailureRaised,
    OperatorRemoved,
    RefuseRegistration,
)
from protocol.facts import StatusReported, TaskOutcome, TaskPlace, TaskState
from protocol.wire.messages import RestoreMode
from tests.mutants.forged_claims import check_forged_claims
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, job_end, opened, reg, stage, start, status

RUNNING, ENDED, SUCCEEDED, UNKNOWN = TaskState.RUNNING, TaskState.ENDED, TaskState.SUCCEEDED, TaskState.UNKNOWN
BATCH, STREAMING = RestoreMode.BATCH, RestoreMode.STREAMING
OK = TaskOutcome.SUCCESS
FORGED = [900, 3]  # newer and older than every real task


def a_running_attempt(mode: RestoreMode = BATCH) -> Playbook:
    """Task 10 runs subtask 1 as attempt 0 of stage 1, job 0."""
    book = Playbook()
    book.feed(job(), stage())
    book.feed(start(10, 1), reg(10, 1, mode=mode), opened(10))
    return book


def look(book: Playbook, seconds: float, **places: tuple[TaskState, int]) -> list[str]:
    """Let time pass; answer each query of Spark. ``places``: t10=(state, partition); other tasks are unknown."""
    known = {int(name[1:]): told for name, told in places.items()}
    answers: list[str] = []
    until = book.now + seconds
    while book.now < until:
        for line in book.wait(min(0.5, until - book.now)):
            answers.append(line)
            if line.startswith("query"):
                answers += book.feed(status(known, asked=[*known, *FORGED]))
    return [line for line in answers if not line.startswith("query")]


# --- a task that does not exist -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BATCH, STREAMING])
@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("number", [0, 1, 99])
def test_a_task_that_spark_does_not_know_is_never_accepted_beside_a_living_one(
    forged: int, number: int, mode: RestoreMode
) -> None:
    book = a_running_attempt(mode)  # H75
    book.feed(reg(forged, 1, number=number, mode=mode))
    look(book, 100, t10=(RUNNING, 1))
    said = [effect for effect in book.effects if isinstance(effect, AttemptAccepted | RefuseRegistration)]
    assert [effect.attempt.task_attempt_id for effect in said if isinstance(effect, AttemptAccepted)] == [10]
    assert [effect.task_attempt_id for effect in said if isinstance(effect, RefuseRegistration)] == [forged]
    assert book.feed(goodbye(10), end(10, 1, OK)) == ["finish 1#0"]


@pytest.mark.parametrize("state", [RUNNING, UNKNOWN])
def test_a_claim_does_not_end_an_attempt_that_spark_has_lost_sight_of(state: TaskState) -> None:
    book = a_running_attempt()  # H75: "unknown" ends an attempt only for a later one that Spark confirms
    book.feed(reg(900, 1, number=1))
    assert look(book, 30, t10=(state, 1)) == []


def test_a_claim_does_not_revoke_a_success() -> None:
    book = a_running_attempt()  # H17, H75
    book.feed(goodbye(10), end(10, 1, OK), reg(900, 1, number=1))
    assert look(book, 100, t10=(SUCCEEDED, 1)) == ["refuse task 900 ATTEMPT_OVER"]


def test_a_claim_whose_connection_breaks_tells_no_failure_and_kills_no_barrier_stage() -> None:
    book = Playbook(parallelism=2)  # H15, H75
    book.feed(job(), stage(tasks=2, barrier=True))
    book.ready(10, 0)
    book.ready(11, 1)
    assert book.feed(reg(900, 1, number=1)) == []
    assert "failed" not in " ".join(book.feed(ConnectionExpired("words", 900)))


def test_a_claim_is_not_a_later_task_that_makes_a_success_harmless() -> None:
    book = a_running_attempt()  # H75: the result of an attempt that we gave up would count twice
    book.feed(ConnectionExpired("words", 10), reg(900, 1, number=1))
    assert book.feed(end(10, 1, OK))[-1] == "cancel [0]"


# --- a free subtask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BATCH, STREAMING])
@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("number", [0, 1, 99])
@pytest.mark.parametrize("said", [(), (opened,), (opened, goodbye)])
def test_a_real_task_wins_against_a_claim_that_came_first(
    forged: int, number: int, mode: RestoreMode, said: tuple[object, ...]
) -> None:
    book = Playbook()  # H75
    book.feed(job(), stage(), reg(forged, 1, number=number, mode=mode))
    for word in said:
        book.feed(word(forged))  # type: ignore[operator]
    book.feed(start(10, 1), reg(10, 1, mode=mode))
    look(book, 10, t10=(RUNNING, 1))
    accepted = [effect.attempt for effect in book.effects if isinstance(effect, AttemptAccepted)]
    assert accepted[-1].task_attempt_id == 10
    assert look(book, 100, t10=(RUNNING, 1)) == []
    assert book.feed(opened(10), end(10, 1, OK)) == ["ready 1#1", "finish 1#1"]


def test_a_real_task_whose_start_was_lost_wins_too() -> None:
    book = Playbook()  # H19, H75
    book.feed(job(), stage(), reg(900, 1), reg(10, 1))
    assert look(book, 10, t10=(RUNNING, 1)) == ["kill 900", "failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 10"]


def test_claims_that_lose_do_not_count_as_kills_of_the_subtask() -> None:
    book = Playbook(attempts_max=1)  # H69, H75
    book.feed(job(), stage(), reg(900, 1), reg(10, 1))
    assert "failed 1#0 GLOBAL_FAILURE" not in look(book, 10, t10=(RUNNING, 1))


def test_a_real_task_whose_start_was_lost_is_not_displaced_while_spark_says_that_it_runs() -> None:
    book = Playbook()  # H19, H75
    book.feed(job(), stage(), reg(10, 1), opened(10), reg(900, 1, number=1))
    assert look(book, 100, t10=(RUNNING, 1)) == ["refuse task 900 ATTEMPT_OVER"]


def test_a_retry_whose_start_was_lost_is_accepted_when_spark_confirms_it() -> None:
    book = a_running_attempt()  # H19, H75
    book.feed(reg(11, 1, number=1))
    assert look(book, 6, t10=(ENDED, 1), t11=(RUNNING, 1)) == ["failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 11"]


# --- a task that is another one -----------------------------------------------------------------------------------


def test_a_claim_to_be_a_task_of_another_partition_is_refused() -> None:
    book = a_running_attempt()  # H75
    book.feed(start(11, 2))
    assert book.feed(reg(11, 1, number=1)) == ["refuse task 11 ATTEMPT_OVER"]
    assert book.feed(reg(11, 2)) == ["accept 2#0 task 11"], "and the real one is not locked out"


def test_a_claim_to_be_a_task_of_another_stage_is_refused() -> None:
    book = a_running_attempt()  # H75
    book.feed(job(1, (2,)), stage(2), start(20, 3, stage=2))
    assert book.feed(reg(20, 3)) == ["refuse task 20 ATTEMPT_OVER"]


@pytest.mark.parametrize("place", [(1, 2), (2, 1)])
def test_an_accepted_claim_that_the_start_refutes_is_over_and_the_real_task_is_not(place: tuple[int, int]) -> None:
    book = Playbook()  # H75
    stage_id, partition = place
    book.feed(job(0, (1, 2)), stage(), reg(11, 1), opened(11))
    assert book.feed(start(11, partition, stage=stage_id)) == ["failed 1#0 LOST_FACT", "reset 1"]
    assert book.feed(goodbye(11)) == ["stale OperatorEnded task 11"]
    if stage_id == 1:
        assert book.feed(reg(11, 2), opened(11)) == ["accept 2#0 task 11", "ready 2#0"]
        assert book.feed(end(11, 2, OK)) == ["finish 2#0"]


@pytest.mark.parametrize("state", [RUNNING, SUCCEEDED, ENDED])
@pytest.mark.parametrize("place", [TaskPlace(1, 2), TaskPlace(2, 1)])
def test_an_accepted_claim_that_a_look_refutes_is_over(state: TaskState, place: TaskPlace) -> None:
    book = Playbook()  # H75: no fact names the task, because they were dropped
    book.feed(job(0, (1, 2)), stage(), reg(11, 1), opened(11))
    book.wait(30)
    answer = StatusReported({0: True}, {11: state}, {11: place})
    assert book.feed(answer) == ["failed 1#0 LOST_FACT", "reset 1"]


def test_a_held_claim_that_the_facts_refute_is_refused_and_tells_nothing() -> None:
    book = a_running_attempt()  # H75
    assert book.feed(reg(11, 1, number=1)) == []
    assert book.feed(start(11, 2)) == ["refuse task 11 ATTEMPT_OVER"]
    assert book.feed(end(11, 2)) == ["failed 2#0 FAILED", "reset 2"], "the real task's death is not hidden"


def test_an_answer_without_a_place_confirms_nothing() -> None:
    book = a_running_attempt()  # H75
    book.feed(reg(900, 1, number=1))
    book.wait(5)
    assert book.feed(StatusReported({0: True}, {10: RUNNING, 900: RUNNING}, {10: TaskPlace(1, 1)})) == []


# --- another run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [(), (opened,), (opened, goodbye)])
@pytest.mark.parametrize("forged_run", [77, 5])
def test_a_claimed_run_does_not_keep_the_real_one_out(said: tuple[object, ...], forged_run: int) -> None:
    book = Playbook()  # H55, H75: nobody has heard of stage 77, and stage 5 is another operator's
    book.feed(job(4, (5,)), stage(5), start(50, 0, stage=5))
    book.wait(20)
    book.feed(reg(900, 1, run=forged_run))
    for word in said:
        book.feed(word(900))  # type: ignore[operator]
    book.feed(job(), stage(), start(10, 0), reg(10, 0))
    look(book, 20, t10=(RUNNING, 0))
    assert book.feed(opened(10)) == ["ready 0#0"]
    assert "end run" not in " ".join(look(book, 100, t10=(RUNNING, 0)))


def test_a_claimed_run_does_not_end_the_real_one() -> None:
    book = Playbook(parallelism=1)  # H55, H75: the run's job is known late, and no task of it is alive for a moment
    book.feed(start(10, 0), reg(10, 0), opened(10), end(10, 0), reg(900, 0, run=77))
    assert look(book, 5.5, t10=(ENDED, 0)) == []
    book.feed(job())  # a look tells the start of each active job
    assert look(book, 30, t10=(ENDED, 0)) == ["refuse task 900 CONCURRENT_RUN"]
    assert book.ready(11, 0, number=1) == ["accept 0#1 task 11", "ready 0#1"]


def test_a_claimed_run_that_ended_well_is_not_a_success() -> None:
    book = Playbook(parallelism=1)  # H75: no final checkpoint may come of it
    book.feed(reg(900, 0, run=77), opened(900), goodbye(900))
    book.feed(job(), stage(), start(10, 0), reg(10, 0))
    assert "end run 77 badly" in look(book, 20, t10=(RUNNING, 0))
    assert book.feed(opened(10), end(10, 0, OK), job_end()) == ["ready 0#1", "finish 0#1", "end run 1 well"]


def test_a_claim_leaves_nothing_behind() -> None:
    book = a_running_attempt()
    book.feed(
        reg(11, 1, number=1), start(11, 2, stage=9), GlobalFailureRaised("words", "boom"), OperatorRemoved("words")
    )
    assert book.ledger.next_deadline() is None


def test_a_claim_that_is_over_does_not_keep_the_real_task_from_registering() -> None:
    book = Playbook()  # H75: found by the histories of forged claims
    book.feed(job(), stage(), reg(11, 1), ConnectionExpired("words", 11))
    assert book.feed(reg(11, 2), opened(11)) == ["accept 2#0 task 11", "ready 2#0"]


def test_a_claimed_run_in_another_stage_of_the_job_does_not_keep_the_real_one_out() -> None:
    book = Playbook()  # H55, H75: found by the histories of forged claims
    book.feed(job(0, (1, 2)), stage(), stage(2), reg(900, 0, run=2), start(10, 0))
    assert book.feed(reg(10, 0)) == []
    assert "accept 0#1 task 10" in look(book, 10, t10=(RUNNING, 0))


def test_a_refused_claim_does_not_keep_spark_from_confirming_the_real_task() -> None:
    book = Playbook(operators=("words", "others"))  # H75: found by the histories of forged claims
    book.feed(job(), stage(), start(10, 1), reg(10, 1), opened(10))
    book.feed(reg(11, 1), ConnectionExpired("words", 11), reg(900, 2))
    assert book.feed(reg(11, 2)) == []
    assert "accept 2#1 task 11" in look(book, 10, t10=(RUNNING, 1), t11=(RUNNING, 2))
    assert book.feed(reg(11, 2, operator="others")) == ["start run 1", "accept 2#0 task 11"], "Spark's place counts"


def test_no_history_of_forged_claims_costs_a_real_task_its_place() -> None:
    first = random.randrange(10**6)  # H75
    for seed in range(first, first + 20):
        print(f"check_forged_claims({seed})")
        check_forged_claims(seed)
