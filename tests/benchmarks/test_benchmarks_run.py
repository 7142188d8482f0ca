"""The benchmarks run and say what they measured. How fast anything is, is no matter of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from benchmarks.__main__ import FIGURES, main
from benchmarks.harness import Figure, interleave, percentile

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "name",
    "unit",
    "p50",
    "p90",
    "p99",
    "max",
    "baseline_p50",
    "baseline_p99",
    "ratio_p50",
    "ratio_p99",
    "samples",
    "params",
}


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """``main`` sets how this process logs; the tests after this one expect what they had."""
    before, configured = structlog.get_config(), structlog.is_configured()
    yield
    if configured:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "spark_fact"])
def test_a_quick_run_writes_its_figure_and_the_host_as_json(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert main(["--quick", "--only", name, "--json", str(file)]) == 0
    check(file, name)


@pytest.mark.spark
def test_the_figure_of_a_real_spark_is_written_too(tmp_path: Path) -> None:
    """In a process of its own: it starts a Spark, and stops it."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "spark_fact", "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, stderr=subprocess.DEVNULL)
    check(file, "spark_fact")


def check(file: Path, name: str) -> None:
    written = json.loads(file.read_text())
    assert written["host"]["cpus"] >= 1
    (figure,) = written["figures"]
    assert set(figure) == KEYS
    assert figure["name"] == name
    assert 0 < figure["p50"] <= figure["p90"] <= figure["p99"] <= figure["max"]
    assert figure["baseline_p50"] > 0
    assert figure["samples"] >= 1
    assert figure["params"]["baseline"]


def test_an_unknown_figure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "light_speed"])
    assert "light_speed" in capsys.readouterr().err


def test_a_ratio_is_subject_over_baseline() -> None:
    figure = Figure("f", "µs", [6.0, 8.0, 4.0], [2.0, 2.0, 4.0]).as_dict()
    assert figure["p50"] == 6.0
    assert figure["baseline_p50"] == 2.0
    assert figure["ratio_p50"] == 3.0


def test_percentiles_are_samples_and_never_beyond_the_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0


def test_baseline_and_subject_take_turns_and_the_warm_up_does_not_count() -> None:
    turns: list[str] = []

    def take(who: str, value: float) -> list[float]:
        turns.append(who)
        return [value]

    samples, baseline = interleave(2, lambda: take("baseline", 1.0), lambda: take("subject", 2.0), lambda text: None)
    assert turns == ["baseline", "subject"] * 3
    assert (samples, baseline) == ([2.0, 2.0], [1.0, 1.0])
