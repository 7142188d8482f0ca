# SPDX-License-Identifier: Apache-2.0

"""The gateways of an operator's live attempts, kept for its coordinators (H88).

The coordinator's actor keeps them in one ``GatewayTable``, in the order of the coordinators' calls. A ``LiveGateways``
is the sight that one incarnation of one part has of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from actors.coordination.confirmation import Confirmation
from actors.coordination.host.gateway import AttemptSends, Gateway
from actors.coordination.host.incarnation import Incarnation
from actors.coordination.subtask_gateway import SubtaskGateway
from protocol.arguments import checked
from protocol.errors import GatewayFull, LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import WireLimits, encode_event

__all__ = ["GatewayTable", "LiveGateways"]

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

    async def send(
        self, subtask: int, event: Any, *, attempt: int | None = None, loss_tolerant: bool = False, urgent: bool = False
    ) -> tuple[Confirmation, ...]:
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
        to = self._of(subtask)
        if attempt is not None:
            to = [sends for sends in to if sends.attempt.attempt == attempt]
        return await self._send(event, to, loss_tolerant, urgent)

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
        return encode_event(event, self._table.limits)

    def _all(self) -> list[AttemptSends]:
        return self._table.all() if self._by.may_act() else []

    def _of(self, subtask: int) -> list[AttemptSends]:
        of_subtask = self._table.of(subtask)
        return of_subtask if self._by.may_act() else []

    async def _send(
        self, event: Any, to: list[AttemptSends], loss_tolerant: bool, urgent: bool
    ) -> tuple[Confirmation, ...]:
        payload = self._encode(event)
        sent = [sends.try_send(self._by, payload, loss_tolerant, urgent) for sends in to]
        return tuple(
            [
                confirmation or await sends.send(self._by, payload, loss_tolerant, urgent)
                for confirmation, sends in zip(sent, to, strict=True)
            ]
        )
