# SPDX-License-Identifier: Apache-2.0

"""Build a new coordinator at each reset, for coordinators that cannot be reset in place (R101).

``RecreateOnReset`` takes the coordinator's place and passes every call on to the current *incarnation*. A reset has
three steps, and ``reset_to_checkpoint`` waits only for the first:

1. The old incarnation's token is revoked. From here on it cannot act (G16; see ``actors.coordination.fencing``).
2. It is closed, concurrently with everything else, after its current call has ended.
3. The new one is created, reset to the checkpoint, and started, in this order.

All calls after a reset wait for the new incarnation and then reach it in order. Each call is awaited before the next
(H5), so no call is in progress at a reset. If a second reset comes before the new incarnation is created, it is created
for the second one. If the new incarnation is already starting, it is fenced, and closed after its start has ended.

Every incarnation that was created is closed once, whenever the resets and the end of the operator come.

A close that raises is logged. One that takes longer than ``close_timeout_s`` is logged and cancelled. Flink fails the
job in both cases (R104), because its old coordinator can still act. Here it is fenced, so the job continues. If the new
one cannot be created, reset or started, every call until the next reset raises that failure. If there is no call, a
handler raises it. So it is a global failure (H7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import anyio

from actors.coordination.fencing import FencedContext, FencedGateway, FencingToken
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.store import CoordinatorStore
from actors.coordination.user_calls import call_user
from actors.exits import contained
from protocol.arguments import checked
from protocol.attempts import FailureReason
from protocol.describing import name_of


class _Incarnation:
    """One of the user's coordinators, from before its creation until after its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restore: tuple[int, bytes | None] | None = None
        self.token = FencingToken()
        self.store: CoordinatorStore | None = None
        self.coordinator: OperatorCoordinator | None = None
        self.failure: Exception | None = None  # why it never took calls
        self.begun = anyio.Event()  # started, or failed to
        self.ended = anyio.Event()  # closed, or given up

    @cached_property
    def beginning(self) -> anyio.CancelScope:  # made on the loop: the coordinator may come from any thread
        return anyio.CancelScope()

    @cached_property
    def closing(self) -> anyio.CancelScope:
        return anyio.CancelScope()

    @property
    def awaited(self) -> bool:
        """The coordinator is not created yet."""
        return self.coordinator is None and not self.begun.is_set()

    async def takes_calls(self) -> bool:
        await self.begun.wait()
        return self.failure is None

    def end(self) -> None:
        """From here on, the incarnation's actions have no effect."""
        self.token.revoke()
        if self.store is not None:
            self.store.revoke()
        self.ended.set()


class RecreateOnReset(OperatorCoordinator):
    """Builds a new coordinator at each reset and passes all calls on to it.

    ``coordinate`` does this by itself if it is given a class or a factory. Use this class to set ``close_timeout_s``.

    Each coordinator gets ``reset_to_checkpoint`` at most once, before its ``start``. So it begins its work in
    ``start``. Gateways are not carried over: every subtask becomes ready again after a reset. A coordinator that was
    replaced has no effect any more: what it sends fails, and its writes to the shared store raise.

    Args:
        factory: makes a coordinator, on the event loop. It must return a new one each time and must not block.
        close_timeout_s: how many seconds the next coordinator waits until the one before is closed. Then that ``close``
            is cancelled, with an error in the log, and the job continues.
        name: the coordinator's name in logs; by default the factory's.
    """

    @checked()
    def __init__(
        self,
        factory: Callable[[], OperatorCoordinator],
        *,
        close_timeout_s: float = 60.0,
        name: str | None = None,
    ) -> None:
        self._factory = factory
        self._close_timeout_s = close_timeout_s
        self._name = name or name_of(factory)
        self._context: CoordinatorContext | None = None
        self._current = _Incarnation(1)
        self._unclosed: list[_Incarnation] = []  # created, and their ``close`` was not called yet; the oldest first
        self._closed = False

    # --- the incarnations -----------------------------------------------------------------------------------------

    async def start(self, context: CoordinatorContext) -> None:
        if self._context is not None:
            raise RuntimeError(f"{self._name} was started before: make a new one for each operator")
        self._context = context
        await self._begin(self._context, self._current)

    @property
    def current(self) -> OperatorCoordinator | None:
        """The coordinator that takes the calls now; None before it is created."""
        return self._current.coordinator

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Fence the current incarnation and return; the new one is created in the background."""
        context, old = self._context, self._current
        if context is None or old.awaited:
            old.restore = (checkpoint_id, state)
            return
        old.token.revoke()
        self._current = new = _Incarnation(old.number + 1)
        new.restore = (checkpoint_id, state)
        context.run_in_background(self._end, context, old, handler=partial(self._over, new))
        context.run_in_background(self._follow, context, old, new, handler=partial(self._over, new))

    async def close(self) -> None:
        """Close the current incarnation, whose start has been cancelled if it was in progress.

        An earlier one whose own ``close`` was never called, because its start was in progress, is closed before it. One
        that is still closing is not waited for, and one that does not exist yet is never created.
        """
        # R105
        self._closed = True
        current, interrupted = self._current, None
        try:
            for replaced in [one for one in self._unclosed if one is not current]:
                try:
                    await self._close_one(replaced)
                except asyncio.CancelledError as error:  # of this call: the others are closed nevertheless
                    interrupted = error
                except BaseException:
                    self._log_of(replaced).exception("replaced coordinator close failed")
                finally:
                    replaced.end()
            await self._close_one(current)
        finally:
            current.end()
        if interrupted is not None:
            raise interrupted

    async def _close_one(self, incarnation: _Incarnation) -> None:
        """Close an incarnation if it was created, and only once."""
        if incarnation in self._unclosed:
            self._unclosed.remove(incarnation)
            assert incarnation.coordinator is not None
            await call_user("close", incarnation.coordinator.close)

    def _log_of(self, incarnation: _Incarnation) -> Any:
        assert self._context is not None
        return self._context.log.bind(coordinator=self._name, incarnation=incarnation.number)

    async def _follow(self, context: CoordinatorContext, old: _Incarnation, new: _Incarnation) -> None:
        await old.ended.wait()
        if self._closed:
            return
        try:
            await self._begin(context, new)
        except Exception:
            if not new.token.revoked:  # otherwise a reset has overtaken it
                raise

    async def _begin(self, context: CoordinatorContext, new: _Incarnation) -> None:
        new.store = context.store.view()
        log = self._log_of(new)
        fenced = FencedContext(context, new.token, new.store, log, new.takes_calls)
        try:
            with new.beginning:
                new.coordinator = await call_user("factory", self._create)
                self._unclosed.append(new)
                if new.restore is not None:
                    await call_user("reset_to_checkpoint", new.coordinator.reset_to_checkpoint, *new.restore)
                await call_user("start", new.coordinator.start, fenced)
                log.debug("coordinator started", restored=new.restore and new.restore[0])
        except BaseException as error:
            new.failure = contained("factory", error)
            if new.failure is error:
                raise
            raise new.failure from error
        finally:
            new.begun.set()

    async def _create(self) -> OperatorCoordinator:
        return self._factory()

    async def _end(self, context: CoordinatorContext, old: _Incarnation) -> None:
        log = self._log_of(old)
        deadline = context.clock.call_later(self._close_timeout_s, partial(self._give_up, old, log))
        try:
            with old.closing:
                await old.begun.wait()
                await self._close_one(old)
            if old in self._unclosed:  # given up during its start: it is closed nevertheless, and delays nothing
                await self._close_late(context, old)
        except Exception:
            log.exception("replaced coordinator close failed")
        finally:
            deadline.cancel()
            old.end()

    async def _close_late(self, context: CoordinatorContext, old: _Incarnation) -> None:
        await old.begun.wait()
        scope = anyio.CancelScope()
        deadline = context.clock.call_later(self._close_timeout_s, scope.cancel)
        try:
            with scope:
                await self._close_one(old)
        finally:
            deadline.cancel()

    def _give_up(self, old: _Incarnation, log: Any) -> None:
        log.warning("replaced coordinator close abandoned", close_timeout_s=self._close_timeout_s)
        old.beginning.cancel()
        old.closing.cancel()
        old.end()

    async def _over(self, incarnation: _Incarnation, result: None, error: Exception | None) -> None:
        """Report, in the coordinator's order, a failure to begin as global, unless a reset has overtaken it."""
        if error is not None and not incarnation.token.revoked:
            raise error

    async def _taking_calls(self) -> OperatorCoordinator:
        """The current incarnation's coordinator, once it has started."""
        current = self._current
        if self._context is None or self._closed:
            raise RuntimeError(f"{self._name} is not running: use it only after start and before close")
        if not await current.takes_calls():
            assert current.failure is not None
            raise current.failure
        assert current.coordinator is not None
        return current.coordinator

    # --- delegated methods ----------------------------------------------------------------------------------------

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        await (await self._taking_calls()).handle_event_from_operator(subtask, attempt, event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return await (await self._taking_calls()).handle_request(subtask, attempt, request)

    async def handle_client_request(self, request: Any) -> Any:
        return await (await self._taking_calls()).handle_client_request(request)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        coordinator = await self._taking_calls()
        await coordinator.subtask_ready(subtask, FencedGateway(gateway, self._current.token))

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        await (await self._taking_calls()).subtask_suspected(subtask, attempt, reason)

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        await (await self._taking_calls()).subtask_responsive(subtask, attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await (await self._taking_calls()).subtask_failed(subtask, attempt, reason)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        await (await self._taking_calls()).subtask_finished(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await (await self._taking_calls()).subtask_reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return await (await self._taking_calls()).checkpoint_coordinator(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await (await self._taking_calls()).notify_checkpoint_complete(checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        await (await self._taking_calls()).notify_checkpoint_aborted(checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await (await self._taking_calls()).notify_checkpoint_discarded(checkpoint_id)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await (await self._taking_calls()).run_ended(run_id, succeeded, reason)


__all__ = ["RecreateOnReset"]
