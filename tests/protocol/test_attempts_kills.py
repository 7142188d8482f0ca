# SPDX-License-Identifier: Apache-2.0

"""The ledger counts the attempts that the framework kills, so that no sequence of kills is endless (H69)."""

from __future__ import annotations

import pytest

from protocol.attempts import (
    AttemptCondemned,
    CancelJobs,
    ConnectionExpired,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    OperatorReset,
    RunEnded,
)
from protocol.facts import StageCompleted, TaskOutcome, TaskState
from protocol.wire.messages import RestoreMode
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, job_end, opened, reg, stage, start, status

KILLED, OK = TaskOutcome.KILLED, TaskOutcome.SUCCESS
STREAMING = RestoreMode.STREAMING


def a_run(*, attempts_max: int | None = 3, barrier: bool = False) -> Playbook:
    book = Playbook(attempts_max=attempts_max)
    book.feed(job(), stage(barrier=barrier))
    return book


def silent(task: int, why: str = "event 7 was not confirmed") -> AttemptCondemned:
    return AttemptCondemned("words", task, why)


def kill_next(
    book: Playbook, number: int, *, run: int = 1, subtask: int = 1, mode: int = RestoreMode.BATCH
) -> list[str]:
    """Start attempt ``number`` of a subtask, keep it silent, and let Spark kill it."""
    task = run * 100 + subtask * 10 + number
    book.feed(start(task, subtask, number=number, stage=run), reg(task, subtask, number=number, run=run, mode=mode))
    book.feed(opened(task))
    answers = book.feed(silent(task))
    book.feed(end(task, subtask, KILLED, number=number, stage=run))
    return answers


def kills(book: Playbook) -> list[tuple[int | None, int | None, int, int]]:
    return [(e.subtask, e.attempt, e.count, e.limit) for e in book.effects if isinstance(e, KillTask)]


def test_the_run_fails_when_a_subtask_has_been_killed_attempts_max_times() -> None:
    book = a_run()  # H69
    book.ready(50, 2)
    assert kill_next(book, 0) == ["kill 110", "failed 1#0 CONFIRMATION_TIMEOUT", "reset 1"]
    assert kill_next(book, 1) == ["kill 111", "failed 1#1 CONFIRMATION_TIMEOUT", "reset 1"]
    last = kill_next(book, 2)
    assert last == ["kill 112", "failed 1#2 CONFIRMATION_TIMEOUT", "failed 2#0 GLOBAL_FAILURE", "cancel [0]"]
    assert kills(book) == [(1, 0, 1, 3), (1, 1, 2, 3), (1, 2, 3, 3)]
    assert book.feed(reg(120, 1, number=3)) == ["refuse task 120 COORDINATOR_FAILED"]


def test_the_failure_names_the_subtask_the_count_and_the_last_reason() -> None:
    book = a_run()  # H69
    for number in range(3):
        kill_next(book, number)
    book.feed(job_end(succeeded=False, reason="cancelled"), reg(20, 1, run=2))
    causes = [e.reason for e in book.effects if isinstance(e, CancelJobs | RunEnded)]
    causes += [e.cause for e in book.effects if isinstance(e, OperatorReset)]
    assert len(causes) == 3
    for cause in causes:
        assert "Headgate has killed subtask 1 of operator 'words' 3 times" in cause
        assert "attempts_max=3" in cause
        assert "words[1]#2 (task 112)" in cause
        assert "confirmation timeout: event 7 was not confirmed" in cause


def test_a_single_attempt_allowed_means_the_first_kill_fails_the_run() -> None:
    book = a_run(attempts_max=1)  # H69
    assert kill_next(book, 0) == ["kill 110", "failed 1#0 CONFIRMATION_TIMEOUT", "cancel [0]"]
    assert "killed subtask 1 of operator 'words' once" in str(book.last)


def test_without_a_setting_the_limit_is_sparks_own_default() -> None:
    book = a_run(attempts_max=None)  # H69
    answers = [kill_next(book, number)[-1] for number in range(4)]
    assert answers == ["reset 1", "reset 1", "reset 1", "cancel [0]"]


def test_each_subtask_has_its_own_count() -> None:
    book = a_run()  # H69
    for number in range(2):
        for subtask in range(4):
            assert kill_next(book, number, subtask=subtask)[-1] == f"reset {subtask}"
    assert kill_next(book, 2, subtask=3)[-1] == "cancel [0]"


def test_lost_connections_count_like_confirmation_timeouts() -> None:
    book = a_run(attempts_max=2)  # H69, H24
    book.ready(10, 1)
    assert book.feed(ConnectionExpired("words", 10), end(10, 1, KILLED)) == [
        "kill 10",
        "failed 1#0 CONNECTION_LOST",
        "reset 1",
    ]
    assert kill_next(book, 1)[-1] == "cancel [0]"


def test_a_connection_that_is_lost_while_the_registration_is_held_does_not_count() -> None:
    book = a_run(attempts_max=1)  # H69: such a task fails by itself, and Spark counts the failure
    book.ready(10, 1)
    assert book.feed(reg(11, 1, number=1)) == []
    assert book.feed(ConnectionExpired("words", 11)) == ["kill 11", "refuse task 11 ATTEMPT_OVER"]
    assert kills(book) == [(1, None, 0, 0)]


def test_a_copy_that_spark_kills_before_it_was_accepted_does_not_count() -> None:
    book = a_run(attempts_max=1)  # H69: it lost to a success; its connection may be gone before Spark reports that
    book.ready(10, 1)
    book.feed(reg(11, 1, number=1), goodbye(10), end(10, 1, OK))
    assert book.feed(ConnectionExpired("words", 11))[:2] == ["kill 11", "refuse task 11 ATTEMPT_OVER"]
    assert book.feed(job_end()) == ["end run 1 well"]


def test_a_takeover_counts_against_the_displaced_attempt() -> None:
    book = a_run(attempts_max=2)  # H69, H13
    book.feed(start(10, 1), reg(10, 1, mode=STREAMING), opened(10))
    first = book.feed(start(11, 1, number=1, speculative=True), reg(11, 1, number=1, mode=STREAMING))
    assert first == ["kill 10", "failed 1#0 SUPERSEDED", "reset 1", "accept 1#1 task 11"]
    second = book.feed(start(12, 1, number=2, speculative=True), reg(12, 1, number=2, mode=STREAMING))
    assert second == ["kill 11", "failed 1#1 SUPERSEDED", "cancel [0]", "refuse task 12 COORDINATOR_FAILED"]


def test_an_older_attempt_that_comes_late_counts_when_it_is_refused_and_killed() -> None:
    book = a_run(attempts_max=1)  # H69, H13
    book.feed(start(8, 2, number=1), stage(attempt=1), start(20, 2, stage_attempt=1), reg(20, 2, mode=STREAMING))
    late = book.feed(reg(8, 2, number=1, mode=STREAMING))
    assert late == ["kill 8", "refuse task 8 ATTEMPT_OVER", "failed 2#0 GLOBAL_FAILURE", "cancel [0]"]


def test_an_attempt_that_spark_does_not_know_and_a_later_one_displaces_counts() -> None:
    book = a_run(attempts_max=1)  # H69
    book.ready(10, 1)
    book.feed(reg(11, 1, number=1))
    book.wait(6)
    told = book.feed(status({11: (TaskState.RUNNING, 1)}, asked=[10]))
    assert told[:2] == ["kill 10", "failed 1#0 LOST_FACT"]
    assert "cancel [0]" in told


def test_a_copy_that_lost_to_a_success_does_not_count() -> None:
    book = a_run(attempts_max=1)  # H69: it did not cause the kill
    book.ready(10, 1)
    book.feed(start(11, 1, number=1, speculative=True), reg(11, 1, number=1))
    book.feed(goodbye(10))
    assert book.feed(end(10, 1, OK)) == ["finish 1#0", "kill 11", "failed 1#1 SUPERSEDED"]
    assert kills(book) == [(1, 1, 0, 0)]


def test_kills_of_a_run_that_fails_anyway_do_not_count() -> None:
    book = Playbook(attempts_max=1)  # H69
    book.feed(reg(10, 1), opened(10))
    assert book.feed(GlobalFailureRaised("words", "boom")) == ["kill 10", "failed 1#0 GLOBAL_FAILURE"]
    assert kills(book) == [(1, 0, 0, 0)]


def test_failures_that_spark_counts_itself_do_not_count() -> None:
    book = a_run(attempts_max=2)  # H69
    for task in range(10, 13):
        book.ready(task, 1, number=task - 10)
        assert book.feed(end(task, 1, number=task - 10))[-1] == "reset 1"
    assert kill_next(book, 4)[-1] == "reset 1"


def test_the_next_run_starts_the_count_again() -> None:
    book = a_run()  # H69
    for run in (1, 2, 3):
        for number in range(2):
            assert kill_next(book, number, run=run)[-1] == "reset 1"
        book.feed(job_end(run - 1, succeeded=False, reason="cancelled"), job(run, (run + 1,)), stage(run + 1))


def test_a_success_in_between_does_not_start_the_count_again() -> None:
    book = a_run()  # H69: as in Spark; otherwise a subtask with repeated revocations could be killed without end
    for number in range(2):
        kill_next(book, number)
    book.ready(30, 1, number=2)
    book.feed(goodbye(30), end(30, 1, OK, number=2), end(30, 1, TaskOutcome.RESUBMITTED, number=2))
    assert kill_next(book, 9)[-1] == "cancel [0]"


def test_a_barrier_stage_that_is_run_again_keeps_its_counts() -> None:
    book = a_run(attempts_max=2, barrier=True)  # H69, H15
    book.ready(10, 1)
    assert book.feed(silent(10)) == ["kill 10", "failed 1#0 CONFIRMATION_TIMEOUT"]
    book.feed(end(10, 1, KILLED), StageCompleted(1, 0, "failed"), stage(attempt=1, barrier=True))
    book.feed(start(20, 1, stage_attempt=1), reg(20, 1), opened(20))
    assert book.feed(silent(20)) == ["kill 20", "failed 1#1 CONFIRMATION_TIMEOUT", "cancel [0]"]


@pytest.mark.parametrize("mode", [STREAMING, RestoreMode.BATCH])
def test_rare_kills_are_forgotten_in_streaming_mode_only(mode: RestoreMode) -> None:
    book = a_run(attempts_max=2)  # H69: a stream goes on from its checkpoint; a batch would start over without end
    ends = []
    for number in range(5):
        task = 10 + number
        answers = book.feed(start(task, 1, number=number), reg(task, 1, number=number, mode=mode), opened(task))
        if answers[-1:] != [f"ready 1#{number}"]:
            break
        book.wait(book.config.kills_forgotten_after_s)
        ends.append(book.feed(silent(task), end(task, 1, KILLED, number=number))[-1])
    assert ends == (["reset 1"] * 5 if mode is STREAMING else ["reset 1", "cancel [0]"])


def test_kills_in_quick_succession_end_a_stream() -> None:
    book = a_run(attempts_max=3)  # H69
    book.feed(start(10, 1), reg(10, 1, mode=STREAMING), opened(10))
    book.wait(book.config.kills_forgotten_after_s)
    assert book.feed(silent(10), end(10, 1, KILLED))[-1] == "reset 1"
    assert [kill_next(book, number, mode=STREAMING)[-1] for number in (1, 2)] == ["reset 1", "cancel [0]"]


@pytest.mark.parametrize("attempts_max", [0, -1])
def test_a_limit_below_one_is_refused(attempts_max: int) -> None:
    with pytest.raises(ValueError, match="attempts_max must be an int of at least 1"):
        LedgerConfig(attempts_max=attempts_max)
