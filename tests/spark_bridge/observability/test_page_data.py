# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from spark_bridge.observability.page_data import CELLS, FAILURES_SHOWN, TEXT_MAX, cells, page_json, page_parts
from spark_bridge.observability.status import CallStatus, CheckpointProgress, FailureRecord, RegistrationStatus
from tests.browser.synthetic import NOW, a_sidecar, an_attempt, an_eventful_one, an_operator, of_many_subtasks


def read(*operators: Any) -> Any:
    return json.loads(page_json(a_sidecar(*operators), ["a sentence"]))


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ready"),
        ({"state": "accepted"}, "accepted"),
        ({"state": "finished"}, "finished"),
        ({"state": "over"}, "over"),
        ({"state": "ending"}, "waiting"),
        ({"requested_at": NOW - 0.1}, "waiting"),
        ({"requested_at": NOW - 5.0}, "stuck"),
        ({"unconfirmed_since_at": NOW - 5.0}, "stuck"),
        ({"unconfirmed_since_at": NOW - 4.9}, "ready"),
        ({"connected": False, "heard_at": NOW - 1.0}, "waiting"),
        ({"connected": False, "heard_at": NOW - 5.0}, "stuck"),
        ({"heard_at": NOW - 50.0}, "ready"),
        ({"known_to_coordinator": False}, "waiting"),
        ({"state": "over", "connected": False, "heard_at": NOW - 50.0}, "over"),
    ],
)
def test_an_attempt_has_the_color_of_its_state(changes: dict[str, Any], state: str) -> None:
    letters = cells(an_operator("crawl", [an_attempt(1, **changes)], parallelism=3), NOW)
    assert [CELLS[letter] for letter in letters] == ["not started", state, "not started"]


def test_a_retry_hides_the_attempt_before_it() -> None:
    operator = an_operator("crawl", [an_attempt(0, state="over"), an_attempt(0, attempt=1)], parallelism=1)
    assert cells(operator, NOW) == "r"


def test_a_task_that_is_not_accepted_for_long_is_stuck() -> None:
    operator = an_operator("crawl", [], parallelism=2)
    assert operator.run is not None
    held = (RegistrationStatus(0, 7, 4.9, "a fact"), RegistrationStatus(1, 8, 5.0, "a fact"))
    assert cells(replace(operator, run=operator.run._replace(registrations=held)), NOW) == "ns"


@pytest.mark.parametrize(("phase_s", "letters"), [(4.9, "rw"), (5.0, "rs")])
def test_a_subtask_that_holds_up_a_checkpoint_waits_and_is_then_stuck(phase_s: float, letters: str) -> None:
    operator = an_operator("crawl", [an_attempt(0), an_attempt(1)], parallelism=2)
    pending = CheckpointProgress(3, False, NOW - 9, "acknowledging", phase_s, 50.0, {0: "nothing", 1: "acknowledge"})
    assert cells(replace(operator, checkpoints=(pending,)), NOW) == letters


def test_attempts_travel_as_columns_and_equal_values_once() -> None:
    attempts = read(an_operator("crawl", [an_attempt(0), an_attempt(1, requested_at=NOW - 1.26)], parallelism=2))[
        "operators"
    ][0]["attempts"]
    assert attempts["count"] == 2
    assert attempts["subtask"] == [0, 1]
    assert attempts["state"] == "ready"
    assert attempts["requested_at"] == [None, NOW - 1.3]
    assert attempts["waits_for"] == ["", "the answer to its request"]


def test_ten_thousand_subtasks_fit_into_half_a_megabyte() -> None:
    written = page_json(of_many_subtasks(10_000), [])
    assert len(written) < 500_000
    assert len(json.loads(written)["operators"][0]["cells"]) == 10_000


def test_the_parts_are_the_whole() -> None:
    status = a_sidecar(an_eventful_one("crawl"), an_eventful_one("other", stuck=True))
    assert b"".join(page_parts(status, ["x"])) == page_json(status, ["x"])
    assert [one["name"] for one in json.loads(page_json(status, []))["operators"]] == ["crawl", "other"]


def test_long_histories_and_texts_are_cut() -> None:
    failures = tuple(FailureRecord(NOW, 0, number, "failed", "x" * 10_000) for number in range(100))
    shown = read(replace(an_operator("crawl", [], parallelism=1), failures=failures))["operators"][0]["failures"]
    assert [one[2] for one in shown] == list(range(100 - FAILURES_SHOWN, 100))
    assert {len(one[4]) for one in shown} == {TEXT_MAX}


def test_what_json_cannot_say_becomes_null() -> None:
    pending = CheckpointProgress(3, False, NOW, "closing", 0.0, inf, {})
    shown = read(replace(an_operator("crawl", [], parallelism=1), checkpoints=(pending,)))
    assert shown["operators"][0]["checkpoints"][0]["deadline_s"] is None


def test_any_text_travels_as_ascii() -> None:
    written = page_json(a_sidecar(an_operator("Größe <☃> \ud800", [], parallelism=1)), ["ü"])
    assert written.isascii()
    assert json.loads(written)["operators"][0]["name"] == "Größe <☃> \\ud800", "no reader takes a lone surrogate"


@pytest.mark.parametrize(
    ("counted", "shown"),
    [
        (2**53, 2**53),
        (2**53 + 1, str(2**53 + 1)),
        (-(2**70), str(-(2**70))),
        (10**1200, str(10**1200)),
        (1.5, 1.5),
        (inf, "Infinity"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_integer_that_a_browser_would_round_comes_as_its_digits(counted: float, shown: object) -> None:  # H156
    (operator,) = read(replace(an_operator("a", [], parallelism=1), counters={"n": counted}))["operators"]
    assert operator["counters"] == [["n", shown]]


def test_no_text_of_the_page_is_long() -> None:  # H156
    text = "x" * 100_000
    operator = replace(
        an_eventful_one("a", stuck=True),
        attempts=(an_attempt(0)._replace(host=text, executor_id=text, failure=text),),
        counters={text: 1},
        call=CallStatus(text, 7.0, text),
    )
    assert len(page_json(a_sidecar(operator), [text])) < 12 * TEXT_MAX + 20_000
