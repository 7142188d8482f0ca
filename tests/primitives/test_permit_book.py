# SPDX-License-Identifier: Apache-2.0

"""What is reserved for somebody who waits for permits ends with the wait, the attempt or the time (H111, H176)."""

from __future__ import annotations

import asyncio
import heapq
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import anyio
import pytest

from headgate import Permits
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError
from spark_bridge.primitives.permits.book import Grant, PermitBook, PermitEffect, Withdraw
from spark_bridge.primitives.permits.schedule import AHEAD_S, EXPIRY_S, Permit, RateSchedule
from spark_bridge.primitives.permits.task import PermitsInTask, PermitsPart
from spark_bridge.primitives.tickets import Asker, Ticket
from spark_bridge.subtask.errors import TimedOut
from tests.primitives.stand_ins import open_alone

A, B, C, D = (Asker("op", subtask, 0) for subtask in range(4))
OTHER = Asker("another operator", 0, 0)


def ticket(asker: Asker, number: int = 1) -> Ticket:
    return Ticket(asker, number)


class Book:
    """A book with a clock, whose invariants are checked after each call."""

    def __init__(self, per_s: float | None = None, burst: int = 1, slots: int = 0) -> None:
        self.book = PermitBook(per_s, burst, slots)
        self.now = 100.0

    def ask(
        self, asker: Asker, number: int = 1, *, slot: bool = False, for_s: float = inf, weight: int = 1
    ) -> list[PermitEffect]:
        return self._checked(self.book.ask(ticket(asker, number), slot, self.now + for_s, self.now, weight))

    def correct(self, asker: Asker, number: int, before: int, after: int) -> list[PermitEffect]:
        return self._checked(self.book.correct(ticket(asker, number), before, after, self.now))

    def give_up(self, asker: Asker, number: int = 1) -> list[PermitEffect]:
        return self._checked(self.book.give_up(ticket(asker, number), self.now))

    def release(self, asker: Asker, *numbers: int) -> list[PermitEffect]:
        return self._checked(self.book.release(asker, numbers, self.now))

    def forget(self, asker: Asker) -> list[PermitEffect]:
        return self._checked(self.book.forget(self.now, *asker))

    def delay(self, asker: Asker, number: int = 1, for_s: float = inf, weight: int = 1) -> float:
        """How long a request for a permit of the rate has to wait."""
        (effect,) = self.ask(asker, number, for_s=for_s, weight=weight)
        assert isinstance(effect, Grant)
        return round(effect.delay_s, 6)

    def _checked(self, effects: list[PermitEffect]) -> list[PermitEffect]:
        self.book.check_invariants()
        return effects


# --- the rate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["give_up", "forget"])
def test_a_permit_that_was_not_used_is_there_for_the_next_one(ends: str) -> None:
    book = Book(per_s=1.0)
    assert [book.delay(one) for one in (A, B, C)] == [0.0, 1.0, 2.0]
    getattr(book, ends)(B)
    assert book.delay(D) == 1.0, "the hole is filled first"
    getattr(book, ends)(C)
    book.give_up(D)
    assert book.delay(A, 2) == 1.0, "and those at the end are as if they had never been handed out"


def test_who_waits_can_get_an_earlier_permit_when_others_have_given_up() -> None:
    book = Book(per_s=1.0)
    assert [book.delay(one) for one in (A, B, C)] == [0.0, 1.0, 2.0]
    book.give_up(B)
    book.now += 0.5
    assert book.delay(C) == 0.5
    assert book.delay(A, 2) == 1.5


def test_asking_again_never_makes_it_later() -> None:
    book = Book(per_s=1.0)
    assert [book.delay(one) for one in (A, B, C)] == [0.0, 1.0, 2.0]
    book.now += 0.25
    assert [book.delay(one) for one in (B, C)] == [0.75, 1.75]


def test_a_grant_that_crosses_the_give_up_is_given_back_however_late_that_is_heard() -> None:
    book = Book(per_s=1.0)
    assert book.delay(A) == 0.0
    assert book.delay(B, for_s=1.0) == 1.0
    book.now += 1.3  # its task gave up before it heard of the grant
    book.give_up(B)
    assert book.delay(C) == 0.0


def test_an_attempt_that_is_over_may_have_used_what_was_due() -> None:
    book = Book(per_s=1.0)
    assert book.delay(A) == 0.0
    book.forget(A)
    assert book.delay(B) == 1.0


@pytest.mark.parametrize("askers", [1, 100])
def test_permits_ahead_of_need_reach_no_further_into_the_future_however_many_ask(askers: int) -> None:
    book = Book(per_s=1000.0, burst=100)
    handed_out = [
        delay for subtask in range(askers) for delay in book.book.take_ahead(Asker("op", subtask, 0), 256, book.now)
    ]
    assert max(handed_out) <= AHEAD_S
    assert book.delay(A) <= 2 * AHEAD_S


def test_those_that_an_attempt_held_ahead_and_cannot_have_used_come_back() -> None:
    book = Book(per_s=1000.0, burst=100)
    delays = book.book.take_ahead(A, 256, book.now)
    assert max(delays) > 0.05
    book.forget(A)
    assert book.delay(B) <= 0.001


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_use_waits_for_its_whole_weight() -> None:  # H111
    book = Book(per_s=10.0, burst=5)
    assert book.delay(A, weight=3) == 0.0
    assert book.delay(B, weight=3) == 0.1
    assert book.delay(C, weight=5) == 0.6
    assert book.delay(D) == 0.7


def test_what_a_use_did_not_weigh_goes_to_others_while_the_bucket_is_not_full() -> None:  # H111
    book = Book(per_s=10.0, burst=10)
    assert book.delay(A, weight=10) == 0.0
    assert book.delay(B, weight=5) == 0.5
    book.correct(A, 1, 10, 4)
    assert book.delay(C, weight=3) == 0.0, "3 of the 6 that A has not used"
    assert book.delay(D, weight=3) == 0.0
    assert book.delay(A, 2, weight=1) == 0.6, "after B"
    book.now += 100.0
    book.correct(B, 1, 5, 0)  # the bucket is full again, with it or without it
    assert [book.delay(one, 3, weight=5) for one in (A, B, C)] == [0.0, 0.0, 0.5]


def test_later_uses_make_up_for_what_a_use_weighed_above_what_it_asked_for() -> None:  # H111
    book = Book(per_s=10.0, burst=10)
    assert book.delay(A, weight=5) == 0.0
    book.correct(A, 1, 5, 25)
    assert book.delay(B, weight=1) == 1.6


def test_the_last_of_a_use_that_was_corrected_is_as_if_it_had_never_been_asked_for() -> None:
    book = Book(per_s=10.0, burst=10)
    assert book.delay(A, weight=10) == 0.0
    book.correct(A, 1, 10, 0)
    assert book.delay(B, weight=10) == 0.0


def test_a_weight_as_large_as_the_burst_is_granted_where_permits_were_held_ahead() -> None:  # H111
    book = Book(per_s=1000.0, burst=100)
    held = book.book.take_ahead(A, 256, book.now)
    assert held
    assert bool(book.book.hands_out_ahead)
    delay = book.delay(B, weight=100)
    assert not book.book.hands_out_ahead
    assert delay == pytest.approx(len(held) / 1000.0 + EXPIRY_S), "after what A holds, which may be used late"
    book.now += 10.0
    assert [book.delay(C, number, weight=100) for number in (1, 2)] == [0.0, 0.1]


@pytest.mark.parametrize("seed", range(100))
def test_what_is_used_late_and_what_has_a_weight_keep_to_the_rate_together(seed: int) -> None:  # H111
    chance = random.Random(seed)
    per_s, burst = chance.choice([(200.0, 30), (1000.0, 60), (1000.0, 300)])
    schedule, now = RateSchedule(per_s, burst), 0.0
    used: list[tuple[float, int]] = []
    for _ in range(chance.randrange(20)):
        for _ in range(chance.choice([1, 5, 20])):
            due = schedule.due(now)
            schedule.take(now)
            used.append((due + chance.choice([0.0, EXPIRY_S]), 1))
        now += chance.expovariate(per_s / 10)
    schedule.stop_sharing(now)
    for _ in range(20):
        weight = chance.choice([1, burst // 2, burst])
        used.append((schedule.due(now, weight), weight))
        schedule.take(now, weight)
        now += chance.choice([0.0, chance.expovariate(per_s / burst)])
    check_rate(used, per_s, burst)


@pytest.mark.parametrize(("seed", "latency_s"), [(0, 0.0), (1, 0.02), (2, 0.08)])
def test_two_tasks_with_five_hundred_coroutines_each_use_all_of_the_rate(seed: int, latency_s: float) -> None:
    """H111: each asks again when it has had its use. Words take a moment in each direction."""
    print("seed", seed)
    book, chance = PermitBook(200.0, 1, 0), random.Random(seed)
    todo: list[tuple[float, int, Asker]] = [(chance.random() * 0.01, 0, one) for one in (A, B) for _ in range(500)]
    heapq.heapify(todo)
    numbers, used, now = dict.fromkeys((A, B), 0), list[float](), 0.0
    while now < 20.0:
        deadline = book.next_deadline(now)
        if deadline is not None and (not todo or deadline <= todo[0][0]):
            now, effects = deadline, book.pass_time(deadline)
        else:
            now, _, asker = heapq.heappop(todo)
            numbers[asker] += 1
            effects = book.ask(Ticket(asker, numbers[asker]), False, inf, now)
        for effect in effects:
            assert isinstance(effect, Grant)
            used.append(now + max(effect.delay_s, latency_s))
            heapq.heappush(todo, (used[-1] + latency_s, len(used), effect.ticket.asker))
    assert sum(time <= 20.0 for time in used) >= 0.95 * 200.0 * 20.0


# --- what one attempt can reserve -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_s", [0.5, 1.0, 20.0, 1000.0])
def test_one_that_asks_a_thousand_times_and_stands_still_delays_another_operator_by_little(
    per_s: float,
) -> None:  # H157
    book = Book(per_s=per_s)
    book.delay(OTHER)
    for number in range(1, 1001):
        assert len(book.ask(A, number)) <= 1
    delay = book.delay(OTHER, 2)
    assert delay <= 2 / per_s + AHEAD_S + 1e-6, "one permit of A, or those of AHEAD_S, and its own"


def test_those_of_a_thousand_requests_take_their_turn_one_after_another_and_others_in_between() -> None:  # H157
    book = Book(per_s=1.0)
    for number in range(1, 6):
        book.ask(A, number)
    got: list[Ticket] = []
    for step in range(1, 8):
        book.delay(OTHER, step)
        deadline = book.book.next_deadline(book.now)
        book.now += 1.0
        if deadline is not None:
            assert deadline <= book.now
            got += [one.ticket for one in book._checked(book.book.pass_time(book.now)) if isinstance(one, Grant)]
        book.now += 1.0
        got += [one.ticket for one in book._checked(book.book.pass_time(book.now)) if isinstance(one, Grant)]
    assert [one.number for one in got] == [3, 4, 5], "2 was granted ahead, and each of the others in its turn"


@pytest.mark.parametrize("ends", ["give_up", "forget"])
def test_what_waits_behind_a_request_ends_with_its_wait_and_its_attempt(ends: str) -> None:  # H157 H176
    book = Book(per_s=1.0)
    assert book.delay(A) == 0.0
    assert book.delay(A, 2) == 1.0
    assert book.ask(A, 3) == book.ask(A, 4, for_s=0.5) == []
    if ends == "give_up":
        assert book.give_up(A, 3) == [Withdraw(ticket(A, 3))]
        book.now += 1.0
        assert book.book.pass_time(book.now) == [Withdraw(ticket(A, 4))]
    else:
        assert book.forget(A) == [Withdraw(ticket(A, 3)), Withdraw(ticket(A, 4))]
        assert book.delay(B) == 1.0
    assert book.book.next_deadline(book.now) is None
    assert book.book._later == {}


def test_a_request_that_waits_behind_another_one_is_not_taken_twice() -> None:
    book = Book(per_s=1.0)
    for number in (1, 2, 3):
        book.ask(A, number)
    with pytest.raises(ValueError, match="has asked already"):
        book.ask(A, 3)


def test_one_that_waits_for_many_slots_takes_turns_with_others() -> None:  # H157
    book = Book(slots=1)
    book.ask(A, 1, slot=True)
    for number in range(2, 100):
        assert book.ask(A, number, slot=True) == []
    assert book.ask(OTHER, 1, slot=True) == []
    assert book.release(A, 1) == [Grant(ticket(A, 2), 0.0)]
    assert book.ask(B, 1, slot=True) == []
    assert book.release(A, 2) == [Grant(ticket(OTHER, 1), 0.0)]
    assert book.release(OTHER, 1) == [Grant(ticket(A, 3), 0.0)]
    assert book.release(A, 3) == [Grant(ticket(B, 1), 0.0)]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_one_whose_time_is_over_gets_no_slot_even_if_nothing_was_heard_of_it() -> None:
    book = Book(slots=1)
    book.ask(A, slot=True)
    book.ask(B, slot=True, for_s=1.0)
    book.ask(C, slot=True, for_s=60.0)
    book.now += 1.5
    assert book.release(A, 1) == [Withdraw(ticket(B)), Grant(ticket(C), 0.0)]


def test_a_slot_is_free_again_if_the_rate_would_be_too_late() -> None:
    book = Book(per_s=1.0, slots=2)
    assert book.ask(A, slot=True) == [Grant(ticket(A), 0.0)]
    assert book.ask(B, slot=True, for_s=0.5) == [Withdraw(ticket(B))]
    assert book.book.in_use == 1
    assert book.ask(B, slot=True, for_s=1.5) == [Grant(ticket(B), 1.0)]
    assert book.give_up(B) == []
    assert book.book.in_use == 1
    assert book.delay(C) == 1.0


def test_a_ticket_that_waits_or_has_a_slot_is_not_taken_twice() -> None:
    book = Book(slots=1)
    book.ask(A, slot=True)
    book.ask(B, slot=True)
    for asker in (A, B):
        with pytest.raises(ValueError, match="has asked already"):
            book.ask(asker, slot=True)
    assert book.release(A, 1) == [Grant(ticket(B), 0.0)]


def test_one_that_has_its_slot_may_look_for_an_earlier_permit() -> None:  # H176
    book = Book(per_s=1.0, slots=2)
    book.ask(B, slot=True)
    assert book.ask(A, slot=True) == [Grant(ticket(A), 1.0)]
    book.give_up(B)
    assert book.delay(A) == 0.0
    assert book.book.in_use == 1


def test_what_cannot_be_given_back_any_more_is_forgotten() -> None:
    book = Book(per_s=1.0, burst=3)
    for number in range(100):
        book.ask(A, number)
        book.now += 1.0
    assert len(book.book._permits) <= 4
    book.forget(A)
    assert len(book.book._permits) <= 1


# --- random histories -------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """One attempt that asks, uses, gives up, and dies; its messages are late, and keep their order."""

    asker: Asker
    alive: bool = True
    heard_at: float = 0.0
    told_at: float = 0.0
    number: int = 0
    waits: dict[int, float] = field(default_factory=dict)  # number to deadline
    due: dict[int, float] = field(default_factory=dict)
    granted: dict[int, float] = field(default_factory=dict)  # number to the moment in the book
    weights: dict[int, int] = field(default_factory=dict)
    uses: set[int] = field(default_factory=set)


class World:
    """Tasks around one book. What is late crosses what was sent before it in the other direction."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.seed = seed
        self.per_s = chance.choice([None, 0.5, 5.0, 50.0, 200.0])
        self.burst = chance.choice([1, 1, 3, 20])
        self.slots = chance.choice([0, 1, 2] if self.per_s else [1, 2, 5])
        self.book = PermitBook(self.per_s, self.burst, self.slots)
        self.now = 0.0
        self.todo: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.used: list[tuple[float, int]] = []  # when, and how much it really was
        self.above: list[tuple[float, int]] = []  # what of it was more than what was asked for
        self.weighs = chance.random() < 0.6
        self.tasks = [Task(Asker("op", n, 0)) for n in range(chance.randrange(1, 6))]

    def later(self, at: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.todo, (at, self.count, do))

    def run(self, until: float) -> None:
        while self.todo and self.todo[0][0] <= until:
            self.now, _, do = heapq.heappop(self.todo)
            do()
            self.book.check_invariants()
            inside = sum(len(task.uses) for task in self.tasks if task.alive)
            assert not self.slots or inside <= self.slots, f"seed {self.seed}: {inside} are inside"
        self.now = max(self.now, until if until < inf else self.now)

    def _latency(self) -> float:
        return self.chance.choice([0.0, 0.001, 0.001, 0.05, 0.3])

    def up(self, task: Task, do: Callable[[], list[PermitEffect]]) -> None:
        task.heard_at = max(task.heard_at, self.now + self._latency())
        self.later(task.heard_at, lambda: self.carry_out(do()) if task.alive else None)

    def carry_out(self, effects: list[PermitEffect]) -> None:
        by_asker = {task.asker: task for task in self.tasks}
        for effect in effects:
            task = by_asker[effect.ticket.asker]
            task.told_at = max(task.told_at, self.now + self._latency())
            if isinstance(effect, Grant):
                task.granted[effect.ticket.number] = self.now + effect.delay_s
                self.later(task.told_at, partial(self.hear_grant, task, effect.ticket.number, effect.delay_s))

    def ask(self, task: Task) -> None:
        task.number += 1
        number, for_s = task.number, self.chance.choice([0.01, 0.2, 1.0, 5.0])
        task.waits[number] = self.now + for_s
        needs_slot = self.slots > 0
        it = Ticket(task.asker, number)
        weight = task.weights[number] = self.chance.randint(1, self.burst) if self.weighs else 1
        self.up(task, lambda: self.book.ask(it, needs_slot, self.now + for_s, self.now, weight))
        ends_at = self.now + for_s * self.chance.choice([1.0, 1.0, self.chance.random()])  # or it is interrupted
        self.later(ends_at, lambda: self.give_up(task, number) if number in task.waits else None)

    def give_up(self, task: Task, number: int) -> None:
        if task.alive:
            del task.waits[number]
            self.up(task, lambda: self.book.give_up(Ticket(task.asker, number), self.now))

    def hear_grant(self, task: Task, number: int, delay_s: float) -> None:
        if not task.alive or number not in task.waits:
            return
        if self.now + delay_s > task.waits[number]:
            self.give_up(task, number)
        else:
            self.later(self.now + delay_s, lambda: self.use(task, number) if number in task.waits else None)

    def use(self, task: Task, number: int) -> None:
        if not task.alive:
            return
        del task.waits[number]
        weight = task.weights[number]
        weighed = self.chance.choice([weight, 0, weight // 2, weight + self.chance.choice([1, 30])])
        if not self.weighs:
            weighed = weight
        self.used.append((task.granted[number], weighed))
        self.above.append((task.granted[number], max(0, weighed - weight)))
        task.uses.add(number)
        takes_s = self.chance.choice([0.0, 0.1, 2.0])
        self.later(self.now + takes_s * self.chance.random(), lambda: self.correct(task, number, weighed))
        self.later(self.now + takes_s, lambda: self.release(task, number))

    def correct(self, task: Task, number: int, weighed: int) -> None:
        it, weight = Ticket(task.asker, number), task.weights[number]
        if task.alive and weighed != weight:
            self.up(task, lambda: self.book.correct(it, weight, weighed, self.now))

    def release(self, task: Task, number: int) -> None:
        if task.alive:
            task.uses.discard(number)
            self.up(task, lambda: self.book.release(task.asker, [number], self.now))

    def die(self, task: Task) -> None:
        """Nothing of it arrives any more, and a moment later the book hears that it is over."""
        task.alive = False

        def forget() -> None:
            self.carry_out(self.book.forget(self.now, *task.asker))
            self.tasks.append(Task(task.asker._replace(attempt=task.asker.attempt + 1)))

        self.later(self.now + self._latency(), forget)


def check_rate(
    uses: list[tuple[float, int]], per_s: float, burst: int, above: Sequence[tuple[float, int]] = ()
) -> None:
    """In no window weigh the uses more than the bucket allows, and what some weighed above what they had asked for."""
    uses = sorted(uses)
    for first in range(len(uses)):
        total = 0
        for last in range(first, min(len(uses), first + 60)):
            total += uses[last][1]
            window = uses[first][0], uses[last][0]
            allowed = burst + per_s * (window[1] - window[0])
            allowed += sum(weight for time, weight in above if window[0] <= time <= window[1])
            assert total <= allowed + 1e-4, f"{total} from {window[0]} to {window[1]}"


@pytest.mark.parametrize("seed", range(200))
def test_after_all_have_given_up_the_next_one_is_served_within_its_time(seed: int) -> None:
    """H111 H176: whatever timed out, was interrupted or died, and whatever crossed whatever."""
    world = World(seed)
    chance = world.chance
    for _ in range(chance.randrange(5, 80)):
        alive = [task for task in world.tasks if task.alive]
        if alive:
            task = chance.choice(alive)
            (world.die if chance.random() < 0.1 else world.ask)(task)
        world.run(world.now + chance.choice([0.0, 0.01, 0.1, 0.5]))
    for task in world.tasks:
        if task.alive and chance.random() < 0.5:
            world.die(task)
    world.run(inf)
    assert world.book.in_use == 0, f"seed {seed}: slots are lost"
    assert not world.book.contended
    if world.per_s is not None:
        check_rate(world.used, world.per_s, world.burst, world.above)
        world.now += EXPIRY_S + sum(weight for _, weight in world.above) / world.per_s
    patient = Ticket(Asker("op", 99, 0), 1)
    interval_s = 1.0 / world.per_s if world.per_s else 0.0
    (effect,) = world.book.ask(patient, world.slots > 0, world.now + interval_s, world.now)
    assert isinstance(effect, Grant), f"seed {seed}: it gets none within {interval_s} s"
    world.book.check_invariants()


@pytest.mark.parametrize("seed", range(100))
def test_permits_that_are_given_back_are_neither_lost_nor_doubled(seed: int) -> None:
    """H111 H176: those that are used keep to the rate, and the schedule forgets those that are not."""
    chance = random.Random(seed)
    per_s, burst = chance.choice([(1.0, 1), (10.0, 5), (200.0, 60), (1000.0, 200)])
    schedule = RateSchedule(per_s, burst)
    now, kept, open_ = 0.0, list[float](), dict[Permit, float]()
    for _ in range(200):
        due = schedule.due(now)
        permit = schedule.take(now)
        assert permit not in open_, "the same one is handed out twice"
        open_[permit] = due
        for one in [one for one in open_ if chance.random() < 0.3]:
            due = open_.pop(one)
            if chance.random() < 0.5:
                schedule.give_back(one)
            else:
                kept.append(due)
        now += chance.choice([0.0, 0.0, chance.expovariate(per_s)])
    for one in list(open_):
        schedule.give_back(one)
    check_rate([(one, 1) for one in kept], per_s, burst)
    assert schedule.due(max([now, *kept])) <= max([now, *kept]) + 1.0 / per_s + 1e-9, f"seed {seed}: some are lost"


# --- the task's half --------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal raises in a thread that waits."""


class Line:
    """As much of a context as the task's half needs, with a book at its other end. Time passes only while it waits.

    ``fails``: what a method raises the next time that it is called, before or after it has had its effect.
    """

    def __init__(self, book: PermitBook) -> None:
        self.book = book
        self.asker = A
        self.time = 0.0
        self.fails: dict[str, tuple[str, BaseException]] = {}
        self.part: PermitsPart

    def now(self) -> float:
        return self.time

    def timed_out(self, text: str) -> TimedOut:
        return TimedOut(text)

    def _fail(self, method: str, moment: str) -> None:
        if self.fails.get(method, ("",))[0] == moment:
            raise self.fails.pop(method)[1]

    def request(self, request: Any, timeout_s: float) -> float | None:
        self._fail("request", "before")
        _, number, needs_slot, left_s, weight = request
        effects = self.book.ask(Ticket(self.asker, number), needs_slot, self.time + left_s, self.time, weight)
        self.book.check_invariants()
        self._fail("request", "after")
        if not effects:
            self.time += timeout_s
            raise TimedOut("no answer")
        (effect,) = effects
        return effect.delay_s if isinstance(effect, Grant) else None

    def sleep(self, seconds: float) -> None:
        self._fail("sleep", "before")
        self.time += seconds

    def send_event(self, event: Any) -> None:
        self._fail("send_event", "before")
        match event:
            case ["give up", number]:
                self.book.give_up(Ticket(self.asker, number), self.time)
            case ["release", numbers]:
                self.book.release(self.asker, numbers, self.time)
            case ["correct", number, before, after]:
                self.book.correct(Ticket(self.asker, number), before, after, self.time)
            case ["more", most]:
                self.part.handle_event(["permits", self.book.take_ahead(self.asker, most, self.time)])
        self.book.check_invariants()

    def send_event_nowait(self, event: Any) -> None:
        self._fail("send_event_nowait", "before")
        self.more = event


def a_task(book: PermitBook, *, ahead: bool = False) -> tuple[PermitsPart, Line]:
    burst = 0 if book._schedule is None else 1_000
    part = PermitsPart("api", burst, book._slots > 0, ahead)
    line = Line(book)
    line.part = part
    open_alone(part, line)
    return part, line


LIMITS: list[tuple[float | None, int]] = [(1.0, 0), (None, 1), (1.0, 1)]
ENDS: list[BaseException] = [Interrupt(), AttemptOver("over"), TimedOut("no capacity"), ValueError("of handle_urgent")]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
@pytest.mark.parametrize("where", [("request", "before"), ("request", "after"), ("sleep", "before")], ids="-".join)
@pytest.mark.parametrize(("per_s", "slots"), LIMITS)
def test_whatever_ends_a_wait_gives_back_what_was_reserved(
    per_s: float | None, slots: int, where: tuple[str, str], end: BaseException
) -> None:
    book = PermitBook(per_s, 1, slots)
    part, line = a_task(book)
    if per_s is not None:
        part.acquire(1, 10.0)
        if slots:
            part.release()
            part.handle_event(["contended", 1, True])  # so that it asks for the next slot too
    elif where[0] == "sleep":
        return  # nothing sleeps without a rate
    line.fails[where[0]] = where[1], end
    with pytest.raises(type(end) if not isinstance(end, TimedOut) else TimedOut):
        part.acquire(1, 10.0)
    assert book.in_use == 0
    (effect,) = book.ask(Ticket(B, 1), slots > 0, inf, line.time)
    assert isinstance(effect, Grant)
    assert effect.delay_s <= 1.0, "it is the next one, and not the one after that"
    if slots:
        with pytest.raises(LocalProtocolError, match="without an acquire"):
            part.release()


def test_a_slot_that_is_kept_stays_kept_if_the_rate_comes_too_late() -> None:
    book = PermitBook(1.0, 1, 2)
    part, _ = a_task(book)
    part.acquire(1, 1.0)
    part.release()
    assert book.in_use == 1
    for _ in range(5):
        with pytest.raises(TimedOut, match=r"no permit of 'api' within 0\.1 s"):
            part.acquire(1, 0.1)
    assert book.in_use == 1
    with pytest.raises(LocalProtocolError, match="without an acquire"):
        part.release()
    part.handle_event(["contended", 1, True])
    assert book.in_use == 0


def test_a_permit_held_ahead_is_kept_for_the_next_use_if_it_is_due_too_late() -> None:
    book = PermitBook(1000.0, 100, 0)
    part, line = a_task(book, ahead=True)
    part.handle_event(["permits", [0.09, 0.095]])
    with pytest.raises(TimedOut):
        part.acquire(1, 0.01)
    part.acquire(1, 1.0)
    assert line.time == pytest.approx(0.09)
    line.fails["sleep"] = "before", Interrupt()
    with pytest.raises(Interrupt):
        part.acquire(1, 1.0)
    part.acquire(1, 1.0)
    assert line.time == pytest.approx(0.095)


def test_what_cannot_be_given_back_now_is_given_back_by_the_next_call() -> None:
    book = PermitBook(None, 1, 1)
    part, line = a_task(book)
    no_capacity = "before", TimedOut("no capacity")
    line.fails = {"request": ("after", Interrupt()), "send_event": no_capacity}
    with pytest.raises(Interrupt):
        part.acquire(1, 1.0)
    assert book.in_use == 1, "the word has not left"
    part.acquire(1, 1.0)
    part.release()
    line.fails["send_event"] = no_capacity
    with pytest.raises(TimedOut):
        part.handle_event(["contended", 1, True])
    assert book.in_use == 1
    line.fails["request"] = "before", Interrupt()
    with pytest.raises(Interrupt):
        part.acquire(1, 1.0)
    assert book.in_use == 0


def test_news_that_others_wait_counts_even_if_older_news_comes_after_it() -> None:
    book = PermitBook(None, 1, 1)
    part, _ = a_task(book)
    part.handle_event(["contended", 3, True])
    part.handle_event(["contended", 2, False])
    part.acquire(1, 1.0)
    part.release()
    assert book.in_use == 0


def test_a_task_that_has_no_capacity_for_permits_ahead_asks_for_each_use() -> None:
    book = PermitBook(1000.0, 100, 0)
    part, line = a_task(book, ahead=True)
    for _ in range(3):
        line.fails["send_event_nowait"] = "before", GatewayFull("full")
        part.acquire(1, 1.0)
    assert line.time <= EXPIRY_S
    part.acquire(1, 1.0)
    assert line.more == ["more", part._ahead]


def test_a_task_that_waits_long_gets_the_permits_of_those_that_give_up() -> None:
    book = PermitBook(0.1, 1, 0)
    part, line = a_task(book)
    for number in range(20):
        book.ask(Ticket(B, number), False, inf, 0.0)
    sleep = line.sleep

    def give_up_meanwhile(seconds: float) -> None:
        sleep(seconds)
        book.forget(line.time, *B)

    line.sleep = give_up_meanwhile  # type: ignore[method-assign]
    part.acquire(1, 600.0)
    assert line.time <= 30.0, "it waits for its look, and for one interval"


# --- coroutines -------------------------------------------------------------------------------------------------------


class LoopLine(Line):
    """A line for coroutines. The book's slots are answered when they are free."""

    def __init__(self, book: PermitBook) -> None:
        super().__init__(book)
        self.waiting: dict[Ticket, asyncio.Future[Any]] = {}
        self.full = 0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def carry_out(self, effects: list[PermitEffect]) -> None:
        self.book.check_invariants()
        for effect in effects:
            answer = self.waiting.pop(effect.ticket)
            if not answer.done():
                answer.set_result(effect.delay_s if isinstance(effect, Grant) else None)

    async def request_async(self, request: Any, timeout_s: float) -> Any:
        _, number, needs_slot, left_s, weight = request
        it, now = Ticket(self.asker, number), self.now()
        answer = self.waiting[it] = asyncio.get_running_loop().create_future()
        self.carry_out(self.book.ask(it, needs_slot, now + left_s, now, weight))
        return await answer

    def send_event_nowait(self, event: Any) -> None:
        if self.full:
            self.full -= 1
            raise GatewayFull("full")
        now = self.now()
        match event:
            case ["give up", number]:
                self.carry_out(self.book.give_up(Ticket(self.asker, number), now))
            case ["release", numbers]:
                self.carry_out(self.book.release(self.asker, numbers, now))
            case ["correct", number, before, after]:
                self.carry_out(self.book.correct(Ticket(self.asker, number), before, after, now))


def permits_of(part: PermitsPart) -> PermitsInTask:
    permits = PermitsInTask("api")
    permits._part = lambda: part  # type: ignore[method-assign]
    return permits


def on_a_loop(book: PermitBook, burst: int = 0) -> tuple[LoopLine, PermitsInTask]:
    part, line = PermitsPart("api", burst, book._slots > 0, False), LoopLine(book)
    line.part = part
    open_alone(part, line)
    return line, permits_of(part)


@pytest.mark.anyio
@pytest.mark.parametrize("full", [0, 1], ids=["capacity", "no capacity"])
@pytest.mark.parametrize("seed", range(5))
async def test_coroutines_that_are_cancelled_give_everything_back(seed: int, full: int) -> None:  # H176
    chance, book = random.Random(seed), PermitBook(None, 1, 3)
    line, permits = on_a_loop(book)
    inside: list[int] = []

    async def use(number: int) -> None:
        async with permits:
            inside.append(number)
            assert len(inside) <= 3
            await asyncio.sleep(0.001 * chance.random())
            inside.remove(number)

    async def cancelled(number: int) -> None:
        with anyio.move_on_after(0.01 * chance.random()):
            try:
                await use(number)
            finally:
                inside[:] = [one for one in inside if one != number]

    line.full = full
    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(cancelled, number)
    await use(-1)
    with anyio.fail_after(60.0):
        while book.in_use > 1:  # noqa: ASYNC110 - one is kept for the next use, and the rest may leave later
            await asyncio.sleep(0.01)
    assert not book.contended
    assert not book._later


@pytest.mark.anyio
async def test_a_use_with_a_weight_is_corrected_in_a_coroutine_and_on_a_thread() -> None:  # H111
    book = PermitBook(0.001, 10, 0)
    _, permits = on_a_loop(book, 10)
    async with permits.weight(10) as used:
        used.correct(4)
        with pytest.raises(LocalProtocolError, match=r"correct\(\) was called twice"):
            used.correct(4)
    async with permits.weight(6):
        pass
    with pytest.raises(LocalProtocolError, match="entered twice"):
        async with used:
            pass
    with pytest.raises(LocalProtocolError, match=r"has the weight 11, but their burst is 10.*or divide the use"):
        async with permits.weight(11):
            pass
    with pytest.raises(LocalProtocolError, match="a use that has not begun"):
        permits.weight(1).correct(1)
    for blocking, named in (
        (permits.acquire, r"use `await acquire_async\(\.\.\.\)`"),
        (permits.__enter__, "use `async with permits`"),
        (permits.weight(1).__enter__, r"use `async with permits\.weight"),
    ):
        with pytest.raises(LocalProtocolError, match=named):
            blocking()


@pytest.mark.parametrize("burst", [10, 0])
def test_a_weight_that_no_use_can_have_is_refused_where_it_is_given(burst: int) -> None:
    """On the driver too, and in a task before the block."""
    permits = Permits("tokens", per_s=5.0, burst=burst) if burst else Permits("tokens", concurrency=2)
    for here in (permits, pickle.loads(pickle.dumps(permits))):
        with pytest.raises(LocalProtocolError, match="has the weight 11, but" if burst else "they limit no rate"):
            here.weight(11)


def test_a_weight_needs_a_rate() -> None:
    part, _ = a_task(PermitBook(None, 1, 1))
    with pytest.raises(LocalProtocolError, match="was given a weight, but they limit no rate"):
        part.acquire(2, 1.0)


def test_a_use_on_a_thread_waits_for_its_weight_and_corrects_it() -> None:  # H111
    part, line = a_task(PermitBook(1.0, 10, 0))
    permits = permits_of(part)
    with permits.weight(10) as used:
        used.correct(7)
    with permits.weight(3):
        assert line.time == 0.0
    with permits.weight(3) as used:
        assert line.time == 3.0
    used.correct(13)
    with permits.weight(1):
        assert line.time == 14.0
