# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.instructions``: the cost of the hot paths, counted in instructions instead of seconds.

For each path of ``benchmarks.hot_paths`` it counts the Python bytecodes executed, the Python functions called or
resumed, and the functions and methods in C called. The counts are for one step, averaged over many, once warm.
Whatever the thread executes counts, including the event loop and the generated ``__init__`` of a dataclass; only the
benchmarks' own code does not. So a count is the same on every machine, however busy, for one minor version of Python.
It says nothing about how long a function in C takes: the other figures do.

``--check`` compares with ``results/instructions.json``; ``--write`` updates that file's counts for this Python.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from actors import ActorSystem
from benchmarks.hot_paths import ASYNC_PATHS, PATHS, AsyncStep, Step

FILE = Path(__file__).parent / "results" / "instructions.json"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
WARM_UP_STEPS = 10
STEPS = 40
TOLERANCE = 0.02

Counts = dict[str, float]
"""``bytecodes``, ``python_calls`` and ``c_calls`` of one step."""


class Counter:
    """Counts what this thread executes between ``start`` and ``stop``, except code of this folder."""

    def __init__(self) -> None:
        self.bytecodes = 0
        self.python_calls = 0
        self.c_calls = 0
        self._not_counted = str(Path(__file__).parent)

    def start(self) -> None:
        gc.disable()  # when it runs, and on what, depends on all earlier allocations
        sys.setprofile(self._profile)
        sys.settrace(self._trace)

    def stop(self) -> None:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()

    def of_one(self, steps: int) -> Counts:
        """The average over this many steps."""
        if not self.bytecodes:
            raise RuntimeError("this Python does not report its bytecodes to a trace function")
        return {
            "bytecodes": round(self.bytecodes / steps, 2),
            "python_calls": round(self.python_calls / steps, 2),
            "c_calls": round(self.c_calls / steps, 2),
        }

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[[FrameType, str, Any], Any] | None:
        if frame.f_code.co_filename.startswith(self._not_counted):
            return None
        self.python_calls += 1
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._trace_within

    def _trace_within(self, frame: FrameType, event: str, arg: Any) -> Callable[[FrameType, str, Any], Any]:
        if event == "opcode":
            self.bytecodes += 1
        return self._trace_within

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and not frame.f_code.co_filename.startswith(self._not_counted):
            self.c_calls += 1


def count(step: Step) -> Counts:
    """The cost of one call of ``step``, which was prepared for ``WARM_UP_STEPS + STEPS``."""
    counter = Counter()
    for number in range(WARM_UP_STEPS):
        step(number)
    counter.start()
    for number in range(WARM_UP_STEPS, WARM_UP_STEPS + STEPS):
        step(number)
    counter.stop()
    return counter.of_one(STEPS)


async def count_async(prepare: Callable[[ActorSystem], AsyncStep]) -> Counts:
    """The same for a step that takes turns of the loop, which are counted, too."""
    counter = Counter()
    standing_clock = itertools.repeat(0.0).__next__  # so that only the code decides when the time is up
    async with ActorSystem("instructions", loop_timer=standing_clock) as system:
        step = prepare(system)
        for number in range(WARM_UP_STEPS):
            await step(number)
        counter.start()
        for number in range(WARM_UP_STEPS, WARM_UP_STEPS + STEPS):
            await step(number)
        counter.stop()
    return counter.of_one(STEPS)


def count_all() -> dict[str, Counts]:
    """The name and the counts of every path."""
    counts = {name: count(prepare(WARM_UP_STEPS + STEPS)) for name, prepare in PATHS.items()}
    for name, prepare in ASYNC_PATHS.items():
        counts[name] = asyncio.run(count_async(prepare), debug=False)
    return counts


def kept() -> dict[str, dict[str, Counts]]:
    """The counts in the file, by minor version of Python."""
    versions: dict[str, dict[str, Counts]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return versions


def compare(before: dict[str, Counts], now: dict[str, Counts]) -> tuple[list[str], list[str]]:
    """The counts that are worse by more than 2 % or cannot be compared, and those that are better by as much."""
    worse = [f"{name}: is in the file and is counted no more" for name in before if name not in now]
    better = []
    for name, counts in now.items():
        if name not in before:
            worse.append(f"{name}: is not in the file")
            continue
        for what, value in counts.items():
            was = before[name][what]
            by = f" ({value / was - 1:+.1%})" if was else ""
            change = f"{name}: {value:g} {what}, was {was:g}{by}"
            if value > was * (1 + TOLERANCE):
                worse.append(change)
            elif value < was * (1 - TOLERANCE):
                better.append(change)
    return worse, better


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.instructions", description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="fail if a path has become worse by more than 2 %%")
    mode.add_argument("--write", action="store_true", help="renew the file for this version of Python")
    options = parser.parse_args(arguments)
    versions, now = kept(), count_all()
    for name, counts in now.items():
        print(f"{name:<22}" + "".join(f"  {value:9.2f} {what}" for what, value in counts.items()))
    if options.write:
        versions[VERSION] = now
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
        print(f"written to {FILE}", file=sys.stderr)
    if options.check:
        return check(versions.get(VERSION), now)
    return 0


def check(before: dict[str, Counts] | None, now: dict[str, Counts]) -> int:
    """Return the exit status: 0, or 1 if a path has become worse, or 2 if the file has no counts for this Python."""
    if before is None:
        print(f"{FILE.name} has no counts for Python {VERSION}: add them with --write", file=sys.stderr)
        return 2
    worse, better = compare(before, now)
    for line in worse:
        print(f"worse: {line}", file=sys.stderr)
    for line in better:
        print(f"better: {line}", file=sys.stderr)
    if worse or better:
        print("meant so? python -m benchmarks.instructions --write", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
