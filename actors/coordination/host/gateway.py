# SPDX-License-Identifier: Apache-2.0

"""What coordinators send through: the gateway to one attempt, all gateways together, and the order of what they carry.

All parts of an operator send to an attempt through the same ``AttemptSends``, in which each has its own bound on the
events that it may send (H27, H150). A ``Gateway`` is the sight that one incarnation of one part has of it.

The coordinator's actor keeps the gateways of the live attempts in one ``GatewayTable``, in the order of the
coordinators' calls (H88). A ``LiveGateways`` is the sight that one incarnation of one part has of it.

A checkpoint is cut, over or begun for every subtask at one moment. To tell thousands of gateways in one turn of the
event loop would hold up every event for as long. So an ``Announcer`` tells only the first few immediately, and the
others a few in each turn. The moment is kept nevertheless. A gateway has its *line*, and everything goes through it
whose order the coordinator or a checkpoint decides. What is put off waits in the line, and what is told through it
later comes after it. So an event that the coordinator sends after its cut follows the cut, and one that it has sent
before, and that the gateway has not handled yet, precedes it (H41, H79).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from functools import partial
from sys import modules
from typing import Any, Generic, Protocol, TypeVar

from actors.coordination.host.incarnation import Incarnation, Sender
from actors.coordination.host.traces import OPENTELEMETRY, with_current_span
from actors.logs import CountedLog, get_logger
from actors.ref import ActorRef
from protocol.arguments import checked
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError
from protocol.event_types import Sent_contra
from protocol.ids import ExecutionAttempt
from protocol.values import value
from protocol.wire.codec import WireLimits, encode_event

M = TypeVar("M")


log = CountedLog(get_logger("headgate.coordinator"))


class Confirmation:
    """The outcome of one event. Awaiting it returns when the event is in the operator's mailbox.

    It may be awaited many times, by many tasks, or not at all. Cancelling one that waits does not affect the event.

    Raises:
        AttemptOver: when awaited, if the attempt ended first. The operator may or may not have handled the event.
        ConfirmationTimeout: when awaited, for a loss-tolerant event that was not confirmed in time.
    """

    # H23
    __slots__ = ("_callbacks", "_done", "_error", "_waiters", "part", "sent_at", "size")

    def __init__(self, size: int = 0, sent_at: float = 0.0, part: int = 0) -> None:
        """For the gateway: the encoded event's size in bytes, when it was sent, in seconds of the actors' clock, and
        the part that sent it."""
        self.size = size
        self.sent_at = sent_at
        self.part = part
        self._done = False
        self._error: AttemptOver | None = None
        self._waiters: list[asyncio.Future[None]] | None = None  # most confirmations need at most one of these lists
        self._callbacks: list[Callable[[Confirmation], object]] | None = None

    def __await__(self) -> Generator[object, None, None]:
        if not self._done:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            try:
                yield from waiter.__await__()
            finally:
                if self._waiters and waiter in self._waiters:
                    self._waiters.remove(waiter)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._done

    def confirmed(self) -> bool:
        """Whether the event is known to be in the operator's mailbox."""
        return self._done and self._error is None

    def error(self) -> AttemptOver | None:
        """Why the event will never be confirmed; None if it was, or if that is still open."""
        return self._error

    @checked()
    def add_done_callback(self, callback: Callable[[Confirmation], object]) -> None:
        """Call ``callback(self)`` on the event loop when the outcome is known; immediately if it already is."""
        if self._done:
            callback(self)
        else:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)

    def settle(self, error: AttemptOver | None = None) -> None:
        """For the gateway: the event was confirmed, or never will be. Only the first call counts."""
        if self._done:
            return
        self._done = True
        self._error = error
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)


class SubtaskGateway(Protocol[Sent_contra]):
    """The way to one execution attempt. It never points to a later attempt.

    Use it on the event loop only. Another thread calls ``CoordinatorContext.call_soon_threadsafe`` first. The events of
    one gateway arrive in the order in which they were sent, each once. Inside ``subtask_failed`` and later the attempt
    is over, and whatever is sent fails immediately with ``AttemptOver``. What is sent inside a span of OpenTelemetry
    is handled by the operator with that span as the current one.
    """

    # H14, H20, H22, H26

    @property
    def attempt(self) -> ExecutionAttempt:
        """The attempt that this gateway leads to."""
        ...

    @property
    def events_pending(self) -> int:
        """How many events were sent and neither confirmed nor failed. The gateway's limits bound this number."""
        ...

    @property
    def bytes_pending(self) -> int:
        """The size of these events' payloads in bytes."""
        ...

    async def send_event(
        self, event: Sent_contra, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Confirmation:
        """Send an event, after waiting for capacity if the gateway's limits are reached, and return its confirmation.

        The event is encoded immediately, so later changes to it have no effect. Awaiting the *confirmation* waits until
        the event is in the operator's mailbox, or raises ``AttemptOver``.

        A call that is never awaited sends nothing; a warning in the log names the place. A call that is cancelled while
        it waits for capacity sends nothing either.

        Args:
            event: a value of a type that events can have; ``event`` registers your own classes.
            loss_tolerant: the event may be lost. A missing confirmation then fails no attempt, and no checkpoint waits
                for it. After ``confirm_timeout_s``, awaiting the confirmation raises ``ConfirmationTimeout``, although
                the event may still arrive.
            urgent: call the operator's ``handle_urgent`` as soon as the event arrives, on a separate thread, while the
                task computes or blocks in foreign code. Urgent events keep their order, and overtake only ordinary
                events that the operator has not handled yet. An operator without ``handle_urgent`` gets them as
                ordinary events. Checkpoints include and hold them like any other event.

        Raises:
            EventEncodeError: a value in the event is of a type that events cannot have, or it is too large.
            LocalProtocolError: the call comes from another thread.
        """
        # H21, H23, H27, H28, H90. The state of the attempt raises nothing here: it shows in the confirmation.
        ...

    def send_event_nowait(
        self, event: Sent_contra, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Confirmation:
        """Send an event as ``send_event`` does, but raise ``GatewayFull`` instead of waiting for capacity."""
        ...


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
        return self._send(event, loss_tolerant, urgent, _AwaitCheck("gateway.send_event", self._sends.attempt))

    async def _send(self, event: Any, loss_tolerant: bool, urgent: bool, check: _AwaitCheck) -> Confirmation:
        check.begun = True
        by, sends = self._by, self._sends
        payload = encode_event(event, sends.limits)
        if OPENTELEMETRY in modules:
            payload = with_current_span(payload, sends.limits)
        sent = sends.try_send(by, payload, loss_tolerant, urgent)
        return sent or await sends.send(by, payload, loss_tolerant, urgent)

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        self._check_thread()
        by, sends = self._by, self._sends
        payload = encode_event(event, sends.limits)
        if OPENTELEMETRY in modules:
            payload = with_current_span(payload, sends.limits)
        sent = sends.try_send(by, payload, loss_tolerant, urgent)
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
    """Notices that ``method``, which sends to ``attempt`` or to several, was called and never awaited, and says where.

    It is an argument of the coroutine, which sets ``begun`` first. If it is dropped before that, it logs. Python's own
    warning names only the coroutine, not the line that created it.
    """

    __slots__ = ("_attempt", "_method", "begun")

    def __init__(self, method: str, attempt: ExecutionAttempt | None = None) -> None:
        self._method = method
        self._attempt = attempt
        self.begun = False

    def __del__(self) -> None:
        if not self.begun:
            frame = sys._getframe(1)  # usually the statement that lacks the await
            to = self._attempt
            told = {} if to is None else {"operator_id": to.operator_id, "subtask": to.subtask, "attempt": to.attempt}
            log.warning(
                "send never awaited",
                **told,
                at=f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}",
                hint=f"the event was not sent: write `await {self._method}(...)`",
            )


Handler = Callable[[], Awaitable[None]]


class GatewayTable:
    """The gateways of the attempts that the coordinator has been told to be ready and not to be over. Loop only.

    ``call_soon``: queues a handler for the coordinator. ``inside_method``: whether the caller is a method of the
    coordinator, or called by one. ``handles_restored``: whether a message of the restored checkpoint is being handled.
    """

    def __init__(
        self,
        parallelism: int,
        call_soon: Callable[[Handler], None],
        inside_method: Callable[[], bool],
        limits: WireLimits,
        handles_restored: Callable[[], bool],
    ) -> None:
        self.parallelism = parallelism
        self.limits = limits
        self.call_soon = call_soon
        self.inside_method = inside_method
        self._handles_restored = handles_restored
        self.thread = threading.get_ident()
        self.by_subtask: dict[int, dict[int, AttemptSends]] = {}  # by task attempt id, in the order of readiness
        self._handlers: list[Handler] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def complete(self) -> bool:
        """Whether every subtask has an attempt that is ready."""
        return len(self.by_subtask) == self.parallelism

    def add(self, sends: AttemptSends) -> None:
        attempt = sends.attempt
        self.by_subtask.setdefault(attempt.subtask, {})[attempt.task_attempt_id] = sends

    def remove(self, attempt: ExecutionAttempt) -> None:
        of_subtask = self.by_subtask.get(attempt.subtask, {})
        of_subtask.pop(attempt.task_attempt_id, None)
        if not of_subtask:
            self.by_subtask.pop(attempt.subtask, None)

    def clear(self) -> None:
        """The run has ended."""
        self.by_subtask.clear()

    def reset(self) -> None:
        """The coordinator forgets everything: its handlers too."""
        self.clear()
        self._handlers.clear()

    def all(self) -> list[AttemptSends]:
        """By subtask, of each the oldest first."""
        return [sends for subtask in sorted(self.by_subtask) for sends in self.by_subtask[subtask].values()]

    def of(self, subtask: int) -> list[AttemptSends]:
        """Those of one subtask, the oldest first. Raises ``ValueError`` if there is no such subtask."""
        if not 0 <= subtask < self.parallelism:
            # A restored message names its first sender, which a lower parallelism may not have any more. Its number
            # says who asked, not whom to answer (H151).
            if subtask >= self.parallelism and self._handles_restored():
                return []
            raise ValueError(f"there is no subtask {subtask}: the operator has {self.parallelism}, counted from 0")
        return list(self.by_subtask.get(subtask, {}).values())

    def wait(self) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        if self.complete:
            waiter.set_result(None)
        else:
            self._waiters.append(waiter)
        return waiter

    def when_complete(self, handler: Handler) -> None:
        self._handlers.append(handler)
        if self.complete:
            self.call_soon(self.call_handlers)

    @property
    def is_awaited(self) -> bool:
        """Whether every subtask is ready, and something waits for that."""
        return self.complete and bool(self._handlers or self._waiters)

    async def call_handlers(self) -> None:
        """Call what waits while every subtask is ready. Only between the coordinator's methods."""
        if not self.complete:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        while self._handlers:
            await self._handlers.pop(0)()


class LiveGateways:
    """The gateways of all attempts that are ready and not over, kept up to date: ``CoordinatorContext.gateways``.

    An attempt is here from before its ``subtask_ready`` until before its ``subtask_failed`` or ``subtask_finished``. A
    subtask has several if there are copies. After the end of a run there are none.

    Use it on the event loop only. Another thread calls ``CoordinatorContext.call_soon_threadsafe`` first.
    """

    __slots__ = ("_by", "_table")

    def __init__(self, table: GatewayTable, by: Incarnation) -> None:
        self._table = table
        self._by = by

    def __len__(self) -> int:
        """How many attempts there are."""
        return len(self._all())

    def __iter__(self) -> Iterator[SubtaskGateway]:
        """The gateways, by subtask, of each the oldest first."""
        return iter([Gateway(sends, self._by) for sends in self._all()])

    @property
    def ready(self) -> tuple[int, ...]:
        """The subtasks that have an attempt, ascending."""
        return tuple(sorted(self._table.by_subtask)) if self._by.may_act() else ()

    @property
    def are_complete(self) -> bool:
        """Whether every subtask has an attempt."""
        return self._by.may_act() and self._table.complete

    @checked()
    def gateways(self, subtask: int) -> tuple[SubtaskGateway, ...]:
        """The gateways of one subtask, the oldest first; empty if it has no attempt.

        While a message of the restored checkpoint is handled, a subtask that only the earlier parallelism had has none
        either.

        Raises:
            ValueError: there is no such subtask.
        """
        return tuple([Gateway(sends, self._by) for sends in self._of(subtask)])

    def send(
        self, subtask: int, event: Any, *, attempt: int | None = None, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, tuple[Confirmation, ...]]:
        """Send an event to a subtask, as ``SubtaskGateway.send_event`` does, and return the confirmations.

        They are in the order of ``gateways(subtask)``, so none if it has no attempt. What a later attempt needs is sent
        in ``subtask_ready``. The sender of a restored message may be a subtask that a lower parallelism does not have:
        while that message is handled, nothing is sent to it, as to one that has no attempt.

        Args:
            subtask: the index of the subtask.
            event: a value of a type that events can have, as for ``SubtaskGateway.send_event``.
            attempt: the number of the attempt to send it to, if it is there; None for all of the subtask's attempts.
            loss_tolerant: as for ``SubtaskGateway.send_event``.
            urgent: likewise.

        Raises:
            EventEncodeError: a value in the event is of a type that events cannot have, or it is too large.
            LocalProtocolError: the call comes from another thread.
            ValueError: there is no such subtask.
        """

        def to() -> list[AttemptSends]:
            return [sends for sends in self._of(subtask) if attempt in (None, sends.attempt.attempt)]

        return self._send(event, to, loss_tolerant, urgent, _AwaitCheck("gateways.send"))

    def broadcast(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, tuple[Confirmation, ...]]:
        """Send an event to all attempts, as ``SubtaskGateway.send_event`` does, and return their confirmations.

        It is encoded once. It leaves immediately to all that have capacity; then this waits for capacity at the others.
        The confirmations are in the order of iteration.

        Raises:
            EventEncodeError: a value in the event is of a type that events cannot have, or it is too large.
            LocalProtocolError: the call comes from another thread.
        """
        return self._send(event, self._all, loss_tolerant, urgent, _AwaitCheck("gateways.broadcast"))

    def broadcast_nowait(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> tuple[Confirmation, ...]:
        """Send an event as ``broadcast`` does, but raise ``GatewayFull`` if any attempt would have to wait.

        In that case nothing was sent to anybody.
        """
        payload, to = self._encode(event), self._all()
        for sends in to:
            if not sends.budget(self._by.part.index).lets_in(len(payload)):
                raise GatewayFull(
                    f"{sends.attempt} has no capacity for the event, so nothing was sent: await broadcast() "
                    "to wait for capacity, or raise events_max or bytes_max of GatewayLimits"
                )
        sent = [sends.try_send(self._by, payload, loss_tolerant, urgent) for sends in to]
        return tuple([confirmation for confirmation in sent if confirmation is not None])  # each of them: see above

    @checked()
    def when_all_ready(self, handler: Handler) -> None:
        """Call ``handler`` once, between other methods, as soon as every subtask has an attempt.

        That may be the next turn. When it is called, no attempt has been reported over in between. A reset of the whole
        coordinator drops it, and so does ``close``. If it raises, the job fails.
        """
        self._check_thread()
        if self._by.may_act():
            self._table.when_complete(self._by.fenced(handler))

    async def all_ready(self) -> None:
        """Wait until every subtask has an attempt. For functions in ``CoordinatorContext.run_in_background``.

        Attempts may be over again when this returns. It continues to wait over resets.

        Raises:
            LocalProtocolError: inside a method of the coordinator, which would wait forever: no attempt is announced
                before the method has returned.
        """
        self._check_thread()
        if self._table.inside_method():
            raise LocalProtocolError(
                "all_ready() cannot be awaited inside a method of the coordinator: no attempt becomes ready before the "
                "method has returned. Use when_all_ready(handler), or await it in context.run_in_background(...)"
            )
        await self._table.wait()

    # --- sending ------------------------------------------------------------------------------------------------

    def _check_thread(self) -> None:
        if threading.get_ident() != self._table.thread:
            raise LocalProtocolError(
                f"the gateways were used from thread {threading.current_thread().name!r}, but they belong to the event "
                "loop: call context.call_soon_threadsafe(handler), and use them in the handler"
            )

    def _encode(self, event: Any) -> bytes:
        self._check_thread()
        payload = encode_event(event, self._table.limits)
        return with_current_span(payload, self._table.limits) if OPENTELEMETRY in modules else payload

    def _all(self) -> list[AttemptSends]:
        return self._table.all() if self._by.may_act() else []

    def _of(self, subtask: int) -> list[AttemptSends]:
        of_subtask = self._table.of(subtask)
        return of_subtask if self._by.may_act() else []

    async def _send(
        self, event: Any, find: Callable[[], list[AttemptSends]], loss_tolerant: bool, urgent: bool, check: _AwaitCheck
    ) -> tuple[Confirmation, ...]:
        check.begun = True
        to = find()
        payload = self._encode(event)
        sent = [sends.try_send(self._by, payload, loss_tolerant, urgent) for sends in to]
        return tuple(
            [
                confirmation or await sends.send(self._by, payload, loss_tolerant, urgent)
                for confirmation, sends in zip(sent, to, strict=True)
            ]
        )


GATEWAYS_PER_TURN = 16


class GatewayLine(Generic[M]):
    """The way to one gateway. Loop only."""

    __slots__ = ("_put_off", "is_over", "ref")

    def __init__(self) -> None:
        self.ref: ActorRef[M]  # set as soon as its actor is spawned
        self.is_over = False
        self._put_off: list[M] = []

    def tell_direct(self, message: M) -> None:
        """``ActorRef.tell_direct``, after everything that was put off."""
        if self._put_off:
            self.catch_up()
        self.ref.tell_direct(message)

    def put_off(self, message: M) -> None:
        """Tell this later, but before anything that is told after it."""
        self._put_off.append(message)

    def catch_up(self) -> bool:
        """Tell what was put off. Returns whether there was anything."""
        put_off = self._put_off
        if not put_off:
            return False
        while put_off:
            self.ref.tell_direct(put_off.pop(0))
        return True

    def end(self) -> None:
        """The gateway is closed: what was put off no longer matters."""
        self.is_over = True
        self._put_off.clear()


class Announcer(Generic[M]):
    """Tells ``per_turn`` gateways in each turn. Loop only.

    ``next_turn``: has ``go_on`` called in a later turn of the loop, once for each call.
    """

    def __init__(self, per_turn: int, next_turn: Callable[[], None]) -> None:
        self._per_turn = per_turn
        self._next_turn = next_turn
        self._after: deque[GatewayLine[M]] = deque()

    def announce(self, lines: Sequence[GatewayLine[M]], message: M) -> None:
        """Tell ``message`` through each line: some immediately, the others soon."""
        first = 0
        if not self._after:
            first = self._per_turn
            for line in lines[:first]:
                line.tell_direct(message)
        if len(lines) <= first:
            return
        for line in lines[first:]:
            line.put_off(message)
        idle = not self._after
        self._after.extend(lines[first:])
        if idle:
            self._next_turn()

    def go_on(self) -> None:
        """Tell the next ones."""
        after, left = self._after, self._per_turn
        while after and left:
            if after.popleft().catch_up():
                left -= 1
        if after:
            self._next_turn()
