# SPDX-License-Identifier: Apache-2.0

"""Who waits for permits, and what is handed out: pure, on the times that it is given.

A request has a *ticket*: who asks, and its own number. It waits for a slot, if it needs one, in the order of arrival.
Then it is answered with the moment from which a permit of the rate may be used; its task waits until then by itself. So
a task that waits for the rate asks nothing meanwhile, and can take part in a checkpoint.

What one attempt has reserved keeps others waiting for little (H157). An attempt has one request in the queue for slots.
If it has a permit that is not due, it gets another one only if that is due within ``AHEAD_S``. Its other requests wait
behind its own, and take their turn when that is over. So one that asks a thousand times, and then stands still or dies,
delays others by one permit, or ``AHEAD_S`` of them.

A permit has a weight. ``correct`` says what a use really weighed. If that is less, the rest is given back, and is there
for others as long as it is valid (see ``schedule``). If it is more, whatever is handed out from then on comes later.

What is reserved for a ticket ends with its wait, its attempt or its time, whichever is first (H176):

| what happens | a ticket that waits | one that was granted | any other |
|---|---|---|---|
| ``ask`` again | refused | its permit becomes an earlier one, if one was given back | a new wait |
| ``give_up``: its wait has ended without a use | waits no more | slot and permit are free again | ignored |
| ``release``: its use is over | ignored | the slot is free again | ignored |
| ``correct``: its use weighed less | ignored | the rest of its permit is free again | ignored |
| ``correct``: its use weighed more | later permits come later | the same | the same |
| ``forget``: its attempt is over | waits no more | the slot is free again, and the permit if it is not due | ignored |
| its time ends before it can be served | waits no more, and gets nothing | nothing | nothing |

A request and the word that it was given up arrive in this order, so the word also finds a grant that it has crossed.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import NamedTuple

from spark_bridge.primitives.permits.schedule import AHEAD_S, Permit, RateSchedule
from spark_bridge.primitives.tickets import Asker, Ticket

_ROUNDING_S = 1e-6


class Grant(NamedTuple):
    """Tell the asker that it may begin after ``delay_s``."""

    ticket: Ticket
    delay_s: float


class Withdraw(NamedTuple):
    """Tell the asker that it gets nothing, if it still waits."""

    ticket: Ticket


PermitEffect = Grant | Withdraw


class _Request(NamedTuple):
    """What a ticket waits for, and until when."""

    needs_slot: bool
    until: float
    weight: int


class PermitBook:
    """What one ``Permits`` hands out. ``slots``: how many may be in use at a time; 0 for any number.

    Attributes:
        in_use: how many slots are taken.
    """

    def __init__(self, per_s: float | None, burst: int, slots: int) -> None:
        self.in_use = 0
        self._slots = slots
        self._schedule = None if per_s is None else RateSchedule(per_s, burst)
        self._waiting: dict[Ticket, _Request] = {}  # for a slot
        self._waits: dict[Asker, set[int]] = {}  # their numbers
        self._held: dict[Asker, set[int]] = {}  # the numbers of those with a slot
        self._permits: dict[Ticket, Permit] = {}  # of the rate, as long as they can be given back
        self._later: dict[Asker, dict[int, _Request]] = {}  # behind others of their attempt, by their numbers
        self._reserved: dict[Asker, tuple[Ticket, float]] = {}  # the last permit of each, and when it is due
        self._ahead = count(-1, -1)  # numbers for permits that nobody has asked for one by one

    @property
    def contended(self) -> bool:
        """Whether somebody waits for a slot, so that nobody keeps one for later."""
        return bool(self._waiting)

    @property
    def hands_out_ahead(self) -> bool:
        """Whether permits may be held ahead of need: not if single ones have a weight."""
        return self._schedule is not None and self._schedule.shares

    def ask(self, ticket: Ticket, needs_slot: bool, until: float, now: float, weight: int = 1) -> list[PermitEffect]:
        """Wait for a slot, if one is needed, and get a permit of the rate, if that is limited.

        From the first weight above 1 on, no permits are handed out ahead of need.

        Raises ``ValueError``, and changes nothing, if the ticket waits already, or has a slot and needs another one.
        """
        asker, number = ticket
        if (
            number in self._waits.get(asker, ())
            or (needs_slot and number in self._held.get(asker, ()))
            or number in self._later.get(asker, ())
        ):
            raise ValueError(f"{ticket} has asked already")
        effects: list[PermitEffect] = []
        request = _Request(needs_slot and self._slots > 0, until, weight)
        if weight > 1 and self._schedule is not None:
            self._schedule.stop_sharing(now)
        self._give_back_permit(ticket)  # what comes now is not later
        if asker in self._later or self._has_enough(asker, request, now):
            self._later.setdefault(asker, {})[number] = request
        else:
            self._begin(ticket, request, now, effects)
        return self._serve(now, effects)

    def next_deadline(self, now: float) -> float | None:
        """When ``pass_time`` has something to do; None if it waits for nothing but calls."""
        schedule = self._schedule
        if not self._later or schedule is None:
            return None
        due: list[float] = []
        for asker, waiting in self._later.items():
            due.append(schedule.due(now, next(iter(waiting.values())).weight) - AHEAD_S)
            if asker in self._reserved:
                due.append(self._reserved[asker][1])
        return max(now, min(due))

    def pass_time(self, now: float) -> list[PermitEffect]:
        """Serve those whose earlier permit is due now."""
        return self._serve(now, [])

    def take_ahead(self, asker: Asker, most: int, now: float) -> list[float]:
        """Hand out permits of the rate ahead of need, as far as they are due soon; return how long each is not due."""
        delays: list[float] = []
        schedule = self._schedule
        while schedule is not None and len(delays) < most and schedule.due(now) - now <= AHEAD_S:
            delays.append(schedule.due(now) - now)
            self._permits[Ticket(asker, next(self._ahead))] = schedule.take(now)
        self._forget_used(now)
        return delays

    def give_up(self, ticket: Ticket, now: float) -> list[PermitEffect]:
        """The asker does not wait any more, and uses nothing."""
        effects: list[PermitEffect] = []
        self._withdraw(ticket, effects)
        if ticket.number in self._later.get(ticket.asker, ()):
            self._leave_later(ticket)
            effects.append(Withdraw(ticket))
        self._free_slot(ticket)
        self._give_back_permit(ticket)
        return self._serve(now, effects)

    def correct(self, ticket: Ticket, before: int, after: int, now: float) -> list[PermitEffect]:
        """The use that asked for the weight ``before`` weighs ``after``."""
        if self._schedule is not None and after > before:
            self._schedule.add(now, after - before)
        elif self._schedule is not None and ticket in self._permits:
            self._permits[ticket] = self._schedule.shorten(self._permits[ticket], after)
        return self._serve(now, [])

    def release(self, asker: Asker, numbers: Collection[int], now: float) -> list[PermitEffect]:
        """The asker uses these slots no longer. Not more than it has: a hostile one may name any number."""
        for number in self._held.get(asker, set()).intersection(numbers):
            self._free_slot(Ticket(asker, number))
        return self._serve(now, [])

    def forget(
        self, now: float, operator_id: str, subtask: int | None = None, attempt: int | None = None
    ) -> list[PermitEffect]:
        """These attempts are over. A permit that one of them may have used is gone."""

        def is_over(asker: Asker) -> bool:
            return operator_id == asker[0] and subtask in (None, asker[1]) and attempt in (None, asker[2])

        effects: list[PermitEffect] = []
        if subtask is None or attempt is None:
            askers = [one for one in {*self._waits, *self._held, *self._later, *self._reserved} if is_over(one)]
        else:
            askers = [Asker(operator_id, subtask, attempt)]
        for asker in askers:
            effects += [Withdraw(Ticket(asker, number)) for number in self._later.pop(asker, {})]
            self._reserved.pop(asker, None)
            for number in list(self._waits.get(asker, ())):
                self._withdraw(Ticket(asker, number), effects)
            for number in list(self._held.get(asker, ())):
                self._free_slot(Ticket(asker, number))
        for ticket in [one for one in self._permits if is_over(one.asker)]:
            if self._schedule is not None and self._schedule.due_of(self._permits[ticket]) > now:
                self._give_back_permit(ticket)
            else:
                del self._permits[ticket]
        return self._serve(now, effects)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _has_enough(self, asker: Asker, request: _Request, now: float) -> bool:
        """Whether what the attempt has reserved comes before what it asks for now."""
        if request.needs_slot and asker in self._waits:
            return True
        ticket, due = self._reserved.get(asker, (None, now))
        if ticket not in self._permits or due <= now or self._schedule is None:
            return False
        return self._schedule.due(now, request.weight) - AHEAD_S > now  # as ``next_deadline`` has it

    def _begin(self, ticket: Ticket, request: _Request, now: float, effects: list[PermitEffect]) -> None:
        if request.needs_slot:
            self._waiting[ticket] = request
            self._waits.setdefault(ticket.asker, set()).add(ticket.number)
        else:
            effects.append(self._grant(ticket, request, now))

    def _serve(self, now: float, effects: list[PermitEffect]) -> list[PermitEffect]:
        self._serve_waiting(now, effects)
        while self._begin_later(now, effects):
            self._serve_waiting(now, effects)
        self._forget_used(now)
        return effects

    def _begin_later(self, now: float, effects: list[PermitEffect]) -> bool:
        """Let each attempt whose own requests are served take the next of them; return whether one did."""
        begun = False
        for asker, waiting in list(self._later.items()):
            number, request = next(iter(waiting.items()))
            ticket = Ticket(asker, number)
            if request.until < now:
                effects.append(Withdraw(ticket))
            elif self._has_enough(asker, request, now):
                continue
            else:
                self._begin(ticket, request, now, effects)
            begun = True
            self._leave_later(ticket)
        return begun

    def _leave_later(self, ticket: Ticket) -> None:
        waiting = self._later[ticket.asker]
        del waiting[ticket.number]
        if not waiting:
            del self._later[ticket.asker]

    def _serve_waiting(self, now: float, effects: list[PermitEffect]) -> None:
        while self._waiting:
            ticket, request = next(iter(self._waiting.items()))
            if request.until < now:
                self._withdraw(ticket, effects)
            elif self.in_use >= self._slots:
                break
            else:
                self._leave_queue(ticket)
                self._held.setdefault(ticket.asker, set()).add(ticket.number)
                self.in_use += 1
                effects.append(self._grant(ticket, request, now))
                if isinstance(effects[-1], Withdraw):
                    self._free_slot(ticket)

    def _grant(self, ticket: Ticket, request: _Request, now: float) -> PermitEffect:
        """Hand out a permit of the rate, unless it comes too late."""
        schedule = self._schedule
        due = now if schedule is None else schedule.due(now, request.weight)
        if due > request.until + _ROUNDING_S:
            return Withdraw(ticket)
        if schedule is not None:
            self._permits[ticket] = schedule.take(now, request.weight)
            self._reserved[ticket.asker] = ticket, due
        return Grant(ticket, due - now)

    def _leave_queue(self, ticket: Ticket) -> bool:
        if self._waiting.pop(ticket, None) is None:
            return False
        numbers = self._waits[ticket.asker]
        numbers.discard(ticket.number)
        if not numbers:
            del self._waits[ticket.asker]
        return True

    def _withdraw(self, ticket: Ticket, effects: list[PermitEffect]) -> None:
        if self._leave_queue(ticket):
            effects.append(Withdraw(ticket))

    def _free_slot(self, ticket: Ticket) -> None:
        numbers = self._held.get(ticket.asker, set())
        if ticket.number in numbers:
            numbers.discard(ticket.number)
            self.in_use -= 1
            if not numbers:
                del self._held[ticket.asker]

    def _give_back_permit(self, ticket: Ticket) -> None:
        permit = self._permits.pop(ticket, None)
        if permit is not None and self._schedule is not None:
            self._schedule.give_back(permit)

    def _forget_used(self, now: float) -> None:
        """Forget what cannot be given back any more. The last one can be at any time."""
        while self._permits and self._schedule is not None:
            ticket, permit = next(iter(self._permits.items()))
            if self._schedule.is_valid(permit, now) or self._schedule.is_last(permit):
                return
            del self._permits[ticket]

    def check_invariants(self) -> None:
        assert all(self._later.values()), "an asker without later requests is kept"
        assert all(len(numbers) == 1 for numbers in self._waits.values()), "an attempt waits for two slots in the queue"
        waiting = [Ticket(asker, number) for asker, numbers in self._waits.items() for number in numbers]
        assert sorted(self._waiting) == sorted(waiting), "one that waits is not in both lists"
        held = {Ticket(asker, number) for asker, numbers in self._held.items() for number in numbers}
        assert len(held) == self.in_use, "slots are lost or doubled"
        assert all(self._waits.values()), "an asker that does not wait is kept"
        assert all(self._held.values()), "an asker without slots is kept"
        assert not self._slots or self.in_use <= self._slots, "more slots are in use than there are"
        assert not self._waiting or self.in_use == self._slots, "one waits although a slot is free"
        assert not held & self._waiting.keys(), "one with a slot waits for one"
        assert not self._permits.keys() & self._waiting.keys(), "one that waits has a permit"
