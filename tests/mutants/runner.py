"""Many mutants, each in a process of its own, a few at a time."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tests.mutants.hunt import Budget, Finding, hunt
from tests.mutants.mutant import Mutant

GRACE_S = 60.0
"""How much longer than its budget a process may take, before it counts as stuck."""
TELL_EVERY_S = 0.5


@dataclass
class _Hunt:
    mutant: Mutant
    process: SpawnProcess
    pipe: Connection
    began: float
    looked: int = 0


def run(
    mutants: Sequence[Mutant],
    budget: Budget,
    jobs: int,
    ended: Callable[[Mutant, Finding], None],
    progress: Callable[[list[tuple[str, int]]], None],
) -> None:
    """Hunt them all. ``ended``: each as it ends. ``progress``: about once a second, who is hunted, and how far."""
    spawn = multiprocessing.get_context("spawn")
    waiting, running = list(mutants), list[_Hunt]()
    told_at = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                pipe, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=_child, args=(mutant, budget, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Hunt(mutant, process, pipe, time.monotonic()))
            wait([one.pipe for one in running], timeout=1.0)
            for one in list(running):
                if (finding := _hear(one, budget)) is not None:
                    running.remove(one)
                    _end(one.process)
                    ended(one.mutant, finding)
            if time.monotonic() - told_at >= 1.0:
                told_at = time.monotonic()
                progress([(one.mutant.name, one.looked) for one in running])
    finally:
        for one in running:
            _end(one.process)


def _hear(one: _Hunt, budget: Budget) -> Finding | None:
    """What the process has said; None while it is at work."""
    seconds = time.monotonic() - one.began
    try:
        while one.pipe.poll():
            said = one.pipe.recv()
            if isinstance(said, Finding):
                return said
            one.looked = said
    except EOFError:
        one.process.join()
        raise RuntimeError(f"the hunt for {one.mutant.name!r} died: exit status {one.process.exitcode}") from None
    if seconds > 3 * budget.seconds + GRACE_S:
        return Finding("none", "stuck in one world", one.looked, seconds, "")
    return None


def _end(process: SpawnProcess) -> None:
    process.kill()
    process.join()


def _child(mutant: Mutant, budget: Budget, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    told_at = time.monotonic()

    def report(looked: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > TELL_EVERY_S:
            told_at = time.monotonic()
            pipe.send(looked)

    pipe.send(hunt(mutant, budget, report))
