# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.support_matrix``: what works, with each Spark, Python and Java that is here.

Each Python with each Spark has an environment, ``.venv-spark-4.1-python3.12``, which is made once from the locks. In
each cell ``headgate check`` runs, alone and with a Spark Connect server, and then tests on a real Spark. What they
print is in ``build/support-matrix``, and so are the results, so that the cells can be tried one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from spark_bridge.driver.environment import spark_release
from spark_bridge.driver.installation import JAVA_MAJOR_MAX, java_major

ROOT: Final = Path(__file__).resolve().parent.parent
OUT: Final = ROOT / "build" / "support-matrix"
RESULTS: Final = OUT / "results.json"
SPARKS: Final = ("4.1", "4.2", "4.3")
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
JAVAS: Final = (17, 21, 25)
JAVA_FOLDERS: Final = ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines")
QUICK: Final = ("-m", "spark and not long and not torch", "tests/spark", "tests/examples")
TIMEOUT_S: Final = 3600.0


class Cell(NamedTuple):
    """One place of the table."""

    spark: str
    python: str
    java: int

    def __str__(self) -> str:
        return f"Spark {self.spark}, Python {self.python}, Java {self.java}"

    @property
    def venv(self) -> Path:
        return ROOT / f".venv-spark-{self.spark}-python{self.python}"

    @property
    def is_refused(self) -> bool:
        """Whether ``headgate check`` has to say that this Java is too new."""
        return self.java > JAVA_MAJOR_MAX.get(spark_release(self.spark), self.java)


def find_python(version: str) -> str | None:
    """An interpreter of this minor version that can make environments; None if there is none."""
    named = shutil.which(f"python{version}")
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [sys.executable, *([named] if named else []), *map(str, reversed(of_pyenv))]:
        code = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return python
    return None


def find_java(major: int) -> str | None:
    """The home of an installed Java of this release; None if there is none."""
    on_path = shutil.which("java")
    homes = [os.environ.get("JAVA_HOME", ""), str(Path(on_path).resolve().parent.parent) if on_path else ""]
    homes += [str(java.parent.parent) for folder in JAVA_FOLDERS for java in Path(folder).glob("**/bin/java")]
    for home in filter(None, homes):
        if _major_of(home) == major:
            return home
    return None


def _major_of(home: str) -> int | None:
    try:
        done = subprocess.run([f"{home}/bin/java", "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return java_major(done.stderr + done.stdout)


def make_environment(cell: Cell, python: str) -> str:
    """Make the cell's environment unless it is there; return why there is none, or nothing."""
    target = f"{cell.venv.name}/.made-from"
    done = subprocess.run(["make", "--silent", target, f"PYTHON={python}"], cwd=ROOT, stdout=sys.stderr, check=False)
    return "" if done.returncode == 0 else f"`make {target}` failed"


def steps(cell: Cell, tests: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What runs in a cell, by name."""
    python = str(cell.venv / "bin" / "python")
    yield "check", [python, "-m", "headgate", "check"]
    yield "check of a server", [python, "-m", "headgate", "check", "--remote", "local"]
    yield "tests", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]


def run(cell: Cell, java_home: str, tests: Sequence[str]) -> str:
    """Try one cell, and return what its place in the table says."""
    OUT.mkdir(parents=True, exist_ok=True)
    python = str(cell.venv / "bin" / "python")
    environment = {
        **os.environ,
        "JAVA_HOME": java_home,
        "PATH": f"{cell.venv / 'bin'}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }
    log = OUT / f"spark-{cell.spark}-python{cell.python}-java{cell.java}.log"
    said = ""
    with log.open("w", encoding="utf-8") as out:
        for name, command in steps(cell, tests):
            out.write(f"--- {name}: {' '.join(command)}\n")
            out.flush()
            begin = out.tell()
            try:
                status = subprocess.call(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                return f"{name}: not done after {TIMEOUT_S:.0f} s"
            out.flush()
            said = log.read_bytes()[begin:].decode(errors="replace").strip()
            if cell.is_refused:
                refused = status != 0 and "too new for Spark" in said
                return "refused by `headgate check`" if refused else f"**{name} did not refuse it**"
            if status != 0:
                return f"**{name} failed**: {_last_line(said)}"
    counted = re.search(r"(\d+) passed", said)
    return f"works ({counted[1]} tests)" if counted else "works"


def _last_line(said: str) -> str:
    return said.splitlines()[-1].strip("= ") if said else "it printed nothing"


def table(results: dict[str, str]) -> str:
    """The table of the page, with what was said of each cell."""
    lines = [
        "| Spark | Python | " + " | ".join(f"Java {java}" for java in JAVAS) + " |",
        "|---" * (2 + len(JAVAS)) + "|",
    ]
    for spark in SPARKS:
        for python in PYTHONS:
            cells = [results.get(str(Cell(spark, python, java)), "not tried yet") for java in JAVAS]
            lines.append(f"| {spark} | {python} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support_matrix", description=__doc__)
    parser.add_argument("--spark", nargs="+", choices=SPARKS, default=SPARKS, help="only these releases")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="only these versions")
    parser.add_argument("--java", nargs="+", choices=JAVAS, type=int, default=JAVAS, help="only these releases")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, default=QUICK, help="the arguments of pytest; the last option"
    )
    options = parser.parse_args(arguments)
    results: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    homes = {java: find_java(java) for java in options.java}
    for version in options.python:
        python = find_python(version)
        for spark in options.spark:
            missing = f"not tried: no Python {version}"
            if python is not None:
                missing = make_environment(Cell(spark, version, 0), python)
            for java, home in homes.items():
                cell = Cell(spark, version, java)
                began = time.monotonic()
                if missing or home is None:
                    said = missing or f"not tried: no Java {java}"
                else:
                    said = run(cell, home, options.tests)
                results[str(cell)] = said
                print(f"{cell}: {said} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
                OUT.mkdir(parents=True, exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    return 1 if any("**" in said for said in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
