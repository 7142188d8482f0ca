# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.support_matrix``: what works, with each Spark, Python and Java that is here.

Each Python with each Spark has an environment, ``.venv-spark-4.1-python3.12``, which is made once from the locks. In
each cell ``headgate check`` runs, alone and with a Spark Connect server, and then tests on a real Spark. What they
print is in ``build/support-matrix``, and so are the results, so that the cells can be tried one after the other.

With ``--connect``, all tests of Spark Connect run instead, one file after the other, and have a table to themselves.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
CONNECT: Final = sorted((ROOT / "tests" / "spark" / "connect").glob("test_*.py"))
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
    said = ""
    for name, command in steps(cell, tests):
        status, said = step(cell, java_home, name, command)
        if cell.is_refused:
            refused = status != 0 and "too new for Spark" in said
            return "refused by `headgate check`" if refused else f"**{name} did not refuse it**"
        if status != 0:
            return f"**{name} failed**: {_last_line(said)}"
    return works(said)


def run_connect(cell: Cell, java_home: str, file: Path) -> str:
    """Run one file of the tests of Spark Connect, and return what its place in their table says."""
    command = [str(cell.venv / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "spark"]
    status, said = step(cell, java_home, file.stem, [*command, str(file)])
    return works(said) if status == 0 else f"**failed**: {_last_line(said)}"


def works(said: str) -> str:
    """What the table says of tests that have passed."""
    counted, skipped = (re.search(rf"(\d+) {outcome}", said) for outcome in ("passed", "skipped"))
    if counted is None:
        return "works"
    return f"works ({counted[1]} tests{f', {skipped[1]} skipped' if skipped else ''})"


def step(cell: Cell, java_home: str, name: str, command: list[str]) -> tuple[int, str]:
    """Run a command in a cell; return its status, and what it has printed."""
    OUT.mkdir(parents=True, exist_ok=True)
    python = str(cell.venv / "bin" / "python")
    environment = {
        **os.environ,
        "JAVA_HOME": java_home,
        "PATH": f"{cell.venv / 'bin'}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }
    log = OUT / f"spark-{cell.spark}-python{cell.python}-java{cell.java}-{name.replace(' ', '-')}.log"
    with log.open("w", encoding="utf-8") as out:
        try:
            status = subprocess.call(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return 1, f"not done after {TIMEOUT_S:.0f} s"
    return status, log.read_text(encoding="utf-8", errors="replace").strip()


def _last_line(said: str) -> str:
    return said.splitlines()[-1].strip("= ") if said else "it printed nothing"


def recorded() -> dict[str, str]:
    """What was said of each place of the tables so far."""
    results: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def record(place: str, said: str) -> dict[str, str]:
    """Add what was said of a place; another process may have added to the file, too."""
    results = {**recorded(), place: said}
    OUT.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


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


def connect_table(results: dict[str, str]) -> str:
    """The table of the page with what was said of each file of the tests of Spark Connect."""
    cells = sorted({key.partition(": ")[0] for key in results if ": " in key})
    lines = ["| Tests | " + " | ".join(cells) + " |", "|---" * (1 + len(cells)) + "|"]
    for file in CONNECT:
        said = (results.get(f"{cell}: {file.name}", "not tried yet") for cell in cells)
        lines.append(f"| `{file.name}` | {' | '.join(said)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support_matrix", description=__doc__)
    parser.add_argument("--spark", nargs="+", choices=SPARKS, default=SPARKS, help="only these releases")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="only these versions")
    parser.add_argument("--java", nargs="+", choices=JAVAS, type=int, default=JAVAS, help="only these releases")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, default=QUICK, help="the arguments of pytest; the last option"
    )
    parser.add_argument(
        "--connect", nargs="*", metavar="FILE", help="run these files of tests/spark/connect (default: all) instead"
    )
    options = parser.parse_args(arguments)
    files = [file for file in CONNECT if not options.connect or file.name in options.connect]
    results = recorded()
    homes = {java: find_java(java) for java in options.java}
    for version in options.python:
        python = find_python(version)
        for spark in options.spark:
            missing = f"not tried: no Python {version}"
            if python is not None:
                missing = make_environment(Cell(spark, version, 0), python)
            for java, home in homes.items():
                cell = Cell(spark, version, java)
                absent = missing or ("" if home else f"not tried: no Java {java}")
                trials: dict[str, Callable[[], str]] = {str(cell): partial(run, cell, home or "", options.tests)}
                if options.connect is not None:
                    trials = {f"{cell}: {file.name}": partial(run_connect, cell, home or "", file) for file in files}
                for place, trial in trials.items():
                    began = time.monotonic()
                    said = absent or trial()
                    print(f"{place}: {said} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
                    results = record(place, said)
    print(table(results) if options.connect is None else connect_table(results))
    return 1 if any("**" in said for said in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
