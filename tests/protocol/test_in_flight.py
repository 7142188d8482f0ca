# SPDX-License-Identifier: Apache-2.0

"""The flights of an async stage against a model that only keeps lists, with a restore at any moment (H180, H181)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.in_flight import Flight, InFlight


class Input(Flight):
    """An input by its number or name, and what was computed of it."""

    def __init__(self, input: Any, result: str | None = None) -> None:
        super().__init__()
        self.input = input
        self.result = result
        self.landed = result is not None

    def __repr__(self) -> str:
        return str(self.input)


class History:
    """A seeded run of a stage: what it takes, computes and gives out, over any number of restores.

    The model of a checkpoint is the whole list of what had left and of what was computed when it was taken, so a
    restore says which results must come out again and which may not be computed again.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ordered = self.dice.random() < 0.5
        self.left: list[tuple[int, str]] = []  # downstream, which is cut together with the stage
        self.computed: dict[int, str] = {}  # results that are known; a restore forgets those since its checkpoint
        self.computations = 0
        self.inputs = 0
        self.checkpoint: tuple[list[Any], list[tuple[int, str]], dict[int, str], int] = ([], [], {}, 0)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.limit = self.dice.randint(1, 6)
        self.stage: InFlight[Input] = InFlight(self.limit, ordered=self.ordered)
        self.aloft: list[Input] = []

    def step(self) -> None:
        self.dice.choice([self.take, self.begin, self.begin, self.land, self.land, self.leave, self.hold, self.lose])()
        self.stage.check_invariants()
        assert len(self.stage) == self.inputs - len(self.left)
        assert len(self.aloft) <= self.limit
        if self.ordered:
            assert [input for input, _ in self.left] == list(range(len(self.left)))

    def take(self) -> None:
        beyond = self.dice.random() < 0.1  # a barrier that can be met only upstream
        if self.stage.has_capacity or beyond:
            taken, places = Input(self.inputs), self.limit - len(self.aloft)
            begins = self.stage.take(taken)
            assert begins == taken.begun
            assert begins == (places > 0 and not self.stage.waiting)
            self.aloft += [taken] if begins else []
            self.inputs += 1

    def begin(self) -> None:
        places = self.limit - len(self.aloft)
        waiting = self.stage.waiting
        begun = self.stage.begin()
        assert len(begun) == min(places, waiting)
        for flight in begun:
            assert flight.input not in self.computed, "a result that is known is computed again"
        self.aloft += begun

    def land(self) -> None:
        if self.aloft:
            flight = self.aloft.pop(self.dice.randrange(len(self.aloft)))
            self.computations += 1
            self.computed[flight.input] = flight.result = f"result {self.computations} of {flight.input}"
            self.stage.land(flight)

    def leave(self) -> None:
        next_input = len(self.left)
        known = self.computed.keys() - {input for input, _ in self.left}
        flight = self.stage.leave()
        assert (flight is not None) == (next_input in known if self.ordered else bool(known))
        if flight is not None:
            assert flight.input in known, "a result leaves that nobody has computed, or twice"
            assert flight.result == self.computed[flight.input]
            self.left.append((flight.input, flight.result))

    def hold(self) -> None:
        held = [(one.input, one.result if one.landed else None) for one in self.stage.held]
        gone = {input for input, _ in self.left}
        assert held == [(one, self.computed.get(one)) for one in range(self.inputs) if one not in gone]
        self.checkpoint = (held, list(self.left), dict(self.computed), self.inputs)

    def lose(self) -> None:
        """The task is lost: the last checkpoint is restored, perhaps with another limit."""
        if self.dice.random() < 0.7:
            return
        held, left, computed, self.inputs = self.checkpoint
        self.left, self.computed = list(left), dict(computed)
        self.begin_anew()
        self.stage.restore(Input(*one) for one in held)

    def end(self) -> None:
        while len(self.stage):
            self.begin()
            self.land()
            self.leave()
            self.stage.check_invariants()


@pytest.mark.parametrize("seed", range(200))
def test_each_input_has_one_result_whatever_is_restored(seed: int) -> None:  # H180, H181
    print(f"seed {seed}")
    history = History(seed)
    for _ in range(300):
        history.step()
    history.end()
    assert sorted(input for input, _ in history.left) == list(range(history.inputs))
    assert dict(history.left) == history.computed


@pytest.mark.parametrize("ordered", [True, False])
def test_what_more_subtasks_had_in_flight_begins_within_the_limit(ordered: bool) -> None:  # H180, H181
    stage: InFlight[Input] = InFlight(2, ordered=ordered)
    stage.restore([Input("a"), Input("b", "known"), Input("c"), Input("d")])
    begun = stage.begin()
    assert [flight.input for flight in begun] == ["a", "c"]
    assert not stage.has_capacity
    first = [] if ordered else [stage.leave()]
    assert stage.leave() is None
    stage.land(begun[1])
    assert [flight.input for flight in stage.begin()] == ["d"]
    assert not stage.take(Input("e"))
    stage.land(begun[0])
    first += [stage.leave() for _ in range(3 - len(first))]
    assert [flight and flight.input for flight in first] == (["a", "b", "c"] if ordered else ["b", "c", "a"])
    assert [flight.input for flight in stage.begin()] == ["e"]


def test_misuse_is_refused() -> None:
    stage: InFlight[Input] = InFlight(1, ordered=True)
    taken = Input("a")
    assert stage.take(taken)
    with pytest.raises(LocalProtocolError, match="restores its flights before it takes an input"):
        stage.restore([])
    stage.land(taken)
    with pytest.raises(LocalProtocolError, match="a cannot land"):
        stage.land(taken)
    stage.leave()
    with pytest.raises(LocalProtocolError, match="cannot land"):
        stage.land(taken)
    with pytest.raises(LocalProtocolError, match="cannot land"):
        stage.land(Input("a"))


def test_one_that_waits_cannot_land() -> None:
    """It would free capacity that it has not taken."""
    stage: InFlight[Input] = InFlight(1, ordered=False)
    stage.take(Input("a"))
    waiting = Input("b")
    assert not stage.take(waiting)
    with pytest.raises(LocalProtocolError, match="cannot land"):
        stage.land(waiting)
