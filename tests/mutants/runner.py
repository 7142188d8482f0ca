# SPDX-License-Identifier: Apache-2.0

"""Hunts many mutants, each in a separate process, a few at a time."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from tests.mutants.cited_tests import NoTestRuns
from tests.mutants.hunt import Budget, Finding, Place, hunt
from tests.mutants.mutant import Mutant

STUCK_S = 300.0
"""The processor time allowed for one world or scope before it counts as endless.

Wall-clock time would not show this: on a loaded machine every world is slow.
"""
MEMORY_BYTES = 6 << 30
"""The memory limit of a process, so that a mutant that accumulates data does not affect others."""
TELL_EVERY_S = 0.5


@dataclass
class _Hunt:
    mutant: Mutant
    process: ForkServerProcess
    pipe: Connection
    began: float
    looked: int = 0


def run(
    mutants: Sequence[Mutant],
    budget: Budget,
    jobs: int,
    ended: Callable[[Mutant, Finding], None],
    progress: Callable[[list[tuple[str, int]]], None],
    places: Mapping[str, Place] | None = None,
) -> None:
    """Hunt them all. ``ended``: called for each at its end. ``progress``: each hunt's state, about once a second.

    ``places``: where to look for a mutant first, by name. Raises ``NoTestRuns`` if a mutant names no test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([hunt.__module__])  # imported once, and not for each mutant
    waiting, running = list(mutants), list[_Hunt]()
    told_at = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child, args=(mutant, budget, STUCK_S, theirs, (places or {}).get(mutant.name)), daemon=True
                )
                process.start()
                theirs.close()
                running.append(_Hunt(mutant, process, pipe, began=time.monotonic()))
            wait([one.pipe for one in running], timeout=1.0)
            for one in list(running):
                if (finding := _hear(one)) is not None:
                    running.remove(one)
                    _end(one.process)
                    ended(one.mutant, finding)
            if time.monotonic() - told_at >= 1.0:
                told_at = time.monotonic()
                progress([(one.mutant.name, one.looked) for one in running])
    finally:
        for one in running:
            _end(one.process)


def _hear(one: _Hunt) -> Finding | None:
    """Return the process's finding; None while it is at work.

    A process that dies from its mutant, or gets stuck in one world, has shown it too.
    """
    try:
        while one.pipe.poll():
            said = one.pipe.recv()
            if isinstance(said, Finding):
                return said
            if isinstance(said, NoTestRuns):
                raise said
            one.looked = said
    except EOFError:
        one.process.join()
        seconds, code = time.monotonic() - one.began, one.process.exitcode
        if code == -signal.SIGPROF:
            seen = f"Stuck: no world and no scope has ended in {STUCK_S:g} s of processor time"
            return Finding("its process", "which stood still", one.looked, seconds, seen)
        return Finding("its process", "which died", one.looked, seconds, f"Died: exit status {code}")
    return None


def _end(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


def _child(mutant: Mutant, budget: Budget, stuck_s: float, pipe: Connection, place: Place | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.setitimer(signal.ITIMER_PROF, stuck_s)  # by default its signal ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    told_at = time.monotonic()

    def report(looked: int) -> None:
        nonlocal told_at
        signal.setitimer(signal.ITIMER_PROF, stuck_s)
        if time.monotonic() - told_at > TELL_EVERY_S:
            told_at = time.monotonic()
            pipe.send(looked)

    with suppress(BrokenPipeError):  # the parent is gone, and nothing waits for the answer
        try:
            pipe.send(hunt(mutant, budget, report, place))
        except NoTestRuns as error:
            pipe.send(error)
