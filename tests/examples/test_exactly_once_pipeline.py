# SPDX-License-Identifier: Apache-2.0

"""The exactly-once pipeline as a command, and the whole of it on real Spark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from examples.exactly_once import __main__ as exactly_once_pipeline
from examples.exactly_once.faults import KINDS, WHAT
from examples.exactly_once.trial import Outcome, SparkDidNotStart, Trial
from tests.examples.conftest import ROOT
from tests.spark.faults.waiting import wait_until

# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallelism", "0"], "--parallelism must be more than 0, not 0"),
        (["--runs", "-1"], "--runs must be more than 0, not -1"),
        (
            ["--faults", "task,flood"],
            "--faults: 'flood' is none of task, unresponsive, coordinator, driver, storage and none",
        ),
        (["--master", "local[4]"], "--master: local[4] retries no task"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exactly_once_pipeline.main(arguments)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_storage_that_was_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Leftovers of another run would be restored, and the proof would mean nothing."""
    (tmp_path / "seed-4" / "sink").mkdir(parents=True)

    with pytest.raises(SystemExit):
        exactly_once_pipeline.main(["--storage", str(tmp_path), "--seed", "3", "--runs", "2"])

    assert "seed-4 has been used" in capsys.readouterr().err


def test_many_runs_end_at_the_first_that_is_wrong_and_name_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def try_once(options: Any, seed: int, *, alone: bool) -> Outcome:
        tried.append(seed)
        return Outcome(list(KINDS), [], 2, 30, 9.5, None, ["2 is doubled"] if seed == 12 else [])

    monkeypatch.setattr(exactly_once_pipeline, "try_once", try_once)

    assert exactly_once_pipeline.main(["--seed", "10", "--runs", "5"]) == 1
    said = capsys.readouterr().out
    assert tried == [10, 11, 12]
    assert "3/5  seed 12  WRONG    9.5 s  task, unresponsive, coordinator, driver" in said
    assert "again: --seed 12" in said
    assert said.splitlines()[-1] == "exactly once: no"

    assert exactly_once_pipeline.main(["--seed", "0", "--runs", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "exactly once: yes"


@pytest.mark.parametrize(("wrong", "arguments"), [([], ["--keep"]), (["1 is missing"], []), ([], [])])
def test_what_a_run_leaves_is_kept_if_it_went_wrong_or_if_that_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: list[str],
    arguments: list[str],
) -> None:
    def run(self: Trial) -> Outcome:
        (folder,) = tmp_path.iterdir()
        (folder / "driver-1.log").touch()
        return Outcome([], [], 1, 0, 1.0, None, wrong)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Trial, "run", run)

    status = exactly_once_pipeline.main(["--seed", "3", *arguments])

    kept = [str(folder) for folder in tmp_path.iterdir()]
    assert status == (1 if wrong else 0)
    assert bool(kept) == bool(wrong or arguments)
    assert all(folder in capsys.readouterr().err for folder in kept)


def test_without_spark_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(self: Trial) -> Outcome:
        raise SparkDidNotStart("no Java")

    monkeypatch.setattr(Trial, "run", run)

    assert exactly_once_pipeline.main([]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "Spark did not start: no Java"


# --- on a real Spark ----------------------------------------------------------------------------------------------

# Two drivers start in turn, and Spark takes seconds to kill an unresponsive worker: more than the other examples.
SPARK_TIMEOUT_S = 900


def started_pipeline(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """The example as a separate program with its temporary files in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "examples.exactly_once", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_every_number_goes_exactly_once_though_everything_dies_once(tmp_path: Path) -> None:
    """The invariant: H13, H15, H18, H25, H31, H40 to H45, H50, H52, in one run with every kind of fault."""
    with started_pipeline(tmp_path, "--seed", 1, "--numbers", 300, "--timeout", SPARK_TIMEOUT_S / 2) as process:
        said, happened = process.communicate(timeout=SPARK_TIMEOUT_S)

    assert (process.returncode, said.splitlines()[-1]) == (0, "exactly once: yes"), said + happened
    assert re.findall(r"^ +[0-3] +300 +300 +300 +300 +300 +300$", said, re.MULTILINE) != []
    for kind in KINDS:
        assert WHAT[kind] in happened
    assert "last of 2 drivers" in said
    assert "Traceback" not in happened
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_ctrl_c_ends_the_drivers_and_leaves_no_file(tmp_path: Path) -> None:
    with started_pipeline(
        tmp_path, "--faults", "none", "--numbers", 10**6, "--seed", 5, "--timeout", SPARK_TIMEOUT_S
    ) as process:
        checkpoints = "exactly-once-5-*/checkpoints/**/*.hgc"
        wait_until(lambda: any(tmp_path.glob(checkpoints)), "a checkpoint", timeout_s=SPARK_TIMEOUT_S / 2)

        process.send_signal(signal.SIGINT)
        _, happened = process.communicate(timeout=SPARK_TIMEOUT_S)

    assert process.returncode == 130
    assert happened.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []
