# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks``: its options, its output, and that every figure it names exists."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import structlog

from benchmarks import __main__ as command
from benchmarks import plots
from benchmarks.harness import Figure, Progress
from tests.benchmarks.made_up import measure


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command changes how this process logs; later tests expect the previous settings."""
    before, configured = structlog.get_config(), structlog.is_configured()
    yield
    if configured:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()


@pytest.fixture
def one_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command knows only one figure, which ends immediately, and writes to ``tmp_path``."""
    monkeypatch.setattr(command, "FIGURES", {"event_confirm": "made_up"})
    monkeypatch.setattr(command, "find", lambda name: measure)
    monkeypatch.setattr(command, "RESULTS", tmp_path)


def test_the_list_names_every_figure_and_measures_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(command.FIGURES)


def test_an_unknown_figure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "light_speed"])
    assert "light_speed" in capsys.readouterr().err


@pytest.mark.usefixtures("one_figure")
def test_the_figures_are_written_as_json_with_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "somewhere" / "figures.json"
    assert command.main(["--quick", "--only", "event_confirm", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["quick"] is True
    assert written["host"]["cpus"] >= 1
    assert [figure["params"]["case"] for figure in written["figures"]] == [{"in_flight": 1}, {"in_flight": 64}]
    out, err = capsys.readouterr()
    assert "event_confirm (in_flight 64)" in out
    assert "measuring nothing" in err
    assert list(tmp_path.iterdir()) == [file.parent], "a part of the figures replaces no plots"


@pytest.mark.usefixtures("one_figure")
def test_a_whole_run_writes_the_latest_figures_and_draws_them(tmp_path: Path) -> None:
    assert command.main([]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"latest.json", "latency.svg"}


@pytest.mark.usefixtures("one_figure")
def test_without_matplotlib_a_whole_run_says_that_plots_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    assert command.main([]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"latest.json"}
    assert "they need matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.FIGURES)
def test_each_figure_is_a_function_of_its_module_and_measures_as_the_harness_asks(name: str) -> None:
    function = command.find(name)
    assert inspect.getdoc(function), "it says what it measures, and in which unit"
    assert list(inspect.signature(function).parameters) == ["quick", "progress"]
    assert get_type_hints(function) == {"quick": bool, "progress": Progress, "return": list[Figure]}
