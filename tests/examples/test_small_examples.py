# SPDX-License-Identifier: Apache-2.0

"""The small examples run from the wheel, without arguments, and show what they claim."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.conftest import RunExample
from tests.spark_bridge.observability.trace_reader import query

SAID = {
    "orders_by_shop": [*(f"shop {shop}: 12000 orders" for shop in range(5)), "attempts lost: 1"],  # H130
    "clicks_stream": ["300 clicks, 300 of them different"],  # H133
    "page_pipeline": ["2000 rows, 2000 of them different", "attempts lost: 1; checkpoints: several"],  # H80
    "typed_events": ["sensors above their limits: 0 1"],  # H97
    "own_process": ["total: 5050 pages: 100"],
    "two_processes": ["totals: [5050, 5050]"],
    "crawl": ["200 pages visited, 200 of them different; a process was killed: True"],  # H100
    "shared_rules": [f"task {task} has worked with the limits [10, 50]" for task in range(3)],  # H110
    "train_numpy": ["30 steps, 2 generations; a worker was killed: True; the same model: True"],  # H104, H105, H108
    "streaming_lines": [  # H52, H55
        "  the query failed: ahead of the action",
        "  it is started again",
        "  the query failed: after the commit, before Spark has noted it",
        "  it is started again",
        "300 lines written, 300 different ones, of 300",
    ],
}


# What Headgate says of the worker that is killed on purpose.
WARNED = {"train_numpy": " WARNING headgate.actors: generation broken "}


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("name", SAID)
def test_an_example_shows_what_it_claims_and_warns_of_nothing_else(name: str, run_example: RunExample) -> None:
    ended = run_example(name)

    assert (ended.returncode, ended.stdout.splitlines()) == (0, SAID[name]), ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if WARNED.get(name, "of nothing") not in line]
    assert warnings == []


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
    """H111"""
    ended = run_example("rate_limit")

    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d+) calls in [\d.]+ s, where (\d+) were allowed", ended.stdout)
    assert found is not None
    assert int(found[1]) == 60 <= int(found[2])
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_an_api_is_paid_again_only_for_calls_that_were_in_flight_when_a_worker_died(run_example: RunExample) -> None:
    """H111, H182, H183: the API's own log of 99 addresses in 2,970 rows."""
    ended = run_example("paid_api")

    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert said[0] == "2970 of 3000 rows have a place; a worker was killed: True"
    paid = re.fullmatch(r"the API was paid for (\d+) calls, with 99 different addresses", said[2])
    assert paid is not None
    spent = re.fullmatch(r"spent: (\d+)\.(\d\d) usd", said[1])
    assert spent is not None
    assert 99 <= int(paid[1]) <= int(spent[1] + spent[2]) <= 200  # cents: what a lost task had reserved is spent


@pytest.mark.long
@pytest.mark.spark
def test_search_of_every_task_ends_when_one_has_found_the_key(run_example: RunExample) -> None:  # H90
    ended = run_example("stop_search")

    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"subtask (\d): (found \d+|stopped)", ended.stdout) == [
        ("0", "stopped"),
        ("1", "found 4321"),
        ("2", "stopped"),
    ]
    assert ended.stderr == ""


@pytest.mark.spark
def test_the_example_of_the_readme_squares_each_number_once(run_example: RunExample) -> None:
    ended = run_example("squares")

    assert ended.returncode == 0, ended.stderr
    assert "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]" in ended.stdout.splitlines()


@pytest.mark.long
@pytest.mark.spark
def test_the_service_answers_all_requests_and_ends(run_example: RunExample) -> None:
    ended = run_example("async_service")

    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["  large: 4999950000", "  medium: 499500", "  small: 45"]


@pytest.mark.long
@pytest.mark.spark
def test_the_notebook_runs_as_a_program_and_ends_by_itself(run_example: RunExample) -> None:  # H120
    ended = run_example("notebook")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18] from a total of 45\n"


@pytest.mark.long
@pytest.mark.spark
def test_the_timeline_of_a_job_is_written(run_example: RunExample, tmp_path: Path) -> None:
    ended = run_example("timeline")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]\n"
    (file,) = tmp_path.rglob("job.json")
    attempts = query(file, "select name from slice where name like 'squares[%' order by name")
    assert attempts == [("squares[0]#0",), ("squares[1]#0",)]


@pytest.mark.long
@pytest.mark.spark
def test_the_counts_are_exact_though_a_process_is_killed(run_example: RunExample) -> None:
    """H101"""
    ended = run_example("counted")

    assert ended.returncode == 0, ended.stderr
    kept, sizes = ended.stdout.splitlines()
    assert kept == "2000 kept of 3000, and 2000 came back; a process was killed: True"
    assert sizes.startswith("sizes from 0 to 2999, half of them below 1")


@pytest.mark.spark
@pytest.mark.parametrize("option", [(), ("--freeze",)])
@pytest.mark.parametrize(
    ("library", "unit"),
    [
        pytest.param("xgboost", "rounds", marks=pytest.mark.long),
        pytest.param("torch", "steps", marks=pytest.mark.torch),
    ],
)
def test_the_model_of_a_library_has_the_same_bits_though_a_worker_is_lost(
    run_example: RunExample, library: str, unit: str, option: tuple[str, ...]
) -> None:
    """H104 H105"""
    ended = run_example(f"train_{library}", *option)

    assert ended.returncode == 0, ended.stderr
    said = rf"20 {unit}, (\d+) generations; a worker was lost: True; the same model: True\n"
    found = re.fullmatch(said, ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= 2


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_the_example_for_torch_says_how_to_get_it(run_example: RunExample) -> None:
    ended = run_example("train_torch")

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "This example needs torch: pip install torch"
