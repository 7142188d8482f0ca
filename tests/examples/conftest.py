# SPDX-License-Identifier: Apache-2.0

"""Small trees to count, and a way to run an example as those do who have installed the wheel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.release.environments import Environment, brought_by

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_TIMEOUT_S = 580

RunExample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def environment_of(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Makes an environment with the wheel and the extras that an example names; the clone is not on its path."""

    @cache
    def environment_with(extras: str) -> Environment:
        linked = brought_by(filter(None, extras.split(",")))
        return Environment(tmp_path_factory.mktemp("installed") / "env", wheel, linked=linked)

    def environment(name: str) -> Environment:
        named = NEEDED.search((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"))
        assert named is not None, f"{name} does not say what it needs"
        return environment_with(named[1] or "")

    return environment


NEEDED = re.compile(r"``headgate(?:\[(.+?)\])?``")


@pytest.fixture
def run_example(tmp_path: Path, environment_of: Callable[[str], Environment]) -> RunExample:
    """Runs an example of the wheel in an empty folder and returns the result; ``environment`` replaces variables.

    The result has no lines of Spark itself, nor those of Headgate that say that the machine is busy.
    """

    def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        command = ("headgate", "example", name, "--run", *map(str, arguments))
        ended = environment_of(name).call(*command, cwd=str(folder), **environment)
        ended.stderr = NOT_OF_THE_EXAMPLE.sub("", ended.stderr).strip()
        return ended

    return run


NOT_OF_THE_EXAMPLE = re.compile(
    r"^(?:WARNING: Using incubator modules: |Using Spark's default log4j profile: |Setting default log level to "
    r"|Setting Spark log level to |To adjust logging level use |\S+ \S+ WARN \w+: "
    r"|.* WARNING headgate\.actors: (?:no progress|handler blocked the event loop) ).*"
    r"|\[Stage \d+:[=> ]*\(\d+ \+ \d+\) / \d+\]",
    re.MULTILINE,
)
"""Spark's lines at its start, its warnings and its progress."""


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
