# SPDX-License-Identifier: Apache-2.0

"""Runs many worlds over several processes. The lowest seed that breaks a rule counts, whichever process runs it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tests.simulation.shared import Totals
from tests.simulation.world import run_world

REPORT_S = 1.0


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

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        self.totals.add(outcome.totals)
        if outcome.broken and (self.broken is None or outcome.seed < self.broken.seed):
            self.broken = outcome

    def settled(self, seed: int) -> bool:
        """Whether the outcome of this seed and of higher ones no longer matters."""
        return self.broken is not None and self.broken.seed <= seed

    def progress(self) -> str:
        rate = self.done / max(time.monotonic() - self.began, 0.001)
        left = (self.count - self.done) / rate if self.done else 0.0
        return f"{self.done}/{self.count} worlds, {rate:.1f} a second, {int(left) // 60} min {int(left) % 60:2} s left"


def run_many(seeds: range, jobs: int, say: Callable[[str], None], run: Run = run_seed) -> Summary:
    """Run the seeds until the lowest one that breaks a rule is known. ``say`` reports progress each second.

    ``RuntimeError``: a process ended before its work did.
    """
    summary = Summary(len(seeds))
    if jobs == 1:
        run_here(seeds, summary, say, run)
    else:
        run_apart(seeds, jobs, summary, say, run)
    return summary


def run_here(seeds: range, summary: Summary, say: Callable[[str], None], run: Run) -> None:
    next_report = summary.began + REPORT_S
    for seed in seeds:
        summary.add(run(seed))
        if summary.broken is not None:
            return
        if time.monotonic() >= next_report:
            say(summary.progress())
            next_report += REPORT_S


def run_apart(seeds: range, jobs: int, summary: Summary, say: Callable[[str], None], run: Run) -> None:
    """Run the seeds in several processes, each with every n-th seed in rising order."""
    workers = [Worker(seeds[number::jobs], run) for number in range(min(jobs, len(seeds)))]
    next_report = summary.began + REPORT_S
    try:
        while working := {worker.pipe: worker for worker in workers if worker.left}:
            for pipe in wait(list(working), timeout=max(0.0, next_report - time.monotonic())):
                assert isinstance(pipe, Connection)
                summary.add(working[pipe].take())
            for worker in working.values():
                if worker.left and summary.settled(worker.left[0]):
                    worker.left = worker.left[:0]
            if time.monotonic() >= next_report:
                say(summary.progress())
                next_report += REPORT_S
    finally:
        for worker in workers:
            worker.stop()


class Worker:
    """A process and its remaining seeds."""

    def __init__(self, seeds: range, run: Run) -> None:
        self.left = seeds
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self._process: BaseProcess = multiprocessing.Process(target=work, args=(run, seeds, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def take(self) -> Outcome:
        try:
            outcome = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process that runs seed {self.left[0]} has ended") from None
        assert isinstance(outcome, Outcome)
        self.left = self.left[1:]
        return outcome

    def stop(self) -> None:
        """Stop the process immediately."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def work(run: Run, seeds: range, pipe: Connection) -> None:
    """Run seeds in a separate process. The parent handles an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for seed in seeds:
            pipe.send(run(seed))
    except BrokenPipeError:
        return  # the parent no longer reads
