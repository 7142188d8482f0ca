# SPDX-License-Identifier: Apache-2.0

"""Runs many worlds over several processes. The lowest seed that breaks a rule counts, whichever process runs it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from tests.simulation.shared import Totals
from tests.simulation.world import run_world

REPORT_S = 1.0
BLOCK = 200
"""How many worlds are handed to the processes at a time."""


@dataclass(frozen=True)
class Outcome:
    """``broken``: the violation, or an empty string."""

    seed: int
    totals: Totals
    broken: str = ""


Run = Callable[[int], Outcome]


def run_seed(seed: int) -> Outcome:
    world, error = run_world(seed)
    return Outcome(seed, world.totals(), "" if error is None else f"{type(error).__name__}: {error}")


@dataclass
class Summary:
    """Summary of the worlds that were run. ``broken``: the outcome of the lowest seed that broke a rule."""

    count: int
    totals: Totals = field(default_factory=Totals)
    broken: Outcome | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def progress(self) -> str:
        rate = self.done / max(time.monotonic() - self.began, 0.001)
        left = (self.count - self.done) / rate if self.done else 0.0
        return f"{self.done}/{self.count} worlds, {rate:.1f} a second, {int(left) // 60} min {int(left) % 60:2} s left"

    def take(self, outcomes: Iterable[Outcome], say: Callable[[str], None]) -> None:
        """Take outcomes in the order of their seeds, until one broke a rule."""
        next_report = self.began + REPORT_S
        for outcome in outcomes:
            self.done += 1
            self.totals.add(outcome.totals)
            if outcome.broken:
                self.broken = outcome
                return
            if time.monotonic() >= next_report:
                say(self.progress())
                next_report += REPORT_S


def run_many(seeds: range, jobs: int, say: Callable[[str], None], run: Run = run_seed) -> Summary:
    """Run the seeds until the lowest one that breaks a rule is known. ``say`` reports progress each second.

    ``RuntimeError``: a process ended before its work did.
    """
    summary = Summary(len(seeds))
    if jobs == 1:
        summary.take(map(run, seeds), say)
        return summary
    pool = ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        blocks = (seeds[start : start + BLOCK] for start in range(0, len(seeds), BLOCK))
        summary.take((outcome for block in blocks for outcome in pool.map(run, block)), say)
    except BrokenProcessPool:
        raise RuntimeError(f"a process that ran seed {seeds[summary.done]} or a later one has ended") from None
    finally:
        pool.shutdown(cancel_futures=True)  # the parent handles an interrupt; each process ends its world
    return summary
