# SPDX-License-Identifier: Apache-2.0

"""Implement ``CoordinatorContext`` with the context of the coordinator's actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from actors import ActorContext, SystemNotRunning
from actors.clock import Clock
from actors.coordination.live_gateways import LiveGateways
from actors.coordination.messages import CallHandler, CoordinatorMessage
from actors.coordination.store import CoordinatorStore
from actors.coordination.user_calls import is_fatal
from protocol.arguments import WAIT, checked
from protocol.describing import is_a
from protocol.facts import StageLook
from protocol.parts import OWN_PART
from protocol.wire.messages import RestoreMode

if TYPE_CHECKING:
    from actors.coordination.coordinator import CoordinatorActor

T = TypeVar("T")


class ContextOfActor:
    """``CoordinatorContext``, implemented with the actor's context."""

    def __init__(self, actor: CoordinatorActor, context: ActorContext[CoordinatorMessage]) -> None:
        self._actor = actor
        self._context = context
        self._timers = 0

    @property
    def operator_id(self) -> str:
        return self._actor.operator_id

    @property
    def parallelism(self) -> int:
        return self._actor.parallelism

    @property
    def mode(self) -> RestoreMode:
        return self._actor.mode

    @property
    def clock(self) -> Clock:
        return self._context.clock

    @cached_property
    def gateways(self) -> LiveGateways:
        return LiveGateways(self._actor.gateways)

    @property
    def store(self) -> CoordinatorStore:
        return self._actor.store

    @property
    def log(self) -> Any:
        return self._context.log

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        return frozenset(self._actor.in_doubt)

    @property
    def handles_restored(self) -> bool:
        return self._actor.taken.handles_restored(OWN_PART)

    def handles_restored_by(self, name: str) -> bool:
        return self._actor.taken.handles_restored(self._index(name))

    def events_taken_by(self, subtask: int, name: str) -> int:
        return self._actor.taken.position(subtask, self._index(name))

    def _index(self, name: str) -> int:
        index = self._actor.table.index(name)
        assert index is not None
        return index

    @property
    def input_begins_again(self) -> bool:
        return self._actor.input_begins_again

    @checked()
    def events_taken(self, subtask: int) -> int:
        return self._actor.taken.position(subtask)

    async def look_at_run(self) -> StageLook:
        return await self._actor.look_at_run()

    @checked()
    def fail_job(self, cause: BaseException | str) -> None:
        error = cause if is_a(cause, BaseException) else RuntimeError(cause)
        self._actor.raise_global_failure("fail_job", error, self._context)

    @checked()
    def call_async(
        self,
        function: Callable[..., T],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        self._context.run_in_thread(
            function,
            *args,
            on_result=lambda result: CallHandler(lambda: handler(result, None)),
            on_error=partial(_handle_error, "call_async", handler),
        )

    @checked()
    def run_in_background(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        self._context.run(
            coroutine_function,
            *args,
            on_result=lambda result: CallHandler(lambda: handler(result, None)),
            on_error=partial(_handle_error, "run_in_background", handler),
        )

    @checked(delay_s=WAIT)
    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self._timers += 1
        self._context.timers.start(f"call_later-{self._timers}", CallHandler(handler), delay_s=delay_s)

    @checked()
    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        with suppress(SystemNotRunning):
            self._context.self_ref.tell_threadsafe(CallHandler(handler))


def _handle_error(
    caller: str, handler: Callable[[Any, Exception | None], Awaitable[None]], error: Exception
) -> CallHandler:
    """Give an ordinary error to the handler; one that would end the program fails the job."""
    if is_fatal(error):
        return failing(caller, error)
    return CallHandler(lambda: handler(None, error))


def failing(caller: str, error: Exception) -> CallHandler:
    """The message that makes the coordinator fail its job when the message's turn comes."""

    async def fail() -> None:
        raise error

    return CallHandler(fail, caller)


__all__ = ["ContextOfActor", "failing"]
