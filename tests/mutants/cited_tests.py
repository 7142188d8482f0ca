# SPDX-License-Identifier: Apache-2.0

"""Hunts a mutant with the tests that cite its rules. They take seconds, and the simulation takes minutes.

Each run of tests is a separate process, which ``tests.mutants.plugin`` changes. The machines' ``check_invariants`` stay
on there, because they belong to these tests.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "actors", "primitives", "headgate", "sources", "streams", "conformance", "spark_bridge")
"""The folders of ``tests/`` that are searched: those without a simulation, an exploration, or a real Spark."""
AREAS = {
    "protocol": "protocol",
    "actors": "actors",
    "spark_bridge.primitives": "primitives",
    "spark_bridge": "spark_bridge",
}
"""The folder to begin with, by the package that the mutant changes: the first one that fits."""
TEST_S = 120
"""The wall-clock time after which a test counts as hanging. Whether it passes without the mutant is verified too."""
HUNTER = "tests"


class NoTestRuns(Exception):
    """The catalogue names a test that does not exist, or that does not run here: nothing has looked at the mutant."""


def look(mutant: Mutant) -> tuple[str, str]:
    """Return the first test that fails with this mutant and passes without it, and how it failed; or two empty texts.

    Tests that cite a rule of the mutant come first, then all others in their files.
    """
    tests = list(tests_of(mutant))
    for several in (tests, list(dict.fromkeys(test.partition("::")[0] for test in tests))):
        with suppress(NoTestRuns):  # none of those that cite the rules is quick
            where, seen = run(several, mutant.name)
            if seen:
                return where, seen
    return "", ""


def run(tests: Sequence[str], name: str) -> tuple[str, str]:
    """Run these tests with the mutant of that name; return like ``look``. Raises ``NoTestRuns``."""
    where, seen = _run(tests, "--mutant", name) if tests else ("", "")
    if seen and not _run([where])[1]:
        return where, seen
    return "", ""


def _run(tests: Sequence[str], *options: str) -> tuple[str, str]:
    """Return the test that fails and its message; or two empty texts."""
    with TemporaryDirectory() as folder:
        found = Path(folder, "found")
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
        arguments += ["-p", "tests.mutants.recorder", "--rootdir", str(ROOT)]
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a fork has imported some plugins already
        on_spark = tests[0].startswith("tests/spark/")
        marks, within_s = ("", TEST_S * 5) if on_spark else ("not long and not spark", TEST_S)
        arguments += ["-m", marks, "--timeout", str(within_s), "--found", str(found), *options]
        status = _in_a_fork([*arguments, *tests])
        if status == pytest.ExitCode.OK:
            return "", ""
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise NoTestRuns(f"pytest finds no test to run in {' '.join(tests)}")
        if not found.exists():
            raise RuntimeError(f"pytest ended with status {status} before a test began: {' '.join(arguments)}")
        where, _, message = found.read_text(encoding="utf-8").partition("\n")
        return where, message or f"Died: exit status {status}"


def _in_a_fork(arguments: list[str]) -> int:
    """Run pytest and return its exit status. A fork has all modules already, which saves most of the time."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        os.chdir(ROOT)
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(silence, descriptor)
        status = int(pytest.main(arguments))
    finally:
        os._exit(status)


def tests_of(mutant: Mutant) -> Iterator[str]:
    """Yield the tests that cite a rule of the mutant, those of the package that it changes first."""
    area = next((folder for package, folder in AREAS.items() if mutant.edits[0].where.startswith(package)), "")
    for folder in sorted(FOLDERS, key=lambda folder: folder != area):
        for test, rules in _citations(folder):
            if not rules.isdisjoint(mutant.rules):
                yield test


@cache
def _citations(folder: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the tests of a folder with the rules that each cites in its text, or its file at the top."""
    return tuple(
        (f"{file.relative_to(ROOT)}::{test.name}", _rules_in(f"{_text_of(test, source)} {ast.get_docstring(module)}"))
        for file in sorted(Path(ROOT, "tests", folder).rglob("test_*.py"))
        for source in [file.read_text(encoding="utf-8")]
        for module in [ast.parse(source)]
        for test in module.body
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_")
    )


def _rules_in(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\bH\d+\b", text))


def _text_of(test: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    first = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : test.end_lineno])
