# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.spark.faults.soak``: faults of Spark in random order, for any length of time, on one cluster.

Every test of this folder that takes only the bench (and a folder) is a row. All rows share one cluster, one Spark
session and one sidecar. At the end, the driver's memory, threads, sockets and files must match those after the first
few rows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import itertools
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from spark_bridge.driver.sidecar import Sidecar
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import start_spark
from tests.spark.faults.bench import Bench
from tests.spark.leftovers import sockets

WARM_UP_ROWS = 10
"""How many rows warm up what stays: Py4J's connections, Spark's pools, imported modules."""
GROWTH_BYTES = 64 << 20
GROWTH_THINGS = 12
"""How much of each may be added after the warm-up: threads, sockets and files."""

Row = Callable[[Bench, Path], None]


@dataclass(frozen=True)
class Footprint:
    """The resources that this process holds."""

    memory_bytes: int
    threads: int
    sockets: int
    files: int

    @staticmethod
    def now() -> Footprint:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        return Footprint(memory, threading.active_count(), len(sockets()), len(os.listdir("/proc/self/fd")))

    def __str__(self) -> str:
        megabytes = self.memory_bytes / 2**20
        return f"{megabytes:.0f} MiB, {self.threads} threads, {self.sockets} sockets, {self.files} files"

    def grown_since(self, before: Footprint) -> list[str]:
        """The resources that exceed the limits."""
        grown = []
        if self.memory_bytes > before.memory_bytes + GROWTH_BYTES:
            grown.append(f"memory by {(self.memory_bytes - before.memory_bytes) / 2**20:.0f} MiB")
        for name in ("threads", "sockets", "files"):
            more = getattr(self, name) - getattr(before, name)
            if more > GROWTH_THINGS:
                grown.append(f"{name} by {more}")
        return grown


def rows() -> dict[str, Row]:
    """Every row, keyed by its pytest name."""
    found: dict[str, Row] = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{file.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and function.__module__ == module.__name__:
                found.update(rows_of(f"{file.stem}::{name}", function))
    return found


def rows_of(name: str, function: Callable[..., None]) -> Iterator[tuple[str, Row]]:
    """One row for each combination of the test's parameters; none for a test that needs more than the bench."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = []
    for mark in marks:
        names, values = mark.args[:2]
        split = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
        choices.append([dict(zip(split, value if len(split) > 1 else (value,), strict=True)) for value in values])
    for chosen in itertools.product(*choices):
        arguments = {key: value for part in chosen for key, value in part.items()}
        wanted = set(inspect.signature(function).parameters) - arguments.keys()
        if "bench" in wanted and wanted <= {"bench", "tmp_path"}:
            label = ", ".join(str(value) for value in arguments.values())
            yield f"{name}[{label}]" if label else name, partial(call, function, arguments, "tmp_path" in wanted)


def call(function: Callable[..., None], arguments: dict[str, Any], folder: bool, bench: Bench, path: Path) -> None:
    more = {"tmp_path": path} if folder else {}
    function(bench=bench, **arguments, **more)


def soak(chosen: dict[str, Row], minutes: float, seed: int) -> list[str]:
    """Run the rows and return what went wrong. Prints one line for each row."""
    order = random.Random(seed)
    cluster = StandaloneCluster()
    cluster.start()
    try:
        spark = start_spark(cluster.master_url, spark_executor_memory="512m")
        with Sidecar(spark) as sidecar:
            wrong = run_rows(chosen, Bench(spark, sidecar, cluster), time.monotonic() + 60 * minutes, order)
        spark.stop()
        return wrong
    finally:
        cluster.stop()


def run_rows(chosen: dict[str, Row], bench: Bench, until: float, order: random.Random) -> list[str]:
    before = now = Footprint.now()
    for number in itertools.count(1):
        name = order.choice(sorted(chosen))
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                chosen[name](bench, Path(folder))
        except Exception:
            traceback.print_exc()
            return [f"row {number}, {name}, went wrong"]
        now = Footprint.now()
        print(f"{number:4} {name}: {time.monotonic() - began:.1f} s; {now}", flush=True)
        if number == WARM_UP_ROWS:
            before = now
        if time.monotonic() > until:
            break
    print(f"after the warm-up: {before}\nat the end:         {now}")
    return [f"grown: {what}" for what in now.grown_since(before)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.faults.soak", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ROW", help="only rows whose names contain one of these")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, at least (default: 30)")
    parser.add_argument("--seed", type=int, default=None, help="the order of the rows (default: a new one, printed)")
    parser.add_argument("--list", action="store_true", help="only say which rows there are")
    options = parser.parse_args(arguments)
    chosen = {
        name: row for name, row in rows().items() if not options.names or any(part in name for part in options.names)
    }
    if not chosen:
        parser.error(f"no row is called anything like {', '.join(options.names)} (--list names them all)")
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    if options.list:
        print("\n".join(chosen))
        return 0
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"{len(chosen)} rows, for {options.minutes:g} minutes; replay the order with --seed {seed}", flush=True)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        wrong = soak(chosen, options.minutes, seed)
    except KeyboardInterrupt:
        return 130
    print("\n".join(wrong) or "nothing went wrong, and nothing has grown")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
