# SPDX-License-Identifier: Apache-2.0

"""The source of all chance in a world: a seed, or a record of earlier draws.

A record keeps each draw with the function that asked for it, step by step, and keeps actions by name. So if steps are
taken out, the other draws still answer the questions that they were drawn for. If one cannot (the option no longer
exists, or no draws are left), the answer is the *tame* one, which keeps a world small and quiet: the first option, the
lowest number, no time that passes, and for ``random()`` a value for which ``random() < likelihood`` is false. So
callers name the tamest option first. To ask whether something unusual happens, they use ``<`` and a likelihood of at
most ``TAME``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any, TypeVar

TAME = 0.75
"""What ``random()`` returns so that nothing unusual happens."""

Draw = float | int | str | None
"""A number drawn, the index of an option, or the name of an action; None is tame."""
Step = dict[str, list[Draw]]
"""The draws of one step, by the function that drew them. What is left out is tame."""

T = TypeVar("T")


class Choices(Random):
    """A seeded source of chance that knows where each step of a world begins."""

    def begin_step(self) -> None:
        """Assign all further draws to the next step."""


class Tame(Choices):
    """Avoids every avoidable event; time passes only if everything waits for it."""

    def random(self) -> float:
        return TAME

    def getrandbits(self, k: int) -> int:
        return 0

    def uniform(self, a: float, b: float) -> float:
        return a

    def expovariate(self, lambd: float = 1.0) -> float:
        return 0.0


Source = Callable[[str], Random]
"""Answers what a function asks if no record does."""


def tame() -> Source:
    quiet = Tame()
    return lambda _: quiet


def seeded(seed: int) -> Source:
    random = Choices(seed)
    return lambda _: random


def half_tame(seed: int) -> Source:
    """Let a coin decide for each function whether its draws are tame."""
    random, quiet = Choices(seed), Tame()
    sources: dict[str, Random] = {}

    def source(place: str) -> Random:
        if place not in sources:
            sources[place] = random if random.random() < 0.5 else quiet
        return sources[place]

    return source


@dataclass(frozen=True)
class Record:
    """A world's chance, written down. ``steps``: the draws before the first step, then those in each step.

    ``eager``: how likely a checkpoint is requested, if that was not drawn.
    """

    seed: int
    eager: float | None = None
    steps: tuple[Step, ...] = ()

    @property
    def wild(self) -> int:
        """How many draws are not tame."""
        return sum(draw is not None for step in self.steps for draws in step.values() for draw in draws)


class StoryTooLong(Exception):
    """The world did not end within its limit of steps."""


class RecordedChoices(Choices):
    """Replays a record, continues with ``beyond``, and writes down everything that it returns.

    An empty record and ``seeded(seed)`` give what the seed gives. ``StoryTooLong`` is raised when more than
    ``steps_max`` steps begin.
    """

    def __init__(self, record: Record, beyond: Source, steps_max: float = inf) -> None:
        self._tame = tame()
        super().__init__(record.seed)
        self._record, self._beyond, self._steps_max = record, beyond, steps_max
        self._given: list[Step] = []
        self._open_step()

    def begin_step(self) -> None:
        if len(self._given) > self._steps_max:
            raise StoryTooLong(f"more than {self._steps_max} steps")
        self._open_step()

    def _open_step(self) -> None:
        steps, number = self._record.steps, len(self._given)
        recorded = number < len(steps)
        self._to_give = {place: iter(draws) for place, draws in steps[number].items()} if recorded else {}
        self._source = self._tame if recorded else self._beyond
        self._writes: Step = {}
        self._given.append(self._writes)

    def given(self) -> Record:
        """Return all draws so far, without tame ones at the end of anything."""
        steps = [shortened(step) for step in self._given]
        while len(steps) > 1 and not steps[-1]:
            steps.pop()
        return Record(self._record.seed, self._record.eager, tuple(steps))

    def _next(self, place: str) -> Draw:
        return next(self._to_give[place], None) if place in self._to_give else None

    def _write(self, place: str, draw: Draw) -> None:
        self._writes.setdefault(place, []).append(draw)

    # --- the draws ---

    def random(self) -> float:
        place = asked_by()
        draw = self._next(place)
        value = draw if isinstance(draw, float) else self._source(place).random()
        self._write(place, None if value == TAME else value)
        return value

    def uniform(self, a: float, b: float) -> float:
        place = asked_by()
        draw = self._next(place)
        value = draw if isinstance(draw, float) and a <= draw <= b else self._source(place).uniform(a, b)
        self._write(place, None if value == a else value)
        return value

    def expovariate(self, lambd: float = 1.0) -> float:
        place = asked_by()
        draw = self._next(place)
        value = draw if isinstance(draw, float) else self._source(place).expovariate(lambd)
        self._write(place, value or None)
        return value

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return self._pick(asked_by(), range(start) if stop is None else range(start, stop, step))

    def randint(self, a: int, b: int) -> int:
        return self._pick(asked_by(), range(a, b + 1))

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]  # a world draws from sequences only
        return self._pick(asked_by(), seq)

    def getrandbits(self, k: int) -> int:
        raise TypeError("a world draws with random, uniform, expovariate, randrange, randint and choice")

    def _pick(self, place: str, options: Sequence[T]) -> T:
        names = names_of(options)
        index = find(self._next(place), names)
        if index is None:
            index = self._source(place).choice(range(len(options)))
        self._write(place, names[index] if index else None)
        return options[index]


def asked_by() -> str:
    """Return the name of the function that draws."""
    return sys._getframe(2).f_code.co_qualname


def names_of(options: Sequence[Any]) -> Sequence[int | str]:
    """Name actions by function, with a number among those of the same name, and other options by index."""
    if not callable(options[0]):
        return range(len(options))
    counted: Counter[str] = Counter()
    names: list[str] = []
    for option in options:
        name = (option.func if isinstance(option, partial) else option).__qualname__
        names.append(f"{name} {counted[name]}")
        counted[name] += 1
    return names


def find(draw: Draw, names: Sequence[int | str]) -> int | None:
    """Find the option that was drawn, or else the last one of its function."""
    if draw in names:
        return names.index(draw)
    if isinstance(draw, str):
        function = draw.rpartition(" ")[0]
        return max((i for i, name in enumerate(names) if str(name).rpartition(" ")[0] == function), default=None)
    return None


def shortened(step: Step) -> Step:
    """Remove the tame draws at the end of each list."""
    return {place: cut for place, draws in step.items() if (cut := without_tail(draws))}


def without_tail(draws: Sequence[Draw]) -> list[Draw]:
    wild = max((i for i, draw in enumerate(draws) if draw is not None), default=-1)
    return list(draws[: wild + 1])
