# SPDX-License-Identifier: Apache-2.0

"""The ``CoordinatorContext`` of every coordinator, and what it needs of the place where the coordinator lives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from actors.clock import Clock
from actors.coordination.host.gateway import GatewayTable, LiveGateways
from actors.coordination.host.incarnation import Incarnation, Sender
from actors.coordination.store import CoordinatorStore
from protocol.arguments import WAIT, checked
from protocol.describing import describe, is_a
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode

__all__ = ["Context", "Host", "Outcome"]

T = TypeVar("T")

Outcome = Callable[[Any, Exception | None], Awaitable[None]]
"""A handler that gets a result and None, or None and an exception."""


class Host(Protocol):
    """Where coordinators live: the actor of an operator, or something that needs a coordinator's work without tasks.

    What it runs or calls, it calls between the coordinators' methods. Nothing here is fenced; the context does that.
    """

    @property
    def operator_id(self) -> str: ...

    @property
    def parallelism(self) -> int: ...

    @property
    def mode(self) -> RestoreMode: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> Any: ...

    @property
    def store(self) -> CoordinatorStore: ...

    @property
    def gateways(self) -> GatewayTable: ...

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]: ...

    def handles_restored(self, part: Sender) -> bool: ...

    @property
    def input_begins_again(self) -> bool: ...

    def events_taken(self, part: Sender, subtask: int) -> int: ...

    @property
    def look_at_run(self) -> Callable[[], Awaitable[StageLook]]: ...

    def fail_job(self, error: BaseException) -> None: ...

    def run_in_thread(self, function: Callable[..., Any], *args: Any, handler: Outcome) -> None: ...

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any, handler: Outcome) -> None: ...

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None: ...

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None: ...


class Context:
    """The ``CoordinatorContext`` of one incarnation of a part. After that is replaced, its methods do nothing.

    Handlers of the incarnation come after its ``start``, as everywhere. After a replacement, work that runs in a thread
    finishes, since a thread cannot be stopped, and its result is dropped. Work that still waits for a thread never
    begins. A coroutine in the background is cancelled.

    Only ``store`` stays writable a little longer. A coordinator cleans up its values there in ``close``, which comes
    after the reset. So writes are refused once the incarnation has ended or was given up. That is before the next one
    is created.
    """

    def __init__(self, host: Host, incarnation: Incarnation, store: CoordinatorStore, log: Any) -> None:
        self._host = host
        self._incarnation = incarnation
        self.operator_id, self.parallelism, self.mode = host.operator_id, host.parallelism, host.mode
        self.clock = host.clock
        self.store = store
        self.log = log
        self.gateways = LiveGateways(host.gateways, incarnation)

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        return self._host.checkpoints_in_doubt

    @property
    def handles_restored(self) -> bool:
        return self._host.handles_restored(self._incarnation.part)

    @property
    def input_begins_again(self) -> bool:
        return self._host.input_begins_again

    @checked()
    def events_taken(self, subtask: int) -> int:
        return self._host.events_taken(self._incarnation.part, subtask)

    async def look_at_run(self) -> StageLook:
        return await self._host.look_at_run()

    @checked()
    def fail_job(self, cause: BaseException | str) -> None:
        error = cause if is_a(cause, BaseException) else RuntimeError(cause)
        if self._may_act("fail_job", cause=describe(error) if error is cause else str(cause)):
            self._host.fail_job(error)

    @checked()
    def call_async(
        self,
        function: Callable[..., T],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        incarnation = self._incarnation

        @wraps(function)
        def in_thread(*args: Any) -> T | None:
            if not incarnation.may_act():
                return None
            try:
                return function(*args)
            except BaseException:
                if not incarnation.may_act():  # whatever it raised, it no longer fails a job
                    return None
                raise

        if self._may_act("call_async"):
            self._host.run_in_thread(in_thread, *args, handler=incarnation.fenced(handler))

    @checked()
    def run_in_background(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        incarnation = self._incarnation

        @wraps(coroutine_function)
        async def in_background(*args: Any) -> T | None:
            return await incarnation.guard(lambda: coroutine_function(*args))

        if self._may_act("run_in_background"):
            self._host.run_in_background(in_background, *args, handler=incarnation.fenced(handler))

    @checked(delay_s=WAIT)
    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        if self._may_act("call_later"):
            self._host.call_later(delay_s, self._incarnation.fenced(handler))

    @checked()
    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        if self._may_act("call_soon_threadsafe"):
            self._host.call_soon_threadsafe(self._incarnation.fenced(handler))

    def _may_act(self, what: str, **details: str) -> bool:
        if not self._incarnation.may_act():
            self.log.info("call of replaced coordinator ignored", what=what, **details)
            return False
        return True
