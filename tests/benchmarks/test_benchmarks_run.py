# SPDX-License-Identifier: Apache-2.0

"""The benchmarks run and report figures. No test asserts how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import FIGURES
from tests.spark.program import Program

WITHOUT_SPARK = {"local_messages", "actors_10k", "checkpoint", "neighbour", "memory", "recovery"}
"""The modules that need no Java."""
RUN_MAX_S = 580.0
"""On a busy machine, Spark alone may take half a minute to start."""


@pytest.mark.long
@pytest.mark.timeout(RUN_MAX_S + 20)
@pytest.mark.parametrize("name", [name for name, module in FIGURES.items() if module in WITHOUT_SPARK])
def test_a_quick_run_writes_its_figure_and_the_host_as_json(name: str, tmp_path: Path) -> None:
    check_quick_run(name, tmp_path / "figures.json")


ON_SPARK = [name for name, module in FIGURES.items() if module not in WITHOUT_SPARK]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(RUN_MAX_S + 20)
@pytest.mark.parametrize("name", ON_SPARK)
def test_a_quick_run_on_a_real_spark_does_too(name: str, tmp_path: Path) -> None:
    check_quick_run(name, tmp_path / "figures.json")


def check_quick_run(name: str, file: Path) -> None:
    """Run it in a separate process, which may start a Spark and leaves no process or file."""
    command = ("-m", "benchmarks", "--quick", "--only", name, "--json", str(file))
    with Program("-W", "always::ResourceWarning", *command) as program:
        program.ends_with(0, RUN_MAX_S)
        assert program.left_behind() == []
        assert "ResourceWarning" not in program.said, program.said
    written = json.loads(file.read_text())
    assert written["host"]["cpus"] >= 1
    assert written["figures"]
    for figure in written["figures"]:
        assert figure["name"] == name
        assert figure["p50"] <= figure["p90"] <= figure["p99"] <= figure["max"]
        assert figure["baseline_p50"] <= figure["baseline_p99"]
        assert figure["samples"] >= 1
        assert figure["params"]["baseline"], "a figure says what it is compared with"
    cases = [str(figure["params"].get("case")) for figure in written["figures"]]
    assert len(set(cases)) == len(cases), "figures of one name are told apart by their case"
