# SPDX-License-Identifier: Apache-2.0

"""The counts of the hot paths are repeatable, and no worse than the stored ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import instructions
from benchmarks.instructions import VERSION, Counter, check, compare, kept

ROOT = Path(__file__).resolve().parents[2]
KEPT = {"path": {"bytecodes": 100.0, "python_calls": 10.0, "c_calls": 0.0}}


def run(*arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run it in a separate process, without other tracing. ``seed``: of the hashes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions", *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.skipif(VERSION not in kept(), reason=f"benchmarks/results/instructions.json has none for Python {VERSION}")
def test_no_hot_path_executes_more_than_is_kept() -> None:
    checked = run("--check")
    assert checked.returncode == 0, checked.stderr


def test_the_counts_do_not_depend_on_the_run() -> None:
    first, second = run(seed="1"), run(seed="2")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_only_what_changes_by_more_than_two_percent_is_said() -> None:
    assert compare(KEPT, {"path": {"bytecodes": 102.0, "python_calls": 9.9, "c_calls": 0.0}}) == ([], [])
    worse, better = compare(KEPT, {"path": {"bytecodes": 103.0, "python_calls": 9.0, "c_calls": 1.0}})
    assert worse == ["path: 103 bytecodes, was 100 (+3.0%)", "path: 1 c_calls, was 0"]
    assert better == ["path: 9 python_calls, was 10 (-10.0%)"]


def test_a_path_that_is_new_or_gone_wants_the_file_renewed() -> None:
    worse, _ = compare(KEPT, {"other": KEPT["path"]})
    assert worse == ["path: is in the file and is counted no more", "other: is not in the file"]


def test_the_exit_status_tells_worse_from_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    slower = {"path": {"bytecodes": 110.0, "python_calls": 10.0, "c_calls": 0.0}}
    assert check(KEPT, KEPT) == 0
    assert check(slower, KEPT) == 0
    assert check(KEPT, slower) == 1
    assert "worse: path: 110 bytecodes" in capsys.readouterr().err
    assert check(None, KEPT) == 2
    assert VERSION in capsys.readouterr().err


def test_the_counts_of_other_versions_stay_when_one_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results" / "instructions.json"
    monkeypatch.setattr(instructions, "FILE", file)
    monkeypatch.setattr(instructions, "count_all", lambda: KEPT)
    assert instructions.main(["--write"]) == 0
    monkeypatch.setattr(instructions, "VERSION", "3.99")
    assert instructions.main(["--write"]) == 0
    assert kept() == {VERSION: KEPT, "3.99": KEPT}


def test_code_of_the_benchmarks_is_not_counted_and_what_it_calls_is() -> None:
    before = sys.gettrace(), sys.getprofile()
    if any(before):
        pytest.skip("something else traces this process")
    counter = Counter()
    counter.start()
    sorted([2, 1])
    counter.stop()
    assert (sys.gettrace(), sys.getprofile()) == before
    assert counter.c_calls == 1, "this file is not in the folder of the benchmarks"
    assert counter.python_calls == 0, "a function that was running before is not counted as called"
