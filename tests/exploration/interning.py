# SPDX-License-Identifier: Apache-2.0

"""Assigns small numbers to the parts of a world, so that its whole state is a short tuple of numbers.

The machines are pure: the result of an input depends only on the machine's state. So each pair of a state and an input
is tried once, on a copy, and remembered. There are few such pairs, and many states of the whole.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tests.exploration.freezing import clone, freeze
from tests.exploration.vocabulary import Output, Violation

FactsT_co = TypeVar("FactsT_co", covariant=True)


class Part(Protocol[FactsT_co]):
    """A machine with its glue. ``step`` changes it in place; ``facts`` returns the facts that the world needs."""

    def step(self, message: Any) -> list[Output]: ...

    def facts(self) -> FactsT_co: ...


class Messages:
    """All messages by number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        key = freeze(value)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number


class Broken(Exception):
    """A step has broken the contract, or the machine could not take it."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation)
        self.violation = violation


Numbered = tuple[tuple[int, int], ...]
"""Outputs: the receiver, and the number of the message."""


class Population(Generic[FactsT_co]):
    """All states of one kind of part, by number, and the state that each message leads to from each."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._numbers: dict[Hashable, int] = {}
        self._parts: list[Part[FactsT_co]] = []
        self.facts: list[FactsT_co] = []
        self._steps: dict[tuple[int, int], tuple[int, Numbered] | Violation] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def number(self, part: Part[FactsT_co]) -> int:
        key = freeze(part)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._parts)
            self._parts.append(part)
            self.facts.append(part.facts())
        return number

    def part(self, number: int) -> Part[FactsT_co]:
        """Return a part to read, not to change."""
        return self._parts[number]

    def step(self, number: int, message: int) -> tuple[int, Numbered]:
        """Return the next state and the outputs. Raises ``Broken``."""
        known = self._steps.get((number, message))
        if known is None:
            known = self._steps[number, message] = self._try(number, message)
        if isinstance(known, Violation):
            raise Broken(known)
        return known

    def _try(self, number: int, message: int) -> tuple[int, Numbered] | Violation:
        part: Part[FactsT_co] = clone(self._parts[number])
        try:
            outputs = part.step(self._messages.values[message])
        except Violation as violation:
            return violation
        except Exception as error:  # a machine that refuses its actor's input, or finds itself in an impossible state
            return Violation("H48", f"{type(part).__name__} broke: {type(error).__name__}: {error}")
        return self.number(part), tuple((to, self._messages.number(value)) for to, value in outputs)


class Boxes:
    """Mailboxes and wires: queues of message numbers. Box 0 is the empty one."""

    def __init__(self) -> None:
        self.contents: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._pushed: dict[tuple[int, int], int] = {}
        self.head: list[int] = [-1]
        self.rest: list[int] = [0]

    def number(self, contents: tuple[int, ...]) -> int:
        number = self._numbers.get(contents)
        if number is None:
            rest = self.number(contents[1:])
            number = self._numbers[contents] = len(self.contents)
            self.contents.append(contents)
            self.head.append(contents[0])
            self.rest.append(rest)
        return number

    def push(self, box: int, message: int) -> int:
        pushed = self._pushed.get((box, message))
        if pushed is None:
            pushed = self._pushed[box, message] = self.number((*self.contents[box], message))
        return pushed


class Link(NamedTuple):
    """The connections of one attempt, seen from both ends at the same time.

    ``up`` and ``down`` are the wires of the newest one, boxes both; ``old`` is the upward wire of the one before,
    which the gateway may still read. ``bound``: which of them the gateway holds. ``open``: whether data written now
    will arrive. ``broken``: the task may notice that it will not. ``apart``: barriers that travel separately.
    """

    up: int = 0
    down: int = 0
    old: int = 0
    bound: int = 0  # 0 none, 1 the newest, 2 the old one
    open: bool = False
    broken: bool = False
    apart: tuple[int, ...] = ()


class Links:
    """All links, by number. Link 0 has no connection."""

    def __init__(self) -> None:
        self.values: list[Link] = []
        self._numbers: dict[Link, int] = {}
        self.number(Link())

    def number(self, link: Link) -> int:
        number = self._numbers.get(link)
        if number is None:
            number = self._numbers[link] = len(self.values)
            self.values.append(link)
        return number
