# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.mutants --random N``: draws mutants, and tries whether the tests that reach their lines see them.

Each process works in a copy of the repository, so the work tree stays as it is, and programs that a test starts have
the mutant too. ``python -m tests.reached`` must have recorded which tests reach which lines. Those of the mutant's
package come first, then the others; files of tests that execute little come before those that execute much, such as
whole simulations. Before them come the tests that are newer than the record and, for a line that no quick test reaches,
those on a real Spark that do (``python -m tests.reached --spark``). For such a line, as a constant is, all tests of the
package come last. A test counts only if it passes without the mutant. What has not run after ``MUTANT_S`` is left out,
and the mutant is undecided; but the test that runs then may end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests import reached
from tests.mutants.drawn import PACKAGES, ROOT, Drawn, draw
from tests.mutants.mutant import Mutant

RESULTS = ROOT / ".mutants"
TEST_S = 60
"""The wall-clock time after which one test counts as hanging."""
MUTANT_S = 300.0
"""The wall-clock time for all tests of one mutant, if the command does not say another one."""
NOT_TRIED = "not long and not torch"
MEMORY_KIB = 8 << 20
AREAS = {"spark_bridge/primitives": "tests/primitives", "spark_bridge/sources": "tests/sources"}
"""The tests of a package, where they are not in the folder of the same name."""

_running = set[subprocess.Popen[bytes]]()
"""The tests that run now. They end with this process."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    ``verdict``: caught, survived, or undecided if the time was up before all tests had run. It is unreached if none saw
    it and no quick test executes the line in its own process. ``by``: the test that saw it.
    """

    verdict: str
    by: str
    tests: int
    seconds: float


def stages(drawn: Drawn) -> Iterator[list[str]]:
    """Yield the tests to try, without their parameters, those that know the mutant best first."""
    by_line = reached.tests_by_line(ROOT / drawn.path)
    package = next((area for place, area in AREAS.items() if drawn.path.startswith(place)), "")
    package = package or f"tests/{drawn.path.partition('/')[0]}"
    tests = reaching = by_line.get(drawn.line, [])
    on_spark = [] if tests else reached.spark_tests_by_line(ROOT / drawn.path).get(drawn.line, [])
    if not tests:  # executed by the import only, such as a constant, or in other processes, or not at all
        tests = sorted({test for those in by_line.values() for test in those})
    tests = _narrow_first(tests)
    yield [*reached.unrecorded(), *_narrow_first(on_spark)]
    yield [test for test in tests if test.startswith(package)]
    yield [test for test in tests if not test.startswith(package)]
    if not reaching:
        yield _narrow_first({test for test in reached.all_tests() if test.startswith(package)}.difference(tests))


def _narrow_first(tests: Iterable[str]) -> list[str]:
    """Order tests by file: those of files that execute little of the product come first."""
    breadth, of_file = reached.breadth(), Counter[str]()
    for test in tests:
        of_file[file_of(test)] += breadth[test]
    return sorted(tests, key=lambda test: (of_file[file_of(test)], test))


def file_of(test: str) -> str:
    return test.partition("::")[0]


class TimeIsUp(Exception):
    """The tests of a mutant took too long together, and none has failed."""


class Workplace:
    """A copy of the repository, in which one mutant after the other is tried."""

    def __init__(self, folder: Path, mutant_s: float = MUTANT_S) -> None:
        self.folder = folder
        self._mutant_s = mutant_s
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def try_out(self, drawn: Drawn) -> Outcome:
        """Run the tests that reach the mutant, until one fails that passes without it."""
        began, by, count = time.monotonic(), "", 0
        verdict = "survived" if drawn.line in reached.tests_by_line(ROOT / drawn.path) else "unreached"
        try:
            for tests in stages(drawn):
                waiting = tests
                while waiting:
                    count += len(waiting)
                    try:
                        self._put(drawn.path, drawn.source())
                        by = self._failure(waiting, began + self._mutant_s - time.monotonic())
                    finally:
                        self._put(drawn.path, (ROOT / drawn.path).read_bytes())
                    if not by:
                        break
                    if not self._failure([by], self._mutant_s):
                        return Outcome("caught", by, count, time.monotonic() - began)
                    print(f"{by} fails without a mutant, too", flush=True)
                    waiting = [test for test in waiting if test != by]
        except TimeIsUp:
            verdict = "undecided" if verdict == "survived" else verdict
        return Outcome(verdict, "", count, time.monotonic() - began)

    def _put(self, path: str, source: bytes) -> None:
        file = self.folder / path
        file.write_bytes(source)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()  # it may have the same size and second

    def _failure(self, tests: Sequence[str], time_s: float) -> str:
        """Return the first test that fails, hangs or ends the process, without its parameters; or an empty text.

        Raises ``TimeIsUp`` if the tests are not over after ``time_s``. The one that runs then gets its own time,
        because it may be about to fail or to hang.
        """
        with TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)  # PostgreSQL, which runs as another user, has its files in there
            listed, found = Path(folder, "listed"), Path(folder, "found")
            listed.write_text("\n".join(tests), encoding="utf-8")
            where = list(dict.fromkeys(map(file_of, tests)))
            arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.recorder", "-m", NOT_TRIED]
            arguments += ["--timeout", str(TEST_S), "--listed", str(listed), "--found", str(found), *where]
            process = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    f'ulimit -d {MEMORY_KIB}; exec "$0" "$@"',
                    sys.executable,
                    "-m",
                    "pytest",
                    *arguments,
                ],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(self.folder), "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            _running.add(process)
            try:
                status = _wait(process, time_s, found)
            finally:
                _end(process)
                _running.discard(process)
            if status in (0, 5):  # all passed, or none was left
                return ""
            if status == 4:
                raise LookupError(f"pytest does not find all of {' '.join(where)}: record anew with make coverage")
            if not found.exists():  # the product cannot even be imported
                return tests[0]
            return found.read_text(encoding="utf-8").partition("\n")[0].partition("[")[0]


def _wait(process: subprocess.Popen[bytes], time_s: float, found: Path) -> int:
    """Wait for the end of a process of tests; after ``time_s`` only until the test that runs has passed."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(time_s, 0.0))
    runs = _text_of(found).partition("\n")[0]
    for _ in range(TEST_S + 60):  # some of it to prepare and to clean up
        if not runs or _text_of(found).partition("\n")[0] != runs:
            break
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
    raise TimeIsUp


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Record:
    """The outcomes of one draw so far, in a file that is not committed. A change of the code makes it void."""

    def __init__(self, count: int, seed: int, within: Sequence[str]) -> None:
        of = sha256(f"{list(within)} {reached.digest_of_the_product()}".encode()).hexdigest()[:12]
        name = f"random-{count}-{seed}-{of}.json"
        self.file = RESULTS / name
        self.outcomes: dict[str, Outcome] = {}
        if self.file.exists():
            known = json.loads(self.file.read_text(encoding="utf-8"))
            self.outcomes = {name: Outcome(**outcome) for name, outcome in known.items()}

    def add(self, drawn: Drawn, outcome: Outcome) -> None:
        self.outcomes[drawn.name] = outcome
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({name: asdict(one) for name, one in self.outcomes.items()}, indent=1)
        self.file.write_text(text, encoding="utf-8")


def try_all(
    count: int, seed: int, within: Sequence[str], jobs: int, catalogue: Iterable[Mutant], mutant_s: float = MUTANT_S
) -> int:
    """Draw and try so many mutants; print those that survive. Returns the exit status: 1 if one survives."""
    if not reached.is_recorded():
        print("first record which tests reach which lines of the present code: make coverage", file=sys.stderr)
        return 2
    chosen = draw(count, seed, within, besides=catalogue)
    record = Record(count, seed, within)
    waiting = [drawn for drawn in chosen if drawn.name not in record.outcomes]
    print(f"{len(chosen)} mutants of seed {seed}, {len(chosen) - len(waiting)} of them tried before", flush=True)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        places = SimpleQueue[Workplace]()
        for number in range(min(jobs, len(waiting))):
            places.put(Workplace(Path(folder, str(number)), mutant_s))

        def one(drawn: Drawn) -> tuple[Drawn, Outcome]:
            place = places.get()
            try:
                return drawn, place.try_out(drawn)
            finally:
                places.put(place)

        trials = [pool.submit(one, drawn) for drawn in waiting]
        try:
            for trial in as_completed(trials):
                drawn, outcome = trial.result()
                record.add(drawn, outcome)
                print(
                    f"{len(record.outcomes)}/{len(chosen)} {outcome.verdict} {drawn.path}:{drawn.line} ({drawn.kind}), "
                    f"{outcome.tests} tests, {outcome.seconds:.0f} s {outcome.by}",
                    flush=True,
                )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _end(process)
    return report(chosen, record)


def report(chosen: Sequence[Drawn], record: Record) -> int:
    """Print the survivors, and how many there are in each package."""
    left = [drawn for drawn in chosen if record.outcomes[drawn.name].verdict != "caught"]
    for drawn in left:
        print(f"\n{record.outcomes[drawn.name].verdict}: {drawn.diff()}")
    print()
    for package in PACKAGES:
        those = [drawn for drawn in chosen if drawn.path.startswith(package)]
        if those:
            print(f"{package}: {len(those)} drawn, {sum(drawn in left for drawn in those)} not caught")
    return 1 if left else 0
