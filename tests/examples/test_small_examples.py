# SPDX-License-Identifier: Apache-2.0

"""The small examples run without arguments and show what they claim."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from examples.rate_limit import CALLS, PermitBucket
from tests.examples.conftest import RunExample
from tests.spark_bridge.observability.trace_reader import query


@pytest.mark.long
@pytest.mark.spark
def test_a_rule_that_is_made_while_the_tasks_run_reaches_them(run_example: RunExample) -> None:
    """H22: the rule is sent before the permission to continue, so the task that reached the limit obeys immediately.

    H66: a rule that exists from the beginning applies to the first record of each task.
    """
    ended = run_example("live_rules")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("tips the scales: 'spam'") == 1
    rows = {
        word: (int(passed), int(dropped))
        for word, passed, dropped in re.findall(r"(\w+) +(\d+) passed +(\d+)", ended.stdout)
    }
    assert sum(rows["spam"]) == 1200
    assert 500 <= rows["spam"][0] < 1200
    assert rows.pop("dam") == (0, 300)
    assert [row for word, row in rows.items() if word != "spam"] == [(300, 0)] * 5
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_no_task_calls_without_a_permit(run_example: RunExample) -> None:
    """H33: every request is answered, and the answers add up to the budget."""
    ended = run_example("rate_limit")

    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d+) calls in ([\d.]+) s, where (\d+) were allowed", ended.stdout)
    assert found is not None
    assert int(found[1]) == CALLS <= int(found[3])
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_a_job_that_fails_again_and_again_leaves_its_neighbour_alone(run_example: RunExample) -> None:  # H65
    ended = run_example("two_jobs")

    assert ended.returncode == 0, ended.stderr
    assert "unlucky: called 4 times, 3 failures, then 'at last'" in ended.stdout
    assert "steady: called 1 time, 0 resets, 100 different numbers" in ended.stdout
    assert "the steady job ran on untouched" in ended.stdout


@pytest.mark.spark
def test_a_coordinator_in_its_own_process_adds_up_what_tasks_report(run_example: RunExample) -> None:
    ended = run_example("own_process")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "total: 5050\n"
    assert ended.stderr == ""


@pytest.mark.spark
def test_the_example_of_the_readme_squares_each_number_once(run_example: RunExample) -> None:
    ended = run_example("squares", PYSPARK_PYTHON=sys.executable)

    assert ended.returncode == 0, ended.stderr
    assert "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]" in ended.stdout.splitlines()


async def test_an_empty_bucket_says_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("examples.rate_limit.time.monotonic", lambda: now[0])
    bucket = PermitBucket()

    answers = [await bucket.handle_request(0, 0, "permit") for _ in range(11)]
    now[0] += answers[-1]

    assert answers == [0.0] * 10 + [1 / 20]
    assert await bucket.handle_request(0, 0, "permit") < 1e-6


@pytest.mark.long
@pytest.mark.spark
def test_the_timeline_of_a_job_is_written(run_example: RunExample, tmp_path: Path) -> None:
    ended = run_example("timeline")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]\n"
    (file,) = tmp_path.rglob("job.json")
    attempts = query(file, "select name from slice where name like 'squares[%' order by name")
    assert attempts == [("squares[0]#0",), ("squares[1]#0",)]
