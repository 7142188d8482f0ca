# SPDX-License-Identifier: Apache-2.0

"""A coordinator's handle to a gateway, and the bound on the events that it may send (H27)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actors.coordination.announcer import GatewayLine
from actors.coordination.confirmation import Confirmation
from actors.coordination.messages import GatewayMessage, SendEvent
from actors.coordination.parts_cut import PartsCut, inner_of, part_of
from actors.coordination.unawaited import AwaitCheck, check_thread
from protocol.errors import AttemptOver, GatewayFull
from protocol.ids import ExecutionAttempt
from protocol.parts import ONE_PART, PartTable
from protocol.wire.codec import WireLimits, encode_event


class SendBudget:
    """Bounds the accepted and unsettled events of one gateway, in number and bytes (H27). Waiters keep their order.

    A coordinator can wait, or be refused, only here: before its event enters the gateway's mailbox. Events that the
    gateway holds back count, and so do those that wait for a confirmation.
    """

    __slots__ = ("_bytes_max", "_events_max", "_waiters", "bytes", "events", "handed_over", "over")

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._waiters: list[asyncio.Future[None]] = []
        self.events = 0
        self.bytes = 0
        self.handed_over: list[Confirmation] = []  # not yet handled by the gateway, in mailbox order
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
        self._take(size)
        return True

    def lets_in(self, size: int) -> bool:
        """Whether ``try_take`` would succeed."""
        return self.over is not None or (not self._waiters and self.has_capacity(size))

    async def take(self, size: int) -> None:
        if self.try_take(size):
            return
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
        self._take(size)
        self._wake()

    def give_back(self, size: int) -> None:
        self.events -= 1
        self.bytes -= size
        self._wake()

    def _take(self, size: int) -> None:
        self.events += 1
        self.bytes += size

    def _wake(self) -> None:
        if self._waiters and not self._waiters[0].done():
            self._waiters[0].set_result(None)


class GatewayHandle:
    """The ``SubtaskGateway`` that coordinators get. Its promises are documented there."""

    __slots__ = ("_attempt", "_budget", "_clock", "_limits", "_ref", "_thread", "cut", "table")

    def __init__(
        self,
        attempt: ExecutionAttempt,
        ref: GatewayLine[GatewayMessage],
        budget: SendBudget,
        clock: Callable[[], float],
        limits: WireLimits,
        table: PartTable = ONE_PART,
    ) -> None:
        self._attempt = attempt
        self._ref = ref
        self._budget = budget
        self._clock = clock
        self._limits = limits
        self._thread = threading.get_ident()
        self.cut: PartsCut | None = None
        self.table = table

    def __repr__(self) -> str:
        return f"<SubtaskGateway {self._attempt}>"

    @property
    def attempt(self) -> ExecutionAttempt:
        return self._attempt

    @property
    def events_pending(self) -> int:
        return self._budget.events

    @property
    def bytes_pending(self) -> int:
        return self._budget.bytes

    def send_event(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, Confirmation]:
        check_thread(self._thread, self._attempt)
        return self._send(event, loss_tolerant, urgent, AwaitCheck(self._attempt))

    async def _send(self, event: Any, loss_tolerant: bool, urgent: bool, check: AwaitCheck) -> Confirmation:
        check.begun = True
        payload = encode_event(inner_of(event), self._limits)
        if not self._budget.try_take(len(payload)):
            await self._budget.take(len(payload))
        return self._hand_over(payload, loss_tolerant, urgent, part_of(event))

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        check_thread(self._thread, self._attempt)
        payload = encode_event(inner_of(event), self._limits)
        if not self._budget.try_take(len(payload)):
            raise GatewayFull(
                f"{self._attempt}: {self._budget.events} events ({self._budget.bytes} bytes) are unconfirmed; "
                "await send_event() to wait for capacity, or raise events_max or bytes_max of GatewayLimits"
            )
        return self._hand_over(payload, loss_tolerant, urgent, part_of(event))

    def has_capacity(self, size: int) -> bool:
        """Whether an event of this size would be sent without waiting."""
        return self._budget.lets_in(size)

    async def send_encoded(self, payload: bytes, loss_tolerant: bool, urgent: bool, part: str) -> Confirmation:
        """``send_event``, for an event that is encoded already, on the event loop."""
        await self._budget.take(len(payload))
        return self._hand_over(payload, loss_tolerant, urgent, part)

    def send_encoded_nowait(self, payload: bytes, loss_tolerant: bool, urgent: bool, part: str) -> Confirmation:
        """The same, if ``has_capacity``."""
        taken = self._budget.try_take(len(payload))
        assert taken
        return self._hand_over(payload, loss_tolerant, urgent, part)

    def _hand_over(self, payload: bytes, loss_tolerant: bool, urgent: bool, part: str) -> Confirmation:
        index = self.table.index(part)
        assert index is not None
        confirmation = Confirmation(len(payload), self._clock(), index)
        send = SendEvent(payload, loss_tolerant, confirmation, urgent, index)
        if not part or self.cut is None or not self.cut.hold(part, partial(self._submit, send)):
            self._submit(send)
        return confirmation

    def _submit(self, send: SendEvent) -> None:
        confirmation = send.confirmation
        if self._budget.over is not None:
            self._budget.give_back(confirmation.size)
            confirmation.settle(self._budget.over)
            return
        self._budget.handed_over.append(confirmation)
        self._ref.tell_direct(send)


__all__ = ["GatewayHandle", "SendBudget"]
