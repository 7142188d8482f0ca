# SPDX-License-Identifier: Apache-2.0

"""Progress bars: what they count, where they are shown, and that they leave Spark's own bar its line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spark_bridge.common.errors import SidecarError
from spark_bridge.observability import progress
from spark_bridge.observability.progress import Progress
from tests.spark_bridge.observability.screen import screen_of

ORDINARY: dict[str, Any] = {"events_received": 7, "failures": 2, "resets": 1, "splits_done": None, "splits_total": None}


class Told:
    """Statistics that a test changes."""

    def __init__(self, **changes: Any) -> None:
        self.statistics = {**ORDINARY, **changes}
        self.gone = False

    def __call__(self) -> dict[str, Any]:
        if self.gone:
            raise SidecarError("gone")
        return dict(self.statistics)


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "active_context", lambda: None)
    return iter(())


def test_the_bar_shows_splits_and_what_was_lost_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(splits_done=0, splits_total=10)
    with Progress("crawl", told, shown=True) as bar:
        told.statistics.update(splits_done=10, failures=4, resets=2)
    assert bar.done == 10
    out, err = capsys.readouterr()
    (line,) = screen_of(err)
    assert out == ""
    assert line.startswith("crawl: 100%")
    assert " 10/10 " in line
    assert line.endswith("lost=2, resets=1]")


@pytest.mark.parametrize(("counted", "done"), [({"kept": 500, "lost": 3}, 500), ({"lost": 3}, 0), ({}, 0)])
def test_it_shows_how_a_counter_of_the_tasks_grows(
    counted: dict[str, int], done: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(counters=[{}, {}])
    with Progress("crawl", told, 2000, counter="kept", shown=True) as bar:
        told.statistics["counters"] = [counted, {}]
    assert bar.done == done
    (line,) = screen_of(capsys.readouterr().err)
    assert f" {done}/2000 " in line
    with pytest.raises(ValueError, match="a bar shows one figure"):
        Progress("crawl", told, count="failures", counter="kept")


def test_of_other_operators_it_shows_how_a_count_grows(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(other=3)
    with Progress("crawl", told, 100, shown=True):
        told.statistics["events_received"] += 25
    (line,) = screen_of(capsys.readouterr().err)
    assert " 25/100 " in line
    with Progress("crawl", told, count="other", shown=True) as bar:
        told.statistics["other"] = 8
    assert bar.done == 5


def test_a_total_that_is_given_counts_more_than_what_the_enumerator_says() -> None:
    with Progress("crawl", Told(splits_done=3, splits_total=10), 12, shown=True) as bar:
        pass
    assert (bar.done, bar._bar.total) == (3, 12)


def test_nothing_is_shown_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("crawl", Told()):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("out", "err", "shown"), [(True, True, True), (True, False, False), (False, True, False)])
def test_both_outputs_have_to_be_terminals(out: bool, err: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err)
    with Progress("crawl", Told()) as bar:
        assert bar._bar.disable is not shown


def test_a_sidecar_that_is_away_for_a_moment_costs_nothing_but_the_figures() -> None:
    told = Told()
    with Progress("crawl", told, shown=True) as bar:
        told.gone = True
    assert bar.done == 0


def test_it_stays_below_the_bar_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = {"spark.ui.showConsoleProgress": "true"}
    context = SimpleNamespace(getConf=lambda: conf)
    monkeypatch.setattr(progress, "active_context", lambda: context)
    with Progress("crawl", Told(), shown=True) as bar:
        assert bar._bar.pos == -1
    conf.clear()
    with Progress("crawl", Told(), shown=True) as bar:
        assert bar._bar.pos == 0


def test_a_line_is_said_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("crawl", Told(), 10, shown=True) as bar:
        bar.say("subtask 3 lost attempt 0")
    said, line = screen_of(capsys.readouterr().err)
    assert said == "subtask 3 lost attempt 0"
    assert line.startswith("crawl:")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"count": "evnts"}, "choose one of events_received, failures, resets"),
        ({"count": "splits_done"}, "choose one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Progress("crawl", Told(), **arguments)


def test_a_bar_is_entered_once() -> None:
    bar = Progress("crawl", Told())
    with bar:
        pass
    with pytest.raises(SidecarError, match=r"make a new one with handle\.progress"), bar:
        pass


def test_without_tqdm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(SidecarError, match=r"pip install 'headgate\[progress\]'"):
        Progress("crawl", Told())
