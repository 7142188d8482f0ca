# SPDX-License-Identifier: Apache-2.0

"""Keep a coordinator that was replaced from acting alongside its successor (G16).

Each incarnation has a token, which a reset revokes. After that, the incarnation has no effect through its context or
its gateways, however late it acts: on the loop, in a thread, in a queued handler, or in a send that waited for
capacity.

Only the store stays writable a little longer. A coordinator cleans up its values there in ``close``, which comes after
the reset. So writes to the store are refused once the incarnation has ended or was given up. That is before the next
one is created.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property, wraps
from typing import Any, TypeVar

import anyio

from actors.clock import Clock
from actors.coordination.confirmation import Confirmation
from actors.coordination.interface import CoordinatorContext, SubtaskGateway
from actors.coordination.live_gateways import LiveGateways
from actors.coordination.parts_cut import inner_of
from actors.coordination.store import CoordinatorStore
from actors.coordination.unawaited import AwaitCheck
from actors.coordination.wrapped_gateway import WrappedGateway
from protocol.describing import describe, is_a
from protocol.errors import AttemptOver
from protocol.facts import StageLook
from protocol.wire.codec import encode_event
from protocol.wire.messages import RestoreMode

T = TypeVar("T")


class FencingToken:
    """One incarnation's right to act. Any thread may read ``revoked``; everything else is loop-only."""

    __slots__ = ("_scopes", "revoked")

    def __init__(self) -> None:
        self.revoked = False
        self._scopes: set[anyio.CancelScope] = set()

    def revoke(self) -> None:
        """Revoke the right permanently, and cancel the calls that it guards."""
        self.revoked = True
        for scope in tuple(self._scopes):
            scope.cancel()

    def is_revoked(self) -> bool:
        """Return ``revoked``, which another thread may change meanwhile."""
        return self.revoked

    async def guard(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of ``call``. If the token is revoked first, cancel ``call`` and return None."""
        if self.revoked:
            return None
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await call()
            finally:
                self._scopes.discard(scope)
        return None


class FencedGateway(WrappedGateway):
    """``SubtaskGateway`` for one incarnation. After that is replaced, its sends fail with ``AttemptOver``."""

    __slots__ = ("_token",)

    def __init__(self, gateway: SubtaskGateway, token: FencingToken) -> None:
        super().__init__(gateway)
        self._token = token

    def __repr__(self) -> str:
        return f"<fenced {self._gateway!r}>"

    def send_event(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, Confirmation]:
        return self._send(event, loss_tolerant, urgent, AwaitCheck(self.attempt))

    async def _send(self, event: Any, loss_tolerant: bool, urgent: bool, check: AwaitCheck) -> Confirmation:
        check.begun = True
        # It may wait for capacity. If it is cancelled there, it sends nothing.
        sent = await self._token.guard(
            lambda: self._gateway.send_event(event, loss_tolerant=loss_tolerant, urgent=urgent)
        )
        return sent or self._refused(event)

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        if self._token.revoked:
            return self._refused(event)
        return self._gateway.send_event_nowait(event, loss_tolerant=loss_tolerant, urgent=urgent)

    def _refused(self, event: Any) -> Confirmation:
        encode_event(inner_of(event))  # an event that cannot be encoded raises, as at any other time (H21)
        confirmation = Confirmation()
        confirmation.settle(AttemptOver(f"{self.attempt}: the coordinator that sent this was replaced by a reset"))
        return confirmation


class FencedContext:
    """``CoordinatorContext`` for one incarnation. After that is replaced, its methods do nothing.

    Handlers of the incarnation come after its ``start``, as everywhere: ``begun`` waits for that and tells whether it
    succeeded. After a replacement, work that runs in a thread finishes, since a thread cannot be stopped, and its
    result is dropped. Work that still waits for a thread never begins. A coroutine in the background is cancelled.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        token: FencingToken,
        store: CoordinatorStore,
        log: Any,
        begun: Callable[[], Awaitable[bool]],
    ) -> None:
        self._context = context
        self._token = token
        self._store = store
        self._log = log
        self._begun = begun

    @property
    def operator_id(self) -> str:
        return self._context.operator_id

    @property
    def parallelism(self) -> int:
        return self._context.parallelism

    @property
    def mode(self) -> RestoreMode:
        return self._context.mode

    @property
    def log(self) -> Any:
        return self._log

    @cached_property
    def gateways(self) -> LiveGateways:
        token = self._token
        return self._context.gateways.seen_by(
            lambda gateway: FencedGateway(gateway, token),
            is_over=token.is_revoked,
            guard=token.guard,
            fenced=self._fenced,
        )

    @property
    def clock(self) -> Clock:
        return self._context.clock

    @property
    def store(self) -> CoordinatorStore:
        return self._store

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        return self._context.checkpoints_in_doubt

    @property
    def handles_restored(self) -> bool:
        return self._context.handles_restored

    @property
    def input_begins_again(self) -> bool:
        return self._context.input_begins_again

    def events_taken(self, subtask: int) -> int:
        return self._context.events_taken(subtask)

    async def look_at_run(self) -> StageLook:
        return await self._context.look_at_run()

    def fail_job(self, cause: BaseException | str) -> None:
        if self._is_valid("fail_job", cause=describe(cause) if is_a(cause, BaseException) else str(cause)):
            self._context.fail_job(cause)

    def call_async(
        self,
        function: Callable[..., T],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        token = self._token

        @wraps(function)
        def in_thread(*args: Any) -> T | None:
            if token.revoked:
                return None
            try:
                return function(*args)
            except BaseException:
                if token.is_revoked():  # whatever it raised, it no longer fails a job
                    return None
                raise

        if self._is_valid("call_async"):
            self._context.call_async(in_thread, *args, handler=self._fenced(handler))

    def run_in_background(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        @wraps(coroutine_function)
        async def in_background(*args: Any) -> T | None:
            return await self._token.guard(lambda: coroutine_function(*args))

        if self._is_valid("run_in_background"):
            self._context.run_in_background(in_background, *args, handler=self._fenced(handler))

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        if self._is_valid("call_later"):
            self._context.call_later(delay_s, self._fenced(handler))

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        if self._is_valid("call_soon_threadsafe"):
            self._context.call_soon_threadsafe(self._fenced(handler))

    def _fenced(self, handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def fenced(*args: Any) -> None:
            if await self._begun() and not self._token.revoked:
                await handler(*args)

        return fenced

    def _is_valid(self, what: str, **details: str) -> bool:
        if self._token.revoked:
            self._log.info("call of replaced coordinator ignored", what=what, **details)
        return not self._token.revoked
