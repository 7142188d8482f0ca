# SPDX-License-Identifier: Apache-2.0

"""A coordinator's gateway to one attempt, and the bound on the events that it may send (H27).

All parts of an operator send to an attempt through the same ``AttemptSends``, in which each has its own bound (H150).
A ``Gateway`` is the sight that one incarnation of one part has of it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actors.coordination.confirmation import Confirmation
from actors.coordination.host.incarnation import Incarnation, Sender
from actors.logs import get_logger
from actors.repeated_lines import CountedLog
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.values import value
from protocol.wire.codec import WireLimits, encode_event

__all__ = ["AttemptSends", "Gateway", "SendBudget", "SendEvent"]

log = CountedLog(get_logger("headgate.coordinator"))


@value
class SendEvent:
    """The message to a gateway's actor about one event."""

    payload: bytes
    loss_tolerant: bool
    confirmation: Confirmation
    urgent: bool = False
    part: int = 0


class SendBudget:
    """Bounds one part's accepted and unsettled events at one gateway, in number and bytes (H27). Waiters keep order.

    A coordinator can wait, or be refused, only here: before its event enters the gateway's mailbox. Events that the
    gateway holds back count, and so do those that wait for a confirmation.
    """

    __slots__ = ("_bytes_max", "_events_max", "_waiters", "bytes", "events", "over")

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._waiters: list[asyncio.Future[None]] = []
        self.events = 0
        self.bytes = 0
        self.over: AttemptOver | None = None  # set as soon as the attempt is over, so that sends fail immediately (H14)

    def end(self, error: AttemptOver) -> None:
        """The attempt is over: wake everything that waits for capacity."""
        if self.over is None:
            self.over = error
            self._wake()

    def has_capacity(self, size: int) -> bool:
        """Whether an event of this size fits. One that exceeds the whole bound fits if nothing else is unsettled."""
        if self.over is not None:
            return True
        return self.events == 0 or (self.events < self._events_max and self.bytes + size <= self._bytes_max)

    def try_take(self, size: int) -> bool:
        """Take capacity without waiting. False if there is none or others wait first; True once the attempt is over."""
        if self.over is None and (self._waiters or not self.has_capacity(size)):
            return False
        self.events += 1
        self.bytes += size
        return True

    def lets_in(self, size: int) -> bool:
        """Whether ``try_take`` would succeed."""
        return self.over is not None or (not self._waiters and self.has_capacity(size))

    async def take(self, size: int) -> bool:
        """Take capacity, after waiting for it. True, unless the wait is cancelled."""
        if self.try_take(size):
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            while True:
                await waiter
                if self.has_capacity(size):
                    break
                waiter = asyncio.get_running_loop().create_future()
                self._waiters[0] = waiter
        except BaseException:
            self._waiters.remove(waiter)
            self._wake()
            raise
        del self._waiters[0]
        self.events += 1
        self.bytes += size
        self._wake()
        return True

    def give_back(self, size: int) -> None:
        self.events -= 1
        self.bytes -= size
        self._wake()

    def _wake(self) -> None:
        if self._waiters and not self._waiters[0].done():
            self._waiters[0].set_result(None)


class AttemptSends:
    """What the parts of an operator send to one attempt. Loop only.

    ``submit`` passes an event to the gateway's actor. ``bounds``: how many events, and how many bytes, each part may
    have unsettled. ``clock`` returns the time that a confirmation begins with.
    """

    __slots__ = ("_bounds", "_budgets", "_clock", "_submit", "attempt", "handed_over", "limits", "over", "thread")

    def __init__(
        self,
        attempt: ExecutionAttempt,
        submit: Callable[[SendEvent], None],
        bounds: tuple[int, int],
        clock: Callable[[], float],
        limits: WireLimits,
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.handed_over: list[Confirmation] = []  # not yet handled by the gateway, in mailbox order
        self.over: AttemptOver | None = None
        self._bounds = bounds
        self._budgets: dict[int, SendBudget] = {}  # of the parts that have sent something, by index
        self.thread = threading.get_ident()
        self._submit = submit
        self._clock = clock

    def budget(self, part: int) -> SendBudget:
        """The bound of the part with this index."""
        budget = self._budgets.get(part)
        if budget is None:
            budget = self._budgets[part] = SendBudget(*self._bounds)
            budget.over = self.over
        return budget

    def end(self, error: AttemptOver) -> None:
        """The attempt is over: wake everything that waits for capacity."""
        self.over = self.over or error
        for budget in self._budgets.values():
            budget.end(self.over)

    def give_back(self, confirmation: Confirmation) -> None:
        """The event is settled, or will not be sent."""
        self._budgets[confirmation.part].give_back(confirmation.size)

    def try_send(self, by: Incarnation, payload: bytes, loss_tolerant: bool, urgent: bool) -> Confirmation | None:
        """Send an encoded event, or return None if there is no capacity for it. ``refused`` if ``by`` was replaced."""
        # Every event passes here: ``may_act`` and ``budget`` without their calls, which ``event_confirm`` would show.
        part = by.part
        if part.acting != by.number:
            return self.refused()
        budget = self._budgets.get(part.index) or self.budget(part.index)
        if not budget.try_take(len(payload)):
            return None
        return self._accept(part, payload, loss_tolerant, urgent)

    async def send(self, by: Incarnation, payload: bytes, loss_tolerant: bool, urgent: bool) -> Confirmation:
        """The same after waiting for capacity. If ``by`` is replaced meanwhile, nothing is sent."""
        if not await by.guard(partial(self.budget(by.part.index).take, len(payload))):
            return self.refused()
        return self._accept(by.part, payload, loss_tolerant, urgent)

    def refused(self) -> Confirmation:
        """The outcome of what a coordinator sends that was replaced."""
        confirmation = Confirmation()
        confirmation.settle(AttemptOver(f"{self.attempt}: the coordinator that sent this was replaced by a reset"))
        return confirmation

    def _accept(self, part: Sender, payload: bytes, loss_tolerant: bool, urgent: bool) -> Confirmation:
        confirmation = Confirmation(len(payload), self._clock(), part.index)
        send = SendEvent(payload, loss_tolerant, confirmation, urgent, part.index)
        if part.held is None and self.over is None:  # both ways below in short, for the many that nothing holds
            self.handed_over.append(confirmation)
            self._submit(send)
        else:
            part.submit(partial(self._hand_over, send))
        return confirmation

    def _hand_over(self, send: SendEvent) -> None:
        confirmation = send.confirmation
        if self.over is not None:
            self.give_back(confirmation)
            confirmation.settle(self.over)
            return
        self.handed_over.append(confirmation)
        self._submit(send)


class Gateway:
    """The ``SubtaskGateway`` of one incarnation of a part. Its promises are documented there.

    After the incarnation is replaced, what it sends fails with ``AttemptOver``.
    """

    __slots__ = ("_by", "_sends")

    def __init__(self, sends: AttemptSends, by: Incarnation) -> None:
        self._sends = sends
        self._by = by

    def __repr__(self) -> str:
        part = self._by.part.name
        return f"<SubtaskGateway {self.attempt}{f', part {part!r}' if part else ''}>"

    @property
    def attempt(self) -> ExecutionAttempt:
        return self._sends.attempt

    @property
    def events_pending(self) -> int:
        return self._sends.budget(self._by.part.index).events

    @property
    def bytes_pending(self) -> int:
        return self._sends.budget(self._by.part.index).bytes

    def send_event(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, Confirmation]:
        self._check_thread()
        return self._send(event, loss_tolerant, urgent, _AwaitCheck(self._sends.attempt))

    async def _send(self, event: Any, loss_tolerant: bool, urgent: bool, check: _AwaitCheck) -> Confirmation:
        check.begun = True
        by, sends = self._by, self._sends
        payload = encode_event(event, sends.limits)
        sent = sends.try_send(by, payload, loss_tolerant, urgent)
        return sent or await sends.send(by, payload, loss_tolerant, urgent)

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        self._check_thread()
        by, sends = self._by, self._sends
        sent = sends.try_send(by, encode_event(event, sends.limits), loss_tolerant, urgent)
        if sent is None:
            raise GatewayFull(
                f"{self.attempt}: {self.events_pending} events ({self.bytes_pending} bytes) are unconfirmed; "
                "await send_event() to wait for capacity, or raise events_max or bytes_max of GatewayLimits"
            )
        return sent

    def _check_thread(self) -> None:
        if threading.get_ident() != self._sends.thread:
            raise LocalProtocolError(
                f"the gateway of {self.attempt} was used from thread {threading.current_thread().name!r}, but it "
                "belongs to the event loop: call context.call_soon_threadsafe(handler), and send in the handler"
            )


class _AwaitCheck:
    """Notices that ``send_event`` was called and never awaited, and says where.

    It is an argument of the coroutine, which sets ``begun`` first. If it is dropped before that, it logs. Python's own
    warning names only the coroutine, not the line that created it.
    """

    __slots__ = ("_attempt", "begun")

    def __init__(self, attempt: ExecutionAttempt) -> None:
        self._attempt = attempt
        self.begun = False

    def __del__(self) -> None:
        if not self.begun:
            frame = sys._getframe(1)  # usually the statement that lacks the await
            log.warning(
                "send_event never awaited",
                operator_id=self._attempt.operator_id,
                subtask=self._attempt.subtask,
                attempt=self._attempt.attempt,
                at=f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}",
                hint="the event was not sent: write `await gateway.send_event(...)`",
            )
