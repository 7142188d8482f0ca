# SPDX-License-Identifier: Apache-2.0

"""Items of a part that a stage yields to an async one: the part hears what becomes of them, and what is added."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from typing import Any, Protocol

__all__ = ["ADDS", "Items"]

ADDS: ContextVar[tuple[str, Any] | None] = ContextVar("ADDS", default=None)
"""In a coroutine that processes an item of a work queue: the name of the queue, and the effects of the result, to which
what it adds is appended."""


class Items(Protocol):
    """A part whose items a stage yields to one that processes many at a time. For the task's own thread."""

    @property
    def name(self) -> str: ...

    given: int
    """The id of the item that was yielded last."""

    def resume(self, ids: Collection[int | None]) -> Collection[int | None]:
        """The next stage has restored these; all others that were with it have left. Return those that are known."""

    def giving_out(self, id_: int) -> None:
        """The result for an item leaves now. What is added until ``left`` belongs to the item."""

    def left(self) -> None:
        """What took the result has come back."""

    def add_found(self, found: list[Any]) -> None:
        """Add what the coroutine of the item that is leaving has found."""
