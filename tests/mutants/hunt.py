"""Hunting one mutant: let a hunter run on the changed product until a checker objects.

The machines' own ``check_invariants`` are switched off: the checkers stand on their own feet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from protocol.attempts import AttemptLedger
from protocol.barrier_tracker import BarrierTracker
from protocol.gateway import GatewayMachine
from protocol.subtask import SubtaskMachine
from tests.mutants.mutant import Mutant
from tests.simulation.world import World, run_world

EAGER = (0.1, None, 0.0)
"""How often somebody asks for a checkpoint, by the seed: often, as the seed draws it, never."""
MACHINES = (AttemptLedger, BarrierTracker, GatewayMachine, SubtaskMachine)

Report = Callable[[int], None]


@dataclass(frozen=True)
class Budget:
    """How long a mutant is hunted: ``worlds`` of the simulation from seed ``first``, and ``seconds`` in all."""

    first: int = 0
    worlds: int = 1500
    seconds: float = 300.0


@dataclass(frozen=True)
class Finding:
    """What became of one hunt. ``seen`` is what a checker said, empty for a survivor.

    ``where`` names the seed or the scope; ``looked`` counts worlds or states.
    """

    hunter: str
    where: str
    looked: int
    seconds: float
    seen: str

    @property
    def rule(self) -> str:
        """The rule that the checker has named, else the kind of the error."""
        rule = re.search(r"\bH\d+\b|invariant|exactly once", self.seen)
        return rule.group() if rule else self.seen.partition(":")[0]


@contextmanager
def changed(mutant: Mutant) -> Iterator[None]:
    """The product with this bug in it, and without its own assertions."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        for machine in MACHINES:
            monkeypatch.setattr(machine, "check_invariants", lambda self: None)
        yield


def run_seed(seed: int) -> tuple[World, Exception | None]:
    """One world of a hunt; the seed says everything."""
    return run_world(seed, EAGER[seed % len(EAGER)])


def simulate(budget: Budget, report: Report) -> Finding:
    """World after world, until one goes wrong. Call it within ``changed``."""
    began = time.monotonic()
    looked = 0
    for seed in range(budget.first, budget.first + budget.worlds):
        _, error = run_seed(seed)
        looked += 1
        report(looked)
        seconds = time.monotonic() - began
        if error is not None:
            return Finding("simulation", f"seed {seed}", looked, seconds, f"{type(error).__name__}: {error}")
        if seconds > budget.seconds:
            break
    return Finding("simulation", f"seeds {budget.first}..", looked, time.monotonic() - began, "")


def hunt(mutant: Mutant, budget: Budget, report: Report = lambda looked: None) -> Finding:
    """Every hunter in turn, until one sees the mutant; else the last one's empty hands."""
    with changed(mutant):
        return simulate(budget, report)
