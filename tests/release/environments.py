# SPDX-License-Identifier: Apache-2.0

"""New environments with the wheel of this tree, and with nothing of this test's own environment but what is linked."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

from tests.release.__main__ import run


def build_wheel(folder: Path) -> Path:
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder])
    (wheel,) = folder.glob("headgate-*.whl")
    return wheel


class Environment:
    """A new environment with the wheel, what it needs, and these packages, from the index.

    ``linked``: with the wheel alone, and all packages of this test's environment but Headgate; no index is asked.
    """

    def __init__(self, folder: Path, wheel: Path, *packages: str, linked: bool = False) -> None:
        self.folder = folder
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        pip = [sys.executable, "-m", "pip", "--python", str(folder), "--quiet", "--disable-pip-version-check"]
        run([*pip, "install", *(("--no-deps", "--no-index") if linked else ()), str(wheel)])
        if packages:
            run([*pip, "install", "--no-deps", *packages])
        if (
            linked
        ):  # the .pth file of the clone there is not read, because these folders are no site of this environment
            here = [path for path in sys.path if path.endswith("site-packages")]
            (self.packages / "linked.pth").write_text("\n".join(here), encoding="utf-8")

    def link(self, folder: Path, *packages: str) -> None:
        """Put packages of this test's own environment into ``folder``, without their metadata."""
        folder.mkdir(exist_ok=True)
        here = next(Path(path) for path in site.getsitepackages() if Path(path, "pyspark").is_dir())
        for name in packages:
            if (here / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(here / name)

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3.*/site-packages")
        return found

    def call(self, *words: str | Path, cwd: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in ``cwd``, by default the environment's folder."""
        ours = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "SPARK_HOME", "SPARK_REMOTE", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        command = [self.folder / "bin" / words[0], *words[1:]]
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=kept | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )

    def checks(self, *options: str, **environment: str) -> dict[str, str]:
        """Return what ``headgate check`` says of each thing, and its status and last line."""
        done = self.call("headgate", "check", *options, **environment)
        lines = done.stdout.splitlines()
        said = {name: text.strip() for name, colon, text in (line.partition(":") for line in lines) if colon}
        return said | {"status": str(done.returncode), "last": lines[-1] if lines else done.stderr}
