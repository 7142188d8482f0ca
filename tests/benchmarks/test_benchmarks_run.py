# SPDX-License-Identifier: Apache-2.0

"""The benchmarks run and report figures. No test asserts how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import FIGURES
from tests.spark.program import Program, wait_until_nobody_is_left

WITHOUT_SPARK = {
    "local_messages",
    "actors_10k",
    "checkpoint",
    "under_load",
    "saturation",
    "neighbour",
    "memory",
    "recovery",
}
"""The modules that need no Java."""
RUN_MAX_S = 1180.0
"""On a busy machine, a figure may take half a minute, and there are forty."""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(RUN_MAX_S + 20)
def test_a_quick_run_on_a_real_spark_does_too(tmp_path: Path) -> None:
    """All in one process: their sessions then share a JVM, whose start takes longer than most of them."""
    on_spark = [name for name, module in FIGURES.items() if module not in WITHOUT_SPARK]
    check_quick_run(on_spark, tmp_path / "figures.json")


@pytest.mark.long
@pytest.mark.timeout(RUN_MAX_S + 20)
@pytest.mark.parametrize("module", sorted(WITHOUT_SPARK))
def test_a_quick_run_writes_its_figures_and_the_host_as_json(module: str, tmp_path: Path) -> None:
    check_quick_run([name for name, of_module in FIGURES.items() if of_module == module], tmp_path / "figures.json")


def check_quick_run(names: list[str], file: Path) -> None:
    """Run these figures in a separate process, which may start a Spark and leaves no process or file."""
    only = [word for name in names for word in ("--only", name)]
    arguments = ("-W", "always::ResourceWarning", "-m", "benchmarks", "--quick", *only, "--json", str(file))
    with Program(*arguments, hang_s=RUN_MAX_S) as program:
        program.ends_with(0)
        wait_until_nobody_is_left(program)
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
