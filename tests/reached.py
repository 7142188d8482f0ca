# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.reached``: which tests reach which lines, and which branches no quick test takes.

It runs the tests that are neither long nor need a real Spark, with coverage, and leaves ``.coverage`` behind. Each line
there has the tests that reach it (``contexts``), without their parameters. What runs in other processes is not seen.
Random mutants (``python -m tests.mutants --random``) are tried with these tests.

The module is also the plugin of pytest that does this in each process of the tests.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from coverage import Coverage
from coverage.exceptions import NoDataError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")
DATA = ROOT / ".coverage"
OF = ROOT / ".coverage_of"
"""The digest of the code that was recorded."""
QUICK = "not long and not spark and not torch"
UNSEEN = ("tests/benchmarks", "tests/mutants")
"""Folders that are left out: tests of tools that trace code themselves, and of the mutants."""


def _coverage(*, suffix: bool) -> Coverage:
    made = Coverage(
        data_file=str(DATA),
        data_suffix=suffix or None,
        branch=True,
        source=[str(ROOT / package) for package in PACKAGES],
        config_file=False,
        messages=False,
    )
    made.set_option(
        "report:exclude_lines",
        [r"^\s*case _:", r"^if TYPE_CHECKING:", r"^\s*@overload", r":? *\.\.\.$", r"raise AssertionError"],
    )
    made.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "module-not-measured"])
    return made


# --- the plugin ---------------------------------------------------------------------------------------------------


class _Recorder:
    """Begins before the product is imported: what a module executes then is nobody's, but it is executed."""

    def __init__(self) -> None:
        self._coverage = _coverage(suffix=True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid.partition("[")[0])
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:  # pytest-xdist ends a process that takes long to unconfigure
        self._coverage.stop()
        self._coverage.save()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    early_config.pluginmanager.register(_Recorder())


# --- what was recorded --------------------------------------------------------------------------------------------


def tests_by_line(file: Path) -> dict[int, list[str]]:
    """Return the tests that reach each line of a file, without their parameters."""
    data = _loaded().get_data()
    return {line: [one for one in tests if one] for line, tests in data.contexts_by_lineno(str(file)).items()}


@cache
def breadth() -> Counter[str]:
    """Return how many lines of the product each test executes."""
    lines = Counter[str]()
    for file in sources(PACKAGES):
        for tests in tests_by_line(file).values():
            lines.update(tests)
    return lines


def all_tests() -> list[str]:
    """Return all tests that have run, without their parameters."""
    return sorted(filter(None, _loaded().get_data().measured_contexts()))


def unrecorded() -> list[str]:
    """Return the tests that have been written since the record, without their parameters."""
    known, since = set(all_tests()), DATA.stat().st_mtime
    found = []
    for file in sorted(ROOT.joinpath("tests").rglob("test_*.py")):
        path = str(file.relative_to(ROOT))
        if file.stat().st_mtime > since and not path.startswith(UNSEEN):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [f"{path}::{name}" for name in names if name.startswith("test_")]
    return [test for test in found if test not in known]


def is_recorded() -> bool:
    """Whether there is a record of the present code."""
    return DATA.exists() and OF.exists() and OF.read_text(encoding="utf-8") == digest_of_the_product()


def digest_of_the_product() -> str:
    digest = sha256()
    for file in sorted(file for package in PACKAGES for file in ROOT.joinpath(package).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _loaded() -> Coverage:
    made = _coverage(suffix=False)
    made.load()
    return made


def untaken(file: Path) -> Iterator[str]:
    """Yield the statements and branches of a file that no test takes, one line each."""
    made = _loaded()
    _, _, _, missing, _ = made.analysis2(str(file))
    arcs = made._analyze(str(file)).missing_branch_arcs()
    lines = file.read_text(encoding="utf-8").splitlines()
    for number in sorted({*missing, *arcs}):
        text = lines[number - 1].strip()
        if number in missing:
            yield f"{file.relative_to(ROOT)}:{number}: never executed: {text}"
        else:
            for to in arcs[number]:
                where = "the end" if to < 0 else f"line {to}"
                yield f"{file.relative_to(ROOT)}:{number}: never continues at {where}: {text}"


def sources(folders: Iterable[str]) -> list[Path]:
    """The files of the product below these folders that have statements."""
    found = [path for folder in folders for path in sorted(ROOT.joinpath(folder).rglob("*.py"))]
    return [path for path in found if len(ast.parse(path.read_text(encoding="utf-8")).body) > 1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reached", description=__doc__)
    parser.add_argument("folders", nargs="*", default=["protocol", "spark_bridge/primitives"], metavar="FOLDER")
    parser.add_argument("--processes", default="2", help="that share the tests (default: 2)")
    parser.add_argument("--show", action="store_true", help="only show what was recorded")
    options = parser.parse_args(arguments)
    status = 0
    if not options.show:
        before = digest_of_the_product()
        for old in ROOT.glob(".coverage*"):
            old.unlink()
        ignored = [f"--ignore={folder}" for folder in UNSEEN]
        run = ["-m", "pytest", "-q", "-p", "tests.reached", "-m", QUICK, *ignored, "-n", options.processes]
        status = subprocess.call([sys.executable, *run, "--dist", "loadfile", "-p", "no:cacheprovider"], cwd=ROOT)
        made = _coverage(suffix=False)
        try:
            made.combine([str(part) for part in ROOT.glob(".coverage.*")])
        except NoDataError:
            print("no test has run", file=sys.stderr)
            return 1
        made.save()
        OF.write_text(before, encoding="utf-8")
    count = 0
    for file in sources(options.folders):
        for line in untaken(file):
            count += 1
            print(line)
    print(f"{count} statements and branches that no quick test takes in {', '.join(options.folders)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
