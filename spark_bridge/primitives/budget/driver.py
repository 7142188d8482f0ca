# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a budget: answers what the tasks of all operators ask, as the book decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import anyio

from actors.coordination import OperatorCoordinator, Reply
from actors.logs import get_logger
from protocol.arguments import NAME, checked
from protocol.attempts import FailureReason
from protocol.describing import show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from spark_bridge.primitives.budget.book import (
    UNITS,
    BudgetBook,
    BudgetEffect,
    Exhausted,
    Reserved,
    Withdraw,
)
from spark_bridge.primitives.budget.task import AMOUNT, AMOUNT_MAX, BudgetInTask, BudgetPart, units_of
from spark_bridge.primitives.primitive import Half, Primitive
from spark_bridge.primitives.tickets import Asker, Ticket
from spark_bridge.storage import StorageFenced
from spark_bridge.storage.port import ValuePort, ValueUser
from spark_bridge.subtask.errors import BudgetExhausted
from spark_bridge.subtask.operator import SubtaskOperator

log = get_logger("headgate.budget")

CEILING = b"ceiling"
LAST_WRITE_S = 10.0
"""How long the last operator that uses a budget waits at its end until what was spent is written."""


class Budget(BudgetInTask, Primitive):
    """An amount, such as money or calls, that all tasks together may spend once, over all runs.

    ``sidecar.budget("usd", 50.0)`` makes it, and ``coordinate(..., uses=[budget])`` gives it to an operator; several
    operators may share it. In the functions that the tasks run, ``with budget.reserve(0.02) as spent:`` reserves an
    amount before a call, and ``spent.settle(0.013)`` says what the call has cost. In coroutines it is ``async with``.

    What is spent and what is reserved are never more than the total together. Only a task that settles for more than it
    has reserved can exceed it, by so much. What an attempt had reserved when it was lost is spent, because it may have
    used it. No retry, restart or restore gives anything back. When there will never be enough for a reservation, it
    raises ``BudgetExhausted``. A job whose task fails with that ends with it, and is not restarted.

    Amounts are exact to a billionth: they are rounded to it, added as integers, and do not drift.

    With ``SidecarConfig.storage``, the next run of the program continues with what is left under this name: with a
    larger total there is more, and with one below what is spent, the budget is exhausted. What is spent is written
    when the last operator that uses the budget ends. Before that, a ceiling above it is written, in advance, and
    nothing is reserved beyond it. So if the driver is killed, that ceiling counts as spent: it is above what was really
    spent by what was reserved, or waited first, at the last write, and by at most a fiftieth of the total. Of two
    programs that use one storage, the later one has it, as for checkpoints. Without a storage, the budget lives as long
    as this object.

    Args:
        name: the name of the part, at most 200 characters. The next run finds the budget by it.
        total: how much may be spent, in all runs together: an int, float or ``Decimal`` from 0.000000001 to
            9000000000.
        values: where the ceiling is kept; ``sidecar.budget`` sets it.

    Raises:
        ValueError: the total is too small or too large, or the name is unsuitable.
    """

    outside_checkpoints = True

    @checked(name=NAME, total=AMOUNT)
    def __init__(self, name: str, total: float | Decimal, *, values: Callable[[], ValuePort] | None = None) -> None:
        BudgetInTask.__init__(self, name)
        Primitive.__init__(self, name)
        self._desk = _Desk(name, BudgetBook(units_of("total", total)), values)

    def __reduce__(self) -> Any:
        return BudgetInTask, (self._name,)

    @property
    def total(self) -> float:
        """How much may be spent, in all runs together. For any thread."""
        return self._desk.book.total / UNITS

    @property
    def spent(self) -> float:
        """What is spent, in all runs together. It never falls. For any thread.

        What earlier runs have spent is known when the first operator that uses the budget has started."""
        return self._desk.book.spent / UNITS

    @property
    def reserved(self) -> float:
        """What tasks have reserved now and not settled. For any thread."""
        return self._desk.book.reserved / UNITS

    @property
    def left(self) -> float:
        """What is neither spent nor reserved, at least 0. For any thread."""
        return self._desk.book.left / UNITS

    def figures(self) -> dict[str, float]:
        """Return what the status shows. For any thread.

        ``limit`` is the total, of which ``spent_total`` is spent, ``reserved`` is reserved now, and ``left`` is
        neither. ``lost_total`` is what lost attempts had reserved in this run, and ``above_total`` what was spent in it
        beyond what had been reserved. ``waiting`` is how many reservations wait.
        """
        book = self._desk.book
        return {
            "limit": self.total,
            "left": self.left,
            "reserved": self.reserved,
            "spent_total": self.spent,
            "lost_total": book.lost / UNITS,
            "above_total": book.above / UNITS,
            "waiting": book.waiting,
        }

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return _Coordinator(self._name, self._desk, operator_id)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(BudgetPart, self._name)


class _Desk:
    """Carries out what the book of one ``Budget`` decides, for all operators that use it. On the loop."""

    def __init__(self, name: str, book: BudgetBook, values: Callable[[], ValuePort] | None) -> None:
        self.book = book
        self._name = name
        self._values = values
        self._warned = False
        self._port: ValuePort | None = None
        self._changing = anyio.Lock()
        self._halves: dict[str, _Coordinator] = {}
        self._replies: dict[Ticket, Reply] = {}
        self._written_bytes: bytes | None = None  # what is in the storage
        self._writing: int | None = None  # the ceiling that is being written
        self._idle = anyio.Event()

    async def attach(self, half: _Coordinator) -> None:
        """An operator uses this budget. Raises ``StorageError`` if what was spent cannot be read."""
        async with self._changing:
            if self._values is None:
                if not self._warned:
                    self._warned = True
                    log.warning("budget kept in memory only, because the sidecar has no storage", budget=self._name)
            elif self._port is None:
                port = self._values()
                user = ValueUser(self._written, self._failed, lambda key: self._written_bytes, lambda: 100)
                entries = dict(await port.open(user))
                self._written_bytes = entries.get(CEILING, b"0")
                self._port, self._writing = port, None
                self.book.restore(int(self._written_bytes))
                self._write(self.book.spent)  # after what an earlier operator may still be writing
            self._halves[half.operator_id] = half

    async def detach(self, half: _Coordinator) -> None:
        """It has ended. With the last one, what was really spent is written."""
        async with self._changing:
            self._halves.pop(half.operator_id, None)
            self.forget(half)
            if self._port is not None and not self._halves:
                self._write(self.book.spent)
                with anyio.move_on_after(LAST_WRITE_S) as limit:
                    while self._writing is not None:
                        self._idle = anyio.Event()
                        await self._idle.wait()
                if limit.cancelled_caught:
                    log.warning("what was spent not written, so the next run finds a ceiling", budget=self._name)
                self._port.close()
                self._port = None

    def forget(self, half: _Coordinator, subtask: int | None = None, attempt: int | None = None) -> None:
        """These attempts of the operator are over."""
        self.carry_out(self.book.forget(half.now, half.operator_id, subtask, attempt), half.now)

    def reserve(self, half: _Coordinator, ticket: Ticket, units: int, timeout_s: float) -> Reply:
        """Answer as soon as it is decided."""
        try:
            effects = self.book.ask(ticket, units, half.now + timeout_s, half.now)
        except ValueError as error:
            raise RemoteProtocolError(f"{error}; {SAME_RELEASE}") from error
        self._replies[ticket] = reply = Reply()
        self.carry_out(effects, half.now)
        return reply

    def carry_out(self, effects: Sequence[BudgetEffect], now: float) -> None:
        todo = list(effects)
        for effect in todo:
            reply = self._replies.pop(effect.ticket)
            match effect:
                case Reserved(ticket) if reply.over:  # its attempt or its wait is over, which this half has yet to hear
                    todo += self.book.give_up(ticket, now)
                case Reserved():
                    reply.answer("")
                case Exhausted(ticket, amount):
                    self._halves[ticket.asker.operator_id].refused.add(ticket.asker[1:])
                    reply.answer(self.exhausted(amount))
                case Withdraw():
                    reply.answer(None)
        if self._port is None or self._writing is not None or not self._halves:
            return
        if (ceiling := self.book.wanted_ceiling()) is not None:
            self._write(ceiling)

    def exhausted(self, amount: int | None = None) -> str:
        """What ``BudgetExhausted`` says."""
        spent, total = self.book.spent, self.book.total
        wanted = "" if amount is None else f"{shown(amount)} was to be reserved, but "
        return (
            f"the budget {self._name!r} is exhausted: {wanted}{shown(spent)} of {shown(total)} is spent, in this run "
            "and in earlier ones. Pass a larger total to sidecar.budget() to go on"
        )

    # --- the ceiling in the storage -----------------------------------------------------------------------------------

    def _write(self, ceiling: int) -> None:
        """Write a ceiling. Meanwhile the lower one of both holds."""
        assert self._port is not None
        assert self.book.ceiling is not None
        self._writing = ceiling
        self.book.ceiling = min(self.book.ceiling, ceiling)
        self._port.append(CEILING, b"%d" % ceiling)

    def _written(self, entries: Mapping[bytes, bytes]) -> None:
        self._written_bytes = entries.get(CEILING, self._written_bytes)
        if self._writing is None or self._written_bytes != b"%d" % self._writing:
            return  # of an earlier operator: a later one follows
        self.book.ceiling, self._writing = self._writing, None
        self._idle.set()
        now = next((half.now for half in self._halves.values()), 0.0)
        self.carry_out(self.book.serve(now), now)

    def _failed(self, error: Exception) -> None:
        """A ceiling was not written; the port tries again. Meanwhile those wait that need a higher one."""
        if isinstance(error, StorageFenced):
            for half in list(self._halves.values()):
                half.context.fail_job(error)


def shown(units: int) -> str:
    """An amount for people."""
    return f"{(Decimal(units) / UNITS).normalize():f}"


class _Coordinator(Half[_Desk]):
    """Passes on what one operator's tasks want.

    Attributes:
        refused: subtask and attempt of those that were told that the budget is exhausted.
    """

    kind = "a budget"

    def __init__(self, name: str, desk: _Desk, operator_id: str) -> None:
        super().__init__(name, desk, operator_id)
        self.refused: set[tuple[Any, ...]] = set()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        match request:
            case [str("reserve"), int(number), int(units), int() | float() as timeout_s] if (
                number > 0 <= timeout_s and 0 < units <= AMOUNT_MAX * UNITS
            ):
                ticket = Ticket(Asker(self.operator_id, subtask, attempt), number)
                return self._desk.reserve(self, ticket, units, timeout_s)
            case _:
                raise RemoteProtocolError(f"not a request for a budget: {show(request, 80)}; {SAME_RELEASE}")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        asker, desk = Asker(self.operator_id, subtask, attempt), self._desk
        match event:
            case [str("settle"), int(number), int(units)] if number > 0 and 0 <= units <= AMOUNT_MAX * UNITS:
                desk.carry_out(desk.book.settle(Ticket(asker, number), units, self.now), self.now)
            case [str("refund"), int(number)] if number > 0:
                desk.carry_out(desk.book.give_up(Ticket(asker, number), self.now), self.now)
            case _:
                raise RemoteProtocolError(f"not an event of a budget: {show(event, 80)}; {SAME_RELEASE}")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        was_refused = (subtask, attempt) in self.refused
        await super().subtask_failed(subtask, attempt, reason)
        if was_refused and BudgetExhausted.__name__ in reason.text:
            self.context.fail_job(BudgetExhausted(self._desk.exhausted()))

    def forget(self, subtask: int | None = None, attempt: int | None = None) -> None:
        super().forget(subtask, attempt)
        if subtask is None:
            self.refused.clear()
        else:
            self.refused.discard((subtask, attempt))
