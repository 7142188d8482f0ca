# SPDX-License-Identifier: Apache-2.0

"""A user's program outside of the repository passes mypy's strict mode, which knows the types of its events (H98).

Each line that the type checker must refuse has a comment that is an error by itself if the line is accepted.
``make release`` checks the same program with pyright too, against the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).with_name("typed_program.py")


def mypy(folder: Path, program: str) -> str:
    (folder / "user.py").write_text(program, encoding="utf-8")
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-msgpack.*,py4j.*,fsspec.*,pandas.*,pyarrow.*]\nignore_missing_imports = true\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(folder / "cache"), "user.py"],
        cwd=folder, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_program_of_a_user_is_checked_down_to_its_events(tmp_path: Path) -> None:  # H98
    program = PROGRAM.read_text(encoding="utf-8")
    assert mypy(tmp_path, program) == "Success: no issues found in 1 source file\n"
    mistakes = [number for number, line in enumerate(program.splitlines(), 1) if "# type: ignore" in line]
    assert len(mistakes) == 14
    told = mypy(tmp_path, re.sub(r"  # type: ignore\[[a-z-]+\]", "", program))
    assert [int(line) for line in re.findall(r"^user\.py:(\d+): error: ", told, re.MULTILINE)] == mistakes, told
    shutil.rmtree(tmp_path / "cache")
