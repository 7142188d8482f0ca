# SPDX-License-Identifier: Apache-2.0

"""Small trees to count, and a way to run an example as those do who have installed the wheel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.release.environments import Environment, build_wheel

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_TIMEOUT_S = 580

RunExample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel; the clone is not on its path."""
    return Environment(
        tmp_path_factory.mktemp("installed") / "env", build_wheel(tmp_path_factory.mktemp("dist")), linked=True
    )


@pytest.fixture
def run_example(tmp_path: Path, installed: Environment) -> RunExample:
    """Runs an example of the wheel in an empty folder and returns the result; ``environment`` replaces variables.

    The result has no lines of Spark itself.
    """

    def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        ended = installed.call(
            "headgate", "example", name, "--run", *map(str, arguments), cwd=str(folder), **environment
        )
        ended.stderr = SPARKS_OWN.sub("", ended.stderr)
        return ended

    return run


SPARKS_OWN = re.compile(
    r"^(WARNING: Using incubator modules: .*|Using Spark's default log4j profile: .*|Setting default log level to .*"
    r"|To adjust logging level use .*|.* WARN NativeCodeLoader: .*|.* WARN Utils: Service 'SparkUI' could not bind .*"
    r"|Setting Spark log level to .*|\r.*\r)\n?",
    re.MULTILINE,
)
"""What it writes to standard error when it starts, and its line of progress, which ends with spaces."""


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
