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
RUN_MAX_S = 1180.0
"""On a busy machine, a figure may take more than a minute, and a module has up to eleven."""


@pytest.mark.long
@pytest.mark.timeout(RUN_MAX_S + 20)
@pytest.mark.parametrize("module", sorted(WITHOUT_SPARK))
def test_a_quick_run_writes_its_figures_and_the_host_as_json(module: str, tmp_path: Path) -> None:
    check_quick_run(module, tmp_path / "figures.json")


ON_SPARK = sorted({module for module in FIGURES.values() if module not in WITHOUT_SPARK})


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(RUN_MAX_S + 20)
@pytest.mark.parametrize("module", ON_SPARK)
def test_a_quick_run_on_a_real_spark_does_too(module: str, tmp_path: Path) -> None:
    check_quick_run(module, tmp_path / "figures.json")


def check_quick_run(module: str, file: Path) -> None:
    """Run its figures in a separate process, which may start a Spark and leaves no process or file."""
    names = [name for name, of_module in FIGURES.items() if of_module == module]
    only = [word for name in names for word in ("--only", name)]
    with Program("-W", "always::ResourceWarning", "-m", "benchmarks", "--quick", *only, "--json", str(file)) as program:
        program.ends_with(0, RUN_MAX_S)
        assert program.left_behind() == []
        assert "ResourceWarning" not in program.said, program.said
    written = json.loads(file.read_text())
    assert written["host"]["cpus"] >= 1
    assert {figure["name"] for figure in written["figures"]} == set(names)
    for figure in written["figures"]:
        assert figure["p50"] <= figure["p90"] <= figure["p99"] <= figure["max"]
        assert figure["baseline_p50"] <= figure["baseline_p99"]
        assert figure["samples"] >= 1
        assert figure["params"]["baseline"], "a figure says what it is compared with"
    cases = [(figure["name"], str(figure["params"].get("case"))) for figure in written["figures"]]
    assert len(set(cases)) == len(cases), "figures of one name are told apart by their case"
