# SPDX-License-Identifier: Apache-2.0

"""The page "Your first change" is right: its changes apply to the code of today, and the tests in it pass then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "your-first-change.md"
COPIED = ("actors", "headgate", "protocol", "spark_bridge", "tests", "docs")
CHANGE = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the repository with all changes of the page, in its order."""
    left_out = shutil.ignore_patterns("__pycache__", "golden", "*.png")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changes = CHANGE.findall(PAGE.read_text(encoding="utf-8"))
    assert changes
    for change in changes:
        applied = subprocess.run(
            ["git", "apply", "-"],
            check=False,
            cwd=tmp_path,
            input=change,
            text=True,
            capture_output=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        )
        assert not applied.returncode, f"{applied.stderr}\nthe code has changed: change the page, too\n{change}"
    return tmp_path


def test_the_changes_of_the_page_apply_and_its_tests_pass(changed: Path) -> None:
    (tests,) = [name for name in FILE.findall(PAGE.read_text(encoding="utf-8")) if name.startswith("tests/")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", tests]
    ran = subprocess.run(command, check=False, cwd=changed, text=True, capture_output=True)
    assert not ran.returncode, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
