# SPDX-License-Identifier: Apache-2.0

"""Searches every reachable state, breadth first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.exploration.ending import check_end
from tests.exploration.interning import Broken
from tests.exploration.reduction import Reduction
from tests.exploration.scopes import Scope
from tests.exploration.steps import Step, Steps
from tests.exploration.vocabulary import Violation
from tests.exploration.world import State, World, base_of

Tell = Callable[[str], None]


@dataclass
class FoundViolation:
    """A broken rule. ``rule``: its number in the contract. ``path``: a shortest story, one line for each step."""

    rule: str
    text: str
    path: list[str]

    def __str__(self) -> str:
        steps = "\n".join(f"{place:4} {line}" for place, line in enumerate(self.path, 1))
        return f"{self.text}\n{steps}"


@dataclass
class Result:
    """The result of one scope. ``parts``: how many states each kind of part has been in."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    complete: bool = False
    violation: FoundViolation | None = None
    parts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "complete" if self.complete else f"violation: {self.violation}" if self.violation else "not complete"
        parts = ", ".join(f"{count} of {name}" for name, count in self.parts.items())
        return (
            f"{self.scope.name}: {self.states} states, {self.transitions} transitions, depth {self.depth}, "
            f"{self.ends} ends, {self.seconds:.1f} s; parts: {parts}; {what}"
        )


class Search:
    """Search of one scope. ``reduce``: leave out orders that cannot make a difference (``reduction``).

    ``symmetric``: also leave out states that differ only in the names of the subtasks (``symmetry``).

    States are remembered by a hash of 64 bits. Of ten million, two collide with a probability of 3 in a million, and
    then the states that follow from one of them are not explored.
    """

    def __init__(self, scope: Scope, *, reduce: bool = True, symmetric: bool = True) -> None:
        self.scope = scope
        self.reduce = reduce
        self.world = World(scope, eager=reduce, symmetric=symmetric)
        self.steps = Steps(self.world)
        self.reduction = Reduction(self.world, self.steps)
        self.seen: set[int] = set()
        self.parents = array("I")
        self.choices = array("H")
        self.ends: list[State] = []
        self.result = Result(scope)
        self.trying: list[Step] = []

    # --- steps ---

    def begin(self) -> State:
        """Return the first state: every subtask that is not late has a ready attempt, and nothing is on its way."""
        world, scope = self.world, self.scope
        state = list(world.initial())
        for subtask in range(scope.subtasks - scope.late):
            world.start(state, subtask * scope.starts)
        while deliveries := [step for step in self.steps.all(tuple(state)) if is_delivery(step)]:
            self.trying = deliveries[:1]
            self.steps.do(state, deliveries[0])
        return tuple(state)

    def next_steps(self, state: State) -> list[Step]:
        return self.reduction.enough(state) if self.reduce else self.steps.all(state)

    def after(self, state: State, step: Step) -> State:
        """Return the state after a step. Raises ``Broken``; ``trying`` then holds the step."""
        self.trying = [step]
        changed = list(state)
        self.steps.do(changed, step)
        if self.reduce:
            self.reduction.settle(changed, self.trying)
        return tuple(changed)

    # --- the search ---

    def run(self, tell: Tell | None = None, *, keep_ends: bool = False, states_max: int | None = None) -> Result:
        began = told = time.perf_counter()
        result = self.result
        try:
            level = [self.world.lesser(self.begin())[0]]
            self.note(level[0], 0, 0)
            first = 0
            while level:
                following: list[State] = []
                for place, state in enumerate(level, first):
                    self.expand(state, place, following, keep_ends)
                    if place % 4096 == 0 and tell is not None and (now := time.perf_counter()) - told >= 1:
                        told = now
                        tell(
                            f"{self.scope.name}: {len(self.parents)} states, depth {result.depth}, {now - began:.0f} s"
                        )
                    if states_max is not None and len(self.parents) > states_max:
                        return result
                first += len(level)
                level = following
                result.depth += bool(level)
            result.complete = True
        except Broken as broken:
            if not self.parents:
                self.result.violation = FoundViolation(broken.violation.rule, str(broken.violation), [])
        finally:
            result.seconds = time.perf_counter() - began
            result.states = len(self.parents)
            result.parts = {
                "tracker": len(self.world.trackers),
                "coordinator": len(self.world.coordinators),
                "ledger": len(self.world.ledgers),
                "gateways": len(self.world.gateways),
                "tasks": len(self.world.tasks),
            }
        return result

    def note(self, state: State, parent: int, choice: int) -> bool:
        """Record a state; return whether it is new."""
        key = hash(state)
        if key in self.seen:
            return False
        self.seen.add(key)
        self.parents.append(parent)
        self.choices.append(choice)
        return True

    def expand(self, state: State, place: int, following: list[State], keep_ends: bool) -> None:
        result = self.result
        try:
            steps = self.next_steps(state)
            if not steps:
                result.ends += 1
                if keep_ends:
                    self.ends.append(state)
                self.trying = []
                check_end(self.world, state)
            for choice, step in enumerate(steps):
                successor = self.world.lesser(self.after(state, step))[0]
                result.transitions += 1
                if self.note(successor, place, choice):
                    following.append(successor)
        except (Broken, Violation) as broken:
            violation = broken.violation if isinstance(broken, Broken) else broken
            result.violation = FoundViolation(violation.rule, str(violation), self.path_to(place, self.trying))
            raise Broken(violation) from None

    def path_to(self, place: int, last: list[Step]) -> list[str]:
        """Return the steps to a state, by its place, and then the last ones. Every subtask keeps its name."""
        choices = []
        while place:
            choices.append(self.choices[place])
            place = self.parents[place]
        lines: list[str] = []
        state, exchanged = self.world.lesser(self.begin())
        for choice in reversed(choices):
            successor = self.after(state, self.next_steps(state)[choice])
            lines += [self.steps.describe(step, exchanged=exchanged) for step in self.trying]
            state, again = self.world.lesser(successor)
            exchanged ^= again
        return lines + [self.steps.describe(step, exchanged=exchanged) for step in last]


def is_delivery(step: Step) -> bool:
    """Whether a step only delivers messages that are under way, so that it belongs to the beginning."""
    takes = ("the tracker takes", "the coordinator takes", "the ledger takes", "the gateway takes")
    return step.what in (*takes, "the gateway reads", "the task reads")


__all__ = ["FoundViolation", "Result", "Search", "base_of"]
