# SPDX-License-Identifier: Apache-2.0

"""One run of the pipeline from start to proof: starts the driver, and starts it again when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from examples.exactly_once.driver import DriverOptions
from examples.exactly_once.faults import DRIVER, WHAT, plan_faults
from examples.exactly_once.proof import Proof, prove

ROOT = Path(__file__).resolve().parent.parent.parent
DRIVER_COMMAND = [sys.executable, "-m", "examples.exactly_once.driver"]
LOOK_EVERY_S = 0.05
GONE_TIMEOUT_S = 15.0
LOG_LINES_SHOWN = 30


class SparkDidNotStart(Exception):
    """A driver could not start Spark; the text says why."""


class TrialOptions(NamedTuple):
    """One run. ``folder`` is for logs and Spark's own files; ``url`` is where checkpoints and the sink lie."""

    seed: int
    master: str
    parallelism: int
    numbers: int
    faults: tuple[str, ...]
    timeout_s: float
    folder: Path
    url: str
    hold_events: bool = True


class Outcome(NamedTuple):
    """How one run ended. ``wrong`` is empty if every number went exactly once."""

    struck: list[str]
    missed: list[str]
    drivers: int
    checkpoints: int
    seconds: float
    proof: Proof | None
    wrong: list[str]


class Trial:
    """Runs outside of the driver, in the process that the user started, so it survives when the driver is killed."""

    def __init__(self, options: TrialOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._planned = plan_faults(options.seed, options.faults, options.parallelism)
        self._journal = options.folder / "journal.jsonl"
        self._journal_read = 0
        self._struck: list[str] = []
        self._wrong: list[str] = []
        self._checkpoints = 0
        self._kills = False  # a fault is about to kill the driver
        self._groups: list[int] = []

    def run(self) -> Outcome:
        """Run until the job has ended and was judged. Ctrl-C ends the driver, and is raised as usual.

        Raises ``SparkDidNotStart`` if a driver reports that.
        """
        options = self._options
        began = time.monotonic()
        self._journal.touch()
        try:
            status = self._run_driver()
            while status == -signal.SIGKILL and self._death_is_due():
                if not self._kills:
                    self._strike(DRIVER)
                self._kills = False
                status = self._run_driver()
        finally:
            for group in self._groups:
                await_end_of_group(group)
        proof = None
        if status == 0:
            proof = prove(f"{options.url}/checkpoints", f"{options.url}/sink", options.numbers, options.parallelism)
            self._wrong += proof.problems
        return Outcome(
            self._struck,
            self._left(),
            len(self._groups),
            self._checkpoints,
            time.monotonic() - began,
            proof,
            self._wrong,
        )

    def _death_is_due(self) -> bool:
        """Whether a fault kills the driver: its own, or the storage's."""
        return self._kills or DRIVER in self._left()

    def _left(self) -> list[str]:
        return [fault.kind for fault in self._planned if fault.kind not in self._struck]

    def _run_driver(self) -> int:
        """Start the driver with the faults still to come, and return its exit status; 1 also if it hangs."""
        options = self._options
        log = options.folder / f"driver-{len(self._groups) + 1}.log"
        planned = [fault for fault in self._planned if fault.kind not in self._struck]
        argument = DriverOptions(
            options.master,
            options.parallelism,
            options.numbers,
            f"{options.url}/checkpoints",
            f"{options.url}/sink",
            str(self._journal),
            planned,
            options.hold_events,
        ).to_json()
        with started([*DRIVER_COMMAND, argument], log, options.folder) as process:
            self._groups.append(process.pid)
            deadline = time.monotonic() + options.timeout_s
            while process.poll() is None and time.monotonic() < deadline:
                self._read_journal()
                time.sleep(LOOK_EVERY_S)
            status = process.poll()
        self._read_journal()
        if status is None:
            self._wrong.append(f"driver {len(self._groups)} did not end within {options.timeout_s:g} s")
            self._wrong.extend(last_lines(log))
            return 1
        if status != 0 and not (status == -signal.SIGKILL and self._death_is_due()):
            self._wrong.append(f"driver {len(self._groups)} ended with status {status}")
            self._wrong.extend(last_lines(log))
        return status

    def _strike(self, kind: str) -> None:
        self._struck.append(kind)
        self._say(WHAT[kind])

    def _read_journal(self) -> None:
        with self._journal.open(encoding="utf-8") as file:
            file.seek(self._journal_read)
            while (line := file.readline()).endswith("\n"):
                self._journal_read = file.tell()
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"fault": kind, **more}:
                self._strike(kind)
                self._kills = self._kills or bool(more.get("kills"))
            case {"wrong": text}:
                self._wrong.append(text)
            case {"no_spark": text}:
                raise SparkDidNotStart(text)
            case {"statistics": statistics}:
                self._checkpoints = statistics["checkpoints_completed"]


@contextmanager
def started(command: list[str], log: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a separate process group, which a Ctrl-C does not reach; the block ends it if it still runs.

    The JVM and the workers of a dead driver end without help, while the next driver already runs.
    """
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TMPDIR": str(temporary),
        "SPARK_LOCAL_DIRS": str(temporary),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def await_end_of_group(group: int) -> None:
    """Wait until no process of a dead driver's group is left: its JVM may take a moment. One that hangs is killed."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(LOOK_EVERY_S)
        os.killpg(group, signal.SIGKILL)


def last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
