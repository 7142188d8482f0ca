# SPDX-License-Identifier: Apache-2.0

"""Walks through the states of a machine, and the checks that apply to every input in every state.

A ``Walk`` drives one machine with seeded random choices. ``explore`` takes the same walks every time. ``wander`` takes
one walk whose seeds come from Hypothesis, so it differs each time and can be shrunk. ``step`` gives one input that
mostly fits. ``probe`` gives copies of the machine every kind of input, with arguments that fit and with others.

Every input goes through ``give``, which verifies the rules common to all machines. Either the machine handles the input
and reaches a valid state, or it raises a documented error and nothing has changed. ``judge`` checks the table of the
particular machine. ``Seen`` records which cells of that table were reached.
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from math import isfinite
from random import Random
from types import FunctionType
from typing import Any, ClassVar, Generic, TypeVar, get_args

from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.machine import Machine, TimePassed
from protocol.values import is_value

InputT = TypeVar("InputT")
EffectT = TypeVar("EffectT")
ChoiceT = TypeVar("ChoiceT")
Names = frozenset[str]
Cell = tuple[Any, ...]
"""A place in a table: its name, then row and column."""

HUGE = 2**63
"""One more than the largest number on the wire."""


# --- a deep picture of a state ----------------------------------------------------------------------------


def freeze(thing: object) -> Hashable:
    """Return everything reachable from ``thing`` as a comparable value.

    The order of dicts counts, because behaviour may depend on it.
    """
    kind: type = type(thing)
    if kind in _LEAVES or isinstance(thing, _NAMES):
        return thing
    if kind is dict:
        assert isinstance(thing, dict)
        return "dict", tuple([(freeze(key), freeze(value)) for key, value in thing.items()])
    if isinstance(thing, _SEQUENCES):
        return kind.__name__, tuple([freeze(value) for value in thing])
    if isinstance(thing, _SETS):
        return "set", tuple(sorted((freeze(value) for value in thing), key=repr))
    if isinstance(thing, bytearray):
        return "bytearray", bytes(thing)
    if isinstance(thing, BaseException):
        return kind.__name__, freeze(thing.args)
    names, is_value = _attributes(kind)
    if is_value and _is_plain(thing, names):
        return thing
    fields = [(name, freeze(getattr(thing, name))) for name in names if hasattr(thing, name)]
    fields += [(name, freeze(value)) for name, value in getattr(thing, "__dict__", {}).items()]
    return kind.__name__, Fields(fields)


_LEAVES = frozenset({type(None), bool, int, float, str, bytes, type, FunctionType})
_NAMES = (Enum, type)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)


class Fields(tuple[tuple[str, Hashable], ...]):
    """Return the attributes of a frozen object by name."""


@cache
def _attributes(kind: Any) -> tuple[tuple[str, ...], bool]:
    """Return the slots of a class, and whether its objects are immutable values."""
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(names), is_value(kind)


def _is_plain(thing: object, names: tuple[str, ...]) -> bool:
    """Whether a value is immutable in all its parts, and equal to any value with equal parts."""
    try:
        hash(thing)
    except TypeError:
        return False
    return not any(isinstance(getattr(thing, name), BaseException) for name in names)


def differences(before: Hashable, after: Hashable, but: Names = frozenset(), path: str = "") -> list[str]:
    """Return where two pictures differ, as paths with both values. Attributes named in ``but`` are ignored."""
    if before == after:
        return []
    if isinstance(before, Fields) and isinstance(after, Fields) and [n for n, _ in before] == [n for n, _ in after]:
        pairs = zip(before, after, strict=True)
        found = [differences(old, new, but, f"{path}.{name}") for (name, old), (_, new) in pairs if name not in but]
        return [line for lines in found for line in lines]
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        found = [differences(old, new, but, path) for old, new in zip(before, after, strict=True)]
        return [line for lines in found for line in lines]
    return [f"{path}: {before} is now {after}"]


def members(union: Any) -> tuple[type, ...]:
    """Return the classes of a union, including those of nested unions."""
    return tuple(get_args(union))


# --- walks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Generic[InputT, EffectT]):
    """One input, its result, and the pictures before and after."""

    input: InputT
    now: float
    effects: tuple[EffectT, ...]
    error: ProtocolError | None
    before: Hashable
    after: Hashable

    @property
    def kinds(self) -> list[type]:
        return [type(effect) for effect in self.effects]

    def changed(self, *but: str) -> list[str]:
        """Return where the state changed, except in these attributes."""
        return differences(self.before, self.after, frozenset(but))

    def nothing(self, *but: str) -> bool:
        """Whether the input was handled and had no effect."""
        return not self.effects and self.error is None and not self.changed(*but)


@dataclass
class Seen:
    """The cells, states and effects that a number of walks have reached together."""

    cells: Counter[Cell] = field(default_factory=Counter)
    effects: Counter[type] = field(default_factory=Counter)
    errors: Counter[type] = field(default_factory=Counter)
    states: set[Hashable] = field(default_factory=set)
    inputs: int = 0


class Walk(ABC, Generic[InputT, EffectT]):
    """A walk of one machine. Subclasses say how it is built, which inputs fit, and what its table says."""

    kinds: ClassVar[tuple[type, ...]]
    """The classes that ``draw`` can create: the members of the input union, or of a union inside one of them."""
    errors: ClassVar[tuple[type[ProtocolError], ...]]
    """The errors that refuse an input. Any other exception fails the test."""
    remembered: ClassVar[dict[type[ProtocolError], Names]] = {}
    """The attributes that a refusal may change, according to its documentation."""
    weights: ClassVar[dict[type, float]] = {}
    """The weight of a kind of input in a step, if it is not 1."""

    def __init__(self, dice: Random, seen: Seen | None = None) -> None:
        self.dice = dice
        self.seen = Seen() if seen is None else seen
        self.now = dice.choice((0.0, 0.3, 1e6))
        self.history: list[Given[InputT, EffectT]] = []
        self.machine: Any = self.build()  # tests look at what is inside
        self.frozen = freeze(self.machine)
        self.at_first: Machine[InputT, EffectT] = copy.deepcopy(self.machine)

    @abstractmethod
    def build(self) -> Machine[InputT, EffectT]:
        """Create a machine before its first input. Its settings may be random."""

    @abstractmethod
    def draw(self, kind: type, fits: bool) -> InputT:
        """Draw an input of this kind. ``fits``: one that the present state can use, if there is any."""

    @abstractmethod
    def state(self) -> Hashable:
        """Return the present state, as the tables see it and in slightly more detail."""

    @abstractmethod
    def cells(self, input: InputT) -> list[Cell]:
        """Return the cells of the tables that this input reaches in the present state."""

    @abstractmethod
    def judge(self, cells: list[Cell], given: Given[InputT, EffectT]) -> None:
        """Check the result of the input against the tables."""

    def follow(self) -> InputT | None:
        """Draw an input that leads to states which random choices seldom reach."""
        return None

    # --- inputs ---

    def perhaps(self, fits: bool) -> bool:
        """Whether one of several arguments should fit. Some still do if the input as a whole should not."""
        return fits or self.dice.random() < 0.6

    def one_of(self, fitting: Iterable[ChoiceT], others: Iterable[ChoiceT], fits: bool) -> ChoiceT:
        """Choose a fitting value or another one. If one group is empty, choose from the other."""
        good, bad = list(fitting), list(others)
        return self.dice.choice((good or bad) if fits else (bad or good))

    def give(self, input: InputT) -> Given[InputT, EffectT]:
        """Give the machine one input, and check the rules common to all machines."""
        machine, before, due = self.machine, self.frozen, self.machine.next_deadline()
        cells = self.cells(input)
        error: ProtocolError | None = None
        effects: tuple[EffectT, ...] = ()
        try:
            try:
                effects = tuple(machine.handle(input, self.now))
            except self.errors as refusal:
                error = refusal
            self.frozen = freeze(machine)
            given = Given(input, self.now, effects, error, before, self.frozen)
            machine.check_invariants()
            if error is not None:
                assert not given.changed(*self.remembered.get(type(error), ())), f"refused by {error!r}"
            self._check_deadline(input, due)
            self.judge(cells, given)
        except Exception as failure:
            failure.add_note(self.story(input))
            raise
        self.seen.inputs += 1
        self.seen.cells.update(cells)
        self.seen.effects.update(given.kinds)
        self.seen.errors.update([] if error is None else [type(error)])
        self.history.append(given)
        return given

    def _check_deadline(self, input: InputT, due: float | None) -> None:
        deadline = self.machine.next_deadline()
        assert deadline is None or isfinite(deadline), f"no moment: {deadline}"
        if isinstance(input, TimePassed) and due is not None and due <= self.now:
            assert deadline is None or deadline > self.now, "its moment has come, and it goes on waiting for it"

    # --- steps ---

    def step(self) -> None:
        """Give one input, which usually fits and even more often leads to a new state."""
        self.now += self.dice.choice((0.0, 0.0, 0.0, 0.1, 0.7))
        leading = self.follow() if self.dice.random() < 0.6 else None
        if leading is None:
            [kind] = self.dice.choices(self.kinds, [self.weights.get(kind, 1.0) for kind in self.kinds])
            leading = self.draw(kind, self.dice.random() < 0.85)
        self.give(leading)

    def probe(self, rounds: int = 1) -> None:
        """Give copies of the machine every kind of input, each fitting and not. The walk itself does not move."""
        fork = self.fork()
        for _ in range(rounds):
            for kind in self.kinds:
                for fits in (True, False):
                    given = fork.give(fork.draw(kind, fits))
                    if given.before != given.after:
                        fork = self.fork()

    def fork(self) -> Walk[InputT, EffectT]:
        """Return a copy of the walk with a separate machine and history."""
        fork = copy.copy(self)
        fork.machine = pickle.loads(pickle.dumps(self.machine))  # copy.deepcopy takes five times as long
        fork.history = list(self.history)
        return fork

    def wait(self, rounds: int = 12) -> None:
        """Advance to every deadline of the machine; ``give`` fails if one does not pass."""
        for _ in range(rounds):
            deadline = self.machine.next_deadline()
            if deadline is None:
                return
            self.now = max(self.now, deadline)
            self.give(self.time_passed())

    def time_passed(self) -> InputT:
        return self.draw(TimePassed, True)

    def replay(self) -> None:
        """Check that the same inputs have the same effects on a machine built in the same way."""
        machine = self.at_first
        for given in self.history:
            effects: tuple[EffectT, ...] = ()
            error: ProtocolError | None = None
            try:
                effects = tuple(machine.handle(given.input, given.now))
            except self.errors as refusal:
                error = refusal
            assert freeze(effects) == freeze(given.effects)
            assert freeze(error) == freeze(given.error)
        assert freeze(machine) == freeze(self.machine)

    def story(self, last: InputT | None = None) -> str:
        """Return the inputs and effects as text for a failure message."""
        lines = [f"{type(self).__name__}, built as {self.at_first_settings()}"]
        for given in self.history:
            lines.append(f"{given.now:10.3f} <- {given.input!s:.200}")
            lines += [f"{'':10}      -> {effect!s:.200}" for effect in given.effects]
            lines += [] if given.error is None else [f"{'':10}      !! {given.error!r}"]
        return "\n".join([*lines, f"{self.now:10.3f} <- {last!s:.200}"])

    def at_first_settings(self) -> str:
        """Return how the machine was built, as far as it differs between walks."""
        return "always"


def explore(walk: type[Walk[Any, Any]], cells: Iterable[Cell], effects: Iterable[type]) -> Seen:
    """Take the same walks every time, and probe every state that none of them has reached before.

    There are at least 15 walks, and more until each of these cells and effects was reached. After 150 the test fails
    and names the missing ones.
    """
    seen, cells, effects = Seen(), set(cells), set(effects)
    for seed in range(150):
        wanderer = walk(Random(seed), seen)
        for _ in range(50):
            state = wanderer.state()
            if state not in seen.states:
                seen.states.add(state)
                wanderer.probe()
            wanderer.step()
        if seed >= 14 and cells <= seen.cells.keys() and effects <= seen.effects.keys():
            break
    missed = sorted(map(str, cells - seen.cells.keys()))
    silent = sorted(effect.__name__ for effect in effects - seen.effects.keys())
    print(f"{seed + 1} walks, {len(seen.states)} states, {len(seen.cells)} cells, {seen.inputs} inputs")
    assert not missed, "cells left out:\n" + "\n".join(missed)
    assert not silent, f"effects that never came: {silent}"
    return seen


WANDERINGS = st.lists(st.integers(0, 2**16), min_size=2, max_size=40)
"""Draw one number for building the machine, one for each step, and one for the probe at the end."""


def wander(walk: type[Walk[Any, Any]], numbers: list[int]) -> None:
    """Take one walk, probe its last state, let the remaining deadlines pass, and repeat all of it.

    Each step has its own number, so a failure shrinks to the necessary steps.
    """
    first, *steps, last = numbers
    wanderer = walk(Random(first))
    for number in steps:
        wanderer.dice.seed(number)
        wanderer.step()
    wanderer.dice.seed(last)
    wanderer.probe()
    wanderer.wait()
    wanderer.replay()


def tell(walk: type[Walk[Any, Any]], seeds: Iterable[int], steps: int) -> list[str]:
    """Return all inputs and results of some walks: equal in every process, whatever the order of sets of strings."""
    told = []
    for seed in seeds:
        wanderer = walk(Random(seed))
        for _ in range(steps):
            wanderer.step()
        for kind in wanderer.kinds * 4:
            wanderer.give(wanderer.draw(kind, False))
        told += [f"{given.input} {given.effects} {given.error!r}" for given in wanderer.history]
    return told
