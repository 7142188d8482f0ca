# SPDX-License-Identifier: Apache-2.0

"""A job with large states, run again and again in one storage, while everything dies at random moments (H190 to H193).

Each run is a separate process that changes some of the values in its states. During it, tasks fail, workers and the
driver are killed with SIGKILL, and so is the server of the storage, which begins again a little later. Only the one for
GCS can do that: the others keep everything in memory. Every third run has another parallelism. After each run, all
values are those of a model. At the end, the storage has no file that no checkpoint needs, and ``headgate checkpoints``
finds everything intact.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

from tests.pipelines.pairs import Outcome
from tests.spark.cluster import ROOT
from tests.spark_bridge.object_stores import STORES, GcsServer, ObjectStore
from tests.states.job import PROCESS_S, Run, model_of, value_of

__all__ = ["FAULTS", "StatesOutcome", "soak_states"]

FAULTS = ("task", "worker", "driver", "server")
PARALLELISM = (2, 3, 4, 5)
REPETITIONS_MAX = 8
HANG_S = 900.0


class StatesOutcome(Outcome):
    """``wrong`` are values, ``strange`` keys; ``left`` are files that nothing needs, and ``damaged`` is the storage."""

    WRONG = ("missing", "wrong", "strange", "left", "damaged")


class Running:
    """The process of a run, its output, and what strikes it."""

    def __init__(self, run: Run) -> None:
        self.run, self.begun, self.done = run, False, False
        with Path(run.folder, "stderr").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.states.job", run.encode()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            )
        self._listener = Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.begun = self.begun or line.startswith("begun")
            self.done = self.done or line.startswith("done")

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    @property
    def pids_of_tasks(self) -> Iterator[int]:
        for file in Path(self.run.folder).glob("task-*"):
            with suppress(ValueError, FileNotFoundError):
                yield int(file.read_text())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def strike(fault: str, running: Running, server: GcsServer | None, chance: Random) -> None:
    """Let something die now."""
    match fault:
        case "task":
            Path(running.run.folder, "raise").touch()
        case "worker":
            pids = sorted(running.pids_of_tasks)
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
        case "driver":
            running.kill()
        case "server":
            assert server is not None
            server.kill()
            time.sleep(chance.uniform(0.0, 2.0))
            server.start()


def complete(run: Run, server: GcsServer | None, chance: Random, outcome: Outcome, *, faults: int) -> None:
    """Repeat a run until it ends well, as a scheduler does. The first tries are struck by so many faults in all."""
    kinds = FAULTS if server is not None else FAULTS[:-1]
    drawn = [chance.choice(kinds) for _ in range(faults)]
    for _ in range(REPETITIONS_MAX):
        running = Running(run)
        try:
            while drawn and not running.begun and not running.wait(0.05):
                pass
            while drawn and not running.wait(chance.uniform(0.0, PROCESS_S)) and not running.done:
                fault = drawn.pop()
                outcome[f"{fault} struck"] += 1
                strike(fault, running, server, chance)
            if not running.wait(HANG_S):
                raise AssertionError(f"a run hangs: {run}")
            if running.done:
                return
            outcome["repeated"] += 1
        finally:
            running.kill()
            for file in Path(run.folder).glob("task-*"):
                file.unlink()
            Path(run.folder, "raise").unlink(missing_ok=True)
    raise AssertionError(f"a run does not end well: {Path(run.folder, 'stderr').read_text()[-3000:]}")


def compare(run: Run, outcome: Outcome, digests: dict[tuple[int, int], str]) -> None:
    result = json.loads(Path(run.folder, "result.json").read_text())
    model = model_of(run.seed, run.number, run.mib)
    found: dict[int, list[Any]] = {}
    for key, *value in result["found"]:
        outcome["strange"] += key in found or key not in model
        found[key] = value
    for key, count in model.items():
        if key not in found:
            outcome["missing"] += 1
            continue
        digest = digests.get((key, count)) or sha256(value_of(run.seed, key, count)).hexdigest()
        digests[key, count] = digest
        outcome["wrong"] += found[key] != [count, digest]
    outcome["left"] += len(result["left"])


@contextmanager
def _storage(kind: str, folder: str) -> Iterator[tuple[ObjectStore, GcsServer | None]]:
    """The store, and its server if that can be killed."""
    if kind != "gcs":
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or the server of S3 writes a line for each request
        with STORES[kind]() as store:
            yield store, None
        return
    with GcsServer(folder) as server:
        yield server.store, server


def _is_intact(store: ObjectStore, url: str) -> bool:
    """Whether ``headgate checkpoints`` has nothing to say of what is stored, contents included."""
    settings = {f"FSSPEC_{store.protocol.upper()}": json.dumps(store.options)}
    command = [sys.executable, "-m", "headgate", "checkpoints", url, "--files"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode == 0


def soak_states(
    folder: str, seed: int, runs: int, mib: int, say: Callable[[str], None] = lambda text: None, *, store: str = "gcs"
) -> StatesOutcome:
    """Run the job so often, with states of ``mib`` MiB in all, in this kind of store."""
    chance, outcome = Random(seed), StatesOutcome()
    digests: dict[tuple[int, int], str] = {}
    parallelism = 2
    place = Path(folder, "job")
    place.mkdir()
    with _storage(store, f"{folder}/server") as (objects, server):
        objects.filesystem.mkdir("states")
        url = f"{objects.protocol}://states/kept"
        for number in range(runs + 1):
            last = number == runs  # without faults, so that what is left can be counted
            if number % 3 == 2:
                parallelism = chance.choice([one for one in PARALLELISM if one != parallelism])
                outcome["rescaled"] += 1
            run = Run(str(place), url, objects.options, seed, number, parallelism, mib, settle=last)
            began = time.monotonic()
            complete(run, server, chance, outcome, faults=0 if last else chance.choice((1, 2, 2, 3)))
            compare(run, outcome, digests)
            if outcome["left"]:
                say(f"left: {json.loads(Path(run.folder, 'result.json').read_text())['left']}")
            say(f"run {number}, {parallelism} subtasks, {time.monotonic() - began:.0f} s: {outcome}")
        outcome["damaged"] += not _is_intact(objects, url)
    return outcome
