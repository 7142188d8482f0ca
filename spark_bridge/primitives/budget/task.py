# SPDX-License-Identifier: Apache-2.0

"""The task's half of a budget, and what user code sees of it there.

to the coordinator   request ["reserve", number, units, timeout_s]   the answer is "" as soon as it is reserved; a text
                                                                     if there will never be so much; None if it would
                                                                     be too late
                     ["settle", number, units]                       it has cost so much
                     ["refund", number]                              it has cost nothing
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING

from protocol.arguments import WAIT, Rule, checked
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.budget.book import UNITS
from spark_bridge.primitives.waiting import Block, OnLoop, OnThread, Unsent, finished, waiting_here
from spark_bridge.subtask.context import refuse_on_loop
from spark_bridge.subtask.errors import BudgetExhausted, TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

AMOUNT_MIN, AMOUNT_MAX = 1 / UNITS, 9 * UNITS
"""In 64 bits, as units."""
AMOUNT = Rule(
    "a number from 0.000000001 to 9000000000",
    lambda value: AMOUNT_MIN <= value <= AMOUNT_MAX,
)
COST = Rule(
    "0 or a number from 0.000000001 to 9000000000",
    lambda value: value == 0 or AMOUNT_MIN <= value <= AMOUNT_MAX,
)


def units_of(name: str, amount: float | Decimal, rule: Rule = AMOUNT) -> int:
    """The amount, to the nearest unit. Raises ``ValueError`` for a ``Decimal`` against the rule."""
    exact = amount if isinstance(amount, Decimal) else Decimal(repr(amount))
    if not exact.is_finite() or not rule.accepts(exact if exact == 0 else float(exact)):
        raise ValueError(f"{name} must be {rule.expected}, not {amount}")
    return int((exact * UNITS).to_integral_value())


class BudgetPart(TaskPart):
    """What this task has reserved. For any thread, and any asyncio loop."""

    waits_for_subtask_ready = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests = 0
        self._unsent = Unsent()
        self._lock = threading.Lock()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def reserve(self, units: int, timeout_s: float) -> int:
        """Wait until so much is reserved; return the number of the reservation."""
        refuse_on_loop("with budget.reserve(...)", "async with budget.reserve(...)")
        return finished(self._reserve(OnThread(self._context), units, timeout_s))

    async def reserve_async(self, units: int, timeout_s: float) -> int:
        """``reserve`` in a coroutine, which may be cancelled."""
        return await self._reserve(OnLoop(self._context), units, timeout_s)

    async def _reserve(self, by: OnThread, units: int, timeout_s: float) -> int:
        self._unsent.send(by)
        with self._lock:
            number = self._requests = self._requests + 1
        try:
            answer: str | None = await by.request(["reserve", number, units, timeout_s], timeout_s)
            if answer is None:
                raise TimedOut("no answer in time")
        except BaseException as error:
            self._unsent.append(["refund", number])
            with suppress(Exception):  # what cannot leave now does so with the next call
                self._unsent.send(by)
            if isinstance(error, TimedOut):
                raise self.task.timed_out(
                    f"nothing was reserved of the budget {self._name!r} within {timeout_s:g} s: what is left is "
                    "reserved by others, or by this task, and may still be settled for less; wait longer, or reserve "
                    "less at the same time"
                ) from error
            raise
        if answer:
            raise BudgetExhausted(answer)
        return number

    def settle(self, number: int, units: int) -> None:
        self._send(["settle", number, units])

    def refund(self, number: int) -> None:
        self._send(["refund", number])

    def _send(self, event: list[str | int]) -> None:
        self._unsent.append(event)
        self._unsent.send(waiting_here(self._context))


class Reservation(Block):
    """A part of a budget for one use: ``with budget.reserve(0.02) as spent:``, or ``async with`` in a coroutine.

    It is for one block. At its end, what was reserved is spent, also if the block raises, unless ``settle`` or
    ``refund`` was called in it.
    """

    def __init__(self, part: Callable[[], BudgetPart], units: int, timeout_s: float) -> None:
        self._find = part
        self._units = units
        self._timeout_s = timeout_s
        self._number = 0
        self._open = False
        self._part: BudgetPart | None = None

    @checked(amount=COST)
    def settle(self, amount: float | Decimal) -> None:
        """Say what it has really cost, once, inside the block. The rest is there for others immediately.

        It may be more than was reserved: that is spent too, even beyond the total, and counted in the figures.

        Raises:
            ValueError: the amount is negative, too small or too large.
            LocalProtocolError: outside the block, or after ``settle`` or ``refund``.
            AttemptOver: the attempt is over. What was reserved is spent.
        """
        units = units_of("amount", amount, COST)
        self._end("settle").settle(self._number, units)

    def refund(self) -> None:
        """Say that nothing was spent, once, inside the block. What was reserved is there for others immediately.

        Raises as ``settle`` does.
        """
        self._end("refund").refund(self._number)

    def _end(self, what: str) -> BudgetPart:
        if self._part is None:
            raise LocalProtocolError(
                f"{what}() before the reservation: call it in `with budget.reserve(...) as spent:`"
            )
        if not self._open:
            raise LocalProtocolError(
                f"{what}() of a reservation that is settled already: call settle() or refund() once, in its block; at "
                "the end of the block, what was reserved is spent"
            )
        self._open = False
        return self._part

    def _begun(self) -> BudgetPart:
        if self._part is not None:
            raise LocalProtocolError("a reservation was entered twice: call budget.reserve(...) for each use")
        return self._find()

    def __enter__(self) -> Reservation:
        part = self._begun()
        self._number = part.reserve(self._units, self._timeout_s)
        self._part, self._open = part, True
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._open:
            part = self._end("settle")
            with suppress(*[Exception] if exception is not None else []):
                part.settle(self._number, self._units)

    async def __aenter__(self) -> Reservation:
        part = self._begun()
        self._number = await part.reserve_async(self._units, self._timeout_s)
        self._part, self._open = part, True
        return self


class BudgetInTask(PartInTask):
    """``Budget`` in a task."""

    _kind = "budget"
    _on_driver = ON_DRIVER | {"left", "reserved", "spent", "total"}

    @checked(amount=AMOUNT, timeout_s=WAIT)
    def reserve(self, amount: float | Decimal, *, timeout_s: float = 600.0) -> Reservation:
        """In a task: reserve an amount for one use, for ``with`` or ``async with``.

        ``with budget.reserve(0.02) as spent:`` waits until so much is reserved, and ``spent.settle(0.013)`` says in the
        block what it has cost. Without that, what was reserved is spent, also if the block raises: the call may have
        been paid. ``spent.refund()`` says that it was not. Thousands of coroutines may wait at the same time; a wait
        that is cancelled, or times out, reserves nothing.

        Args:
            amount: how much at most, to the nearest billionth.
            timeout_s: how many seconds to wait at most, while others may settle for less than they have reserved.

        Raises:
            BudgetExhausted: there will never be so much. If the task fails with it, the job fails with it, and is not
                restarted.
            TimedOut: nothing was reserved within ``timeout_s`` seconds.
            LocalProtocolError: outside a function that ``handle.subtask`` runs in tasks; or for ``with`` in a
                coroutine, where it would stop all others.
            AttemptOver: the attempt is over.
        """
        return Reservation(self._part, units_of("amount", amount), timeout_s)
