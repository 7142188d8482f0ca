# SPDX-License-Identifier: Apache-2.0

"""Who computes a value of a cache, and who waits for it (H183)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from random import Random

import pytest

from spark_bridge.primitives.cache import book as module
from spark_bridge.primitives.cache.book import (
    ENTRY_BYTES,
    Answer,
    CacheBook,
    CacheEffect,
    Lease,
    Withdraw,
)
from spark_bridge.primitives.tickets import Asker, Ticket

A, B, C = (Ticket(Asker("op", subtask, subtask), 1) for subtask in range(3))
LEASE_S = 10.0
KEY = b"key"


@pytest.fixture
def book() -> Iterator[CacheBook]:
    made = CacheBook(10_000, LEASE_S)
    yield made
    made.check_invariants()


def forgotten(book: CacheBook, ticket: Ticket, now: float = 0.0) -> list[CacheEffect]:
    return book.forget(now, *ticket.asker)


def put(book: CacheBook, ticket: Ticket, value: bytes, key: bytes = KEY) -> list[CacheEffect]:
    return book.arrived(key) if book.put(key, ticket, value) else []


def test_one_computes_and_the_others_wait_for_its_value(book: CacheBook) -> None:
    assert [book.get(KEY, one, 0.0) for one in (A, B, C)] == [[Lease(A)], [], []]
    assert put(book, A, b"v") == [Answer(B, b"v"), Answer(C, b"v")]
    assert book.get(KEY, A, 0.0) == [Answer(A, b"v")]


def test_nobody_sees_a_value_and_nobody_computes_it_before_it_is_safe(book: CacheBook) -> None:
    book.get(KEY, A, 0.0)
    book.get(KEY, B, 0.0)
    assert book.put(KEY, A, b"v")
    assert forgotten(book, A) == [], "its value is on the way"
    assert book.get(KEY, C, 0.0) == []
    assert book.arrived(KEY) == [Answer(B, b"v"), Answer(C, b"v")]


@pytest.mark.parametrize("lost", ["failed", "the attempt is over", "too slow"])
def test_a_lost_lease_goes_to_exactly_one_waiter_in_turn(book: CacheBook, lost: str) -> None:
    for one in (A, B, C):
        book.get(KEY, one, 0.0)
    if lost == "failed":
        assert book.end(A, 1.0) == [Lease(B)]
    elif lost == "too slow":
        assert book.next_deadline() == LEASE_S
        assert book.pass_time(LEASE_S) == [Lease(B, overdue=A)]
    else:
        assert forgotten(book, A) == [Lease(B)]
    assert book.end(A, 1.0) == [], "it has none any more"
    assert put(book, B, b"v") == [Answer(C, b"v")]


def test_those_that_wait_no_more_are_passed_over(book: CacheBook) -> None:
    for one in (A, B, C):
        book.get(KEY, one, 0.0)
    other = Ticket(A.asker, 2)
    book.get(KEY, other, 0.0)
    assert book.end(B, 0.0) == [Withdraw(B)]
    assert forgotten(book, A) == [Withdraw(other), Lease(C)], "not to another call of the attempt that is over"


def test_a_lease_that_crosses_the_end_of_its_wait_goes_on(book: CacheBook) -> None:
    for one in (A, B, C):
        book.get(KEY, one, 0.0)
    assert book.end(A, 0.0) == [Lease(B)]
    assert book.end(B, 0.0) == [Lease(C)], "B gave up before it heard of the lease"


def test_a_late_value_is_kept_if_there_is_none_and_replaces_none(book: CacheBook) -> None:
    for one in (A, B, C):
        book.get(KEY, one, 0.0)
    book.pass_time(LEASE_S)
    assert put(book, A, b"late") == [Answer(C, b"late")], "it was paid for"
    assert put(book, B, b"second") == []
    assert book.values == {KEY: b"late"}


def test_one_that_computes_beside_a_late_value_is_not_joined_by_a_third_after_an_eviction() -> None:
    book = CacheBook(2 * ENTRY_BYTES, LEASE_S)
    book.get(KEY, A, 0.0)
    book.pass_time(LEASE_S)
    assert book.get(KEY, B, LEASE_S) == [Lease(B)]
    put(book, A, b"late")
    put(book, C, b"x" * ENTRY_BYTES, b"other")
    assert KEY not in book.values
    assert book.get(KEY, C, LEASE_S) == []
    assert put(book, B, b"v") == [Answer(C, b"v")]
    book.check_invariants()


def test_the_values_that_nobody_has_wanted_for_longest_are_dropped() -> None:
    book = CacheBook(3 * (ENTRY_BYTES + 2), LEASE_S)
    for number in range(3):
        put(book, A, b"v", b"%d" % number)
    book.get(b"0", A, 0.0)
    put(book, A, b"v", b"3")
    assert list(book.values) == [b"2", b"0", b"3"]
    put(book, A, b"v" * 10_000, b"4")
    assert not book.values, "one that is larger than all together is not kept either"
    assert book.counts.evictions == 5
    book.check_invariants()


def test_an_attempt_cannot_make_the_driver_keep_keys_without_end(
    book: CacheBook, monkeypatch: pytest.MonkeyPatch
) -> None:  # H157
    monkeypatch.setattr(module, "LEASED_BYTES_MAX", 10 * (ENTRY_BYTES + 1))
    for number in range(10):
        book.get(b"%d" % number, Ticket(A.asker, number), 0.0)
    for key in (b"10", b"0"):
        with pytest.raises(OverflowError):
            book.get(key, Ticket(A.asker, 11), 0.0)
    assert book.get(b"10", B, 0.0) == [Lease(B)], "others can"
    with pytest.raises(ValueError, match="has asked already"):
        book.get(b"x", B, 0.0)
    put(book, B, b"v", b"10")
    answered = Ticket(A.asker, 12)
    assert book.get(b"10", answered, 0.0) == [Answer(answered, b"v")], "a value that is there takes nothing"


def test_the_keys_of_an_attempt_take_what_is_allowed_and_no_byte_more() -> None:  # H157
    for most, fits in ((ENTRY_BYTES + 3, True), (ENTRY_BYTES + 2, False)):
        with pytest.MonkeyPatch.context() as patch, nullcontext() if fits else pytest.raises(OverflowError):
            patch.setattr(module, "LEASED_BYTES_MAX", most)
            assert CacheBook(10_000, LEASE_S).get(b"key", A, 0.0) == [Lease(A)]


class History:
    """Any calls in any order, with what each ticket may expect."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.book = CacheBook(self.random.choice((400, 1500, 100_000)), LEASE_S)
        self.now = 0.0
        self.number = 0
        self.keys = [b"%d" % number for number in range(self.random.randint(1, 6))]
        self.askers = [Asker(f"op {one % 2}", one, 7 - one) for one in range(4)]
        self.waiting: dict[Ticket, bytes] = {}
        self.leases: dict[Ticket, tuple[bytes, float]] = {}
        self.lost: dict[Ticket, bytes] = {}  # those that compute although their lease was taken
        self.arriving: dict[bytes, bytes] = {}
        self.first: dict[bytes, bytes] = {}  # the value that was put first since the key had none
        self.counts = module.Counts()

    def carry_out(self, effects: Iterable[CacheEffect]) -> None:
        for effect in effects:
            ticket = effect.ticket
            key = self.waiting.pop(ticket)
            if isinstance(effect, Answer):
                assert effect.value == self.first[key], "a value was replaced"
            elif isinstance(effect, Lease):
                assert key not in {one for one, _ in self.leases.values()}, "two compute one value"
                assert key not in self.arriving, "a value that was computed is computed again"
                self.leases[ticket] = key, self.now + LEASE_S
                self.counts.leases += 1

    def get(self) -> None:
        self.number += 1
        ticket, key = Ticket(self.random.choice(self.askers), self.number), self.random.choice(self.keys)
        self.waiting[ticket] = key
        self.counts.gets += 1
        self.counts.hits += key in self.book.values
        self.counts.waits += key not in self.book.values and (key in self.arriving or key in self.book._leased)
        self.carry_out(self.book.get(key, ticket, self.now))

    def put(self) -> None:
        ticket = self.random.choice([*self.leases, *self.lost] or [None])
        if ticket is None:
            return
        key = self.leases.pop(ticket)[0] if ticket in self.leases else self.lost.pop(ticket)
        value = b"value %d" % self.number
        if self.book.put(key, ticket, value):
            assert key not in self.arriving
            assert key not in self.book.values
            self.arriving[key] = self.first[key] = value

    def arrive(self) -> None:
        if self.arriving:
            key = self.random.choice(list(self.arriving))
            del self.arriving[key]
            self.carry_out(self.book.arrived(key))

    def end(self) -> None:
        ticket = self.random.choice([*self.leases, *self.waiting, *self.lost] or [None])
        if ticket is None:
            return
        if self.leases.pop(ticket, None) is None and ticket in self.waiting:
            assert self.book.end(ticket, self.now) == [Withdraw(ticket)]
            del self.waiting[ticket]
        else:
            self.lost.pop(ticket, None)
            self.carry_out(self.book.end(ticket, self.now))

    def forget(self) -> None:
        asker = self.random.choice(self.askers)
        place = self.random.choice((asker, asker[:2], asker[:1]))
        over = [one for one in (*self.leases, *self.lost) if one.asker[: len(place)] == place]
        for ticket in over:
            self.leases.pop(ticket, None)
            self.lost.pop(ticket, None)
        effects = self.book.forget(self.now, *place)
        self.carry_out(effects)
        assert not [one for one in (*self.waiting, *self.leases) if one.asker[: len(place)] == place]

    def time(self) -> None:
        self.now += self.random.choice((0.1, 4.0, LEASE_S))
        for ticket in [one for one, (_, until) in self.leases.items() if until <= self.now]:
            self.lost[ticket] = self.leases.pop(ticket)[0]
        self.carry_out(self.book.pass_time(self.now))

    def check(self) -> None:
        self.book.check_invariants()
        assert {key for key, _ in self.leases.values()} == set(self.book._leased)
        assert self.book.arriving == self.arriving
        assert (self.book.waiting, self.book.leased) == (len(self.waiting), len(self.leases))
        counts = self.book.counts
        assert (counts.gets, counts.hits) == (self.counts.gets, self.counts.hits)
        assert (counts.waits, counts.leases) == (self.counts.waits, self.counts.leases)
        for key in self.waiting.values():
            assert key in self.arriving or key in self.book._leased, "one waits for nobody"


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_one_computes_each_value_and_nobody_waits_for_nobody(seed: int) -> None:  # H183
    history = History(seed)
    steps = [history.get] * 5 + [history.put] * 2 + [history.arrive] * 2 + [history.end, history.forget, history.time]
    for _ in range(400):
        history.random.choice(steps)()
        history.check()
    while history.waiting or history.leases or history.arriving:  # and all come to an end
        history.put()
        history.arrive()
        history.check()
    assert not history.book._keys
