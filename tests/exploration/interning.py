# SPDX-License-Identifier: Apache-2.0

"""Assigns small numbers to the parts of a world, so that its whole state is a short tuple of numbers.

The machines are pure: the result of an input depends only on the machine's state. So each pair of a state and an input
is tried once, on a copy, and remembered. There are few such pairs, and many states of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tests.exploration.freezing import clone, freeze
from tests.exploration.vocabulary import Output, Violation

FactsT_co = TypeVar("FactsT_co", covariant=True)
KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Part(Protocol[FactsT_co]):
    """A machine with its glue. ``step`` changes it in place; ``facts`` returns the facts that the world needs."""

    def step(self, message: Any) -> list[Output]: ...

    def facts(self) -> FactsT_co: ...


class Memo(dict[KeyT, ValueT]):
    """The results of a function, each computed when it is first asked for."""

    def __init__(self, compute: Callable[[KeyT], ValueT]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: KeyT) -> ValueT:
        value = self[key] = self._compute(key)
        return value


class Numbers(Generic[ValueT]):
    """Values by number. Two with the same ``form`` have one number."""

    def __init__(self, form: Callable[[Any], Hashable]) -> None:
        self.values: list[ValueT] = []
        self._form = form
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: ValueT) -> int:
        form = self._form(value)
        number = self._numbers.get(form)
        if number is None:
            number = self._numbers[form] = len(self.values)
            self.values.append(value)
        return number


class Messages(Numbers[Any]):
    """All messages by number."""

    def __init__(self) -> None:
        super().__init__(freeze)


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
        self._parts: Numbers[Part[FactsT_co]] = Numbers(freeze)
        self.facts: Memo[int, FactsT_co] = Memo(lambda number: self.part(number).facts())
        self._steps: Memo[tuple[int, int], tuple[int, Numbered] | Violation] = Memo(self._try)

    def __len__(self) -> int:
        return len(self._parts.values)

    def number(self, part: Part[FactsT_co]) -> int:
        return self._parts.number(part)

    def part(self, number: int) -> Part[FactsT_co]:
        """Return a part to read, not to change."""
        return self._parts.values[number]

    def step(self, number: int, message: int) -> tuple[int, Numbered]:
        """Return the next state and the outputs. Raises ``Broken``."""
        known = self._steps[number, message]
        if isinstance(known, Violation):
            raise Broken(known)
        return known

    def _try(self, step: tuple[int, int]) -> tuple[int, Numbered] | Violation:
        number, message = step
        part: Part[FactsT_co] = clone(self.part(number))
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
        self._pushed = Memo[tuple[int, int], int](lambda key: self.number((*self.contents[key[0]], key[1])))
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
        return self._pushed[box, message]


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


class Links(Numbers[Link]):
    """All links, by number. Link 0 has no connection."""

    def __init__(self) -> None:
        super().__init__(lambda link: link)
        self.number(Link())
