"""Who waits for whom, right now.

Each ``ask`` that is unanswered and each ``send`` that waits for room is on record, with the actor (or task)
that waits. The dump of it is what one wants to see when a system stands still; a cycle in it is a deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.cell import ActorCell

current_cell: ContextVar[ActorCell[Any] | None] = ContextVar("headgate_current_actor", default=None)


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` has waited for ``target`` for ``for_s`` seconds: ``what`` (a room, an answer),
    ``message_type``."""

    waiter: str
    what: str
    target: str
    message_type: str
    for_s: float


class WaitBoard:
    """The waits of one system. Recording one costs a tuple and a dict entry; all naming is left to the
    dump."""

    __slots__ = ("_next", "_now", "_open")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next = 0
        self._open: dict[int, tuple[object, str, ActorCell[Any], object, float]] = {}

    def current_cell(self) -> ActorCell[Any] | None:
        """The actor in whose name this code runs, if any."""
        return current_cell.get()

    def begin(self, what: str, target: ActorCell[Any], message: object) -> int:
        """Put a wait of the current actor or task on record; returns its key for ``end``."""
        self._next = key = self._next + 1
        waiter = current_cell.get() or asyncio.current_task()
        self._open[key] = (waiter, what, target, message, self._now())
        return key

    def end(self, key: int) -> None:
        """The wait is over."""
        self._open.pop(key, None)

    @contextmanager
    def waiting(self, what: str, target: ActorCell[Any], message: object) -> Iterator[None]:
        """On record while the block runs."""
        key = self.begin(what, target, message)
        try:
            yield
        finally:
            self.end(key)

    def waits(self) -> list[Wait]:
        """All waits, the oldest first."""
        now = self._now()
        return [
            Wait(_name(waiter), what, target.path, type(message).__name__, now - since)
            for waiter, what, target, message, since in self._open.values()
        ]

    def cycles(self) -> list[tuple[str, ...]]:
        """Rings of actors that wait for one another, each once, beginning with its smallest name."""
        edges: dict[str, set[str]] = {}
        for wait in self.waits():
            edges.setdefault(wait.waiter, set()).add(wait.target)
        found: set[tuple[str, ...]] = set()
        for start in edges:
            _follow(edges, (start,), found)
        return sorted(found)


def _follow(edges: dict[str, set[str]], path: tuple[str, ...], found: set[tuple[str, ...]]) -> None:
    for target in sorted(edges.get(path[-1], ())):
        if target in path:
            ring = path[path.index(target) :]
            at = ring.index(min(ring))
            found.add(ring[at:] + ring[:at])
        else:
            _follow(edges, (*path, target), found)


def _name(waiter: object) -> str:
    if isinstance(waiter, asyncio.Task):
        return f"task {waiter.get_name()}"
    return str(getattr(waiter, "path", "?"))
