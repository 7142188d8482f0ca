# SPDX-License-Identifier: Apache-2.0

"""`python -m tests.reached` on a small project: what no test takes is printed, and which tests reach a line is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from coverage import Coverage

from tests import reached

PRODUCT = """
from __future__ import annotations


def sign(value: int) -> str:
    if value < 0:
        return "-"
    if value == 0:
        word = "zero"
    return "+"
"""
TESTS = """
import pytest

from protocol.some import sign


@pytest.mark.parametrize("value", [1, 2])
def test_positive(value: int) -> None:
    assert sign(value) == "+"


def test_negative() -> None:
    assert sign(-1) == "-"
"""


def test_untaken_statements_and_branches_are_listed_and_the_tests_of_a_line_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("protocol/some.py", PRODUCT), ("tests/test_some.py", TESTS)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        (file.parent / "__init__.py").touch()
    shutil.copy(reached.__file__, tmp_path / "tests")
    ini = "[pytest]\nmarkers =\n    long: -\n    spark: -\n    torch: -\n"
    (tmp_path / "pytest.ini").write_text(ini, encoding="utf-8")
    command = [sys.executable, "-m", "tests.reached", "protocol"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-3:] == [
        "protocol/some.py:8: never continues at line 9: if value == 0:",
        'protocol/some.py:9: never executed: word = "zero"',
        "2 statements and branches that no quick test takes in protocol",
    ]
    monkeypatch.setattr(reached, "ROOT", tmp_path)
    monkeypatch.setattr(reached, "DATA", tmp_path / ".coverage")
    monkeypatch.setattr(reached, "_loaded", loaded)
    tests = reached.tests_by_line(tmp_path / "protocol" / "some.py")
    assert sorted(tests[6]) == ["tests/test_some.py::test_negative", "tests/test_some.py::test_positive"]
    assert tests[7] == ["tests/test_some.py::test_negative"]
    assert reached.unrecorded() == []
    newer = tmp_path / "tests" / "test_newer.py"
    newer.write_text("async def test_new() -> None: ...\ndef test_positive() -> None: ...\n", encoding="utf-8")
    os.utime(newer, ns=(0, (tmp_path / ".coverage").stat().st_mtime_ns + 10**9))
    assert reached.unrecorded() == ["tests/test_newer.py::test_new", "tests/test_newer.py::test_positive"]
    assert reached.is_recorded()
    assert reached.spark_tests_by_line(tmp_path / "protocol" / "some.py") == {}
    (tmp_path / "protocol" / "newer.py").touch()
    assert reached.is_recorded()  # it has no code
    (tmp_path / "protocol" / "newer.py").write_text("SOME = 1\n", encoding="utf-8")
    assert not reached.is_recorded()


def loaded(data: Path) -> Coverage:
    made = reached._coverage(data, suffix=False)
    made.load()
    return made
