# SPDX-License-Identifier: Apache-2.0

"""The inputs of an async stage that are in flight, and the results that have not left.

Theory of operation
-------------------
A stage takes an input, works on it for a while beside others, and gives out its result. Between the two it has a
*flight*. A checkpoint may fall into that time, and a restore must neither lose the input nor pay for its result twice:

| the flight              | in a checkpoint            | after a restore                        |
|-------------------------|----------------------------|----------------------------------------|
| waits for its beginning | the input                  | it begins                              |
| has begun               | the input                  | it begins again                        |
| has landed              | the result, with effects   | the result leaves, and nothing is done |
| has left                | nothing: it is downstream  | nothing                                |

So a result is never computed again if a checkpoint that holds it is restored, and each input has exactly one result
downstream (H180). What belongs to a result (events, counts) is held with it and happens when it leaves: otherwise it
would happen twice, or not at all. Flink's operator holds the input until its result has left, and then pays again.

*A flight leaves before its result is given out*, not after: what takes the result may take a checkpoint before it comes
back, and then holds the result itself.

*Order* (H181): results leave in the order of the inputs, or in that in which they land.

*The limit* is of flights that have not left, because results need memory too. The stage takes an input only if there
is capacity, except when a barrier can be met only upstream of the next input: that input waits (``waiting``), and no
more than ``limit`` flights have begun and not landed. The same holds for what a checkpoint of more subtasks, or of a
higher limit, has brought.

Everything happens on one thread. What flights compute may land on another one, which passes it on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from protocol.errors import LocalProtocolError

__all__ = ["Flight", "InFlight"]

Input = TypeVar("Input")


class Flight(Generic[Input]):
    """One input on its way. ``input``: what a checkpoint holds of it. ``result``: what has landed; None before."""

    __slots__ = ("begun", "input", "number", "result")

    def __init__(self, number: int, input: Input, result: Any = None) -> None:
        self.number = number
        self.input = input
        self.result = result
        self.begun = False

    def __repr__(self) -> str:
        return f"Flight({self.number}, {self.input!r}, {self.result!r})"


class InFlight(Generic[Input]):
    """The flights of one stage. ``limit``: how many may be on their way at a time, at least 1."""

    def __init__(self, limit: int, *, ordered: bool) -> None:
        self._limit = limit
        self._ordered = ordered
        self._next = 0
        self._flights: dict[int, Flight[Input]] = {}  # that have not left, by number, in the order of their inputs
        self._waiting: deque[Flight[Input]] = deque()  # those that have not begun
        self._landed: deque[Flight[Input]] = deque()  # in this order; empty if ordered
        self._aloft = 0  # how many have begun, and not landed

    def __len__(self) -> int:
        """How many have not left."""
        return len(self._flights)

    @property
    def has_capacity(self) -> bool:
        """Whether another input may be taken."""
        return len(self._flights) < self._limit

    @property
    def may_leave(self) -> bool:
        """Whether a result may leave."""
        if not self._ordered:
            return bool(self._landed)
        return bool(self._flights) and next(iter(self._flights.values())).result is not None

    @property
    def waiting(self) -> int:
        """How many have not begun."""
        return len(self._waiting)

    def take(self, input: Input) -> Flight[Input]:
        """Take an input. It may begin with the next ``begin``."""
        flight = self._add(input, None)
        self._waiting.append(flight)
        return flight

    def restore(self, flights: Iterable[tuple[Input, Any]]) -> None:
        """Take what a checkpoint holds: inputs with their results, or with None, in the order of the inputs.

        Raises ``LocalProtocolError`` if something was taken before.
        """
        if self._next:
            raise LocalProtocolError("a stage restores its flights before it takes an input")
        for input, result in flights:
            flight = self._add(input, result)
            if result is None:
                self._waiting.append(flight)
            else:
                self._has_landed(flight)

    def begin(self) -> list[Flight[Input]]:
        """The flights that begin now, as many as the limit allows, in the order of their inputs."""
        begun = []
        while self._waiting and self._aloft < self._limit:
            flight = self._waiting.popleft()
            flight.begun = True
            begun.append(flight)
            self._aloft += 1
        return begun

    def land(self, flight: Flight[Input], result: Any) -> None:
        """A flight that has begun has its result, which is not None.

        Raises ``LocalProtocolError`` if it has one already, has not begun, or is unknown.
        """
        known = flight.begun and self._flights.get(flight.number) is flight
        if not known or flight.result is not None or result is None:
            raise LocalProtocolError(f"{flight!r} cannot land with {result!r}")
        flight.result = result
        self._aloft -= 1
        self._has_landed(flight)

    def leave(self) -> Flight[Input]:
        """Take out the next flight whose result leaves; ``may_leave`` says whether there is one."""
        flight = next(iter(self._flights.values())) if self._ordered else self._landed.popleft()
        del self._flights[flight.number]
        return flight

    def held(self) -> Iterator[tuple[Input, Any]]:
        """What a checkpoint holds now: each input with its result or None, in the order of the inputs."""
        return ((flight.input, flight.result) for flight in self._flights.values())

    def _add(self, input: Input, result: Any) -> Flight[Input]:
        flight = self._flights[self._next] = Flight(self._next, input, result)
        self._next += 1
        return flight

    def _has_landed(self, flight: Flight[Input]) -> None:
        if not self._ordered:
            self._landed.append(flight)

    def check_invariants(self) -> None:
        landed = {number for number, flight in self._flights.items() if flight.result is not None}
        waiting = {flight.number for flight in self._waiting}
        assert list(self._flights) == sorted(self._flights), "the inputs have another order"
        assert [flight.number for flight in self._waiting] == sorted(waiting), "the inputs wait in another order"
        assert waiting <= self._flights.keys() - landed, "one waits that has left or landed"
        assert self._aloft == len(self._flights) - len(landed) - len(waiting), "flights are lost or doubled"
        assert 0 <= self._aloft <= self._limit, "more are aloft than the limit allows"
        if not self._ordered:
            assert {flight.number for flight in self._landed} == landed, "a result is lost or leaves twice"
