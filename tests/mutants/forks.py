# SPDX-License-Identifier: Apache-2.0

"""A process that collects the tests once, and then runs some of them in a fork for each mutant.

The file with the mutant lies on the disk by then, for programs that a test starts and modules that are imported late.
In the fork, the function with the mutant gets its new code. It stays the same object, so modules that have imported it,
tables and decorators have the mutant. That is right as long as the function has not been executed yet. What is executed
at an import (a constant, a class, a default, a decorator, a function that these call) has left its results behind, so
the caller asks another ``Forks`` that begins with the mutant. ``UnlikeBefore`` says what else goes there.

A fork is made before any test has run, so there are no threads of tests, no event loops and no servers to share. It has
a session of its processes, and all of them are killed when it has ended, also those that have left the session.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.mutants.recorder import Recorder

if TYPE_CHECKING:
    from tests.mutants.drawn import Function

TEST_S = 60
"""The wall-clock time after which one test counts as hanging."""
COLLECTION_S = 600
"""The wall-clock time after which the imports count as hanging."""
NOT_TRIED = "not long and not torch"
MEMORY_BYTES = 8 << 30
SEED = 0
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux's ``prctl``: a process whose parent has died becomes a child of this process."""
PASSED, FAILED, TIME_IS_UP = 73, 74, 75
"""The exit statuses of a fork. A test that ends its process does so with another one."""


class TimeIsUp(Exception):
    """The tests of a mutant took too long together, and none has failed."""


class UnlikeBefore(Exception):
    """The function with the mutant cannot get its new code in a process that has the old one. The text says why."""


class DoesNotBegin(Exception):
    """The tests cannot be collected. The text is what pytest said."""


class Forks:
    """The process, in a folder with a copy of the repository. ``where``: the tests that it collects, as for pytest.

    Raises ``DoesNotBegin`` if it cannot collect them.
    """

    def __init__(self, folder: Path, where: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        variables = {"PYTHONPATH": str(folder), "PYTHONHASHSEED": str(SEED)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks", *where],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        if not self._answer():
            self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            self.close()
            raise DoesNotBegin(said)

    def failure(self, tests: Sequence[str], time_s: float, path: str = "", function: Function | None = None) -> str:
        """Run tests in a fork, with the present code of a function; return the first that fails, hangs or kills it.

        ``tests`` and the result are without parameters. The result is empty if all pass. Raises ``TimeIsUp`` if a test
        would begin later than after ``time_s``, and ``UnlikeBefore``.
        """
        change = None if function is None else [path, function.first_line, function.name]
        with TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)  # PostgreSQL, which runs as another user, has its files in there
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                ask = {"tests": list(tests), "time_s": time_s, "folder": folder, "change": change}
                self._process.stdin.write(json.dumps(ask).encode() + b"\n")
                self._process.stdin.flush()
            answer = self._answer()
        if not answer:
            raise RuntimeError("the process that forks for mutants has died")
        if answer.get("unlike"):
            raise UnlikeBefore(answer["unlike"])
        if answer["status"] == TIME_IS_UP:
            raise TimeIsUp
        return str(answer["test"]).partition("[")[0]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            with suppress(BrokenPipeError):
                file.close()


# --- in that process ----------------------------------------------------------------------------------------------


class _Loop:
    """The plugin of pytest that runs what it is asked for, in forks, instead of all tests."""

    def __init__(self, asked: IO[bytes], answers: IO[bytes]) -> None:
        self._asked = asked
        self._answers = answers
        self._functions = defaultdict[tuple[str, int, str], list[FunctionType]](list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest itself says what it cannot collect
        gc.unfreeze()
        for found in gc.get_objects():
            if type(found) is FunctionType:
                self._functions[_key(found.__code__)].append(found)
        gc.freeze()
        items = defaultdict[str, list[pytest.Item]](list)
        for item in session.items:
            items[item.nodeid.partition("::")[0]].append(item)
        signal.alarm(0)
        self._say(items=len(session.items))
        for line in self._asked:
            ask = json.loads(line)
            try:
                change = self._change(*ask["change"]) if ask["change"] else None
            except UnlikeBefore as error:
                self._say(unlike=str(error))
                continue
            tests = set(ask["tests"])
            files = dict.fromkeys(test.partition("::")[0] for test in ask["tests"])
            chosen = [item for file in files for item in items[file] if item.nodeid.partition("[")[0] in tests]
            self._say(**_in_a_fork(chosen, change, Path(ask["folder"]), ask["time_s"]))
        return True

    def _say(self, **answer: object) -> None:
        self._answers.write(json.dumps(answer).encode() + b"\n")
        self._answers.flush()

    def _change(self, path: str, first_line: int, name: str) -> tuple[list[FunctionType], CodeType]:
        """Return the function objects to change, and their new code. Raises ``UnlikeBefore``."""
        file = str(Path.cwd() / path)
        key = (file, first_line, name)
        new = [
            code
            for code in _codes(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True))
            if _key(code) == key
        ]
        old = self._functions[key]
        if not old and any(getattr(module, "__file__", None) == file for module in list(sys.modules.values())):
            raise UnlikeBefore("no function object has the code of the line")
        if len(new) != 1:
            raise UnlikeBefore(f"{len(new)} functions of that name begin on the line")
        if any(function.__code__.co_freevars != new[0].co_freevars for function in old):
            raise UnlikeBefore("the function has other variables of its surroundings")
        return old, new[0]


def _key(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _in_a_fork(
    items: Sequence[pytest.Item], change: tuple[list[FunctionType], CodeType] | None, folder: Path, time_s: float
) -> dict[str, object]:
    """Run the tests in a fork; return its exit status, and the test that failed, hung or killed it."""
    deadline = time.monotonic() + time_s
    found = folder / "found"
    status: int | None = None
    child = os.fork()
    if not child:
        try:
            status = _run(items, change, found, deadline)
        finally:
            os._exit(FAILED if status is None else status)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the next fork has it, too, until it runs its tests
    try:
        while status is None and time.monotonic() < deadline + 2 * TEST_S:  # a test that hangs ends itself, as a rule
            ended, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0.02)
    finally:
        _end_all_of(child)
    test = items[0].nodeid if items else ""
    with suppress(FileNotFoundError):
        test = found.read_text(encoding="utf-8").partition("\n")[0]
    return {"status": status, "test": "" if status == PASSED else test}


def _run(
    items: Sequence[pytest.Item], change: tuple[list[FunctionType], CodeType] | None, found: Path, deadline: float
) -> int:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ["TMPDIR"], tempfile.tempdir = str(found.parent), None
    random.seed(SEED)
    functions, code = change or ([], None)
    for function in functions:
        assert code is not None
        function.__code__ = code
    recorder = Recorder(found)
    for number, item in enumerate(items):
        if time.monotonic() > deadline:
            return TIME_IS_UP
        if not number:
            item.config.pluginmanager.register(recorder)
        following = items[number + 1] if number + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if recorder.failed:
            return FAILED
    return PASSED


def _end_all_of(child: int) -> None:
    """Kill the session of a fork and what has left it, which Linux makes children of this process."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # nothing is left
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                for process in _children():
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.01)


def _children() -> Iterator[int]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(file.parent.name)


def main(where: Sequence[str]) -> int:
    signal.alarm(COLLECTION_S)  # by default its signal ends the process
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", NOT_TRIED, "--timeout", str(TEST_S)]
    arguments += ["--hypothesis-seed", str(SEED), *where]
    return int(pytest.main(arguments, plugins=[_Loop(asked, answers)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
