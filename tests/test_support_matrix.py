# SPDX-License-Identifier: Apache-2.0

"""What ``python -m tests.support_matrix`` finds and prints, and that the page shows it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import support_matrix
from tests.support_matrix import (
    CONNECT,
    PYTHONS,
    ROOT,
    SPARKS,
    Cell,
    connect_table,
    find_java,
    find_python,
    run,
    run_connect,
    table,
)

PAGE = ROOT / "docs" / "platforms" / "versions.md"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_this_python_is_found_and_one_that_does_not_exist_is_not() -> None:
    assert find_python(HERE) is not None
    assert find_python("3.99") is None


def test_a_java_is_found_by_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.8\" 2025-07-15' >&2\n", encoding="utf-8")
    java.chmod(0o700)
    monkeypatch.setattr(support_matrix, "JAVA_FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    assert find_java(21) == str(java.parent.parent)
    assert find_java(22) is None


def cell_that_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell, said: str, status: int) -> Cell:
    """A cell whose interpreter is a program that prints a text."""
    monkeypatch.setattr(support_matrix, "ROOT", tmp_path)
    monkeypatch.setattr(support_matrix, "OUT", tmp_path / "out")
    python = cell.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n", encoding="utf-8")
    python.chmod(0o700)
    return cell


@pytest.mark.parametrize(
    ("cell", "said", "status", "expected"),
    [
        (Cell("4.3", "3.12", 21), "== 17 passed, 1 skipped in 3 s ==", 0, "works (17 tests, 1 skipped)"),
        (
            Cell("4.3", "3.12", 21),
            "== 1 failed, 17 passed in 3 s ==",
            1,
            "**check failed**: 1 failed, 17 passed in 3 s",
        ),
        (Cell("4.1", "3.12", 25), "java is Java 25, which is too new for Spark 4.1", 1, "refused by `headgate check`"),
        (Cell("4.1", "3.12", 25), "Headgate works here.", 0, "**check did not refuse it**"),
    ],
)
def test_a_cell_says_what_happened(
    cell: Cell, said: str, status: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(cell_that_prints(tmp_path, monkeypatch, cell, said, status), "/java", ["tests"]) == expected
    log = tmp_path / "out" / f"spark-{cell.spark}-python{cell.python}-java{cell.java}-check.log"
    assert said in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [("== 12 passed in 3 s ==", 0, "works (12 tests)"), ("== 1 failed in 3 s ==", 1, "**failed**: 1 failed in 3 s")],
)
def test_a_file_of_the_tests_of_connect_has_a_place_of_its_cell(
    said: str, status: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_that_prints(tmp_path, monkeypatch, Cell("4.1", "3.12", 17), said, status)
    assert run_connect(cell, "/java", CONNECT[0]) == expected
    assert connect_table({f"{cell}: {CONNECT[0].name}": expected}).splitlines()[::2] == [
        "| Tests | Spark 4.1, Python 3.12, Java 17 |",
        f"| `{CONNECT[0].name}` | {expected} |",
        *(f"| `{file.name}` | not tried yet |" for file in CONNECT[2::2]),
    ]


def test_the_page_has_a_row_for_each_spark_with_each_python_and_each_file_and_no_failure() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (4\.\d) \| (3\.\d+) \|", page, re.MULTILINE)
    assert rows == [(spark, python) for spark in SPARKS for python in PYTHONS]
    assert table({}).splitlines()[:2] == [line for line in page.splitlines() if line.startswith("|")][:2]
    assert re.findall(r"^\| `(test_\w+\.py)` \|", page, re.MULTILINE) == [file.name for file in CONNECT]
    assert "**" not in page
