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
from collections.abc import Iterable
from typing import Generic, TypeVar

from protocol.errors import LocalProtocolError

__all__ = ["Flight", "InFlight"]

FlightT = TypeVar("FlightT", bound="Flight")


class Flight:
    """One input on its way. A stage derives a class that has the input, and the result once there is one.

    Attributes:
        begun: whether it has begun since it was taken or restored.
        landed: whether its result is known.
    """

    __slots__ = ("begun", "landed")

    def __init__(self) -> None:
        self.begun = self.landed = False


class InFlight(Generic[FlightT]):
    """The flights of one stage. ``limit``: how many may be on their way at a time, at least 1."""

    def __init__(self, limit: int, *, ordered: bool) -> None:
        self._limit = limit
        self._ordered = ordered
        self._flights: dict[FlightT, None] = {}  # that have not left, in the order of their inputs
        self._waiting: deque[FlightT] = deque()  # those that have not begun
        self._leaving: deque[FlightT] = deque()  # in the order in which they leave: all if ordered, or those landed
        self._aloft = 0  # how many have begun, and not landed

    def __len__(self) -> int:
        """How many have not left."""
        return len(self._flights)

    @property
    def has_capacity(self) -> bool:
        """Whether another input may be taken."""
        return len(self._flights) < self._limit

    @property
    def waiting(self) -> int:
        """How many have not begun."""
        return len(self._waiting)

    @property
    def held(self) -> Iterable[FlightT]:
        """What a checkpoint holds now, in the order of the inputs: those that have not left."""
        return self._flights

    def take(self, flight: FlightT) -> bool:
        """Take an input. Return whether it begins now; otherwise it does with a later ``begin``."""
        self._flights[flight] = None
        if self._ordered:
            self._leaving.append(flight)
        if self._aloft < self._limit and not self._waiting:
            flight.begun = True
            self._aloft += 1
            return True
        self._waiting.append(flight)
        return False

    def restore(self, flights: Iterable[FlightT]) -> None:
        """Take what a checkpoint holds, in the order of the inputs. Those with a result have ``landed``.

        Raises ``LocalProtocolError`` if something was taken before.
        """
        if self._flights:
            raise LocalProtocolError("a stage restores its flights before it takes an input")
        for flight in flights:
            self._flights[flight] = None
            if not flight.landed:
                self._waiting.append(flight)
            if self._ordered or flight.landed:
                self._leaving.append(flight)

    def begin(self) -> list[FlightT]:
        """Those that have waited and begin now, as many as the limit allows, in the order of their inputs."""
        begun = []
        while self._waiting and self._aloft < self._limit:
            flight = self._waiting.popleft()
            flight.begun = True
            begun.append(flight)
            self._aloft += 1
        return begun

    def land(self, flight: FlightT) -> None:
        """A flight that has begun has its result.

        Raises ``LocalProtocolError`` if it has one already, or has not begun.
        """
        if flight.landed or not flight.begun:
            raise LocalProtocolError(f"{flight!r} cannot land")
        flight.landed = True
        self._aloft -= 1
        if not self._ordered:
            self._leaving.append(flight)

    def leave(self) -> FlightT | None:
        """Take out the next flight whose result leaves. None if none may leave yet."""
        if not self._leaving or not self._leaving[0].landed:
            return None
        flight = self._leaving.popleft()
        del self._flights[flight]
        return flight

    def check_invariants(self) -> None:
        landed = [flight for flight in self._flights if flight.landed]
        waiting = set(self._waiting)
        assert list(self._waiting) == [flight for flight in self._flights if flight in waiting], "another order waits"
        assert not any(flight.begun or flight.landed for flight in waiting), "one waits that has begun"
        assert self._aloft == len(self._flights) - len(landed) - len(waiting), "flights are lost or doubled"
        assert 0 <= self._aloft <= self._limit, "more are aloft than the limit allows"
        if self._ordered:
            assert list(self._leaving) == list(self._flights), "results would leave in another order"
        else:
            assert len(self._leaving) == len(landed), "a result is lost or leaves twice"
            assert set(self._leaving) == set(landed), "what leaves has no result"
