# SPDX-License-Identifier: Apache-2.0

"""A budget is spent once: what is reserved, lost, given back and written ahead (H176, H182)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal
from math import inf
from typing import Any

import pytest

from spark_bridge.primitives.budget.book import (
    BudgetBook,
    BudgetEffect,
    Exhausted,
    Reserved,
    Withdraw,
)
from spark_bridge.primitives.budget.driver import shown
from spark_bridge.primitives.budget.task import units_of
from spark_bridge.primitives.tickets import Asker, Ticket

A, B, C = (Ticket(Asker("op", subtask, 0), 1) for subtask in range(3))


@pytest.fixture
def book() -> Iterator[BudgetBook]:
    made = BudgetBook(100)
    yield made
    made.check_invariants()


def test_a_reservation_waits_only_for_what_others_may_give_back(book: BudgetBook) -> None:
    assert book.ask(A, 60, inf, 0.0) == [Reserved(A)]
    assert book.ask(B, 60, inf, 0.0) == []
    assert book.ask(C, 101, inf, 0.0) == [Exhausted(C, 101)]
    assert book.settle(A, 30, 0.0) == [Reserved(B)]
    assert book.ask(A, 20, inf, 0.0) == [], "it waits for B"
    assert book.settle(B, 55, 0.0) == [Exhausted(A, 20)]
    assert (book.spent, book.left, book.above) == (85, 15, 0)


def test_what_a_lost_attempt_had_reserved_is_spent_and_its_waits_end(book: BudgetBook) -> None:  # H182
    book.ask(A, 60, inf, 0.0)
    book.ask(B, 60, inf, 0.0)
    assert book.forget(0.0, *A.asker) == [Exhausted(B, 60)]
    assert (book.spent, book.lost, book.reserved) == (60, 60, 0)
    assert book.settle(A, 1, 0.0) == book.refund(A, 0.0) == [], "a word that comes after its attempt is over"
    assert book.spent == 60


@pytest.mark.parametrize("how", ["refund", "give_up"])
def test_what_was_not_spent_is_there_for_the_next_one(book: BudgetBook, how: str) -> None:  # H176 H182
    book.ask(A, 60, inf, 0.0)
    book.ask(B, 60, inf, 0.0)
    assert getattr(book, how)(A, 0.0) == [Reserved(B)]
    assert (book.spent, book.refunded) == (0, 60)


def test_one_that_waits_no_more_gets_nothing(book: BudgetBook) -> None:  # H176
    book.ask(A, 60, inf, 0.0)
    book.ask(B, 60, 1.0, 0.0)
    assert book.give_up(B, 0.5) == [Withdraw(B)]
    book.ask(B, 60, 1.0, 0.5)
    assert book.refund(A, 2.0) == [Withdraw(B)]


def test_what_is_settled_above_a_reservation_is_spent_beyond_the_total(book: BudgetBook) -> None:
    book.ask(A, 60, inf, 0.0)
    book.settle(A, 120, 0.0)
    assert (book.spent, book.above, book.left) == (120, 60, 0)
    assert book.ask(B, 1, inf, 0.0) == [Exhausted(B, 1)]


def test_nothing_is_reserved_beyond_the_ceiling_that_is_written() -> None:  # H182
    book = BudgetBook(1000)
    book.restore(100)
    assert book.spent == 100, "the last run may have spent all of its ceiling"
    assert book.ask(A, 1, inf, 0.0) == []
    assert book.wanted_ceiling() == 111
    book.ceiling = 111
    assert book.serve(0.0) == [Reserved(A)]
    assert book.wanted_ceiling() is None
    assert book.ask(B, 500, inf, 0.0) == []
    assert book.wanted_ceiling() == 611
    book.ceiling = 611
    assert book.serve(0.0) == [Reserved(B)]
    book.settle(B, 1, 0.0)
    assert book.wanted_ceiling() == 112, "the ceiling comes down again"
    book.check_invariants()


@pytest.mark.parametrize(("total", "cost", "most"), [(10_000, 1, 250), (1_000, 50, 45)])
def test_a_ceiling_is_written_seldom(total: int, cost: int, most: int) -> None:
    """Each write is one to the storage: many small uses share one, and a large one has one or two."""
    book, writes = BudgetBook(total), 0
    book.restore(0)
    for number in range(total // cost):
        ticket = Ticket(A.asker, number)
        effects = book.ask(ticket, cost, inf, 0.0)
        effects += book.settle(ticket, cost, 0.0)
        while (ceiling := book.wanted_ceiling()) is not None:
            writes += 1
            book.ceiling = ceiling
            effects += book.serve(0.0)
            effects += book.settle(ticket, cost, 0.0)
        assert effects == [Reserved(ticket)]
    assert (book.spent, book.ceiling) == (total, total)
    assert writes <= most


def test_a_total_that_was_raised_leaves_more_and_one_below_what_is_spent_leaves_nothing() -> None:
    for total, left in ((80, 30), (30, 0)):
        book = BudgetBook(total)
        book.restore(50)
        assert book.left == left
        assert book.ask(A, left + 1, inf, 0.0) == [Exhausted(A, left + 1)]


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1, 0, 1e-10, Decimal("NaN"), Decimal("1e-10"), 1e10])
def test_what_cannot_be_an_amount_is_refused(amount: Any) -> None:
    with pytest.raises(ValueError, match="amount must be a number from 0"):
        units_of("amount", amount)


def test_amounts_are_exact_to_a_billionth() -> None:
    assert sum(units_of("amount", 0.1) for _ in range(3)) == units_of("amount", 0.3) == units_of("a", 0.1 + 0.2)
    assert units_of("amount", Decimal("0.000000001")) == 1
    assert shown(units_of("amount", 12.5)) == "12.5"
    assert shown(units_of("amount", 1000)) == "1000"


# --- random histories -------------------------------------------------------------------------------------------------


ASKERS = [Asker(f"op {one % 2}", one, 7 - one) for one in range(4)]


class World:
    """A book, what its storage has, and a naive account of it: a list of what each reservation has become."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.total = self.chance.choice([10, 100, 1000])
        self.durable = self.chance.random() < 0.6
        self.stored = 0
        self.writing: int | None = None
        self.really_spent = 0
        self.reserved: dict[Ticket, int] = {}
        self.waiting: dict[Ticket, int] = {}
        self.numbers = 0
        self.book = self.begun()

    def begun(self) -> BudgetBook:
        book = BudgetBook(self.total)
        if self.durable:
            book.restore(self.stored)
        return book

    def carry_out(self, effects: list[BudgetEffect]) -> None:
        for effect in effects:
            is_first = next(iter(self.waiting)) == effect.ticket
            amount = self.waiting.pop(effect.ticket)
            if isinstance(effect, Reserved):
                assert is_first, "one that came later is served before one that still waits"
                self.reserved[effect.ticket] = amount
            elif isinstance(effect, Exhausted):
                assert self.book.spent + amount > self.total
        wanted = self.book.wanted_ceiling()
        if wanted is not None and self.writing is None:
            assert self.book.ceiling is not None
            self.writing, self.book.ceiling = wanted, min(self.book.ceiling, wanted)

    def written(self) -> None:
        if self.writing is not None:
            self.stored = self.book.ceiling = self.writing
            self.writing = None
            self.carry_out(self.book.serve(0.0))

    def step(self) -> None:
        chance, what = self.chance, self.chance.random()
        ticket = chance.choice(list(self.reserved)) if self.reserved else None
        if what < 0.5:
            self.numbers += 1
            new = Ticket(chance.choice(ASKERS), self.numbers)
            self.waiting[new] = chance.randint(1, max(1, self.total // 5))
            self.carry_out(self.book.ask(new, self.waiting[new], inf, 0.0))
        elif what < 0.6 and self.waiting:
            self.carry_out(self.book.give_up(chance.choice(list(self.waiting)), 0.0))
        elif what < 0.65:
            asker = chance.choice(ASKERS)
            place = chance.choice((asker, asker[:2], asker[:1]))
            for one in [one for one in self.reserved if one.asker[: len(place)] == place]:
                self.really_spent += self.reserved.pop(one)
            self.carry_out(self.book.forget(0.0, *place))
            assert not [one for one in self.waiting if one.asker[: len(place)] == place]
        elif what < 0.75 and ticket:
            del self.reserved[ticket]
            self.carry_out(self.book.refund(ticket, 0.0))
        elif what < 0.95 and ticket:
            amount = chance.randint(0, self.reserved.pop(ticket))
            self.really_spent += amount
            self.carry_out(self.book.settle(ticket, amount, 0.0))
        else:
            self.written()

    def driver_dies(self) -> None:
        """What tasks had reserved may be spent. The next run has what is in the storage, or is about to be."""
        ceiling = self.chance.choice([self.stored, self.writing if self.writing is not None else self.stored])
        in_flight = sum(self.reserved.values())
        assert self.really_spent + in_flight <= ceiling, "a restart gives something back"
        if self.writing is None:  # otherwise it is about to come down
            first = next(iter(self.waiting.values()), 0)
            assert ceiling - self.really_spent <= in_flight + first + max(2, self.total // 50)
        self.stored, self.really_spent, self.writing = ceiling, ceiling, None
        self.reserved, self.waiting = {}, {}
        self.book = self.begun()


@pytest.mark.parametrize("seed", range(300))
def test_never_more_than_the_total_however_many_are_lost_and_whenever_the_driver_dies(seed: int) -> None:
    """H182: beside a naive account of the same history."""
    world = World(seed)
    for _ in range(world.chance.randrange(10, 200)):
        world.step()
        book = world.book
        book.check_invariants()
        assert book.spent == world.really_spent, f"seed {seed}"
        assert book.reserved == sum(world.reserved.values()), f"seed {seed}"
        assert book.spent + book.reserved <= world.total, f"seed {seed}"
        assert (book.left, book.waiting) == (world.total - book.spent - book.reserved, len(world.waiting))
        for ticket in (*world.waiting, *world.reserved):
            with pytest.raises(ValueError, match="has asked already"):
                book.ask(ticket, 1, inf, 0.0)
        if world.durable:
            assert book.spent + book.reserved <= world.stored, f"seed {seed}: more than was written"
            if world.chance.random() < 0.02:
                world.driver_dies()
        else:
            assert not world.waiting or book.reserved, f"seed {seed}: one waits for nobody"
    while world.writing is not None:
        world.written()
    for ticket in list(world.reserved):
        world.reserved.pop(ticket)
        world.carry_out(world.book.refund(ticket, 0.0))
        world.written()
