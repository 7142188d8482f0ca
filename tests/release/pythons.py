# SPDX-License-Identifier: Apache-2.0

"""The Pythons of this machine that Headgate supports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MANAGED = (".pyenv/versions/{version}.*/bin", ".local/share/uv/python/cpython-{version}.*/bin")
"""Under the home directory: where pyenv and uv keep their installations."""


def find_python(version: str, folders: Sequence[str] | None = None, home: Path | None = None) -> Path | None:
    """An interpreter of ``version`` ("3.12") that can make environments: from ``folders`` (PATH), pyenv or uv."""
    on_path = map(Path, os.get_exec_path() if folders is None else folders)
    for folder in (*on_path, *_managed(version, home or Path.home())):
        python = folder / f"python{version}"
        if os.access(python, os.X_OK) and _is_usable(python, version):
            return python
    return None


def _managed(version: str, home: Path) -> Iterator[Path]:
    for pattern in MANAGED:
        yield from sorted(home.glob(pattern.format(version=version)), reverse=True)


def _is_usable(python: Path, version: str) -> bool:
    """Whether it runs: a shim of pyenv may point nowhere, and Debian ships Python without ``ensurepip``."""
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{python} does not run: {error}", file=sys.stderr)
        return False
    return done.stdout.strip() == version
