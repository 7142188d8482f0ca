# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.simulation``: its output, its exit status, and many worlds over several processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.mutants.catalogue import BY_NAME
from tests.simulation.__main__ import main
from tests.simulation.many import Outcome, run_many
from tests.simulation.shared import Totals


def test_many_worlds_end_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "0", "--seeds", "4", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "seeds 0..3, over 2 processes" in out
    assert "4/4 worlds" in out
    for figure in ("events down", "events up", "checkpoints", "resets", "restores", "drivers lost", "failures of"):
        assert figure in out
    assert "no rule was broken" in out


def test_a_broken_rule_is_told_with_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # H22: an edit that lets some events reach the operator twice
    BY_NAME["events-twice"].apply(monkeypatch)
    assert main(["--first", "0", "--seeds", "60", "--jobs", "1"]) == 1
    many = capsys.readouterr().out
    found = re.search(r"breaks the contract: H22.*\nseed (\d+) broke the contract; replay: python -m (.*)", many)
    assert found is not None
    assert main(found[2].split()[1:]) == 1
    one = capsys.readouterr().out
    assert "a driver starts" in one
    assert many.endswith(one)

    monkeypatch.undo()
    assert main(["--seed", found[1]]) == 0
    assert "no rule was broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--seeds", "0"], ["--jobs", "0"], ["--seed", "1", "--seeds", "2"], ["--seed", "x"]]
)
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


# --- several processes ---


def breaks_later(seed: int) -> Outcome:
    """Return an outcome for a seed: the even ones break, from 6 on."""
    return Outcome(seed, Totals(1, steps=seed), f"seed {seed}" if seed >= 6 and seed % 2 == 0 else "")


def dies(seed: int) -> Outcome:
    os._exit(seed)


def quietly(_: str) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_lowest_seed_that_breaks_a_rule_counts_and_higher_ones_do_not(jobs: int) -> None:
    summary = run_many(range(100), jobs, quietly, breaks_later)
    assert summary.broken == Outcome(6, Totals(1, steps=6), "seed 6")
    assert summary.done == summary.totals.worlds == 7
    assert summary.totals.steps == sum(range(7))


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="seed 0 or a later one has ended"):
        run_many(range(4), 2, quietly, dies)


def test_an_interrupt_ends_everything_quietly() -> None:
    command = [sys.executable, "-u", "-m", "tests.simulation", "--seeds", "100000", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # the first progress: all processes are running
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == b""
