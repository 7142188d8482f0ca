"""Walks through the states of a machine, and what must hold of every input in every state.

A ``Walk`` drives one machine by seeded dice: ``explore`` takes walks that are always the same, ``wander`` one whose
seeds come from Hypothesis, so that it is another one each time and can be shrunk. ``step`` takes an input that mostly
fits, ``probe`` gives copies of the machine every kind of input there is, with arguments that fit and with others.

Whatever is given goes through ``give``, which holds what is common to all machines: an input is handled, and the state
is a possible one, or it is refused by a documented error, and nothing has changed. What the table of the one machine
says is up to ``judge``; which cells of it were met is written down in ``Seen``.
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
"""One more than the wire carries."""


# --- a deep picture of a state ----------------------------------------------------------------------------


def freeze(thing: object) -> Hashable:
    """All that can be reached from ``thing``, as a value that compares. The order of dicts counts: behaviour may
    depend on it.
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
    """The attributes of a frozen object, by name."""


@cache
def _attributes(kind: Any) -> tuple[tuple[str, ...], bool]:
    """The slots of a class, and whether its objects are values, which nobody can change."""
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(names), is_value(kind)


def _is_plain(thing: object, names: tuple[str, ...]) -> bool:
    """Whether a value is one to its last part, and equal to another one with equal parts."""
    try:
        hash(thing)
    except TypeError:
        return False
    return not any(isinstance(getattr(thing, name), BaseException) for name in names)


def differences(before: Hashable, after: Hashable, but: Names = frozenset(), path: str = "") -> list[str]:
    """Where two pictures differ, as paths with both values; attributes that are named in ``but`` do not count."""
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
    """The classes of a union, those of the unions in it included."""
    return tuple(get_args(union))


# --- walks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Generic[InputT, EffectT]):
    """One input, what came of it, and the pictures before and after."""

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
        """Where the state is another one than before, in anything but these attributes."""
        return differences(self.before, self.after, frozenset(but))

    def nothing(self, *but: str) -> bool:
        """Handled, and without any consequence."""
        return not self.effects and self.error is None and not self.changed(*but)


@dataclass
class Seen:
    """What a number of walks have met, all together."""

    cells: Counter[Cell] = field(default_factory=Counter)
    effects: Counter[type] = field(default_factory=Counter)
    errors: Counter[type] = field(default_factory=Counter)
    states: set[Hashable] = field(default_factory=set)
    inputs: int = 0


class Walk(ABC, Generic[InputT, EffectT]):
    """One machine on its way. Subclasses say how it is built, what fits, and what its table says."""

    kinds: ClassVar[tuple[type, ...]]
    """What ``draw`` can make: the members of the input union, or of a union inside one of them."""
    errors: ClassVar[tuple[type[ProtocolError], ...]]
    """How an input is refused. Any other exception fails the test."""
    remembered: ClassVar[dict[type[ProtocolError], Names]] = {}
    """What a refusal leaves behind, by its documentation."""
    weights: ClassVar[dict[type, float]] = {}
    """How often a step takes a kind, where it is not 1."""

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
        """A machine before its first input. Its settings may be diced."""

    @abstractmethod
    def draw(self, kind: type, fits: bool) -> InputT:
        """An input of this kind. ``fits``: one that the present state can do something with, if there is any."""

    @abstractmethod
    def state(self) -> Hashable:
        """The present state, as the tables look at it and somewhat finer."""

    @abstractmethod
    def cells(self, input: InputT) -> list[Cell]:
        """The cells of the tables that this input meets in the present state."""

    @abstractmethod
    def judge(self, cells: list[Cell], given: Given[InputT, EffectT]) -> None:
        """Hold what came of the input against the tables."""

    def follow(self) -> InputT | None:
        """An input that leads on, to where dice alone seldom come."""
        return None

    # --- inputs ---

    def perhaps(self, fits: bool) -> bool:
        """Whether one of several arguments is to fit: where the input as a whole is not to, some still do."""
        return fits or self.dice.random() < 0.6

    def one_of(self, fitting: Iterable[ChoiceT], others: Iterable[ChoiceT], fits: bool) -> ChoiceT:
        """Any of the fitting ones, or of the others; where there is none of the one sort, of the other."""
        good, bad = list(fitting), list(others)
        return self.dice.choice((good or bad) if fits else (bad or good))

    def give(self, input: InputT) -> Given[InputT, EffectT]:
        """Give the machine one input, and hold what is common to all machines."""
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
        """One input, which fits more often than not, and leads on more often than that."""
        self.now += self.dice.choice((0.0, 0.0, 0.0, 0.1, 0.7))
        leading = self.follow() if self.dice.random() < 0.6 else None
        if leading is None:
            [kind] = self.dice.choices(self.kinds, [self.weights.get(kind, 1.0) for kind in self.kinds])
            leading = self.draw(kind, self.dice.random() < 0.85)
        self.give(leading)

    def probe(self, rounds: int = 1) -> None:
        """Give copies of the machine every kind of input, each fitting and not. The walk itself stays where it is."""
        fork = self.fork()
        for _ in range(rounds):
            for kind in self.kinds:
                for fits in (True, False):
                    given = fork.give(fork.draw(kind, fits))
                    if given.before != given.after:
                        fork = self.fork()

    def fork(self) -> Walk[InputT, EffectT]:
        """The same walk with a machine and a history of its own."""
        fork = copy.copy(self)
        fork.machine = pickle.loads(pickle.dumps(self.machine))  # copy.deepcopy takes five times as long
        fork.history = list(self.history)
        return fork

    def wait(self, rounds: int = 12) -> None:
        """Let every moment come that the machine waits for; each passes, or ``give`` objects."""
        for _ in range(rounds):
            deadline = self.machine.next_deadline()
            if deadline is None:
                return
            self.now = max(self.now, deadline)
            self.give(self.time_passed())

    def time_passed(self) -> InputT:
        return self.draw(TimePassed, True)

    def replay(self) -> None:
        """The same inputs once more, given to a machine that was built in the same way, have the same effects."""
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
        """What was given and what came, for the reader of a failure."""
        lines = [f"{type(self).__name__}, built as {self.at_first_settings()}"]
        for given in self.history:
            lines.append(f"{given.now:10.3f} <- {given.input!s:.200}")
            lines += [f"{'':10}      -> {effect!s:.200}" for effect in given.effects]
            lines += [] if given.error is None else [f"{'':10}      !! {given.error!r}"]
        return "\n".join([*lines, f"{self.now:10.3f} <- {last!s:.200}"])

    def at_first_settings(self) -> str:
        """How the machine was built, as far as it differs from walk to walk."""
        return "always"


def explore(walk: type[Walk[Any, Any]], cells: Iterable[Cell], effects: Iterable[type]) -> Seen:
    """Walks that are the same every time; every state that none of them has met before is probed.

    There are at least 15, and as many more as it takes until each of these cells and effects was met; after 150 the
    test fails, and names those that were left out.
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
"""One number for the building of the machine, one for each step, one for what is tried at the end."""


def wander(walk: type[Walk[Any, Any]], numbers: list[int]) -> None:
    """One walk, the probe of the state in which it ends, the moments that are left, and all of it once more.

    Each step has its own number, so a failure shrinks to the steps that it needs.
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
    """All that some walks gave and got; equal in every process, whatever the order of its sets of strings."""
    told = []
    for seed in seeds:
        wanderer = walk(Random(seed))
        for _ in range(steps):
            wanderer.step()
        for kind in wanderer.kinds * 4:
            wanderer.give(wanderer.draw(kind, False))
        told += [f"{given.input} {given.effects} {given.error!r}" for given in wanderer.history]
    return told
