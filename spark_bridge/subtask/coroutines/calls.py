# SPDX-License-Identifier: Apache-2.0

"""What the coroutine of a record is given: who it works for, and effects that happen when its result leaves."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, overload

from protocol.event_types import Answer, Request

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["Effects", "RecordContext", "content_key"]

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

    __slots__ = ("_context", "_key", "attempt", "effects", "operator_id", "parallelism", "subtask", "tries")

    def __init__(self, context: SubtaskContext[Any], key: Callable[[], str], tries: int) -> None:
        self._context = context
        self._key = key
        self.effects: Effects = []
        self.tries = tries
        self.operator_id = context.operator_id
        self.subtask = context.subtask
        self.attempt = context.attempt
        self.parallelism = context.parallelism

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
