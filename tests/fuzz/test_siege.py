# SPDX-License-Identifier: Apache-2.0

"""The server under attack, with everything behind it, in a separate process (H61, H62)."""

from __future__ import annotations

from random import Random

import pytest

from protocol.attempts.operator import SPARK_TASK_FAILURES_MAX
from tests.fuzz import siege
from tests.fuzz.__main__ import main
from tests.fuzz.driver_half import PARALLELISM, VICTIM
from tests.fuzz.hostile_tasks import send_what_nobody_can_read
from tests.fuzz.target import Target, run_cases


@pytest.mark.parametrize("target", siege.TARGETS, ids=lambda target: target.name)
def test_honest_tasks_are_not_harmed_by_any_form_of_attack(target: Target) -> None:  # H22, H30, H61, H62, H77
    run_cases(target, first=1, count=1)


def test_hostile_tasks_are_killed_as_often_as_they_deserve_it() -> None:  # H62, H69
    """More often than Spark would let a subtask fail, whichever subtask it is."""
    tasks = PARALLELISM[VICTIM] * (SPARK_TASK_FAILURES_MAX - 1) + 1
    last = siege.run(lambda: siege.lay_siege(Random(1), [send_what_nobody_can_read] * tasks))
    assert last["killed"] == tasks


def test_the_targets_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "siege" in capsys.readouterr().out


def test_a_run_says_how_far_it_is_and_that_nothing_was_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "relay", "--seed", "5", "--cases", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("first case 5\n")
    assert "relay 20\nnothing was broken\n" in out


@pytest.mark.parametrize("options", [["--seconds", "-1"], ["--target", "nothing"], ["--cases", "few"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert options[0] in capsys.readouterr().err
