# SPDX-License-Identifier: Apache-2.0

"""Hunts one mutant: a hunter runs on the changed product until a checker objects.

The machines' own ``check_invariants`` are switched off, so the checkers work without their help.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from protocol.attempts import AttemptLedger
from protocol.barrier_tracker import BarrierTracker
from protocol.gateway.machine import GatewayMachine
from protocol.subtask.machine import SubtaskMachine
from tests.exploration import SCOPES, explore
from tests.mutants.forged_claims import check_forged_claims
from tests.mutants.late_writes import check_late_writes
from tests.mutants.lost_facts import check_lost_facts
from tests.mutants.mutant import Mutant
from tests.mutants.parts import check_parts
from tests.mutants.second_runs import check_history
from tests.simulation.logs import quiet_logs
from tests.simulation.world import World, run_world

EAGER = (0.1, None, 0.0)
"""How often a checkpoint is requested, chosen by the seed: often, as the seed draws it, never."""
FEW = 150
"""The number of worlds before the exploration; the others come after it."""
MACHINES = (AttemptLedger, BarrierTracker, GatewayMachine, SubtaskMachine)

Report = Callable[[int], None]


@dataclass(frozen=True)
class Budget:
    """The limits of a hunt.

    ``worlds``: of the simulation, from seed ``first``. ``histories``: of each kind, before the exploration. ``states``:
    of each scope. A hunt does not use a clock, so its result depends on these numbers and not on the machine.
    """

    first: int = 0
    worlds: int = 1500
    states: int = 25_000
    histories: int = 10


@dataclass(frozen=True)
class Finding:
    """The result of one hunt. ``seen`` is the checker's message, empty for a survivor.

    ``where`` names the seed or the scope; ``looked`` counts the hunter's worlds or states.
    """

    hunter: str
    where: str
    looked: int
    seconds: float
    seen: str

    @property
    def rule(self) -> str:
        """The rule that the checker named, or else the kind of the error."""
        rule = re.search(r"\bH\d+\b|invariant|exactly once", self.seen)
        return rule.group() if rule else self.seen.partition(":")[0]


@contextmanager
def changed(mutant: Mutant) -> Iterator[None]:
    """Put this bug into the product, and disable the product's own assertions."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        for machine in MACHINES:
            monkeypatch.setattr(machine, "check_invariants", lambda self: None)
        yield


def run_seed(seed: int) -> tuple[World, Exception | None]:
    """Run one world of a hunt; the seed decides everything."""
    return run_world(seed, EAGER[seed % len(EAGER)])


def simulate(seeds: range, report: Report, before: int = 0) -> Finding:
    """Run worlds until one goes wrong; ``before`` have run already. Call it within ``changed``."""
    began, looked = time.monotonic(), before
    for seed in seeds:
        _, error = run_seed(seed)
        looked += 1
        if error is not None:
            seen = f"{type(error).__name__}: {error}"
            return Finding("simulation", f"seed {seed}", looked, time.monotonic() - began, seen)
        report(looked)
    return Finding("simulation", f"seeds {seeds.start}..", looked, time.monotonic() - began, "")


def tell_histories(hunter: str, check: Callable[[int], None], count: int) -> Finding:
    """Run histories until ``check`` objects to one. Call it within ``changed``."""
    began = time.monotonic()
    for seed in range(count):
        try:
            with quiet_logs():
                check(seed)
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            return Finding(hunter, f"seed {seed}", seed + 1, time.monotonic() - began, seen)
    return Finding(hunter, f"{count} seeds", count, time.monotonic() - began, "")


def explore_scopes(budget: Budget, report: Report) -> Finding:
    """Explore the scopes, the small ones first, until a path goes wrong. Call it within ``changed``."""
    began, looked = time.monotonic(), 0
    for scope in SCOPES.values():
        seen = ""
        try:
            result = explore(scope, states_max=budget.states)
            looked += result.states
            seen = "" if result.violation is None else result.violation.text
        except Exception as error:  # an error of the product, which the exploration does not expect
            seen = f"{type(error).__name__}: {error}"
        report(looked)
        if seen:
            return Finding("exploration", f"scope {scope.name}", looked, time.monotonic() - began, seen)
    return Finding("exploration", f"{len(SCOPES)} scopes", looked, time.monotonic() - began, "")


def hunt(mutant: Mutant, budget: Budget, report: Report = lambda looked: None) -> Finding:
    """Hunt in a few worlds, histories of each kind, the small scopes, then many worlds, until one shows the mutant.

    A mutant with an argument is not hunted for long. A survivor's finding reports everything that was tried.
    """
    few = min(FEW, budget.worlds)
    middle, end = budget.first + few, budget.first + (few if mutant.argued else budget.worlds)
    with changed(mutant):
        hunts: tuple[Callable[[], Finding], ...] = (
            lambda: simulate(range(budget.first, middle), report),
            lambda: tell_histories("second runs", check_history, budget.histories),
            lambda: tell_histories("lost facts", check_lost_facts, budget.histories),
            lambda: tell_histories("late writes", check_late_writes, budget.histories),
            lambda: tell_histories("forged claims", check_forged_claims, budget.histories),
            lambda: tell_histories("parts", check_parts, budget.histories),
            lambda: explore_scopes(budget, report),
            lambda: simulate(range(middle, end), report, before=few),
        )
        seconds, finding = 0.0, Finding("nobody", "", 0, 0.0, "")
        for one in hunts:
            finding = one()
            seconds += finding.seconds
            if finding.seen:
                return replace(finding, seconds=seconds)
    return replace(finding, hunter="all", seconds=seconds)
