# SPDX-License-Identifier: Apache-2.0

"""The same program ten days in a row, killed on some of them at random moments and then repeated (H174).

A run is one sink or ready-made part, and one seed. Each day is a separate process. On some days it is killed with
SIGKILL, with its JVM and its workers, from before its first task to after its last checkpoint, and a scheduler repeats
the day with the same ``input_id``. After each day, all rows of all days so far are in the target, each once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tests.days.job import PARTS, SINKS, pair_of, rows_of
from tests.pipelines.pairs import SCHEMA, Outcome, Pair, Servers, prepare
from tests.spark.cluster import ROOT

__all__ = ["DAYS", "KINDS", "soak_days"]

DAYS = 10
KINDS = (*SINKS, *PARTS)
KILLS_OF_A_DAY = (0, 0, 0, 1, 1, 2)  # one of these is drawn
WITHIN_S = 2.5  # about how long a day takes from "begun" to its end
HANG_S = 300.0


def soak_days(
    servers: Servers, kind: str, seed: int, say: Callable[[str], None] = lambda text: None, *, days: int = DAYS
) -> Outcome:
    """Run the days of one kind, and count what is wrong and how often a day was killed."""
    chance = random.Random(f"{kind} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        pair = pair_of(kind, folder, servers.postgres.conninfo, servers.redis.url)
        prepare(servers, pair, late=False)
        outcome = Outcome()
        for day in range(days):
            _bring(folder, day)
            for _ in range(chance.choice(KILLS_OF_A_DAY)):
                outcome["killed " + _kill(_process(pair, kind, day), chance)] += 1
            counted = _finish(_process(pair, kind, day))
            _compare(outcome, pair, servers, day)
            if kind in (*SINKS, "queue") and counted != len(rows_of(0)) * (day + 1):
                outcome["miscounted"] += 1
            say(f"day {day}: {outcome}")
        return outcome


def _bring(folder: str, day: int) -> None:
    """The file that a source finds on this day."""
    found = Path(folder, "found")
    found.mkdir(exist_ok=True)
    table = pyarrow.table([list(rows_of(day)), [""] * len(rows_of(day))], schema=SCHEMA)
    pyarrow.parquet.write_table(table, found / f"{day}.parquet", row_group_size=10)


def _process(pair: Pair, kind: str, day: int) -> subprocess.Popen[str]:
    arguments = [pair.folder, kind, str(day), pair.conninfo, pair.redis_url]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.days.job", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
    )


def _kill(process: subprocess.Popen[str], chance: random.Random) -> str:
    """Let it begin, wait for a random time, and kill it with everything that it has started. Return how far it was."""
    assert process.stdout is not None
    said = [process.stdout.readline().strip()]
    time.sleep(chance.uniform(0, WITHIN_S))
    _end(process)
    said += process.stdout.read().split("\n")
    process.stdout.close()
    if any(line.startswith("left") for line in said):
        return "too late"
    return "after its end" if any(line.startswith("done") for line in said) else "within"


def _finish(process: subprocess.Popen[str]) -> int:
    """Wait until it has ended well; return how many rows it has counted."""
    try:
        out, _ = process.communicate(timeout=HANG_S)
    finally:
        _end(process)
    assert process.returncode == 0, f"a day ended with status {process.returncode}: {out}"
    return int(out.partition("done ")[2].split()[0])


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _compare(outcome: Outcome, pair: Pair, servers: Servers, day: int) -> None:
    found = Counter(pair.read(servers))
    expected = {row for one in range(day + 1) for row in rows_of(one)}
    outcome["missing"] += len(expected - found.keys())
    outcome["doubled"] += found.total() - len(found)
    outcome["strange"] += len(found.keys() - expected)
