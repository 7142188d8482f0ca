# SPDX-License-Identifier: Apache-2.0

"""New environments with the wheel of this tree, and with nothing of this test's own environment but what is linked."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.__main__ import ROOT, run


def brought_by(extras: Iterable[str], *others: str) -> set[str]:
    """The distributions that pip installs for ``headgate[extras]`` and ``others``; of one that is missing here, without
    its needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extras = [text for extra in extras for text in project["optional-dependencies"][extra]]
    texts = [*project["dependencies"], *of_extras, *others]
    waiting = [(Requirement(text), "") for text in texts]  # each with the extra that asks for it
    found: dict[str, set[str]] = {}  # with the extras of each
    while waiting:
        one, asked_by = waiting.pop()
        name = canonicalize_name(one.name)
        if one.marker and not one.marker.evaluate({"extra": asked_by}):
            continue
        if name in found and one.extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | one.extras
        try:
            needed = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # such as torch
            continue
        waiting += [(Requirement(text), extra) for text in needed for extra in ("", *one.extras)]
    return set(found)


class Environment:
    """A new environment with the wheel, what it needs, and these packages, from the index.

    ``linked``: with the wheel and these distributions of this test's own environment instead; no index is asked.
    """

    def __init__(self, folder: Path, wheel: Path, *packages: str, linked: Iterable[str] | None = None) -> None:
        self.folder = folder
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        pip = [sys.executable, "-m", "pip", "--python", str(folder), "--quiet", "--disable-pip-version-check"]
        run([*pip, "install", *(() if linked is None else ("--no-deps", "--no-index")), str(wheel)])
        if packages:
            run([*pip, "install", "--no-deps", *packages])
        for name in linked or ():
            with suppress(metadata.PackageNotFoundError):
                self._link_distribution(name)

    def _link_distribution(self, name: str) -> None:
        here = metadata.distribution(name)
        for top in {file.parts[0] for file in here.files or ()} - {"..", "__pycache__"}:
            if not (self.packages / top).is_symlink():  # else distributions share a folder, such as google
                (self.packages / top).symlink_to(Path(str(here.locate_file(top))))
        if name == "pyspark":  # its scripts use the Python of the path; those of others name that of this test
            for file in here.files or ():
                if ".." in file.parts and file.parent.name == "bin":
                    (self.folder / "bin" / file.name).symlink_to(Path(str(here.locate_file(file))).resolve())

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
