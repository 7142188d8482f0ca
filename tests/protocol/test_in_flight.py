# SPDX-License-Identifier: Apache-2.0

"""Random histories of the flights of an async stage, beside a naive model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.in_flight import Flight, InFlight


class Model:
    """What a stage must do, said with lists: each input is in one of them, or has left."""

    def __init__(self, limit: int, ordered: bool) -> None:
        self.limit = limit
        self.ordered = ordered
        self.inputs: list[int] = []  # that have not left
        self.begun: list[int] = []  # and not landed
        self.landed: list[int] = []

    @property
    def next_to_leave(self) -> int | None:
        if self.ordered:
            return self.inputs[0] if self.inputs and self.inputs[0] in self.landed else None
        return self.landed[0] if self.landed else None

    def begin(self) -> list[int]:
        waiting = [one for one in self.inputs if one not in self.begun and one not in self.landed]
        begins = waiting[: max(0, self.limit - len(self.begun))]
        self.begun += begins
        return begins


class History:
    """One history, with restores from what was held at any moment before."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ordered = self.dice.random() < 0.5
        self.taken = 0
        self.left: list[Any] = []
        self.computed: list[int] = []  # inputs whose result has landed
        self.held: tuple[Any, ...] = ()
        self.new(())

    def new(self, held: Any) -> None:
        limit = self.dice.randint(1, 5)
        self.machine: InFlight[int] = InFlight(limit, ordered=self.ordered)
        self.model = Model(limit, self.ordered)
        self.flying: dict[int, Flight[int]] = {}
        self.machine.restore(held)
        self.model.inputs = [one for one, _ in held]
        self.model.landed = [one for one, result in held if result is not None]

    def step(self) -> None:
        match self.dice.choice(["take", "begin", "land", "land", "leave", "hold", "restore", "over"]):
            case "take" if self.machine.has_capacity or self.dice.random() < 0.1:
                self.machine.take(self.taken)
                self.model.inputs.append(self.taken)
                self.taken += 1
            case "begin":
                begun = self.machine.begin()
                assert [one.input for one in begun] == self.model.begin()
                self.flying.update((one.input, one) for one in begun)
            case "land" if self.flying:
                self.land(self.dice.choice(sorted(self.flying)))
            case "leave":
                self.leave()
            case "hold":
                self.held = (self.taken, list(self.left), list(self.computed), list(self.machine.held()))
            case "restore" if self.held and self.dice.random() < 0.2:
                self.taken, left, computed, held = self.held
                self.left, self.computed = list(left), list(computed)
                self.new(held)
        self.compare()

    def land(self, number: int) -> None:
        assert number not in self.computed, f"the result for {number} is held, and was computed again"
        self.computed.append(number)
        flight = self.flying.pop(number)
        self.machine.land(flight, f"result of {number}")
        with pytest.raises(LocalProtocolError, match="cannot land"):
            self.machine.land(flight, "another result")
        self.model.begun.remove(number)
        self.model.landed.append(number)

    def leave(self) -> None:
        number = self.model.next_to_leave
        assert self.machine.may_leave is (number is not None)
        if number is not None:
            flight = self.machine.leave()
            assert (flight.input, flight.result) == (number, f"result of {number}")
            self.left.append(number)
            self.model.inputs.remove(number)
            self.model.landed.remove(number)

    def compare(self) -> None:
        self.machine.check_invariants()
        model = self.model
        assert len(self.machine) == len(model.inputs)
        assert self.machine.has_capacity is (len(model.inputs) < model.limit)
        assert self.machine.waiting == len(model.inputs) - len(model.begun) - len(model.landed)
        assert len(self.flying) <= model.limit
        landed = {one: f"result of {one}" for one in model.landed}
        assert list(self.machine.held()) == [(one, landed.get(one)) for one in model.inputs]

    def end(self) -> None:
        while self.machine:
            begun = self.machine.begin()
            assert [one.input for one in begun] == self.model.begin()
            self.flying.update((one.input, one) for one in begun)
            if self.flying:
                self.land(self.dice.choice(sorted(self.flying)))
            self.leave()
            self.compare()


@pytest.mark.parametrize("seed", range(200))
def test_each_input_has_one_result_whatever_is_restored(seed: int) -> None:  # H180, H181
    print(f"seed {seed}")
    history = History(seed)
    for _ in range(300):
        history.step()
    history.end()
    assert sorted(history.left) == list(range(history.taken))
    assert sorted(history.computed) == list(range(history.taken))
    if history.ordered:
        assert history.left == sorted(history.left)


def test_results_leave_in_the_order_in_which_they_land_unless_ordered() -> None:  # H181
    for ordered, expected in ((True, ["a", "b"]), (False, ["b", "a"])):
        flights: InFlight[str] = InFlight(2, ordered=ordered)
        flights.take("a")
        flights.take("b")
        for flight in reversed(flights.begin()):
            flights.land(flight, flight.input.upper())
        assert [flights.leave().input for _ in range(2)] == expected


def test_nothing_is_restored_after_an_input() -> None:
    flights: InFlight[str] = InFlight(2, ordered=True)
    flights.take("a")
    with pytest.raises(LocalProtocolError, match="restores its flights before"):
        flights.restore([("b", None)])


@pytest.mark.parametrize("result", [None, "other"])
def test_only_a_flight_that_is_known_lands_and_with_a_result(result: Any) -> None:
    flights: InFlight[str] = InFlight(2, ordered=True)
    flights.take("a")
    (flight,) = flights.begin()
    with pytest.raises(LocalProtocolError, match="cannot land"):
        flights.land(flight if result is None else Flight(0, "a"), result)
