# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.first_steps``: what a new user waits for, in seconds, and what it takes, in MB.

Each column is a revision of the repository, in a folder with nothing in it: an empty home, an empty package cache, no
variable of this shell but where programs and the package index are, and a Python without packages. Java and the
package index are those of the machine.
The steps: install the wheel with Spark, look whether it works, run the README's example, and clone and ``make run``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("pip install", "check", "first example", "make run")
LIMIT_S = 1800
_KEPT = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("PIP_")}
"""Where programs and the package index are."""


class NewUser:
    """Does the steps with one revision; ``folder`` is all that they may write to."""

    def __init__(self, folder: Path, revision: str) -> None:
        self._clone = folder / "clone"
        self._env = folder / "env"
        self._home = folder / "home"
        self._home.mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, self._clone], check=True)
        subprocess.run(["git", "-C", self._clone, "checkout", "--quiet", revision], check=True)
        subprocess.run([sys.executable, "-m", "venv", self._env], check=True)
        build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=self._clone, check=True, capture_output=True)
        (self._wheel,) = folder.glob("headgate-*.whl")

    def do(self, step: str) -> str:
        """Do one step; return its seconds, and the MB that it has added."""
        before = self._bytes()
        began = time.monotonic()
        done = subprocess.run(
            self._command(step),
            cwd=self._clone if step == "make run" else self._home,
            env={"HOME": str(self._home), "LANG": "C.UTF-8", **_KEPT},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        took_s = time.monotonic() - began
        if done.returncode:
            print(f"{step} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}", file=sys.stderr)
            return f"failed after {took_s:.0f} s"
        added = (self._bytes() - before) / 1e6
        return f"{took_s:.0f} s" + (f", {added:.0f} MB" if added >= 1 else "")

    def _command(self, step: str) -> list[str | Path]:
        python = self._env / "bin" / "python"
        if step == "pip install":
            return [python, "-m", "pip", "install", "--quiet", f"{self._wheel}{self._extra()}"]
        if step == "check":
            return [python, "-m", "headgate", "check"]
        if step == "first example":
            return [python, self._clone / "examples" / "squares.py"]
        return ["make", "run"]

    def _extra(self) -> str:
        """The extra that brings Spark; none in the revisions whose wheel always brings it."""
        return "[pyspark]" if "\npyspark = " in (self._clone / "pyproject.toml").read_text(encoding="utf-8") else ""

    def _bytes(self) -> int:
        """What the environments take; not the package cache, nor the clone."""
        found = [self._env, *self._clone.glob(".venv*")]
        return sum(file.lstat().st_size for one in found for file in one.rglob("*") if not file.is_dir())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"], help="commits, a column each; HEAD by default")
    asked = parser.parse_args(arguments)
    columns = []
    for revision in asked.revisions:
        folder = Path(tempfile.mkdtemp(prefix="first-steps-"))
        try:
            user = NewUser(folder, revision)
            columns.append({step: user.do(step) for step in STEPS})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"| step | {' | '.join(asked.revisions)} |\n|{'---|' * (1 + len(columns))}")
    for step in STEPS:
        print(f"| {step} | {' | '.join(column[step] for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
