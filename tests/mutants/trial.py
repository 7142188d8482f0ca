# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.mutants --random N``: draws mutants, and tries whether the tests that reach their lines see them.

Each process works in a copy of the repository, so the work tree stays as it is, and programs that a test starts have
the mutant too. It collects the tests once and runs them in a fork for each mutant (``forks.py``), or in a fresh process
that begins with the mutant, if an import has already executed the function that has it; the command says where it was
tried in this way. ``python -m tests.reached`` must have recorded which tests reach which lines. Those of the mutant's
package come first, then the others; files of tests that execute little come before those that execute much, such as
whole simulations. Before them come the tests that are newer than the record and, for a line that no quick test reaches,
those on a real Spark that do (``python -m tests.reached --spark``). For such a line, as a constant is, all tests of the
package come last. A test counts only if it passes without the mutant. What has not run after ``MUTANT_S`` is left out,
and the mutant is undecided; but the test that runs then may end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests import reached
from tests.mutants.drawn import PACKAGES, ROOT, Drawn, draw
from tests.mutants.forks import DoesNotBegin, Forks, TimeIsUp, UnlikeBefore
from tests.mutants.mutant import Mutant

RESULTS = ROOT / ".mutants"
MUTANT_S = 300.0
"""The wall-clock time for all tests of one mutant, if the command does not say another one."""
ALL_TESTS = ("tests", *(f"--ignore={folder}" for folder in reached.UNSEEN))
AREAS = {"spark_bridge/primitives": "tests/primitives", "spark_bridge/sources": "tests/sources"}
"""The tests of a package, where they are not in the folder of the same name."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    ``verdict``: caught, survived, or undecided if the time was up before all tests had run. It is unreached if none saw
    it and no quick test executes the line in its own process. ``by``: the test that saw it. ``fresh``: why it was tried
    in fresh processes; empty if it was tried in forks.
    """

    verdict: str
    by: str
    tests: int
    seconds: float
    fresh: str = ""


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


def _in_portions(stages: Iterable[list[str]]) -> Iterator[list[str]]:
    """Split each stage: a fresh process has to collect all files that it is given, and most mutants are seen by few."""
    for tests in stages:
        files = list(dict.fromkeys(map(file_of, tests)))
        for several in (files[:4], files[4:]):
            yield [test for test in tests if file_of(test) in several]


def _narrow_first(tests: Iterable[str]) -> list[str]:
    """Order tests by file: those of files that execute little of the product come first."""
    breadth, of_file = reached.breadth(), Counter[str]()
    for test in tests:
        of_file[file_of(test)] += breadth[test]
    return sorted(tests, key=lambda test: (of_file[file_of(test)], test))


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Workplace:
    """A copy of the repository, in which one mutant after the other is tried. ``where``: the tests that it collects."""

    def __init__(self, folder: Path, mutant_s: float = MUTANT_S, where: Sequence[str] = ALL_TESTS) -> None:
        self.folder = folder
        self._mutant_s = mutant_s
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.forks = Forks(folder, where)

    def close(self) -> None:
        """End its processes. A trial that runs fails with RuntimeError."""
        self.forks.close()

    def try_out(self, drawn: Drawn) -> Outcome:
        """Run the tests that reach the mutant, until one fails that passes without it."""
        began, by, count = time.monotonic(), "", 0
        verdict = "survived" if drawn.line in reached.tests_by_line(ROOT / drawn.path) else "unreached"
        fresh = _executed_before(drawn)
        try:
            for tests in _in_portions(stages(drawn)) if fresh else stages(drawn):
                waiting = tests
                while waiting:
                    count += len(waiting)
                    by, fresh = self._failure(drawn, waiting, began + self._mutant_s - time.monotonic(), fresh)
                    if not by:
                        break
                    if not self.forks.failure([by], self._mutant_s):
                        return Outcome("caught", by, count, time.monotonic() - began, fresh)
                    print(f"{by} fails without a mutant, too", flush=True)
                    waiting = [test for test in waiting if test != by]
        except TimeIsUp:
            verdict = "undecided" if verdict == "survived" else verdict
        return Outcome(verdict, "", count, time.monotonic() - began, fresh)

    def _failure(self, drawn: Drawn, tests: Sequence[str], time_s: float, fresh: str) -> tuple[str, str]:
        """Return like ``Forks.failure``, and why the tests ran in a fresh process. Raises ``TimeIsUp``."""
        try:
            self._put(drawn.path, drawn.source())
            if not fresh:
                try:
                    return self.forks.failure(tests, time_s, drawn.path, drawn.function()), ""
                except UnlikeBefore as error:
                    fresh = str(error)
            try:
                with closing(Forks(self.folder, list(dict.fromkeys(map(file_of, tests))))) as forks:
                    return forks.failure(tests, time_s), fresh
            except DoesNotBegin:  # the product cannot even be imported
                return tests[0], fresh
        finally:
            self._put(drawn.path, (ROOT / drawn.path).read_bytes())

    def _put(self, path: str, source: bytes) -> None:
        file = self.folder / path
        file.write_bytes(source)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()  # it may have the same size and second


def _executed_before(drawn: Drawn) -> str:
    """Why a change comes too late in a process that has imported the product; empty if it does not."""
    function = drawn.function()
    if function is None:
        return "executed at an import"
    if not reached.lines_of_imports(ROOT / drawn.path).isdisjoint(function.body):
        return f"{function.name} is called at an import"
    return ""


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
        numbers = range(min(jobs, len(waiting)))
        every = list(pool.map(lambda number: Workplace(Path(folder, str(number)), mutant_s), numbers))
        places = SimpleQueue[Workplace]()
        for place in every:
            places.put(place)

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
                where = f", in fresh processes: {outcome.fresh}" if outcome.fresh else ""
                print(
                    f"{len(record.outcomes)}/{len(chosen)} {outcome.verdict} {drawn.path}:{drawn.line} ({drawn.kind}), "
                    f"{outcome.tests} tests, {outcome.seconds:.0f} s {outcome.by}{where}",
                    flush=True,
                )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for place in every:
                place.close()
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
