# SPDX-License-Identifier: Apache-2.0

"""In continuous integration a skipped test has failed, unless the committed list names it with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

@pytest.fixture
def a_browser():
    pytest.skip("needs a browser")

def test_in_a_fixture(a_browser):
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_inside(number):
    if number == 2:
        pytest.skip("needs luck")

@pytest.mark.skip(reason="needs root")
def test_marked():
    pass

@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    assert False

def test_that_passes():
    pass
"""
LISTED = """
[[skip]]
test = "test_some.py::test_inside"
reason = "needs luck"
why = "..."
[[skip]]
test = "test_some.py::test_marked"
reason = "another reason"
why = "..."
"""
PLUGIN = """
from pathlib import Path
from tests import skips
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport, pytest_runtest_setup

skips.LIST = Path(__file__).with_name("allowed_skips.toml")
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    (folder / "allowed_skips.toml").write_text(LISTED, encoding="utf-8")
    (folder / "conftest.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    unset = ("CI", skips.END)
    kept = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_skipped_test_fails_in_continuous_integration_unless_it_is_listed_with_this_reason(
    tmp_path: Path, processes: str
) -> None:
    ended = run(tmp_path, "--numprocesses", processes, CI="true")
    assert ended.returncode == 1
    assert "2 passed, 1 skipped, 1 xfailed" in ended.stdout, ended.stdout
    for test, reason in (("test_in_a_fixture", "needs a browser"), ("test_marked", "needs root")):
        assert f"test_some.py::{test} was skipped in continuous integration: {reason}\n" in ended.stdout
    assert "or name the test, this reason and why nothing is lost in tests/allowed_skips.toml" in ended.stdout


def test_anywhere_else_a_skipped_test_is_skipped(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "2 passed, 3 skipped, 1 xfailed" in ended.stdout


def test_a_file_that_is_skipped_as_a_whole_fails_too(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("import pytest\npytest.importorskip('no_such_package')\n", encoding="utf-8")
    ended = run(tmp_path, "test_other.py", CI="true")
    assert ended.returncode != 0
    assert "test_other.py was skipped in continuous integration: could not import 'no_such_package'" in ended.stdout


@pytest.mark.parametrize(("ends", "passed"), [("1", 0), ("99999999999", 2)])
def test_tests_that_begin_after_the_end_of_the_time_are_skipped_and_listed_by_line(
    tmp_path: Path, ends: str, passed: int
) -> None:
    ended = run(
        tmp_path,
        "-k",
        "inside or that_passes",
        "--deselect",
        "test_some.py::test_inside[2]",
        **{skips.END: ends},
        CI="1",
    )
    assert ended.returncode == 0, ended.stdout
    assert f"{passed} passed" in ended.stdout if passed else "2 skipped" in ended.stdout
    assert (f"test_some.py:11: {skips.OUT_OF_TIME}" in ended.stdout) is not bool(passed)


@pytest.mark.parametrize("allowed", skips.read(), ids=lambda allowed: f"{allowed.test.partition('::')[2]}")
def test_the_list_names_tests_and_reasons_that_exist_and_says_why(allowed: skips.AllowedSkip) -> None:
    file, _, function = allowed.test.partition("::")
    text = Path(ROOT, file).read_text(encoding="utf-8")
    assert f"def {function}(" in text
    assert allowed.reason in text
    assert allowed.why.endswith(".")
