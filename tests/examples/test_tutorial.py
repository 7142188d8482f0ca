# SPDX-License-Identifier: Apache-2.0

"""The tutorial works as its page says, command by command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.examples.conftest import ROOT, RUN_TIMEOUT_S

PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?[^\n]*\n(.*?)^```', re.MULTILINE | re.DOTALL)
TAKINGS = 500500

pytestmark = pytest.mark.spark


@pytest.mark.long  # a minute or three for a new environment and seven starts of Spark
@pytest.mark.timeout(1800)
def test_the_page_can_be_followed_to_the_letter(tmp_path: Path) -> None:
    """Its commands, in its order, in a new environment with the wheel; the second terminal kills the driver."""
    shell = Shell(tmp_path)
    for kind, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            (shell.folder / title).write_text(text, encoding="utf-8")
        elif title == "first terminal":
            shell.start(text)
        elif title == "second terminal":
            shell.wait_for("checkpoint 3:")
            shell.run(text)
            assert shell.end() == -signal.SIGKILL
        elif kind == "sh":
            shell.run(text)

    right = f"takings: {TAKINGS} of {TAKINGS}"
    assert right in shell.said["count.py"]
    twice = re.search(r"takings: (\d+) of", shell.said["lose_a_task.py"])
    assert twice is not None
    assert TAKINGS < int(twice[1]) <= TAKINGS + sum(range(501, 802))
    assert "task 1 died after takings of" in shell.said["survive_a_task.py"]
    assert right in shell.said["survive_a_task.py"]
    closed = re.search(r"'sold': (\d+), 'turned away': (\d+)} together 1000", shell.said["talk_back.py"])
    assert closed is not None
    assert int(closed[1]) >= 137  # 100 000 needs this many of the largest orders
    assert "back to checkpoint" in shell.said["survive_the_driver.py"]
    assert right in shell.said["survive_the_driver.py"]


class Shell:
    """Runs the page's commands; `pip install` takes a wheel of this tree, and the Spark of this test."""

    def __init__(self, root: Path) -> None:
        self.folder = root
        self.said: dict[str, str] = {}  # by program: the output of its last run
        self._wheels = root / "wheels"
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(self._wheels)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
        self._environment = dict(os.environ)
        for name in ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV"):
            self._environment.pop(name, None)

    def run(self, commands: str) -> None:
        for command in commands.splitlines():
            if command.startswith("cd "):
                self.folder /= command.removeprefix("cd ")
            elif command == "python3 -m venv .venv":
                self._make_environment()
            elif command.startswith(". ") or not command:
                pass  # the environment is on the PATH already
            elif command == "pip install 'headgate[pyspark]'":
                (wheel,) = self._wheels.glob("*.whl")
                self._call(f"python -m pip install --quiet --no-deps --no-index {wheel}")
            else:
                self._call(command)

    def start(self, command: str) -> None:
        self._running = subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        """Wait until the running program has printed this; the test's timeout limits the wait."""
        assert self._running.stdout is not None
        assert any(text in line for line in self._running.stdout), f"it ended without {text!r}"

    def end(self) -> int:
        code = self._running.wait(RUN_TIMEOUT_S)
        assert self._running.stdout is not None
        self._running.stdout.close()
        return code

    def _call(self, command: str) -> None:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self.said[command.removeprefix("python ")] = done.stdout

    def _make_environment(self) -> None:
        """A new environment that finds Headgate's dependencies where this test finds them, but not Headgate itself."""
        venv.create(self.folder / ".venv", with_pip=True, symlinks=True)
        (site,) = (self.folder / ".venv").glob("lib/python*/site-packages")
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        (site / "dependencies.pth").write_text(installed + "\n", encoding="utf-8")
        self._environment["PATH"] = f"{self.folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
