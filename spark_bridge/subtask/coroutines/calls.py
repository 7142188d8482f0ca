# SPDX-License-Identifier: Apache-2.0

"""What coroutines are given and give: the context of a record, its effects, a failure; and what a stage was told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, overload

from protocol.describing import name_of
from protocol.event_types import Answer, Request
from protocol.wire.event_classes import event
from spark_bridge.subtask.coroutines.retry import Retry

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["AsyncOperator", "Effects", "Failed", "RecordContext", "Settings", "content_key", "is_async"]

Effects = list[list[Any]]
"""What happens with a result: ``["event", event]``, ``["count", name, by]``, ``["observe", name, value]``."""


def content_key(name: str, encoded: bytes) -> str:
    """A key that is the same whenever a record of the same content is processed, by whichever subtask."""
    return blake2b(encoded, digest_size=16, key=name.encode()[:64]).hexdigest()


class RecordContext:
    """What a coroutine knows of its record's task; a function of two arguments gets it as the first one.

    Events and counts are part of the result: they happen once, when the result leaves the stage, also if the task is
    lost in between. A try that fails has none. For the loop's thread.

    Attributes:
        key: a text for the ``Idempotency-Key`` of a service: the same for the same content of the record, in whichever
            task or run it is processed, unless ``concurrently`` was given a ``key``.
        tries: the number of this try, from 1.
        operator_id, subtask, attempt, parallelism: as those of ``SubtaskContext``.
    """

    __slots__ = ("_context", "_key", "effects", "tries")

    def __init__(self, context: SubtaskContext[Any], key: Callable[[], str], tries: int, effects: Effects) -> None:
        self._context = context
        self._key = key
        self.tries = tries
        self.effects = effects

    @property
    def operator_id(self) -> str:
        return self._context.operator_id

    @property
    def subtask(self) -> int:
        return self._context.subtask

    @property
    def attempt(self) -> int:
        return self._context.attempt

    @property
    def parallelism(self) -> int:
        return self._context.parallelism

    @property
    def key(self) -> str:
        """See above. Raises ``EventEncodeError`` if the record has a value that events cannot have."""
        return self._key()

    def send_event(self, event: Any) -> None:
        """Send ``event`` to the coordinator when the result leaves; it is encoded then, so do not change it."""
        self.effects.append(["event", event])

    def count(self, name: str, by: SupportsIndex | SupportsFloat = 1) -> None:
        """As ``SubtaskContext.count``, when the result leaves."""
        self.effects.append(["count", name, by])

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None:
        """As ``SubtaskContext.observe``, when the result leaves."""
        self.effects.append(["observe", name, value])

    @overload
    async def request(self, payload: Request[Answer], timeout_s: float = 30.0) -> Answer: ...

    @overload
    async def request(self, payload: Any, timeout_s: float = 30.0) -> Any: ...

    async def request(self, payload: Any, timeout_s: float = 30.0) -> Any:
        """Ask the coordinator now, and await its answer: see ``SubtaskContext.request_async``."""
        return await self._context.request_async(payload, timeout_s)


class AsyncOperator:
    """An async stage with more than a function: pass the class to ``concurrently``, or a ``partial`` of it.

    All methods run on one event loop in each task, which has a separate thread, so fields need no locks between awaits.
    ``start`` comes first, then ``process_record`` for up to ``limit`` records at a time, then ``stop``, also if a call
    failed; a task that is killed stops nothing. It has no state in checkpoints: these have the records in flight.
    """

    async def start(self) -> None:
        """Prepare, for example open a session. Called once in each task, before the first record."""

    async def process_record(self, context: RecordContext, record: Any) -> Any:
        """Return the result for ``record``. Cancelled when the attempt ends."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def process_record(self, context, record)`"
        )

    def handle_event(self, event: Any) -> None:
        """Handle an event of the coordinator, on the loop: set an ``asyncio.Event`` that coroutines await, say.

        Events that the coordinator sends in ``subtask_ready`` come before ``start``.
        """

    async def stop(self) -> None:
        """Release resources. It has 10 seconds, and what it raises is only logged."""


@event("headgate.Failed")
@dataclass(frozen=True)
class Failed:
    """A record without a result, as ``on_error="yield"`` gives it to the next stage.

    Attributes:
        record: the record.
        error: the class and text of the last error.
        tries: how many calls were made.
    """

    record: Any
    error: str
    tries: int


def is_async(function: Any) -> bool:
    """Whether calling it gives an awaitable, as far as that can be seen."""
    made_by = function.func if isinstance(function, partial) else function
    call = made_by if inspect.isroutine(made_by) else getattr(type(made_by), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call)


@dataclass(frozen=True)
class Settings:
    """What ``concurrently`` was given; see there."""

    call: Any
    limit: int
    ordered: bool
    timeout_s: float | None
    retry: Retry
    on_error: Any
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None
    key: Callable[[Any], str] | None
    rows: bool
    schema: Any
    with_context: bool = False
    """Whether the function takes a ``RecordContext``."""
    failures_to: str = ""
    """The name of the part that writes failures."""

    @property
    def name(self) -> str:
        """The name of the function or class."""
        return name_of(self.call.func if isinstance(self.call, partial) else self.call)

    @property
    def is_class(self) -> bool:
        """Whether each task makes an ``AsyncOperator``."""
        return not is_async(self.call)
