# SPDX-License-Identifier: Apache-2.0

"""Small trees to count, and a way to run an example as a separate program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_TIMEOUT_S = 580

RunExample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_example(tmp_path: Path) -> RunExample:
    """Runs ``examples/<name>.py`` in an empty folder and returns the result; ``environment`` replaces variables."""

    def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Forty files in three folders, of very different sizes, two of which are not text."""
    root = tmp_path / "tree"
    for number in range(40):
        folder = root / f"part{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(f"w{n % 97}" for n in range(number * number))
        (folder / f"file{number}.txt").write_text(f"every file: {words} ünï\n", encoding="utf-8")
    (root / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (root / "part0" / "__pycache__").mkdir()
    (root / "part0" / "__pycache__" / "file0.txt").write_text("compiled")
    return root
