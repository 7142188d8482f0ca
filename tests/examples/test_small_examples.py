# SPDX-License-Identifier: Apache-2.0

"""The small examples run without arguments and show what they claim."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.rate_limit import CALLS
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
    """H111"""
    ended = run_example("rate_limit")

    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d+) calls in [\d.]+ s, where (\d+) were allowed", ended.stdout)
    assert found is not None
    assert int(found[1]) == CALLS <= int(found[2])
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_a_folder_is_read_as_a_format_of_spark_although_a_task_is_killed(run_example: RunExample) -> None:  # H130
    ended = run_example("orders_by_shop")

    lines = [*(f"shop {shop}: 12000 orders" for shop in range(5)), "attempts lost: 1"]
    assert (ended.returncode, ended.stdout.splitlines()) == (0, lines), ended.stderr
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_a_growing_folder_is_a_stream_of_spark_that_new_sidecars_continue(run_example: RunExample) -> None:  # H133
    ended = run_example("clicks_stream")

    assert (ended.returncode, ended.stdout) == (0, "300 clicks, 300 of them different\n"), ended.stderr
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_a_pipeline_writes_each_row_once_although_a_task_is_killed(run_example: RunExample) -> None:  # H80
    ended = run_example("page_pipeline")

    said = "2000 rows, 2000 of them different\nattempts lost: 1; checkpoints: several\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_dataclasses_of_the_program_travel_both_ways(run_example: RunExample) -> None:  # H97
    ended = run_example("typed_events")

    assert (ended.returncode, ended.stdout) == (0, "sensors above their limits: 0 1\n"), ended.stderr
    assert ended.stderr == ""


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


@pytest.mark.long
@pytest.mark.spark
def test_a_job_that_fails_again_and_again_leaves_its_neighbour_alone(run_example: RunExample) -> None:  # H65
    ended = run_example("two_jobs")

    assert ended.returncode == 0, ended.stderr
    assert "unlucky: called 4 times, 3 failures, then 'at last'" in ended.stdout
    assert "steady: called 1 time, 0 resets, 100 different numbers" in ended.stdout
    assert "the steady job ran on untouched" in ended.stdout


@pytest.mark.long
@pytest.mark.spark
def test_a_coordinator_in_its_own_process_adds_up_what_tasks_report(run_example: RunExample) -> None:
    ended = run_example("own_process")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "total: 5050 pages: 100\n"
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_two_sidecars_in_their_own_processes_have_a_stage_each_of_one_job(run_example: RunExample) -> None:
    ended = run_example("two_processes")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "totals: [5050, 5050]\n"
    assert ended.stderr == ""


@pytest.mark.spark
def test_the_example_of_the_readme_squares_each_number_once(run_example: RunExample) -> None:
    ended = run_example("squares", PYSPARK_PYTHON=sys.executable)

    assert ended.returncode == 0, ended.stderr
    assert "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]" in ended.stdout.splitlines()


@pytest.mark.long
@pytest.mark.spark
def test_the_async_service_answers_all_requests(run_example: RunExample) -> None:
    ended = run_example("async_service")

    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["  large: 4999950000", "  medium: 499500", "  small: 45"]
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_the_notebook_runs_as_a_program_and_ends_by_itself(run_example: RunExample) -> None:  # H120
    ended = run_example("notebook", PYSPARK_PYTHON=sys.executable)

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
def test_the_crawl_visits_every_page_once_though_a_process_is_killed(run_example: RunExample) -> None:
    """H100"""
    ended = run_example("crawl")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "200 pages visited, 200 of them different; a process was killed: True\n"


@pytest.mark.long
@pytest.mark.spark
def test_the_counts_are_exact_though_a_process_is_killed(run_example: RunExample) -> None:
    """H101"""
    ended = run_example("counted")

    assert ended.returncode == 0, ended.stderr
    kept, sizes = ended.stdout.splitlines()
    assert kept == "2000 kept of 3000, and 2000 came back; a process was killed: True"
    assert sizes.startswith("sizes from 0 to 2999, half of them below 1")


@pytest.mark.long
@pytest.mark.spark
def test_every_task_works_with_each_limit(run_example: RunExample) -> None:
    """H110"""
    ended = run_example("shared_rules")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"task {task} has worked with the limits [10, 50]" for task in range(3)]


@pytest.mark.long
@pytest.mark.spark
def test_the_model_has_the_same_bits_though_a_worker_is_killed(run_example: RunExample) -> None:
    """H104 H105 H108"""
    ended = run_example("train_numpy")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "30 steps, 2 generations; a worker was killed: True; the same model: True\n"
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("option", [(), ("--freeze",)])
def test_the_model_of_xgboost_has_the_same_bits_though_a_worker_is_lost(
    run_example: RunExample, option: tuple[str, ...]
) -> None:
    """H104 H105"""
    ended = run_example("train_xgboost", *option)

    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"20 rounds, (\d+) generations; a worker was lost: True; the same model: True\n", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= 2


@pytest.mark.torch
@pytest.mark.spark
@pytest.mark.parametrize("option", [(), ("--freeze",)])
def test_the_model_of_torch_has_the_same_bits_though_a_worker_is_lost(
    run_example: RunExample, option: tuple[str, ...]
) -> None:
    """H104 H105"""
    ended = run_example("train_torch", *option)

    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"20 steps, (\d+) generations; a worker was lost: True; the same model: True\n", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= 2


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_the_example_for_torch_says_how_to_get_it(run_example: RunExample) -> None:
    ended = run_example("train_torch")

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "This example needs torch: pip install torch\n"
