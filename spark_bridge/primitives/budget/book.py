# SPDX-License-Identifier: Apache-2.0

"""What is left of a budget, and who waits for some: pure, on the times that it is given.

All amounts are integers, in units of which ``UNITS`` are one. A request has a *ticket*: who asks, and its own number.

| what happens | a ticket that waits | one that has a reservation | any other |
|---|---|---|---|
| ``ask`` | refused | refused | reserved, exhausted, or it waits |
| ``settle``: it has cost so much | ignored | this is spent, and the rest is free | ignored |
| ``give_up``: the wait has ended without a use | waits no more | free again | ignored |
| ``refund``: it has cost nothing | ignored | free again | ignored |
| ``forget``: its attempt is over | waits no more | spent: it may have been used (H182) | ignored |
| its time ends before it can be served | waits no more | nothing | nothing |

Those that wait are served in their order. One waits only as long as what others have reserved may come back. If what
is spent leaves too little for it, it is exhausted.

What is spent never falls. If the budget is durable, nothing is reserved beyond ``ceiling``, which is in the storage: so
after the driver has died, no more than that was spent. ``wanted_ceiling`` says which one to write next.
"""

from __future__ import annotations

from typing import NamedTuple

from spark_bridge.primitives.tickets import Ticket

UNITS = 10**9
STEPS = 100
"""The ceiling is raised by this fraction of the total."""


class Reserved(NamedTuple):
    """Tell the asker that it may spend what it has asked for."""

    ticket: Ticket


class Exhausted(NamedTuple):
    """Tell the asker that there will never be so much."""

    ticket: Ticket
    amount: int


class Withdraw(NamedTuple):
    """Tell the asker that it gets nothing, if it still waits."""

    ticket: Ticket


BudgetEffect = Reserved | Exhausted | Withdraw


class _Wait(NamedTuple):
    amount: int
    until: float


class BudgetBook:
    """The accounts of one budget.

    Attributes:
        spent: what is spent for good, in this run and in earlier ones.
        reserved: what tasks have reserved and not settled.
        ceiling: what ``spent`` and ``reserved`` together may reach; None if it is not limited by a storage.
        granted, settled, refunded, lost: the sums of all reservations, and of how they have ended.
        above: how much more was spent than had been reserved for it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.spent = self.reserved = 0
        self.ceiling: int | None = None
        self.granted = self.settled = self.refunded = self.lost = self.above = 0
        self._step = max(1, total // STEPS)
        self._reserved: dict[Ticket, int] = {}
        self._waiting: dict[Ticket, _Wait] = {}

    @property
    def left(self) -> int:
        """What is neither spent nor reserved."""
        return max(0, self.total - self.spent - self.reserved)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def restore(self, ceiling: int) -> None:
        """An earlier run may have spent so much."""
        self.spent = max(self.spent, ceiling)
        self.ceiling = self.spent

    def ask(self, ticket: Ticket, amount: int, until: float, now: float) -> list[BudgetEffect]:
        """Reserve ``amount``. Raises ``ValueError``, and changes nothing, if the ticket has asked already."""
        if ticket in self._waiting or ticket in self._reserved:
            raise ValueError(f"{ticket} has asked already")
        self._waiting[ticket] = _Wait(amount, until)
        return self.serve(now)

    def settle(self, ticket: Ticket, amount: int, now: float) -> list[BudgetEffect]:
        """What the ticket has reserved has cost ``amount``. More than was reserved is spent as well."""
        reserved = self._take(ticket)
        if reserved is None:
            return []
        self.settled += reserved
        self.spent += amount
        self.above += max(0, amount - reserved)
        return self.serve(now)

    def refund(self, ticket: Ticket, now: float) -> list[BudgetEffect]:
        """What the ticket has reserved was not spent."""
        reserved = self._take(ticket)
        if reserved is None:
            return []
        self.refunded += reserved
        return self.serve(now)

    def give_up(self, ticket: Ticket, now: float) -> list[BudgetEffect]:
        """The asker does not wait any more, and has spent nothing."""
        if self._waiting.pop(ticket, None) is None:
            return self.refund(ticket, now)
        return [Withdraw(ticket), *self.serve(now)]

    def forget(
        self, now: float, operator_id: str, subtask: int | None = None, attempt: int | None = None
    ) -> list[BudgetEffect]:
        """These attempts are over. They may have spent what they had reserved."""

        def is_over(ticket: Ticket) -> bool:
            asker = ticket.asker
            return operator_id == asker[0] and subtask in (None, asker[1]) and attempt in (None, asker[2])

        for ticket in [one for one in self._reserved if is_over(one)]:
            amount = self._reserved.pop(ticket)
            self.reserved -= amount
            self.spent += amount
            self.lost += amount
        gone = [one for one in self._waiting if is_over(one)]
        for ticket in gone:
            del self._waiting[ticket]
        return [*map(Withdraw, gone), *self.serve(now)]

    def serve(self, now: float) -> list[BudgetEffect]:
        """Serve those that wait, as far as there is something for them."""
        effects: list[BudgetEffect] = []
        blocked = False
        for ticket, (amount, until) in list(self._waiting.items()):
            used = self.spent + self.reserved
            if until < now:
                effects.append(Withdraw(ticket))
            elif self.spent + amount > self.total:
                effects.append(Exhausted(ticket, amount))
            elif blocked or used + amount > (self.total if self.ceiling is None else min(self.total, self.ceiling)):
                blocked = True
                continue
            else:
                self._reserved[ticket] = amount
                self.reserved += amount
                self.granted += amount
                effects.append(Reserved(ticket))
            del self._waiting[ticket]
        return effects

    def wanted_ceiling(self) -> int | None:
        """The ceiling to write now; None if the one that is written will do."""
        if self.ceiling is None:
            return None
        used = self.spent + self.reserved
        first = next((wait.amount for wait in self._waiting.values()), 0)
        wanted = max(self.spent, min(self.total, used + first + self._step))
        too_low = self.ceiling < min(wanted, used + first + self._step // 2)
        too_high = self.ceiling > used + first + 2 * self._step
        return wanted if (too_low or too_high) and wanted != self.ceiling else None

    def _take(self, ticket: Ticket) -> int | None:
        amount = self._reserved.pop(ticket, None)
        if amount is not None:
            self.reserved -= amount
        return amount

    def check_invariants(self) -> None:
        assert self.reserved == sum(self._reserved.values()), "the sum of the reservations is wrong"
        assert self.granted == self.settled + self.refunded + self.lost + self.reserved, (
            "a reservation is lost or doubled"
        )
        assert not self._reserved.keys() & self._waiting.keys(), "one that waits has a reservation"
        if not self.above and self.ceiling is not None:
            assert self.spent + self.reserved <= max(self.spent, self.total), "more is reserved than there is"
