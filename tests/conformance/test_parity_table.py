# SPDX-License-Identifier: Apache-2.0

"""The parity table is complete: every clause has a row, and the test that the row names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = (ROOT / "docs" / "flink-parity.md").read_text(encoding="utf-8")

CLAUSES = [f"R{number}" for number in range(1, 134)]
GAPS = [f"G{number}" for number in range(1, 20)]
SCENARIOS = [f"S{number}" for part in (range(1, 64), range(86, 94), range(119, 137)) for number in part]
"""The numbers of the parity list; it has no others."""

ROW = re.compile(r"^\| ([RGS]\d+) \| (.+?) \| (.+?) \|(?: (.*?) \||)$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
VERDICT = re.compile(r"\*\*(kept|changed|absent|closed|open)\*\*")
ROWS = {match[1]: match for match in ROW.finditer(TABLE)}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_clause_and_every_gap_has_one_row_in_order() -> None:
    rows = [match[1] for match in ROW.finditer(TABLE)]
    assert [row for row in rows if row[0] in "RG"] == CLAUSES + GAPS


@pytest.mark.parametrize("row", CLAUSES + GAPS)
def test_a_row_says_what_became_of_its_clause_and_names_a_test_that_exists(row: str) -> None:
    _, _, here, shown_by = ROWS[row].groups()
    verdict = VERDICT.match(here)
    assert verdict is not None, here
    if verdict[1] not in ("kept", "closed"):
        assert len(here) > len(verdict[0]) + len(": it says why"), here
    tests = TEST.findall(shown_by or "")
    if verdict[1] not in ("absent", "open"):
        assert tests, "it names a test"
    assert [f"{path}::{name}" for path, name in tests if name not in names_in(path)] == []
    assert TEST.sub("", shown_by or "").strip(" ,") == "", "nothing but tests"


def test_every_scenario_has_a_test_that_cites_it_or_a_row_that_says_why_there_is_none() -> None:
    here = Path(__file__)
    suites = [path.read_text(encoding="utf-8") for path in here.parent.glob("*.py") if path != here]
    cited = {number for suite in suites for number in re.findall(r"\bS\d+\b", suite)}
    assert [scenario for scenario in SCENARIOS if scenario not in cited and scenario not in ROWS] == []
    assert sorted(cited - set(SCENARIOS)) == [], "no scenario has such a number"
