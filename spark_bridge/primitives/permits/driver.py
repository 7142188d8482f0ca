# SPDX-License-Identifier: Apache-2.0

"""The driver's half of permits: answers what the tasks of all operators ask, as the book decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from actors.coordination import OperatorCoordinator, Reply, SubtaskGateway
from protocol.arguments import AT_LEAST_1, NAME, POSITIVE, checked
from protocol.describing import show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from spark_bridge.primitives.permits.book import Grant, PermitBook, PermitEffect
from spark_bridge.primitives.permits.schedule import RateSchedule
from spark_bridge.primitives.permits.task import WEIGHT_MAX, PermitsInTask, PermitsPart
from spark_bridge.primitives.primitive import Half, Primitive, tell_all
from spark_bridge.primitives.tickets import Asker, Ticket
from spark_bridge.subtask.operator import SubtaskOperator


class Permits(PermitsInTask, Primitive):
    """A rate and a number of concurrent users that all tasks keep to together, such as those of an external service.

    ``sidecar.permits(name, per_s=20)`` makes it, and ``coordinate(..., uses=[permits])`` gives it to an operator;
    several operators may share it. In the functions that the tasks run, ``with permits:`` waits for a permit, and in
    coroutines ``async with permits:``, of which thousands may wait.

    In any ``w`` seconds at most ``burst + per_s * w`` uses are allowed, over all tasks. ``with permits.weight(1200) as
    used:`` is a use that counts as so many, such as the tokens of a call; the sum of the weights has that bound.
    ``used.correct(900)`` says what it really was. The bound holds for the corrected weights too if none is above what
    was asked for. What is above it was used already: so it comes on top, and all later uses wait until the rate has
    made up for it.

    If ``per_s`` is at least 100, and ``burst`` more than a twentieth of it, the tasks hold a few permits ahead of need,
    so that the usual use costs no round trip; a task that dies takes those of about a tenth of a second with it. From
    the first use with a weight above 1 on, each use asks the driver. At most ``concurrency`` tasks or threads are
    inside ``with permits:`` at the same time. The places of an attempt that is lost become free
    when Spark or the sidecar knows that it is over.

    Waiting tasks are served in the order in which they ask. What was reserved for a task that stops waiting, because of
    its timeout, an error, or its death, goes to the next one that asks. A task that already waits for a later permit
    looks for such an earlier one every few seconds.

    A task that asks several times, from several threads, waits with its first request only; the others take their turn
    after it. So a task that stands still or dies delays others by one permit, or by a tenth of a second. It
    keeps the places that it has until it is known to be over: if its connection is lost, it may still be inside.

    Args:
        name: the name of the part, at most 200 characters.
        per_s: permits a second, a finite number above 0. None for no limit.
        burst: how many permits may be used at one moment after a pause, at least 1. No use can have a larger weight.
        concurrency: how many may be in use at the same time, at least 1. None for no limit.

    Raises:
        ValueError: there is no limit at all, a limit is too small, or the name is unsuitable.
    """

    outside_checkpoints = True

    @checked(name=NAME, per_s=POSITIVE, burst=AT_LEAST_1, concurrency=AT_LEAST_1)
    def __init__(
        self, name: str, *, per_s: float | None = None, burst: int = 1, concurrency: int | None = None
    ) -> None:
        PermitsInTask.__init__(self, name, 0 if per_s is None else burst)
        Primitive.__init__(self, name)
        if per_s is None and concurrency is None:
            raise ValueError(f"permits {name!r} limit nothing: pass per_s, concurrency or both")
        self._slots = concurrency or 0
        self._desk = _Desk(PermitBook(per_s, burst, self._slots), burst)
        self._hands_out_ahead = per_s is not None and RateSchedule(per_s, burst).shares

    def __reduce__(self) -> Any:
        return PermitsInTask, (self._name, self._burst)

    @property
    def in_use(self) -> int:
        """How many of the ``concurrency`` are taken now: by those inside, and by tasks that keep one for the next use.

        For any thread."""
        return self._desk.book.in_use

    def figures(self) -> dict[str, float]:
        return {"in_use": self.in_use}

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return _Coordinator(self._name, self._desk, operator_id)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(PermitsPart, self._name, self._burst or 0, self._slots > 0, self._hands_out_ahead)


class _Desk:
    """Carries out what the book of one ``Permits`` decides, for all operators that use it. On the loop.

    Attributes:
        changes: how often ``contended`` has changed. Tasks may hear of changes in another order.
    """

    def __init__(self, book: PermitBook, burst: int) -> None:
        self.book = book
        self.burst = burst
        self.contended = False
        self.changes = 0
        self._halves: dict[str, _Coordinator] = {}
        self._replies: dict[Ticket, Reply] = {}
        self._timer: float | None = None

    async def attach(self, half: _Coordinator) -> None:
        """An operator uses these permits."""
        self._halves[half.operator_id] = half

    async def detach(self, half: _Coordinator) -> None:
        """It has ended."""
        self._halves.pop(half.operator_id, None)
        self.forget(half)

    def forget(self, half: _Coordinator, subtask: int | None = None, attempt: int | None = None) -> None:
        """These attempts of the operator are over."""
        self._timer = None  # it may have been one of the operator's, and end with it
        self.carry_out(self.book.forget(half.now, half.operator_id, subtask, attempt), half.now)

    def ask(self, half: _Coordinator, ticket: Ticket, needs_slot: bool, timeout_s: float, weight: int) -> Reply:
        """Answer with the time to wait as soon as there is what is needed; with None if it would come too late."""
        effects = self.book.ask(ticket, needs_slot, half.now + timeout_s, half.now, weight)
        self._replies[ticket] = reply = Reply()
        self.carry_out(effects, half.now)
        return reply

    def carry_out(self, effects: Sequence[PermitEffect], now: float) -> None:
        todo = list(effects)
        for effect in todo:
            reply = self._replies.pop(effect.ticket)
            if isinstance(effect, Grant) and reply.over:  # its attempt is over, which this half has yet to hear
                todo += self.book.give_up(effect.ticket, now)
            else:
                reply.answer(effect.delay_s if isinstance(effect, Grant) else None)
        if self.contended != self.book.contended:
            self.contended = self.book.contended
            self.changes += 1
            for one in list(self._halves.values()):
                one.tell_contended()
        self._arm(now)

    def _arm(self, now: float) -> None:
        due = self.book.next_deadline(now)
        if due is None or not self._halves or (self._timer is not None and now < self._timer <= due):
            return
        self._timer = due
        half = next(iter(self._halves.values()))
        half.context.call_later(max(0.0, due - now), partial(self._wake, half))

    async def _wake(self, half: _Coordinator) -> None:
        self._timer = None
        self.carry_out(self.book.pass_time(half.now), half.now)


class _Coordinator(Half[_Desk]):
    """Passes on what one operator's tasks want."""

    kind = "permits"

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        match request:
            case [str("acquire"), int(number), bool(needs_slot), int() | float() as timeout_s, int(weight)] if (
                number > 0 <= timeout_s and 0 < weight <= self._desk.burst
            ):
                ticket = Ticket(Asker(self.operator_id, subtask, attempt), number)
                return self._desk.ask(self, ticket, needs_slot, timeout_s, weight)
            case _:
                raise RemoteProtocolError(f"not a request for permits: {show(request, 80)}; {SAME_RELEASE}")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        asker, book = Asker(self.operator_id, subtask, attempt), self._desk.book
        match event:
            case [str("more"), int(count)]:
                delays = None
                if book.hands_out_ahead:
                    delays = book.take_ahead(asker, min(max(count, 1), 1000), self.now)
                await self.context.gateways.send(subtask, ["permits", delays], attempt=attempt, urgent=True)
            case [str("give up"), int(number)] if number > 0:
                self._desk.carry_out(book.give_up(Ticket(asker, number), self.now), self.now)
            case [str("correct"), int(number), int(before), int(after)] if (
                number > 0 < before <= self._desk.burst and 0 <= after <= WEIGHT_MAX
            ):
                effects = book.correct(Ticket(asker, number), before, after, self.now)
                self._desk.carry_out(effects, self.now)
            case [str("release"), [*numbers]] if {int}.issuperset(map(type, numbers)):
                self._desk.carry_out(book.release(asker, numbers, self.now), self.now)
            case _:
                raise RemoteProtocolError(f"not an event of permits: {show(event, 80)}; {SAME_RELEASE}")

    def _contended(self) -> list[Any]:
        return ["contended", self._desk.changes, self._desk.contended]

    def tell_contended(self) -> None:
        """Tell all attempts whether some task waits for a slot."""
        tell_all(self.context, self._contended())

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        if self._desk.contended:
            await gateway.send_event(self._contended(), urgent=True)
