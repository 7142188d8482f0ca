# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.reached``: which tests reach which lines, and which branches no quick test takes.

It runs the tests that are neither long nor need a real Spark, with coverage, and leaves ``.coverage`` behind. Each line
there has the tests that reach it (``contexts``), without their parameters. What runs in other processes is not seen.
Random mutants (``python -m tests.mutants --random``) are tried with these tests. With ``--spark`` it runs those on a
real Spark instead, and leaves ``.coverage_spark`` behind: for lines that no quick test reaches.

The module is also the plugin of pytest that does this in each process of the tests.
"""

from __future__ import annotations

import argparse
import ast
import os
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
SPARK_DATA = ROOT / ".coverage_spark"
OF = "_of"
"""Added to these names: the file with the digest of the code that was recorded."""
QUICK = "not long and not spark and not torch"
SPARK = "spark and not long and not torch"
INTO = "HEADGATE_REACHED"
"""The environment variable that names the file into which the plugin records."""
UNSEEN = ("tests/benchmarks", "tests/mutants")
"""Folders that are left out: tests of tools that trace code themselves, and of the mutants."""


def _coverage(data: Path, *, suffix: bool) -> Coverage:
    made = Coverage(
        data_file=str(data),
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
        self._coverage = _coverage(Path(os.environ[INTO]), suffix=True)
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
    """Return the quick tests that reach each line of a file, without their parameters."""
    return _by_line(DATA, file)


def spark_tests_by_line(file: Path) -> dict[int, list[str]]:
    """Return the tests on a real Spark that reach each line; empty if they have not run with the present code."""
    return _by_line(SPARK_DATA, file) if is_recorded(SPARK_DATA) else {}


def lines_of_imports(file: Path) -> set[int]:
    """Return the lines of a file that were executed before the first test: by imports, and for parameters of tests."""
    contexts = _loaded(DATA).get_data().contexts_by_lineno(str(file))
    return {line for line, tests in contexts.items() if "" in tests}


def _by_line(data: Path, file: Path) -> dict[int, list[str]]:
    contexts = _loaded(data).get_data().contexts_by_lineno(str(file))
    return {line: [one for one in tests if one] for line, tests in contexts.items()}


@cache
def breadth() -> Counter[str]:
    """Return how many lines of the product each test executes."""
    lines = Counter[str]()
    for file in sources(PACKAGES):
        for tests in (*tests_by_line(file).values(), *spark_tests_by_line(file).values()):
            lines.update(tests)
    return lines


def all_tests() -> list[str]:
    """Return all quick tests that have run, without their parameters."""
    return sorted(filter(None, _loaded(DATA).get_data().measured_contexts()))


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


def is_recorded(data: Path | None = None) -> bool:
    """Whether there is a record of the present code."""
    data = data or DATA
    of = data.with_name(data.name + OF)
    return data.exists() and of.exists() and of.read_text(encoding="utf-8") == digest_of_the_product()


def digest_of_the_product() -> str:
    digest = sha256()
    for file in sorted(file for package in PACKAGES for file in ROOT.joinpath(package).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _loaded(data: Path) -> Coverage:
    made = _coverage(data, suffix=False)
    made.load()
    return made


def untaken(file: Path) -> Iterator[str]:
    """Yield the statements and branches of a file that no test takes, one line each."""
    made = _loaded(DATA)
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
    parser.add_argument("--spark", action="store_true", help="record the tests that need a real Spark instead")
    options = parser.parse_args(arguments)
    if options.spark:
        return _record(SPARK_DATA, SPARK, options.processes)
    status = 0 if options.show else _record(DATA, QUICK, options.processes)
    if not DATA.exists():
        return 1
    count = 0
    for file in sources(options.folders):
        for line in untaken(file):
            count += 1
            print(line)
    print(f"{count} statements and branches that no quick test takes in {', '.join(options.folders)}")
    return status


def _record(data: Path, chosen: str, processes: str) -> int:
    """Run the chosen tests, and return pytest's exit status."""
    before = digest_of_the_product()
    for old in (data, *ROOT.glob(f"{data.name}.*")):
        old.unlink(missing_ok=True)
    ignored = [f"--ignore={folder}" for folder in UNSEEN]
    run = ["-m", "pytest", "-q", "-p", "tests.reached", "-m", chosen, *ignored, "-n", processes]
    run += ["--dist", "loadfile", "-p", "no:cacheprovider"]
    status = subprocess.call([sys.executable, *run], cwd=ROOT, env={**os.environ, INTO: str(data)})
    made = _coverage(data, suffix=False)
    try:
        made.combine([str(part) for part in ROOT.glob(f"{data.name}.*")])
    except NoDataError:
        print("no test has run", file=sys.stderr)
        return 1
    made.save()
    data.with_name(data.name + OF).write_text(before, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
