# SPDX-License-Identifier: Apache-2.0

"""The figures as a table, and that docs/reference/benchmarks.md has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from tests.benchmarks.made_up import event_figure, load_figure, results

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "benchmarks.md"


def test_a_row_has_the_percentiles_and_the_ratios_of_its_figure() -> None:
    rows = tables.table(
        results(event_figure("event_pipelined", {"in_flight": 64}), load_figure("aligned"))
    ).splitlines()
    assert rows[:2] == tables.HEAD.splitlines()
    assert rows[2:] == ["| `event_pipelined`, in flight 64 | µs | 200 | 298 | 100 | 149 | 2.00 (2.00 to 2.00) | 2.00 |"]


def test_a_case_that_is_one_of_several_is_named_without_its_key() -> None:
    row = tables.table(results(event_figure("memory", {"of": "growth", "side": "task"}))).splitlines()[-1]
    assert row.startswith("| `memory`, growth, side task | ")


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (9.994, "9.99"), (46.82, "46.8"), (504.4, "504"), (1216.0, "1,216")]
)
def test_a_number_has_three_digits_or_all_of_the_whole_ones(value: float, text: str) -> None:
    assert tables.number(value) == text


def test_the_page_has_the_figures_of_the_latest_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") > 50
    assert table in PAGE.read_text(), (
        "run `python -m benchmarks.tables` and put its table into docs/reference/benchmarks.md"
    )
