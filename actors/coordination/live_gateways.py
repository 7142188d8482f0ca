# SPDX-License-Identifier: Apache-2.0

"""The gateways of an operator's live attempts, kept for its coordinator (H88).

The coordinator's actor keeps them in one ``GatewayTable``, in the order of the coordinator's own calls. A
``LiveGateways`` is one coordinator's sight of that table: a part of a chain sends under its name, and an incarnation
that was replaced sees nothing any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from actors.coordination.confirmation import Confirmation
from actors.coordination.interface import SubtaskGateway
from actors.coordination.parts_cut import PartsCut, part_of
from protocol.arguments import checked
from protocol.errors import GatewayFull, LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import WireLimits, encode_event

T = TypeVar("T")

Handler = Callable[[], Awaitable[None]]


class SendingGateway(SubtaskGateway, Protocol):
    """A gateway that takes an event that is encoded already. ``part``: the part of a chain that sends it, if any."""

    cut: PartsCut | None

    def has_capacity(self, size: int) -> bool: ...

    async def send_encoded(self, payload: bytes, loss_tolerant: bool, urgent: bool, part: str) -> Confirmation: ...

    def send_encoded_nowait(self, payload: bytes, loss_tolerant: bool, urgent: bool, part: str) -> Confirmation: ...


class GatewayTable:
    """The gateways of the attempts that the coordinator has been told to be ready and not to be over. Loop only.

    ``call_soon``: queues a handler for the coordinator. ``inside_method``: whether the caller is a method of the
    coordinator, or called by one. ``cut``: that of the coordinator's parts.
    """

    def __init__(
        self,
        parallelism: int,
        call_soon: Callable[[Handler], None],
        inside_method: Callable[[], bool],
        limits: WireLimits,
        cut: PartsCut,
    ) -> None:
        self.cut = cut
        self.parallelism = parallelism
        self.limits = limits
        self.call_soon = call_soon
        self.inside_method = inside_method
        self.thread = threading.get_ident()
        self.by_subtask: dict[int, dict[int, SendingGateway]] = {}  # by task attempt id, in the order of readiness
        self._handlers: list[Handler] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def complete(self) -> bool:
        """Whether every subtask has an attempt that is ready."""
        return len(self.by_subtask) == self.parallelism

    def add(self, gateway: SendingGateway) -> None:
        gateway.cut = self.cut
        attempt = gateway.attempt
        self.by_subtask.setdefault(attempt.subtask, {})[attempt.task_attempt_id] = gateway

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

    __slots__ = ("_decorate", "_fenced", "_guard", "_is_over", "_table", "_wrap")

    def __init__(
        self,
        table: GatewayTable,
        decorate: Callable[[SubtaskGateway], SubtaskGateway] = lambda gateway: gateway,
        wrap: Callable[[Any], Any] = lambda event: event,
        is_over: Callable[[], bool] = lambda: False,
        guard: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]] | None = None,
        fenced: Callable[[Handler], Handler] = lambda handler: handler,
    ) -> None:
        self._table = table
        self._decorate = decorate
        self._wrap = wrap
        self._is_over = is_over
        self._guard = guard
        self._fenced = fenced

    def __len__(self) -> int:
        """How many attempts there are."""
        return sum(1 for _ in self._all())

    def __iter__(self) -> Iterator[SubtaskGateway]:
        """The gateways, by subtask, of each the oldest first."""
        return iter([self._decorate(gateway) for gateway in self._all()])

    @property
    def ready(self) -> tuple[int, ...]:
        """The subtasks that have an attempt, ascending."""
        return () if self._is_over() else tuple(sorted(self._table.by_subtask))

    @property
    def are_complete(self) -> bool:
        """Whether every subtask has an attempt."""
        return not self._is_over() and self._table.complete

    @checked()
    def gateways(self, subtask: int) -> tuple[SubtaskGateway, ...]:
        """The gateways of one subtask, the oldest first; empty if it has no attempt.

        Raises:
            ValueError: there is no such subtask.
        """
        return tuple([self._decorate(gateway) for gateway in self._of(subtask)])

    async def send(
        self, subtask: int, event: Any, *, attempt: int | None = None, loss_tolerant: bool = False, urgent: bool = False
    ) -> tuple[Confirmation, ...]:
        """Send an event to a subtask, as ``SubtaskGateway.send_event`` does, and return the confirmations.

        They are in the order of ``gateways(subtask)``, so none if it has no attempt. What a later attempt needs is sent
        in ``subtask_ready``.

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
        gateways = self._of(subtask)
        if attempt is not None:
            gateways = [gateway for gateway in gateways if gateway.attempt.attempt == attempt]
        return await self._send(event, gateways, loss_tolerant, urgent)

    async def broadcast(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> tuple[Confirmation, ...]:
        """Send an event to all attempts, as ``SubtaskGateway.send_event`` does, and return their confirmations.

        It is encoded once. It leaves immediately to all that have capacity; then this waits for capacity at the others.
        The confirmations are in the order of iteration.

        Raises:
            EventEncodeError: a value in the event is of a type that events cannot have, or it is too large.
            LocalProtocolError: the call comes from another thread.
        """
        return await self._send(event, self._all(), loss_tolerant, urgent)

    def broadcast_nowait(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> tuple[Confirmation, ...]:
        """Send an event as ``broadcast`` does, but raise ``GatewayFull`` if any attempt would have to wait.

        In that case nothing was sent to anybody.
        """
        payload, part = self._encode(event)
        gateways = self._all()
        for gateway in gateways:
            if not gateway.has_capacity(len(payload)):
                raise GatewayFull(
                    f"{gateway.attempt} has no capacity for the event, so nothing was sent: await broadcast() "
                    "to wait for capacity, or raise events_max or bytes_max of GatewayLimits"
                )
        return tuple([gateway.send_encoded_nowait(payload, loss_tolerant, urgent, part) for gateway in gateways])

    @checked()
    def when_all_ready(self, handler: Handler) -> None:
        """Call ``handler`` once, between other methods, as soon as every subtask has an attempt.

        That may be the next turn. When it is called, no attempt has been reported over in between. A reset of the whole
        coordinator drops it, and so does ``close``. If it raises, the job fails.
        """
        self._check_thread()
        if not self._is_over():
            self._table.when_complete(self._fenced(handler))

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

    # --- views --------------------------------------------------------------------------------------------------

    def seen_by(
        self,
        decorate: Callable[[SubtaskGateway], SubtaskGateway],
        *,
        wrap: Callable[[Any], Any] = lambda event: event,
        is_over: Callable[[], bool] = lambda: False,
        guard: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]] | None = None,
        fenced: Callable[[Handler], Handler] = lambda handler: handler,
    ) -> LiveGateways:
        """The same gateways for a coordinator that gets ``decorate(gateway)`` of each, and sends ``wrap(event)``."""
        return LiveGateways(
            self._table,
            lambda gateway: decorate(self._decorate(gateway)),
            lambda event: self._wrap(wrap(event)),
            lambda: is_over() or self._is_over(),
            guard or self._guard,
            lambda handler: self._fenced(fenced(handler)),
        )

    # --- sending ------------------------------------------------------------------------------------------------

    def _check_thread(self) -> None:
        if threading.get_ident() != self._table.thread:
            raise LocalProtocolError(
                f"the gateways were used from thread {threading.current_thread().name!r}, but they belong to the event "
                "loop: call context.call_soon_threadsafe(handler), and use them in the handler"
            )

    def _encode(self, event: Any) -> tuple[bytes, str]:
        """Return the payload and the name of the part that sends it."""
        self._check_thread()
        wrapped = self._wrap(event)
        return encode_event(wrapped, self._table.limits), part_of(wrapped)

    def _all(self) -> list[SendingGateway]:
        if self._is_over():
            return []
        table = self._table.by_subtask
        return [gateway for subtask in sorted(table) for gateway in table[subtask].values()]

    def _of(self, subtask: int) -> list[SendingGateway]:
        if not 0 <= subtask < self._table.parallelism:
            raise ValueError(
                f"there is no subtask {subtask}: the operator has {self._table.parallelism}, counted from 0"
            )
        return [] if self._is_over() else list(self._table.by_subtask.get(subtask, {}).values())

    async def _send(
        self, event: Any, gateways: list[SendingGateway], loss_tolerant: bool, urgent: bool
    ) -> tuple[Confirmation, ...]:
        payload, part = self._encode(event)
        sent = [
            gateway.send_encoded_nowait(payload, loss_tolerant, urgent, part)
            if gateway.has_capacity(len(payload))
            else None
            for gateway in gateways
        ]

        async def wait() -> tuple[Confirmation, ...]:
            return tuple(
                [
                    confirmation or await gateway.send_encoded(payload, loss_tolerant, urgent, part)
                    for confirmation, gateway in zip(sent, gateways, strict=True)
                ]
            )

        if self._guard is None:
            return await wait()
        return await self._guard(wait) or ()


__all__ = ["GatewayTable", "LiveGateways", "SendingGateway"]
