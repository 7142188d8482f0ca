# SPDX-License-Identifier: Apache-2.0

"""The attempt ledger: one test per sentence of the contract.

The tasks of one test have increasing ids, as Spark assigns them. ``1#2`` is attempt 2 of subtask 1.
"""

from __future__ import annotations

import pytest

from protocol.attempts import (
    AttemptAccepted,
    AttemptCondemned,
    CancelJobs,
    ConnectionExpired,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    OperatorAdded,
    OperatorRemoved,
    OperatorReset,
    RefuseRegistration,
    RunEnded,
    SubtaskFailed,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import (
    ApplicationEnded,
    ExecutorLost,
    FactsDropped,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskOutcome,
    TaskPlace,
    TaskState,
)
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
KILLED = TaskOutcome.KILLED


def a_running_attempt(parallelism: int = 4, tasks: int = 4) -> Playbook:
    """Subtask 1 runs as attempt 0, task 10, of stage 1, job 0."""
    book = Playbook(parallelism)
    book.feed(job(), stage(tasks=tasks))
    assert book.ready(10, 1) == ["start run 1", "accept 1#0 task 10", "ready 1#0"]
    return book


# --- identity ---------------------------------------------------------------------------------------------


def test_an_attempt_is_named_by_operator_subtask_number_and_spark_task() -> None:
    book = Playbook()  # H1
    book.feed(reg(10, 1))
    effect = book.last
    assert isinstance(effect, AttemptAccepted)
    attempt = effect.attempt
    assert (attempt.operator_id, attempt.subtask, attempt.attempt, attempt.task_attempt_id) == ("words", 1, 0, 10)
    assert (effect.run_id, effect.connection_id) == (1, 1010)


def test_attempt_numbers_rise_across_stage_attempts_though_spark_starts_again_at_zero() -> None:
    book = a_running_attempt()  # H2
    assert book.feed(end(10, 1, TaskOutcome.FETCH_FAILED)) == ["failed 1#0 FETCH_FAILED", "reset 1"]
    assert book.feed(start(20, 1, number=0, stage_attempt=1), reg(20, 1, number=0)) == ["accept 1#1 task 20"]


def test_what_comes_from_an_attempt_that_is_over_is_reported_stale_and_changes_nothing() -> None:
    book = a_running_attempt()  # H3
    book.feed(end(10, 1))
    assert book.feed(goodbye(10)) == ["stale OperatorEnded task 10"]
    assert book.feed(opened(10)) == ["stale OperatorOpened task 10"]
    assert book.feed(AttemptCondemned("words", 10, "late")) == ["stale AttemptCondemned task 10"]
    assert book.feed(ConnectionExpired("words", 10)) == ["stale ConnectionExpired task 10"]


def test_reports_about_unknown_operators_and_tasks_are_stale() -> None:
    book = a_running_attempt()  # H3
    assert book.feed(opened(99)) == ["stale OperatorOpened task 99"]
    assert book.feed(opened(10, "nobody")) == ["stale OperatorOpened task 10"]


# --- ready, failed, reset ---------------------------------------------------------------------------------


def test_a_retry_that_registers_before_the_facts_waits_for_the_end_of_its_predecessor() -> None:
    book = a_running_attempt()  # H10
    assert book.feed(reg(11, 1, number=1)) == []
    assert book.feed(end(10, 1)) == ["failed 1#0 FAILED", "reset 1", "accept 1#1 task 11"]


def test_an_attempt_that_dies_before_it_registered_is_reported_failed() -> None:
    book = Playbook()  # H11
    book.feed(job(), start(10, 0), reg(10, 0), start(11, 1))
    assert book.feed(end(11, 1)) == ["failed 1#0 FAILED", "reset 1"]
    assert book.feed(end(11, 1)) == []
    assert book.feed(start(12, 1, number=1), reg(12, 1, number=1)) == ["accept 1#1 task 12"]


def test_a_death_before_any_registration_of_the_stage_is_reported_with_the_first() -> None:
    book = Playbook()  # H11
    assert book.feed(job(), stage(), start(10, 1), end(10, 1), start(11, 1, number=1)) == []
    assert book.feed(reg(11, 1, number=1)) == ["start run 1", "failed 1#0 FAILED", "reset 1", "accept 1#1 task 11"]


def test_a_death_known_only_after_the_successor_was_accepted_is_not_reported() -> None:
    book = Playbook()  # H10 before H11: the successor's ready and failed have nothing between them
    book.feed(job(), start(11, 1, number=1), reg(11, 1, number=1), opened(11))
    assert book.feed(start(10, 1), end(10, 1)) == []
    assert book.feed(end(11, 1, number=1)) == ["failed 1#0 FAILED", "reset 1"]


def test_a_registration_of_a_task_that_has_ended_is_refused() -> None:
    book = a_running_attempt()  # H11
    book.feed(start(11, 2), end(11, 2))
    assert book.feed(reg(11, 2)) == ["refuse task 11 ATTEMPT_OVER"]


def test_killed_and_superseded_attempts_are_distinguished_from_failed_ones() -> None:
    book = a_running_attempt()  # H12
    assert book.feed(end(10, 1, KILLED, reason="stage cancelled"))[0] == "failed 1#0 KILLED"
    book.ready(11, 1, number=1)
    assert book.feed(end(11, 1, TaskOutcome.COMMIT_DENIED, number=1))[0] == "failed 1#1 FAILED"
    book.ready(12, 1, number=2)
    book.feed(start(13, 1, number=3, speculative=True), reg(13, 1, number=3), opened(13))
    assert book.feed(end(13, 1, KILLED, number=3, reason="another attempt succeeded")) == ["failed 1#3 SUPERSEDED"]


def test_a_task_whose_operator_raised_fails_immediately() -> None:
    book = a_running_attempt()  # H12
    assert book.feed(goodbye(10, "ValueError: no")) == ["failed 1#0 FAILED", "reset 1"]
    assert book.feed(end(10, 1)) == []


# --- several attempts alive -------------------------------------------------------------------------------


def test_a_speculative_copy_is_accepted_too_and_only_the_last_death_resets() -> None:
    book = a_running_attempt()  # H13
    copy = book.feed(start(11, 1, number=1, speculative=True), reg(11, 1, number=1), opened(11))
    assert copy == ["accept 1#1 task 11", "ready 1#1"]
    assert book.feed(end(10, 1)) == ["failed 1#0 FAILED"]
    assert book.feed(end(11, 1, number=1)) == ["failed 1#1 FAILED", "reset 1"]


def test_a_late_retry_in_a_zombie_stage_attempt_is_accepted_too() -> None:
    book = a_running_attempt()  # H13: the older task registers after the newer one
    book.feed(stage(attempt=1), start(8, 2, number=1), start(20, 2, number=0, stage_attempt=1), reg(20, 2))
    assert book.feed(reg(8, 2, number=1)) == ["accept 2#1 task 8"]


def test_when_one_of_two_succeeds_the_other_is_superseded_and_killed() -> None:
    book = a_running_attempt()  # H12, H13
    book.feed(start(11, 1, number=1, speculative=True), reg(11, 1, number=1), opened(11))
    assert book.feed(end(11, 1, OK, number=1)) == ["finish 1#1", "kill 10", "failed 1#0 SUPERSEDED"]
    assert book.feed(end(10, 1, KILLED, reason="another attempt succeeded")) == []


def test_a_copy_that_registers_after_the_success_waits_until_it_ends() -> None:
    book = a_running_attempt()  # H13
    book.feed(start(11, 1, number=1, speculative=True), end(10, 1, OK))
    assert book.feed(reg(11, 1, number=1)) == []
    ended = book.feed(end(11, 1, KILLED, number=1, reason="another attempt succeeded"))
    assert ended == ["refuse task 11 ATTEMPT_OVER", "failed 1#1 SUPERSEDED"]


STREAMING = RestoreMode.STREAMING


def a_streaming_attempt() -> Playbook:
    book = Playbook()
    book.feed(job(), stage(), start(10, 1), reg(10, 1, mode=STREAMING), opened(10))
    return book


def test_in_streaming_mode_a_copy_takes_over_and_the_subtask_is_reset_first() -> None:
    book = a_streaming_attempt()  # H13, H18: the copy restores the state that the coordinator was notified of
    copy = book.feed(start(11, 1, number=1, speculative=True), reg(11, 1, number=1, mode=STREAMING))
    assert copy == ["kill 10", "failed 1#0 SUPERSEDED", "reset 1", "accept 1#1 task 11"]
    assert book.feed(opened(11)) == ["ready 1#1"]
    assert book.feed(end(10, 1, KILLED, reason="superseded")) == []
    assert book.feed(end(11, 1, OK, number=1)) == ["finish 1#1"]


def test_in_streaming_mode_the_attempt_of_a_new_stage_attempt_takes_over_from_the_zombie() -> None:
    book = a_streaming_attempt()  # H13, spark-facts 13
    book.feed(stage(attempt=1), start(20, 1, number=0, stage_attempt=1))
    taken_over = book.feed(reg(20, 1, number=0, mode=STREAMING))
    assert taken_over == ["kill 10", "failed 1#0 SUPERSEDED", "reset 1", "accept 1#1 task 20"]


def test_in_streaming_mode_an_older_attempt_that_comes_late_is_refused_and_killed() -> None:
    book = a_streaming_attempt()  # H13
    book.feed(stage(attempt=1), start(8, 2, number=1), start(20, 2, number=0, stage_attempt=1))
    book.feed(reg(20, 2, mode=STREAMING))
    assert book.feed(reg(8, 2, number=1, mode=STREAMING)) == ["kill 8", "refuse task 8 ATTEMPT_OVER"]


def test_in_streaming_mode_a_copy_of_an_attempt_that_ended_well_waits() -> None:
    book = a_streaming_attempt()  # H13: its output may be counted already
    book.feed(goodbye(10), start(11, 1, number=1, speculative=True))
    assert book.feed(reg(11, 1, number=1, mode=STREAMING)) == []
    assert book.feed(end(10, 1)) == ["failed 1#0 FAILED", "reset 1", "accept 1#1 task 11"]


# --- condemned --------------------------------------------------------------------------------------------


def test_a_condemned_attempt_is_killed_by_its_own_id_and_over_immediately() -> None:
    book = a_running_attempt()  # H25, spark-facts 16
    book.ready(11, 2)
    answers = book.feed(AttemptCondemned("words", 10, "event 7 was not confirmed within 5 s"))
    assert answers == ["kill 10", "failed 1#0 CONFIRMATION_TIMEOUT", "reset 1"]
    failed = book.effects[-2]
    assert isinstance(failed, SubtaskFailed)
    assert "event 7" in failed.reason.text
    assert book.feed(goodbye(10), end(10, 1, KILLED)) == ["stale OperatorEnded task 10"]


def test_an_attempt_that_is_silent_is_killed_with_a_separate_kind() -> None:
    book = a_running_attempt()  # H94
    answers = book.feed(AttemptCondemned("words", 10, "no sign of life", silent=True))
    assert answers == ["kill 10", "failed 1#0 HEARTBEAT_TIMEOUT", "reset 1"]


def test_an_attempt_whose_connection_expired_is_killed_and_failed() -> None:
    book = a_running_attempt()  # H24
    assert book.feed(ConnectionExpired("words", 10)) == ["kill 10", "failed 1#0 CONNECTION_LOST", "reset 1"]


def test_an_attempt_with_an_unreadable_event_is_not_said_to_have_missed_a_deadline() -> None:  # H62
    book = a_running_attempt()
    answers = book.feed(AttemptCondemned("words", 10, "an unreadable event", unusable=True))
    assert answers == ["kill 10", "failed 1#0 UNUSABLE", "reset 1"]
    kill = next(effect for effect in book.effects if isinstance(effect, KillTask))
    assert kill.reason == "unusable: an unreadable event"


def test_an_attempt_that_said_it_ended_well_is_not_condemned() -> None:
    book = a_running_attempt()  # H25: Spark may have its output already
    book.feed(goodbye(10))
    assert book.feed(AttemptCondemned("words", 10, "late")) == ["stale AttemptCondemned task 10"]
    assert book.feed(ConnectionExpired("words", 10)) == ["stale ConnectionExpired task 10"]
    assert book.feed(end(10, 1, OK)) == ["finish 1#0"]


def test_a_success_of_a_superseded_attempt_after_the_winner_was_revoked_fails_the_job_too() -> None:
    book = a_running_attempt()  # the invariant: the coordinator was told that it is over
    book.feed(stage(attempt=1), start(20, 1, stage_attempt=1), reg(20, 1))
    assert book.feed(end(10, 1, OK)) == ["finish 1#0", "kill 20", "failed 1#1 SUPERSEDED"]
    assert book.feed(end(10, 1, TaskOutcome.RESUBMITTED)) == ["failed 1#0 REVOKED", "reset 1"]
    assert book.feed(end(20, 1, OK, stage_attempt=1)) == ["cancel [0]"]


# --- success and its revocation ---------------------------------------------------------------------------


def test_an_attempt_that_registers_after_a_later_one_has_succeeded_waits_if_that_ones_start_was_lost() -> None:
    book = Playbook()  # H13, H17, H19
    book.feed(job(), stage(), reg(20, 0, number=1), opened(20), goodbye(20), end(20, 0, OK, number=1))
    assert book.feed(start(10, 0), reg(10, 0)) == [], "a copy, or its success was revoked: a look will tell"


def test_a_resubmitted_success_is_failed_and_reset_like_any_other() -> None:
    book = a_running_attempt()  # H17, spark-facts 9
    book.feed(goodbye(10), end(10, 1, OK))
    assert book.feed(end(10, 1, TaskOutcome.RESUBMITTED)) == ["failed 1#0 REVOKED", "reset 1"]
    assert book.feed(end(10, 1, OK), end(10, 1, TaskOutcome.RESUBMITTED)) == []
    assert book.ready(11, 1, number=1) == ["accept 1#1 task 11", "ready 1#1"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rerun_of_a_finished_subtask_revokes_the_success_though_no_fact_said_so(number: int) -> None:
    book = a_running_attempt()  # H17: after a fetch failure Spark posts no Resubmitted
    book.feed(end(10, 1, OK))
    again = start(20, 1, number=number, stage_attempt=1 - number)
    assert book.feed(again, reg(20, 1, number=number)) == ["failed 1#0 REVOKED", "reset 1", "accept 1#1 task 20"]


def test_a_zombie_that_registers_after_its_successor_finished_revokes_nothing() -> None:
    book = a_running_attempt()  # H17
    book.feed(stage(attempt=1), start(8, 2, number=1), start(20, 2, stage_attempt=1), reg(20, 2))
    book.feed(opened(20), end(20, 2, OK, stage_attempt=1))
    assert book.feed(reg(8, 2, number=1)) == []
    assert book.feed(end(8, 2, KILLED, number=1)) == ["refuse task 8 ATTEMPT_OVER", "failed 2#1 SUPERSEDED"]


# --- executors --------------------------------------------------------------------------------------------


def test_a_lost_executor_fails_its_attempts_and_their_doubled_ends_are_harmless() -> None:
    book = a_running_attempt()  # H19, spark-facts 9
    book.feed(start(11, 2, executor="e2"), reg(11, 2), opened(11), start(12, 3, executor="e1"))
    lost = ["failed 1#0 EXECUTOR_LOST", "reset 1", "failed 3#0 EXECUTOR_LOST", "reset 3"]
    assert book.feed(ExecutorLost("e1", "gone")) == lost
    assert book.feed(end(10, 1, TaskOutcome.EXECUTOR_LOST), ExecutorLost("e1", "gone")) == []


def test_a_lost_executor_does_not_fail_a_success_but_only_spark_can_revoke_it() -> None:
    book = a_running_attempt()  # H17
    book.feed(end(10, 1, OK))
    assert book.feed(ExecutorLost("e1")) == []


def test_an_attempt_that_ended_well_before_its_executor_was_lost_waits_for_spark() -> None:
    book = a_running_attempt()  # H17: Spark may have counted its success just before
    assert book.feed(goodbye(10), ExecutorLost("e1")) == []
    assert book.feed(end(10, 1, OK)) == ["finish 1#0"]


# --- missing, doubled, late facts -------------------------------------------------------------------------


def test_a_plain_successor_shows_that_the_end_of_its_predecessor_was_dropped() -> None:
    book = a_running_attempt()  # H19, spark-facts 7
    assert book.feed(start(11, 1, number=1)) == []
    assert book.feed(reg(11, 1, number=1)) == ["failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 11"]


def test_a_lost_end_of_an_attempt_that_ended_well_counts_as_a_revoked_success() -> None:
    book = a_running_attempt()  # H17, H56: the same splits for the same subtask are correct in either case
    book.feed(goodbye(10), start(11, 1, number=1))
    assert book.feed(reg(11, 1, number=1)) == ["failed 1#0 REVOKED", "reset 1", "accept 1#1 task 11"]


def test_when_no_fact_decides_the_engine_is_asked() -> None:
    book = a_running_attempt()  # H19
    book.feed(reg(11, 1, number=1))
    assert book.wait(4.9) == []
    assert book.wait(0.2) == ["query tasks [10, 11] jobs [0]"]
    assert book.wait(1.8) == []
    assert book.wait(0.2) == ["query tasks [10, 11] jobs [0]"], "no answer: it is asked again"
    answer = status({10: (TaskState.ENDED, 1), 11: (TaskState.RUNNING, 1)})
    assert book.feed(answer) == ["failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 11"]


@pytest.mark.parametrize(
    ("old", "answers"),
    [
        (TaskState.RUNNING, ["accept 1#1 task 11"]),
        (TaskState.ENDED, ["failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 11"]),
        (TaskState.UNKNOWN, ["kill 10", "failed 1#0 LOST_FACT", "reset 1", "accept 1#1 task 11"]),
        (TaskState.SUCCEEDED, ["finish 1#0"]),
    ],
)
def test_each_answer_of_the_engine_decides(old: TaskState, answers: list[str]) -> None:
    book = a_running_attempt()  # H19
    book.feed(reg(11, 1, number=1))
    book.wait(5)
    assert book.feed(status({10: (old, 1), 11: (TaskState.RUNNING, 1)})) == answers


def test_a_task_that_long_outlives_a_success_is_a_rerun_not_a_copy() -> None:
    book = a_running_attempt()  # H17, H19: Spark kills redundant copies within seconds
    book.feed(reg(11, 1, number=1), end(10, 1, OK))
    book.wait(4.9)
    runs = status({11: (TaskState.RUNNING, 1)})
    assert book.feed(runs) == []
    book.wait(0.2)
    assert book.feed(runs) == ["failed 1#0 REVOKED", "reset 1", "accept 1#1 task 11"]


def test_an_answer_to_a_look_from_before_the_registration_decides_nothing() -> None:
    book = a_running_attempt()  # H19: the old attempt may have died since
    book.feed(reg(11, 1, number=1))
    assert book.feed(StatusReported({}, {10: TaskState.RUNNING})) == []


def test_a_held_registration_whose_task_is_over_is_refused() -> None:
    book = a_running_attempt()  # H19
    book.feed(reg(11, 1, number=1))
    book.wait(5)
    answers = book.feed(status({10: (TaskState.RUNNING, 1), 11: (TaskState.ENDED, 1)}))
    assert answers == ["refuse task 11 ATTEMPT_OVER", "failed 1#1 FAILED"]


def test_a_held_registration_whose_connection_went_away_is_dropped() -> None:
    book = a_running_attempt()  # H19
    book.feed(reg(11, 1, number=1))
    assert book.feed(goodbye(11)) == ["stale OperatorEnded task 11"]
    assert book.feed(ConnectionExpired("words", 11)) == ["kill 11", "refuse task 11 ATTEMPT_OVER"]
    assert book.feed(end(11, 1, KILLED, number=1)) == ["failed 1#1 KILLED"], "Spark confirms that it existed"


def test_no_registration_is_held_permanently() -> None:
    book = a_running_attempt()  # H19, H48
    book.feed(reg(11, 1, number=1))
    answers = book.wait(60)
    assert answers[-1] == "refuse task 11 ATTEMPT_OVER"
    assert book.ledger.next_deadline() is not None  # the audit of the run goes on


def test_a_regular_look_finds_the_end_that_nobody_misses() -> None:
    book = a_running_attempt()  # H19
    assert book.wait(30) == ["query tasks [10] jobs [0]"]
    assert book.feed(StatusReported({0: True}, {10: TaskState.ENDED})) == ["failed 1#0 LOST_FACT", "reset 1"]
    book.ready(11, 1, number=1)
    book.wait(30)
    assert book.feed(StatusReported({0: True}, {11: TaskState.SUCCEEDED})) == ["finish 1#1"]
    assert book.feed(end(11, 1, OK, number=1)) == []


def test_dropped_facts_bring_a_look_soon() -> None:
    book = a_running_attempt()  # H19
    book.feed(FactsDropped(3))
    assert book.wait(5) == ["query tasks [10] jobs [0]"]


def test_a_stage_that_completed_brings_a_look_soon() -> None:
    book = a_running_attempt()  # H19, spark-facts 8
    book.feed(StageCompleted(1, 0))
    assert book.wait(5) == ["query tasks [10] jobs [0]"]


def test_an_attempt_that_the_engine_does_not_know_is_left_alone_unless_a_successor_waits() -> None:
    book = a_running_attempt()  # H19: Spark's own records lose facts, too
    book.wait(30)
    assert book.feed(StatusReported({}, {10: TaskState.UNKNOWN})) == []


def test_every_doubled_fact_is_harmless() -> None:
    book = a_running_attempt()  # H19
    assert book.feed(job(), stage(), start(10, 1)) == []
    first = book.feed(end(10, 1))
    assert first == ["failed 1#0 FAILED", "reset 1"]
    assert book.feed(end(10, 1), end(10, 1)) == []
    assert book.feed(job_end()) == ["end run 1 well"]
    assert book.feed(job_end(), job(), end(10, 1), stage(), start(10, 1)) == []


# --- global failover --------------------------------------------------------------------------------------


def test_a_global_failure_fails_every_live_attempt_and_cancels_the_job_once() -> None:
    book = a_running_attempt()  # H8, H15
    book.ready(11, 2)
    book.ready(12, 3)
    book.feed(goodbye(12), end(12, 3, OK))
    failed = ["failed 1#0 GLOBAL_FAILURE", "failed 2#0 GLOBAL_FAILURE", "cancel [0]"]
    assert book.feed(GlobalFailureRaised("words", "boom")) == failed
    assert book.feed(GlobalFailureRaised("words", "again")) == []
    assert book.feed(reg(13, 1, number=1)) == ["refuse task 13 COORDINATOR_FAILED"]
    assert "boom" in book.refusal
    assert book.feed(end(10, 1, KILLED), end(13, 1, number=1)) == []


def test_the_reset_after_a_global_failure_comes_once_before_the_next_run() -> None:
    book = a_running_attempt()  # H15
    book.feed(GlobalFailureRaised("words", "boom"), GlobalFailureRaised("words", "again"))
    assert book.feed(job_end(succeeded=False, reason="cancelled")) == ["end run 1 badly"]
    assert book.feed(reg(20, 1, run=2)) == ["start run 2", "reset all", "accept 1#1 task 20"]
    resets = [effect for effect in book.effects if isinstance(effect, OperatorReset)]
    assert [reset.cause for reset in resets] == ["boom"]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_failed_run_says_whether_spark_called_its_job_a_success(succeeded: bool) -> None:  # H174
    book = a_running_attempt()
    book.feed(GlobalFailureRaised("words", "boom"))
    assert book.feed(job_end(succeeded=succeeded, reason="" if succeeded else "cancelled")) == ["end run 1 badly"]
    (ended,) = (effect for effect in book.effects if isinstance(effect, RunEnded))
    assert ended.job_succeeded is succeeded


def test_a_global_failure_before_the_first_run_resets_at_its_start() -> None:
    book = Playbook()  # H8, H15
    assert book.feed(GlobalFailureRaised("words", "boom")) == []
    assert book.feed(reg(10, 1)) == ["start run 1", "reset all", "accept 1#0 task 10"]


def test_a_job_that_becomes_known_after_the_global_failure_is_cancelled_then() -> None:
    book = Playbook()  # H15, H19
    book.feed(reg(10, 1))
    assert book.feed(GlobalFailureRaised("words", "boom")) == ["kill 10", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(job()) == ["cancel [0]"]


def test_one_failed_task_of_a_barrier_stage_fails_all_and_resets_the_operator_once() -> None:
    book = a_running_barrier_stage()  # H15, spark-facts 19
    assert book.feed(end(10, 0)) == ["failed 0#0 FAILED", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(end(11, 1, KILLED), StageCompleted(1, 0, "failed"), stage(attempt=1, barrier=True)) == []
    again = book.feed(start(20, 0, stage_attempt=1), reg(20, 0), start(21, 1, stage_attempt=1), reg(21, 1))
    assert again == ["reset all", "accept 0#1 task 20", "accept 1#1 task 21"]


def test_a_barrier_task_of_a_failed_stage_attempt_is_refused() -> None:
    book = Playbook(parallelism=3)  # H15
    book.feed(job(), stage(barrier=True))
    book.ready(10, 0)
    book.feed(start(12, 2), end(10, 0))
    assert book.feed(reg(12, 2)) == ["refuse task 12 ATTEMPT_OVER"]
    assert book.feed(reg(21, 1)) == [], "its start will say of which stage attempt it is"
    assert book.feed(start(21, 1, stage_attempt=1)) == ["reset all", "accept 1#0 task 21"]


def test_a_barrier_task_waits_for_its_start_because_a_failure_may_be_on_its_way() -> None:
    book = Playbook()  # H15
    book.feed(job(), stage(barrier=True), start(10, 0), reg(10, 0))
    assert book.feed(reg(21, 1)) == [], "it may be of the next stage attempt"
    assert book.feed(end(10, 0)) == ["failed 0#0 FAILED"]
    assert book.feed(start(21, 1, stage_attempt=1)) == ["reset all", "accept 1#0 task 21"]


def test_late_deaths_of_a_failed_barrier_stage_attempt_are_ignored() -> None:
    book = a_running_barrier_stage()  # H15
    book.feed(end(10, 0), start(20, 0, stage_attempt=1), reg(20, 0), opened(20))
    assert book.feed(start(9, 1), end(9, 1, KILLED)) == []
    assert book.feed(StageCompleted(1, 0, "failed")) == []


def test_a_barrier_stage_that_starts_again_shows_that_it_failed() -> None:
    book = a_running_barrier_stage()  # H15, H19
    assert book.feed(stage(attempt=1, barrier=True)) == ["failed 0#0 GLOBAL_FAILURE", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(start(20, 0, stage_attempt=1), reg(20, 0)) == ["reset all", "accept 0#1 task 20"]


@pytest.mark.parametrize(
    "seen", [StageCompleted(1, 0, "failed"), stage(attempt=1, tasks=2, barrier=True)], ids=["end", "restart"]
)
def test_a_task_that_proves_to_be_of_a_failed_barrier_stage_attempt_fails_with_the_next_sign_of_it(
    seen: StageCompleted | StageSubmitted,
) -> None:
    book = Playbook(parallelism=2)  # H15, H19
    book.feed(job(), stage(tasks=2, barrier=True), start(10, 0), reg(10, 0), opened(10))
    assert book.feed(end(10, 0), reg(21, 1)) == ["failed 0#0 FAILED"]
    book.wait(book.config.heal_after_s)  # the start of task 21 is late, so Spark is asked instead
    assert "accept 1#0 task 21" in book.feed(status({21: (TaskState.RUNNING, 1)}), opened(21))
    assert book.feed(start(21, 1)) == []
    assert book.feed(seen) == ["failed 1#0 GLOBAL_FAILURE"]


def test_a_run_that_opens_in_a_later_attempt_of_its_barrier_stage_refuses_the_tasks_of_earlier_ones() -> None:
    book = Playbook(parallelism=2)  # H15, H55
    book.feed(job(), stage(tasks=2, barrier=True), start(10, 0), stage(attempt=1, tasks=2, barrier=True))
    assert book.feed(reg(10, 0)) == ["start run 1", "refuse task 10 ATTEMPT_OVER"]
    assert book.feed(start(20, 0, stage_attempt=1), reg(20, 0)) == ["accept 0#0 task 20"]


def test_a_finished_barrier_task_is_revoked_by_the_failure_of_another() -> None:
    book = a_running_barrier_stage()  # H15, H17
    book.feed(end(10, 0, OK))
    assert book.feed(end(11, 1)) == ["failed 1#0 FAILED", "failed 0#0 REVOKED"]


# --- runs -------------------------------------------------------------------------------------------------


def test_a_second_action_resets_the_operator_once_before_any_of_its_tasks_is_accepted() -> None:
    book = a_running_attempt()  # H2, H55
    book.feed(end(10, 1, OK))
    assert book.feed(job_end()) == ["end run 1 well"]
    again = book.feed(job(1, (2,)), reg(20, 1, run=2), reg(21, 2, run=2))
    assert again == ["start run 2", "reset all", "accept 1#1 task 20", "accept 2#0 task 21"]


def test_two_runs_at_the_same_time_are_refused_with_the_fix() -> None:
    book = a_running_attempt()  # H55
    book.wait(10)
    assert book.feed(job(1, (2,)), reg(20, 1, run=2)) == []
    assert book.wait(1) == ["query tasks [10, 20] jobs [0]"]
    assert book.feed(StatusReported({0: True}, {10: TaskState.RUNNING})) == ["refuse task 20 CONCURRENT_RUN"]
    assert book.refusal == (
        "operator 'words' is in use by stage 1 of job 0; "
        "run the two actions one after the other, or coordinate two operators"
    )


def test_a_registration_that_waited_for_another_run_does_not_end_its_own() -> None:
    book = a_running_attempt()  # H55; found by simulation: its run, whose jobs were not known, ended while it ran
    assert book.feed(reg(20, 1, run=2), reg(21, 1, number=1, run=2)) == []
    book.feed(end(10, 1, OK))
    assert book.feed(job_end())[-3:] == ["start run 2", "reset all", "accept 1#1 task 20"]
    book.feed(opened(20), end(20, 1, OK, stage=2))
    assert not [effect for effect in book.wait(20) if effect.startswith("end run")]


def test_a_success_revoked_after_a_global_failure_resets_no_subtask() -> None:
    book = a_running_attempt()  # H15; found by simulation
    book.feed(end(10, 1, OK), GlobalFailureRaised("words", "fail_job"))
    assert book.feed(end(10, 1, TaskOutcome.RESUBMITTED)) == ["failed 1#0 REVOKED"]
    assert book.feed(job_end(0, succeeded=False), reg(20, 1, run=2))[-3:] == [
        "start run 2",
        "reset all",
        "accept 1#1 task 20",
    ]


def test_a_global_failure_of_a_run_whose_job_is_not_known_kills_its_tasks() -> None:
    book = Playbook()  # H48; found by simulation: an unresponsive task delayed a job that could not be cancelled
    book.feed(reg(10, 1), opened(10))
    assert book.feed(GlobalFailureRaised("words", "fail_job")) == ["kill 10", "failed 1#0 GLOBAL_FAILURE"]
    assert book.feed(reg(11, 1, number=1)) == ["refuse task 11 COORDINATOR_FAILED"]


def test_an_operator_in_two_stages_of_one_job_is_refused_immediately() -> None:
    book = Playbook()  # H55
    book.feed(job(0, (1, 2)), reg(10, 1), reg(20, 1, run=2))
    assert book.feed(start(10, 1)) == ["refuse task 20 CONCURRENT_RUN"]


def test_a_lost_end_of_the_first_job_is_healed_by_a_look() -> None:
    book = a_running_attempt(tasks=1)  # H19, H55
    book.feed(end(10, 1, OK))
    book.wait(20)
    book.feed(job(1, (2,)), reg(20, 1, run=2))
    assert book.wait(1) == ["query tasks [20] jobs [0]"]
    healed = ["end run 1 well", "start run 2", "reset all", "accept 1#1 task 20"]
    answer = StatusReported({0: False}, {20: TaskState.RUNNING})
    assert book.feed(answer) == [], "its end may be on its way"
    assert book.wait(2) == ["query tasks [20] jobs [0]"]
    assert book.feed(answer) == healed


def test_a_look_that_overtakes_the_end_of_a_job_does_not_say_how_it_ended() -> None:
    book = a_running_attempt()  # H19 (found by the simulation, seed 53822)
    book.feed(goodbye(10))
    book.wait(5)
    assert book.feed(StatusReported({0: False}, {10: TaskState.RUNNING})) == []
    assert book.feed(job_end(succeeded=False, reason="cancelled")) == ["failed 1#0 RUN_ENDED", "end run 1 badly"]


def test_a_look_without_an_answer_is_repeated_soon() -> None:
    book = a_running_attempt()  # H19
    look = ["query tasks [10] jobs [0]"]
    assert book.wait(30) == look
    assert book.wait(2) == look
    assert book.feed(StatusReported({0: True}, {10: TaskState.RUNNING})) == []
    assert book.wait(29.9) == []
    assert book.wait(0.2) == look


def test_a_job_that_has_just_started_is_not_asked_about_yet() -> None:
    book = a_running_attempt()  # H19: Spark's own records lag the bus, too
    book.feed(end(10, 1, OK), job(1, (2,)), reg(20, 1, run=2))
    assert book.wait(1) == ["query tasks [20] jobs []"]


@pytest.mark.parametrize(("outcome", "how"), [(OK, "well"), (TaskOutcome.FAILED, "badly")])
def test_a_run_ends_at_the_second_look_that_knows_no_job_of_it(outcome: TaskOutcome, how: str) -> None:
    book = Playbook(parallelism=1)  # H19: the facts of both ends of its job are lost
    book.ready(10, 0)
    book.feed(end(10, 0, outcome))
    look, answer = ["query tasks [] jobs []"], StatusReported({}, {})
    assert book.wait(5) == look
    assert book.feed(answer) == [], "the facts may be on their way"
    assert book.wait(1.9) == []
    assert book.feed(answer) == [], "an answer to another operator's look comes at any moment"
    assert book.wait(0.2) == look
    assert book.feed(answer) == [f"end run 1 {how}"]
    assert book.ledger.next_deadline() is None


def test_a_run_between_two_attempts_goes_on_if_a_look_tells_its_job() -> None:
    book = Playbook(parallelism=1)  # H19: only the start of its job is lost
    book.ready(10, 0)
    book.feed(end(10, 0))
    for _ in range(5):
        book.wait(5)
        assert book.feed(job(), StatusReported({}, {})) == []
    assert book.ready(11, 0, number=1) == ["accept 0#1 task 11", "ready 0#1"]


def test_a_run_that_lives_without_a_known_job_goes_on() -> None:
    book = Playbook(parallelism=1)  # H19
    book.ready(10, 0)
    for state in (TaskState.RUNNING, TaskState.UNKNOWN, TaskState.RUNNING):
        book.wait(31)
        assert book.feed(StatusReported({}, {10: state})) == []
    book.feed(end(10, 0))
    book.wait(31)
    assert book.feed(StatusReported({}, {10: TaskState.ENDED})) == [], "counted from when nothing lives"


def test_a_run_whose_job_was_never_known_ends_when_the_next_comes_and_nothing_of_it_runs() -> None:
    book = Playbook()  # H19, H55
    book.feed(reg(10, 1), opened(10), reg(20, 1, run=2))
    assert book.wait(5) == ["query tasks [10, 20] jobs []"]
    places = {10: TaskPlace(1, 1), 20: TaskPlace(2, 1)}
    answers = book.feed(StatusReported({}, {10: TaskState.ENDED, 20: TaskState.RUNNING}, places))
    assert answers == [
        "failed 1#0 LOST_FACT",
        "reset 1",
        "end run 1 badly",
        "start run 2",
        "reset all",
        "accept 1#1 task 20",
    ]


def test_a_run_whose_job_was_never_known_is_in_the_way_while_a_task_of_it_runs() -> None:
    book = Playbook()  # H19, H55
    book.feed(reg(10, 1), opened(10), reg(20, 1, run=2))
    book.wait(5)
    assert book.feed(status({10: (TaskState.RUNNING, 1)}, jobs={})) == ["refuse task 20 CONCURRENT_RUN"]


@pytest.mark.parametrize("jobs", [{}, {0: True}])
def test_a_run_of_which_an_answer_says_nothing_is_not_ended_by_the_next(jobs: dict[int, bool]) -> None:
    book = Playbook()  # H19, H55: its job is known in one case, and Spark has lost sight of its task in both
    book.feed(*([job()] if jobs else []), start(10, 1), reg(10, 1), opened(10), reg(20, 1, run=2))
    book.wait(5)
    known = {10: TaskState.UNKNOWN, 20: TaskState.RUNNING}
    assert "end run 1 badly" not in book.feed(StatusReported({}, known, {20: TaskPlace(2, 1)}))


def test_the_end_of_a_job_whose_start_was_lost_ends_the_run_that_waits_for_it() -> None:
    book = Playbook(parallelism=1)  # H19, H57
    book.feed(reg(10, 0), opened(10), end(10, 0, OK))
    assert book.feed(job_end(7)) == ["end run 1 well"]


def test_a_stage_that_nobody_has_heard_of_outlives_one_of_its_two_jobs() -> None:
    book = Playbook()  # H55
    book.feed(job(0, (1, 2)), job(1, (1, 3)), job_end(0))
    book.feed(stage())
    assert book.ready(10, 0) == ["start run 1", "accept 0#0 task 10", "ready 0#0"]


def test_a_run_ends_when_the_last_of_its_jobs_has_ended() -> None:
    book = a_running_attempt()  # H57: a shuffle stage can serve two jobs
    book.feed(job(1, (1, 2)))
    assert book.feed(job_end(0)) == []
    assert book.feed(end(10, 1, OK)) == ["finish 1#0"]
    assert book.feed(job_end(1)) == ["end run 1 well"]


def test_a_failed_job_fails_every_live_attempt_and_late_facts_are_ignored() -> None:
    book = a_running_attempt()  # H15, H57, spark-facts 8
    book.ready(11, 2)
    answers = book.feed(job_end(succeeded=False, reason="stage 1 was cancelled"))
    assert answers == ["failed 1#0 RUN_ENDED", "failed 2#0 RUN_ENDED", "end run 1 badly"]
    over = book.last
    assert isinstance(over, RunEnded)
    assert over.reason == "stage 1 was cancelled"
    assert book.feed(end(10, 1, KILLED), end(11, 2, KILLED), StageCompleted(1, 0, "cancelled")) == []


def test_a_task_of_a_run_that_has_ended_is_refused() -> None:
    book = a_running_attempt()  # H57
    book.feed(job_end())
    assert book.feed(reg(11, 2)) == ["refuse task 11 ATTEMPT_OVER"]


def test_a_task_whose_job_ended_before_its_registration_opens_no_run() -> None:
    book = a_running_attempt()  # H57
    book.feed(end(10, 1, OK), job_end(), job(1, (2,)), start(20, 1, stage=2))
    assert book.feed(StageCompleted(2, 0), job_end(1)) == []
    assert book.feed(reg(20, 1, run=2)) == ["refuse task 20 ATTEMPT_OVER"]


def test_an_end_that_a_look_told_first_keeps_its_place_among_the_facts() -> None:
    book = a_running_attempt()  # H17, H19 (found by the simulation, seed 80838)
    book.feed(goodbye(10))
    book.wait(5)
    assert book.feed(StatusReported({}, {10: TaskState.SUCCEEDED})) == ["finish 1#0"]
    book.feed(start(20, 1, stage_attempt=1))
    assert book.feed(reg(20, 1)) == [], "the end may have come before or after its launch"
    assert book.feed(end(10, 1, OK), job_end()) == ["end run 1 well", "refuse task 20 ATTEMPT_OVER"]


def test_of_two_that_wait_the_older_is_accepted_first() -> None:
    book = a_running_attempt()  # H2, H10
    book.feed(end(10, 1, OK), reg(21, 1, run=2, number=1), reg(20, 1, run=2))
    assert book.feed(job_end())[-1] == "accept 1#1 task 20"
    assert book.feed(start(21, 1, number=1, stage=2)) == ["failed 1#1 LOST_FACT", "reset 1", "accept 1#2 task 21"]


def test_a_job_that_failed_by_its_coordinator_ends_badly_whatever_spark_says() -> None:
    book = a_running_attempt()  # H15
    book.feed(GlobalFailureRaised("words", "boom"))
    assert book.feed(job_end(succeeded=True)) == ["end run 1 badly"]


def test_the_end_of_the_application_ends_every_run_as_failed() -> None:
    book = a_running_attempt()  # H57
    assert book.feed(ApplicationEnded()) == ["failed 1#0 RUN_ENDED", "end run 1 badly"]
    assert book.feed(reg(11, 1)) == ["refuse task 11 SHUTTING_DOWN"]
    assert book.ledger.next_deadline() is None


def test_a_removed_operator_ends_its_run_and_is_unknown_afterwards() -> None:
    book = a_running_attempt()  # H57
    assert book.feed(OperatorRemoved("words")) == ["failed 1#0 RUN_ENDED", "end run 1 badly"]
    assert book.feed(reg(11, 1, number=1)) == ["refuse task 11 UNKNOWN_OPERATOR"]
    assert book.feed(OperatorRemoved("words")) == []
    assert book.feed(OperatorAdded("words", 4)) == []


# --- refusals ---------------------------------------------------------------------------------------------


def test_an_unknown_operator_is_refused_and_the_known_ones_are_listed() -> None:
    book = Playbook(operators=("words", "lines"))
    assert book.feed(reg(10, 1, operator="wrods")) == ["refuse task 10 UNKNOWN_OPERATOR"]
    assert "'lines', 'words'" in book.refusal


def test_a_subtask_out_of_range_is_refused_with_the_number_that_is_needed() -> None:
    book = Playbook(parallelism=4)
    book.feed(job(), stage(tasks=8))
    assert book.feed(reg(10, 4)) == ["refuse task 10 SUBTASK_OUT_OF_RANGE"]
    assert "an RDD with 8 partitions needs parallelism=8" in book.refusal


def test_fewer_partitions_than_subtasks_are_refused_with_every_way_out() -> None:  # H58
    book = Playbook(parallelism=4)
    book.feed(job(), stage(tasks=2, partitions=2))
    assert book.feed(reg(10, 0)) == ["refuse task 10 TOO_FEW_PARTITIONS"]
    assert "parallelism=4, but the RDD of stage 1 has only 2 partitions" in book.refusal
    assert "parallelism=2, call repartition(4) before its subtasks, or pass allow_fewer=True" in book.refusal
    assert book.feed(end(10, 0), job_end(False)) == []  # no run has begun
    book.feed(job(1, (2,)), stage(2, partitions=4))
    assert book.feed(reg(20, 0, run=2)) == ["start run 2", "accept 0#0 task 20"]


def test_a_registration_that_overtakes_the_number_of_partitions_has_its_run_failed() -> None:  # H58
    book = Playbook(parallelism=4)
    book.feed(job())
    assert book.feed(reg(10, 0)) == ["start run 1", "accept 0#0 task 10"]
    assert book.feed(stage(tasks=2, partitions=2)) == ["failed 0#0 GLOBAL_FAILURE", "cancel [0]"]
    cancel = book.last
    assert isinstance(cancel, CancelJobs)
    assert "allow_fewer=True" in cancel.reason
    assert book.feed(reg(11, 1)) == ["refuse task 11 TOO_FEW_PARTITIONS"]
    assert book.feed(job_end(False)) == ["end run 1 badly"]


def test_fewer_partitions_are_accepted_if_allowed() -> None:  # H58
    book = Playbook(operators=())
    book.feed(OperatorAdded("words", 4, allow_fewer=True), job(), stage(tasks=2, partitions=2))
    assert book.feed(reg(10, 0)) == ["start run 1", "accept 0#0 task 10"]
    assert book.feed(stage(tasks=2, partitions=2)) == []


def test_a_streaming_run_that_may_have_fewer_partitions_waits_until_their_number_is_known() -> None:  # H174, H58
    """Its positions count the records of one of so many partitions."""
    for streaming in (True, False):
        book = Playbook(operators=())
        book.feed(OperatorAdded("words", 4, allow_fewer=True), job())
        told = book.feed(reg(10, 0, mode=RestoreMode.STREAMING if streaming else RestoreMode.BATCH))
        assert told == ["start run 1", *([] if streaming else ["accept 0#0 task 10"])]
        assert book.feed(stage(tasks=2, partitions=3)) == (["accept 0#0 task 10"] if streaming else [])
        [accepted] = (effect for effect in book.effects if isinstance(effect, AttemptAccepted))
        assert accepted.partitions == (3 if streaming else 0)
    book = Playbook(parallelism=4)
    assert book.feed(job(), reg(10, 0, mode=RestoreMode.STREAMING)) == ["start run 1", "accept 0#0 task 10"]


def test_a_number_of_partitions_that_never_comes_ends_the_wait() -> None:  # H174, H19
    book = Playbook(operators=())
    book.feed(OperatorAdded("words", 4, allow_fewer=True), job())
    book.feed(reg(10, 0, mode=RestoreMode.STREAMING))
    assert "refuse task 10 ATTEMPT_OVER" in book.wait(LedgerConfig().give_up_after_s)
    refusal = next(effect for effect in book.effects if isinstance(effect, RefuseRegistration))
    assert "Spark did not report how many partitions stage 1 has" in refusal.message


def test_the_end_of_a_run_says_that_its_job_left_partitions_out() -> None:  # H58, H55
    book = Playbook(parallelism=4)
    book.feed(job(), stage(tasks=1, partitions=4), reg(10, 0), start(10, 0), opened(10))
    book.feed(goodbye(10), end(10, 0, OK))
    book.feed(job_end())
    assert isinstance(book.last, RunEnded)
    assert book.last.computed == 1


def a_union(*, fewer: bool = False) -> Playbook:
    """Two operators with four subtasks each, and a stage of four tasks, two for each of them."""
    book = Playbook(operators=())
    book.feed(OperatorAdded("left", 4, allow_fewer=fewer), OperatorAdded("right", 4, allow_fewer=fewer))
    book.feed(job(), stage(tasks=4, partitions=4))
    return book


def test_two_operators_that_share_out_the_tasks_of_a_stage_are_refused_with_a_way_out() -> None:  # H58
    book = a_union()
    book.feed(start(10, 0), start(12, 2))
    assert book.feed(reg(10, 0, operator="left")) == ["start run 1", "accept 0#0 task 10"]
    assert book.feed(reg(12, 2, operator="right")) == ["refuse task 12 TOO_FEW_PARTITIONS"]
    assert "'right' in some of its tasks and 'left' in others" in book.refusal
    assert "Call repartition(4) on each of them after its subtasks and before the union()" in book.refusal


def test_registrations_of_a_union_that_overtake_the_facts_have_their_runs_failed() -> None:  # H58, H19
    book = a_union()
    book.feed(reg(10, 0, operator="left"), reg(12, 2, operator="right"))
    assert book.feed(start(10, 0)) == []  # what only a registration claims proves nothing (H75)
    told = book.feed(start(12, 2))
    assert told.count("failed 0#0 GLOBAL_FAILURE") == 1
    assert told.count("failed 2#0 GLOBAL_FAILURE") == 1


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
def test_operators_that_follow_each_other_in_each_task_are_accepted(order: tuple[str, str]) -> None:  # H58
    """A chain of mapPartitions, and zip: the tasks register for one operator after the other."""
    book = a_union()
    book.feed(*(start(10 + n, n) for n in range(4)))
    told = book.feed(reg(10, 0, operator=order[0]), reg(11, 1, operator=order[0]), reg(10, 0, operator=order[1]))
    told += book.feed(
        *(reg(10 + n, n, operator=name) for n in (1, 2, 3) for name in order if (n, name) != (1, order[0]))
    )
    assert sum(line.startswith("accept") for line in told) == 8
    assert not any(line.startswith(("refuse", "failed")) for line in told)


@pytest.mark.parametrize(
    ("parallelism", "fewer", "tasks", "missing"),
    [(4, False, 4, 2), (2, False, 4, 0), (4, True, 4, 0), (4, False, 2, 0)],
)
def test_the_end_of_a_run_says_of_how_many_subtasks_no_task_came(
    parallelism: int, fewer: bool, tasks: int, missing: int
) -> None:  # H58
    """A union with an RDD that has no operator: two of the stage's four tasks know nothing of it."""
    book = Playbook(operators=())
    book.feed(OperatorAdded("words", parallelism, allow_fewer=fewer), job(), stage(tasks=tasks, partitions=4))
    for task, subtask in ((10, 0), (11, 1)):
        book.feed(start(task, subtask), reg(task, subtask), opened(task), goodbye(task), end(task, subtask, OK))
    book.feed(*(event for task in (12, 13) for event in (start(task, task - 10), end(task, task - 10, OK))), job_end())
    assert isinstance(book.last, RunEnded)
    assert (book.last.succeeded, book.last.missing) == (True, missing)


def test_two_streaming_operators_in_one_task_are_refused_with_every_way_out() -> None:  # H174
    """One after the other, or zipped: the second one counts what the first one yields, which skips after a retry."""
    for late in (False, True):
        book = a_union()
        if not late:
            book.feed(start(10, 0))
        told = book.feed(reg(10, 0, operator="right", mode=RestoreMode.STREAMING))
        told += book.feed(reg(10, 0, operator="left", mode=RestoreMode.STREAMING))
        if late:
            assert not any(line.startswith("failed") for line in told)  # a claim proves nothing (H75)
            told = book.feed(start(10, 0))
        assert "failed 0#0 GLOBAL_FAILURE" in told
        assert "cancel [0]" in told
        cancel = next(effect.reason for effect in book.effects if isinstance(effect, CancelJobs))
        for words in ("'left' and 'right'", "chain(first=..., second=...)", 'mode="batch"'):
            assert words in cancel
        assert ("refuse task 10 SECOND_OPERATOR" in told) is not late


@pytest.mark.parametrize("streaming", ["left", "right"])
def test_one_streaming_operator_among_others_in_one_task_is_accepted(streaming: str) -> None:  # H174, H58
    book = a_union()
    book.feed(start(10, 0), start(11, 1))
    for name in ("right", "left"):
        mode = RestoreMode.STREAMING if name == streaming else RestoreMode.BATCH
        assert book.feed(reg(10, 0, operator=name, mode=mode))[-1] == "accept 0#0 task 10"
    assert book.feed(reg(11, 1, operator=streaming, mode=RestoreMode.STREAMING)) == ["accept 1#0 task 11"]


def test_a_union_is_accepted_if_subtasks_may_be_missing() -> None:  # H58
    book = a_union(fewer=True)
    book.feed(start(10, 0), start(12, 2))
    told = book.feed(reg(10, 0, operator="left"), reg(12, 2, operator="right"))
    assert sum(line.startswith("accept") for line in told) == 2


def test_a_subtask_beyond_the_parallelism_is_refused_with_the_way_out_of_a_union() -> None:  # H58
    book = Playbook(parallelism=2)
    book.feed(job(), stage(tasks=4, partitions=4))
    assert book.feed(reg(12, 2)) == ["refuse task 12 SUBTASK_OUT_OF_RANGE"]
    assert "call repartition(2) after its subtasks and before the union() instead" in book.refusal


def test_a_stage_that_runs_some_of_enough_partitions_is_accepted() -> None:  # H58
    book = Playbook(parallelism=4)
    book.feed(job(), stage(tasks=1, partitions=4))  # take(1), or an output of which Spark has kept the rest
    assert book.feed(reg(10, 2)) == ["start run 1", "accept 2#0 task 10"]
    assert book.feed(stage(attempt=1, tasks=1, partitions=4)) == []  # a retry of the stage


def test_a_second_registration_of_a_task_is_refused_and_the_first_lives_on() -> None:
    book = a_running_attempt()
    assert book.feed(reg(10, 1)) == ["refuse task 10 DUPLICATE_REGISTRATION"]
    assert book.feed(reg(10, 2)) == ["refuse task 10 DUPLICATE_REGISTRATION"]
    assert book.feed(end(10, 1)) == ["failed 1#0 FAILED", "reset 1"]


def test_a_refused_input_changes_nothing() -> None:
    book = a_running_attempt()
    with pytest.raises(LocalProtocolError, match="has a coordinator already"):
        book.ledger.handle(OperatorAdded("words", 2), book.now)
    with pytest.raises(LocalProtocolError, match="at least 1"):
        book.ledger.handle(OperatorAdded("more", 0), book.now)
    with pytest.raises(RemoteProtocolError):
        book.ledger.handle(reg(11, 1, mode=7), book.now)
    assert book.feed(reg(12, 0, operator="more")) == ["refuse task 12 UNKNOWN_OPERATOR"]
    assert book.feed(reg(11, 2)) == ["accept 2#0 task 11"]


def test_a_configuration_without_a_positive_time_is_refused() -> None:
    with pytest.raises(ValueError, match="query_every_s"):
        LedgerConfig(query_every_s=0)


# --- several operators ------------------------------------------------------------------------------------


def test_one_stage_hosts_several_operators_each_with_its_own_attempts() -> None:
    book = Playbook(operators=("words", "lines"))  # H1
    book.feed(job(), start(10, 1))
    assert book.feed(reg(10, 1)) == ["start run 1", "accept 1#0 task 10"]
    assert book.feed(reg(10, 1, operator="lines")) == ["start run 1", "accept 1#0 task 10"]
    assert book.feed(end(10, 1)) == ["failed 1#0 FAILED", "reset 1"] * 2


def test_a_failure_of_one_coordinator_leaves_the_other_operators_alone() -> None:
    book = Playbook(operators=("words", "lines"))  # H8
    book.feed(job(), reg(10, 1), job(1, (2,)), reg(20, 1, run=2, operator="lines"))
    assert book.feed(GlobalFailureRaised("words", "boom")) == ["failed 1#0 GLOBAL_FAILURE", "cancel [0]"]
    assert book.feed(reg(21, 2, run=2, operator="lines")) == ["accept 2#0 task 21"]


# --- memory -----------------------------------------------------------------------------------------------


def test_stages_without_an_operator_leave_nothing_behind() -> None:
    book = a_running_attempt()
    books = book.ledger._engine
    for stage_id in range(100, 2000):
        book.ledger.handle(job(stage_id, (stage_id,)), book.now)
        book.ledger.handle(start(stage_id, 0, stage=stage_id), book.now)
        if stage_id % 2:
            book.ledger.handle(end(stage_id, 0, OK, stage=stage_id), book.now)
            book.ledger.handle(job_end(stage_id), book.now)
    assert len(books.stages) <= 600
    assert all(len(books.stages[stage_id].tasks) == 1 for stage_id in books.stages)
    book.feed(end(1900, 0, OK, stage=1900))
    assert not books.stages[1900].tasks
    book.feed(*(job_end(stage_id) for stage_id in range(100, 2000)))
    assert list(books.stages) == [1]
    assert list(books.job_stages) == [0]


def test_a_run_that_has_ended_leaves_nothing_behind() -> None:
    book = a_running_attempt()  # H57
    book.feed(job_end(), end(10, 1), start(10, 1), stage())
    assert not book.ledger._engine.stages
    assert not book.ledger._engine.job_stages
    assert book.ledger.next_deadline() is None


def test_a_kill_names_the_reason() -> None:
    book = a_running_attempt()  # H25
    book.feed(AttemptCondemned("words", 10, "event 7 was not confirmed"))
    kill = next(effect for effect in book.effects if isinstance(effect, KillTask))
    assert kill.reason == "confirmation timeout: event 7 was not confirmed"


def test_a_task_that_was_launched_beside_a_zombie_does_not_revoke_its_success() -> None:
    book = a_running_attempt()  # H17: by the order of the facts it is not a rerun (found by the simulation, seed 1022)
    book.feed(stage(attempt=1), start(20, 1, stage_attempt=1), goodbye(10), end(10, 1, OK))
    assert book.feed(reg(20, 1)) == []
    assert book.feed(job_end()) == ["end run 1 well", "refuse task 20 ATTEMPT_OVER"]


# --- a job whose end is lost --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("tasks", "how"), [(1, "well"), (2, "badly")])
def test_a_run_counts_as_complete_only_if_all_of_its_tasks_have_ended_well(tasks: int, how: str) -> None:
    """H19, H55. Found by the simulation: a job's start fact and one task's facts were lost. The other tasks had
    succeeded. When a second job came, the ledger told the coordinator that the first one had succeeded."""
    book = Playbook()
    book.feed(stage(tasks=tasks))
    book.ready(10, 1)
    book.feed(end(10, 1, TaskOutcome.SUCCESS), start(20, 1, stage=2), reg(20, 1, run=2))
    assert f"end run 1 {how}" in book.wait(10)


# --- successes that are void (H15, H17) ---------------------------------------------------------------------


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
