# SPDX-License-Identifier: Apache-2.0

"""`.ci/find-python` against fake interpreters, in a PATH with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).resolve().parent.parent / ".ci" / "find-python"


def put(folder: Path, name: str, *, good: bool) -> Path:
    """Put an interpreter called ``name`` into ``folder``: the running one, or one that fails at everything."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n' if good else "#!/bin/sh\nexit 1\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def path_folder(tmp_path: Path) -> Path:
    shell = shutil.which("sh")
    assert shell
    (tmp_path / "sh").symlink_to(os.path.realpath(shell))
    return tmp_path


def find(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "sh"), str(FIND_PYTHON)],
        env={"PATH": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_python3_is_taken_when_it_is_new_enough(path_folder: Path) -> None:
    python3 = put(path_folder, "python3", good=True)
    put(path_folder, "python3.12", good=True)
    assert find(path_folder).stdout == f"{python3}\n"


def test_a_newer_one_by_its_full_name_is_taken_where_python3_is_too_old(path_folder: Path) -> None:
    put(path_folder, "python3", good=False)
    newer = put(path_folder, "python3.12", good=True)
    assert find(path_folder).stdout == f"{newer}\n"


def test_the_interpreter_that_was_asked_for_comes_first(path_folder: Path) -> None:
    put(path_folder, "python3", good=True)
    chosen = put(path_folder, "python3.11", good=True)
    assert find(path_folder, PYTHON=str(chosen)).stdout == f"{chosen}\n"


def test_without_any_one_line_says_what_is_needed(path_folder: Path) -> None:
    put(path_folder, "python3", good=False)
    done = find(path_folder)
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "3.11" in done.stderr
    assert "python3-venv" in done.stderr
