# SPDX-License-Identifier: Apache-2.0

"""Hunts one mutant: a hunter runs on the changed product until a checker objects.

The tests that cite the mutant's rules come first, because they take seconds. For all other hunters, the machines' own
``check_invariants`` are switched off, so the checkers work without their help.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import pytest

from protocol.attempts.ledger import AttemptLedger
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.file_retention import FileRetention
from protocol.gateway.machine import GatewayMachine
from protocol.subtask.machine import SubtaskMachine
from tests.exploration import SCOPES, Scope, explore
from tests.mutants import cited_tests
from tests.mutants.catalogue import BY_NAME
from tests.mutants.forged_claims import check_forged_claims
from tests.mutants.late_writes import check_late_writes
from tests.mutants.lost_facts import check_lost_facts
from tests.mutants.mutant import Mutant
from tests.mutants.parts import check_parts
from tests.mutants.second_runs import check_history
from tests.protocol.tunnel_worlds import check_tunnel
from tests.simulation.logs import quiet_logs
from tests.simulation.world import World, run_world

EAGER = (0.1, None, 0.0)
"""How often a checkpoint is requested, chosen by the seed: often, as the seed draws it, never."""
MACHINES = (AttemptLedger, BarrierTracker, FileRetention, GatewayMachine, SubtaskMachine)

EXPLORED = (
    "protocol.",
    "actors.coordination.engine.coordinator:TakenEvents.",
    "actors.coordination.engine.inputs:",
)
"""What the exploration runs of the product. It cannot see a mutant elsewhere, so it is not tried on one."""

Report = Callable[[int], None]
Place = tuple[str, str]
"""Where a mutant was caught: ``hunter`` and ``where`` of the finding."""


@dataclass(frozen=True)
class Budget:
    """The limits of a hunt.

    ``worlds``: of the simulation, from seed ``first``. ``histories``: of each kind. ``states``: of each scope.
    ``tests``: whether the tests that cite its rules run. A hunt does not use a clock, so its result depends on these
    numbers and not on the machine.
    """

    first: int = 0
    worlds: int = 1500
    states: int = 25_000
    histories: int = 10
    tests: bool = True

    def at_most(self, other: Budget) -> Budget:
        return Budget(
            self.first,
            min(self.worlds, other.worlds),
            min(self.states, other.states),
            min(self.histories, other.histories),
            self.tests and other.tests,
        )


ROUNDS = (
    Budget(worlds=12, states=1000, histories=3),
    Budget(worlds=150, states=5000),
    Budget(worlds=150),
    Budget(),
)
"""A hunt spends its budget in rounds. Each hunter catches most of its mutants early, so it looks briefly first."""


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
        return rule.group() if rule else re.split(r"[:\n]", self.seen, maxsplit=1)[0]


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


def tell_histories(hunter: str, check: Callable[[int], None], seeds: range) -> Finding:
    """Run histories until ``check`` objects to one. Call it within ``changed``."""
    began = time.monotonic()
    for seed in seeds:
        try:
            with quiet_logs():
                check(seed)
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            return Finding(hunter, f"seed {seed}", seed + 1, time.monotonic() - began, seen)
    return Finding(hunter, f"{seeds.stop} seeds", seeds.stop, time.monotonic() - began, "")


def run_cited_tests(mutant: Mutant, tests: Sequence[str] = ()) -> Finding:
    """Run these tests, or all that cite a rule of the mutant, until one fails that passes without it."""
    began = time.monotonic()
    where, seen = cited_tests.run(tests, mutant.name) if tests else cited_tests.look(mutant)
    return Finding(cited_tests.HUNTER, where, 1, time.monotonic() - began, seen)


def explore_scopes(states: int, report: Report, scopes: Collection[Scope] = tuple(SCOPES.values())) -> Finding:
    """Explore so many states of each scope, until a path goes wrong. Call it within ``changed``."""
    began, looked = time.monotonic(), 0
    for scope in scopes:
        seen = ""
        try:
            result = explore(scope, states_max=states)
            looked += result.states
            seen = "" if result.violation is None else result.violation.text
        except Exception as error:  # an error of the product, which the exploration does not expect
            seen = f"{type(error).__name__}: {error}"
        report(looked)
        if seen:
            return Finding("exploration", f"scope {scope.name}", looked, time.monotonic() - began, seen)
    return Finding("exploration", f"{len(scopes)} scopes", looked, time.monotonic() - began, "")


HISTORIES: tuple[tuple[str, Callable[[int], None]], ...] = (
    ("second runs", check_history),
    ("lost facts", check_lost_facts),
    ("late writes", check_late_writes),
    ("forged claims", check_forged_claims),
    ("parts", check_parts),
    ("tunnel", check_tunnel),
)


def hunt(mutant: Mutant, budget: Budget, report: Report = lambda looked: None, place: Place | None = None) -> Finding:
    """Hunt with tests, in worlds, in histories of each kind and in the scopes, until one shows the mutant.

    The worlds, histories and scopes come in rounds that grow. ``place``: where to look before all else. A mutant with
    an argument is not hunted in the last round, nor with tests, which may know more than what is promised. A
    survivor's finding reports everything that was tried. Raises ``NoTestRuns`` if the mutant names no test.
    """
    rounds = ROUNDS[:-1] if mutant.argued else ROUNDS
    if not any(edit.where.startswith(EXPLORED) for edit in mutant.edits):
        budget = replace(budget, states=0)
    if mutant.by:
        return run_cited_tests(mutant, [mutant.by])
    began, before, worlds = time.monotonic(), Budget(worlds=0, states=0, histories=0), Finding("", "", 0, 0.0, "")
    if place is not None and place[0] == cited_tests.HUNTER:
        with suppress(cited_tests.NoTestRuns):  # the place is gone
            if (finding := run_cited_tests(mutant, [place[1]])).seen:
                return finding
    has_tests = budget.tests and not mutant.argued and BY_NAME.get(mutant.name) == mutant
    if has_tests and (finding := run_cited_tests(mutant)).seen:
        return finding
    with changed(mutant):
        for look in _hunts_at(place, report):
            if (finding := look()).seen:
                return finding
        for limit in (budget.at_most(each) for each in rounds):
            for one in _hunts(budget.first, before, limit, report):
                finding = one()
                if finding.seen:
                    return replace(finding, seconds=time.monotonic() - began)
                worlds = finding if finding.hunter == "simulation" else worlds
            before = limit
    return replace(worlds, hunter="all", seconds=time.monotonic() - began)


def _hunts_at(place: Place | None, report: Report) -> list[Callable[[], Finding]]:
    """Return the hunt in one place: a seed or a scope. None if a process was lost there, or the place is gone."""
    hunter, where = place or ("", "")
    kind, _, name = where.partition(" ")
    histories = dict(HISTORIES)
    if kind == "seed" and hunter == "simulation":
        return [lambda: simulate(range(int(name), int(name) + 1), report)]
    if kind == "seed" and hunter in histories:
        return [lambda: tell_histories(hunter, histories[hunter], range(int(name), int(name) + 1))]
    if kind == "scope" and name in SCOPES:
        return [lambda: explore_scopes(Budget.states, report, [SCOPES[name]])]
    return []


def _hunts(first: int, before: Budget, limit: Budget, report: Report) -> Iterator[Callable[[], Finding]]:
    """Yield the hunts of a round, up to ``limit``, without what was tried ``before``."""
    if limit.worlds > before.worlds:
        seeds = range(first + before.worlds, first + limit.worlds)
        yield lambda: simulate(seeds, report, before.worlds)
    for hunter, check in HISTORIES if limit.histories > before.histories else ():
        yield partial(tell_histories, hunter, check, range(before.histories, limit.histories))
    if limit.states > before.states:
        yield lambda: explore_scopes(limit.states, report)
