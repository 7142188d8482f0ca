# SPDX-License-Identifier: Apache-2.0

"""The plots of made-up figures: which are drawn, that they are SVG, and that the same figures give the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plots
from tests.benchmarks.made_up import checkpoint_figure, event_figure, hold_figure, load_figure, results

ALL = results(
    event_figure(),
    event_figure("event_pipelined", {"in_flight": 64}),
    event_figure("local_tell"),
    checkpoint_figure(1),
    checkpoint_figure(256, timeline=True),
    *(hold_figure(mode, "down", subtasks) for mode in ("aligned", "unheld") for subtasks in (16, 256)),
    hold_figure("aligned", "up", 16),
    load_figure("aligned"),
    load_figure("unheld"),
)


def text_of(file: Path) -> str:
    root = ElementTree.fromstring(file.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return " ".join(root.itertext())


def test_each_plot_is_an_svg_that_names_its_figures(tmp_path: Path) -> None:
    drawn = plots.draw(ALL, tmp_path)
    assert drawn == [tmp_path / f"{name}.svg" for name in ("latency", "load", "checkpoint", "hold", "timeline")]
    latency, load, checkpoint, hold, timeline = map(text_of, drawn)
    assert "event_confirm" in latency
    assert "event_pipelined (in_flight 64)" in latency
    assert "local_tell" not in latency
    assert "a checkpoint every second, hold_events=False" in load
    assert "2,000 subtasks" in load
    assert "Flink 2.3.0" in checkpoint
    assert "Flink 2.3.0" in hold
    assert all(where in hold for where in ("its gateway closes", "valve closes", "without a checkpoint"))
    assert all(what in timeline for what in ("snapshot", "barrier", "acknowledged"))


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    drawn = plots.draw(ALL, tmp_path)
    first = [file.read_bytes() for file in drawn]
    assert [file.read_bytes() for file in plots.draw(ALL, tmp_path)] == first


def test_a_figure_that_is_missing_is_left_out(tmp_path: Path) -> None:
    assert plots.draw(results(), tmp_path) == []
    assert plots.draw(results(event_figure()), tmp_path) == [tmp_path / "latency.svg"]
    assert plots.draw(results(checkpoint_figure(256)), tmp_path) == [tmp_path / "checkpoint.svg"]
    assert plots.draw(results(hold_figure("aligned", "up", 16)), tmp_path) == [tmp_path / "hold.svg"]
    assert "Flink" not in text_of(tmp_path / "hold.svg"), "Flink holds nothing that a task sends"
    assert plots.draw(results(load_figure("unheld")), tmp_path) == [tmp_path / "load.svg"]


def test_the_largest_sample_stands_after_all_others_on_the_axis_of_nines() -> None:
    assert plots.nines(0.0) == 0.0
    assert plots.nines(0.99) == pytest.approx(2.0)
    assert plots.nines(0.999) < plots.nines(1.0) == plots.MAX_NINES


def test_the_command_draws_beside_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latest.json"
    file.write_text(json.dumps(ALL))
    assert plots.main([str(file)]) == 0
    assert str(tmp_path / "timeline.svg") in capsys.readouterr().out
    assert (tmp_path / "timeline.svg").exists()


def test_without_matplotlib_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    assert plots.main([str(tmp_path / "latest.json")]) == 1
    assert "matplotlib" in capsys.readouterr().err
