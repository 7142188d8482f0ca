# SPDX-License-Identifier: Apache-2.0

"""The diagnosis in words, from statuses made by hand. tests/spark/observability has the same situations for real."""

from __future__ import annotations

from typing import Any

import pytest

from spark_bridge.observability.diagnosis import explain, waits
from spark_bridge.observability.status import CallStatus, RegistrationStatus, RelayStatus
from tests.spark_bridge.observability.statuses import NOW, attempt, checkpoint, operator, run, sidecar

BUSY = CallStatus("handle_request(subtask=1, attempt=0)", 40.0, "crawl.py:31 in fetch")


def attempts(*changed: int, **changes: Any) -> tuple[Any, ...]:
    return tuple(attempt(subtask, **(changes if subtask in changed else {})) for subtask in range(4))


def test_nothing_is_said_while_everything_moves() -> None:
    assert explain(sidecar(operator())) == ()
    assert explain(sidecar(operator(run=None, attempts=()))) == ()


def test_an_action_that_was_several_jobs_is_explained_and_is_not_a_wait() -> None:  # H55
    status = sidecar(operator(run=None, attempts=(), jobs_of_last_action=3))
    (sentence,) = explain(status)
    assert "the last action over 'crawl' was 3 jobs" in sentence
    assert "counters have all" in sentence
    assert "collect()" in sentence
    assert waits(status) == ()
    assert explain(sidecar(operator(run=None, attempts=(), jobs_of_last_action=1))) == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"call": BUSY, "attempts": attempts(3, requested_at=NOW - 41)},
            "subtask 3 has waited 41 s for an answer to a request; the coordinator of 'crawl' has been in "
            "handle_request(subtask=1, attempt=0) for 40 s, awaiting at crawl.py:31 in fetch",
        ),
        (
            {"queued": 9, "attempts": attempts(1, 3, requested_at=NOW - 6)},
            "subtasks 1, 3 have waited 6 s for an answer to a request; 9 messages wait in the mailbox of the "
            "coordinator of 'crawl'",
        ),
        (
            {"call": BUSY, "attempts": (attempt(0, requested_at=NOW - 41), attempt(1, known_to_coordinator=False))},
            "subtask 0 has waited 41 s for an answer to a request; subtask 1 has waited 60 s for the coordinator's "
            "subtask_ready; the coordinator of 'crawl' has been in handle_request(subtask=1, attempt=0) for 40 s, "
            "awaiting at crawl.py:31 in fetch",
        ),
        (
            {"attempts": attempts(0, 2, deferred_at=NOW - 31)},
            "subtasks 0, 2 have waited 31 s for an answer that the coordinator of 'crawl' has deferred: it has not "
            "settled the Reply yet",
        ),
        (
            {"call": BUSY, "queued": 2},
            "the coordinator of 'crawl' has been in handle_request(subtask=1, attempt=0) for 40 s, awaiting at "
            "crawl.py:31 in fetch; 2 messages wait behind it",
        ),
        (
            {"checkpoints": (checkpoint("waiting"),)},
            "checkpoint 12 of 'crawl' has waited 25 s for the coordinator's snapshot of an earlier one",
        ),
        (
            {"checkpoints": (checkpoint("closing", 2, step="close"),)},
            "checkpoint 12 of 'crawl' waits for subtask 2, whose process has not answered for 25 s",
        ),
        (
            {"checkpoints": (checkpoint("snapshotting"),)},
            "checkpoint 12 of 'crawl' has waited 25 s for the coordinator: checkpoint_coordinator has not returned",
        ),
        (
            {"checkpoints": (checkpoint("acknowledging", 3, step="acknowledge"),)},
            "checkpoint 12 of 'crawl' waits for subtask 3, which has computed for 25 s without looking at its mailbox",
        ),
        (
            {"checkpoints": (checkpoint("acknowledging", 0, 3, step="acknowledge"),)},
            "checkpoint 12 of 'crawl' waits for subtasks 0, 3, which have computed for 25 s without looking at their "
            "mailboxes",
        ),
        (
            {"checkpoints": (checkpoint("storing")._replace(savepoint=True),)},
            "savepoint 12 of 'crawl' has waited 25 s for the storage to write it",
        ),
        (
            {"attempts": attempts(0, connected=False, heard_at=NOW - 20)},
            "subtask 0 has had no connection to the sidecar for up to 20 s",
        ),
        (
            {"attempts": attempts(0, unconfirmed_since_at=NOW - 12, heard_at=NOW - 11)},
            "subtask 0 has not confirmed an event for 12 s: the process is stopped or holds the interpreter lock, or "
            "the mailbox is full; the last sign of life came 11 s ago",
        ),
        (
            {"run": run(registrations=(RegistrationStatus(2, 9, 8.0, "the end of another run of the operator"),))},
            "a task of subtask 2 of 'crawl' has waited 8 s to be accepted: it waits for the end of another run of the "
            "operator",
        ),
    ],
)
def test_a_wait_has_its_sentence_and_a_short_one_has_none(changes: dict[str, Any], sentence: str) -> None:
    assert explain(sidecar(operator(**changes))) == (sentence,)
    assert explain(sidecar(operator(**changes)), waiting_s=100.0) == ()


def test_a_checkpoint_does_not_guess_what_a_subtask_does_that_has_said_nothing_since_it_began() -> None:
    late = checkpoint("acknowledging", 0, 1, 2, step="acknowledge")
    silent = attempts(0, heard_at=late.triggered_at - 1)
    heard = attempts(1, 2, heard_at=late.triggered_at + 1)
    assert explain(sidecar(operator(checkpoints=(late,), attempts=(*silent, *heard)))) == (
        "checkpoint 12 of 'crawl' waits for subtask 0, which has not answered for 25 s: its task computes without "
        "looking at the mailbox, or the process does not answer at all",
    )
    assert explain(sidecar(operator(checkpoints=(late,), attempts=heard))) == (
        "checkpoint 12 of 'crawl' waits for subtasks 0, 1, 2, which have computed for 25 s without looking at their "
        "mailboxes",
    )


def test_a_checkpoint_names_those_that_have_not_confirmed_what_was_sent_before_it() -> None:
    late = checkpoint("acknowledging", 0, 1, 2, step="acknowledge")
    status = sidecar(operator(checkpoints=(late,), attempts=attempts(0, 1, unconfirmed_since_at=NOW - 30)))
    assert explain(status)[0] == (
        "checkpoint 12 of 'crawl' has waited 25 s for subtasks 0, 1 to confirm every event sent before it"
    )


@pytest.mark.parametrize(
    ("lacking", "cores", "reason"),
    [
        ({"task_count": 4, "tasks_started": 1}, 2, "3 have no slot: the application has 2 cores"),
        ({"task_count": 4, "tasks_started": 1}, 1, "3 have no slot: the application has 1 core"),
        ({"task_count": 4, "tasks_started": 1}, 64, "3 have no slot, because Spark has not started their tasks yet"),
        ({"task_count": 4, "tasks_started": 1}, None, "3 have no slot, because Spark has not started their tasks yet"),
        ({"task_count": 2, "tasks_started": 1}, 2, "1 has no slot: the application has 2 cores"),
        (
            {"task_count": 4, "tasks_started": 3},
            4,
            "2 tasks that Spark has started have not registered yet: they are still starting, or cannot reach "
            "127.0.0.1:4242",
        ),
    ],
)
def test_subtasks_without_a_task_are_counted_with_the_reason(
    lacking: dict[str, int], cores: int | None, reason: str
) -> None:
    changed = run(subtasks_seen=1, missing=(1, 2, 3), **lacking)
    status = sidecar(operator(run=changed, attempts=(attempt(0),)), cores=cores)
    assert explain(status) == (f"1 of 4 subtasks of 'crawl' is ready; {reason}",)
    assert explain(status, waiting_s=100.0) == ()


def test_an_action_with_fewer_tasks_than_subtasks_lacks_none() -> None:
    one = run(subtasks_seen=1, missing=(1, 2, 3), task_count=1, tasks_started=1)
    assert explain(sidecar(operator(run=one, attempts=(attempt(0),)))) == ()


def test_a_sentence_names_five_subtasks_at_most() -> None:
    late = tuple(attempt(subtask, requested_at=NOW - 9) for subtask in range(40))
    (sentence,) = explain(sidecar(operator(parallelism=40, attempts=late, run=run(subtasks_seen=40, task_count=40))))
    assert sentence.startswith("subtasks 0, 1, 2, 3, 4 and 35 more have waited 9 s")


def test_the_sidecar_itself_comes_first_and_operators_in_the_order_of_their_names() -> None:
    slow = {"call": BUSY}
    status = sidecar(
        operator(operator_id="b", **slow),
        operator(operator_id="a", **slow),
        loop_lag_max_ms=1500.0,
        relay=RelayStatus("jvm", 10, 3, 0),
    )
    sentences = explain(status)
    assert sentences[0].startswith("the sidecar's event loop was blocked for up to 1.5 s")
    assert sentences[1].startswith("3 facts from Spark were lost")
    assert ["'a'" in sentences[2], "'b'" in sentences[3]] == [True, True]


def test_attempts_that_have_ended_wait_for_nothing() -> None:
    over = attempts(0, 1, 2, 3, state="over", connected=False, heard_at=NOW - 99, unconfirmed_since_at=NOW - 99)
    assert explain(sidecar(operator(attempts=over))) == ()
