# SPDX-License-Identifier: Apache-2.0

"""Who waits for whom, right now.

Each unanswered ``ask`` and each ``send`` that waits for space is on record, with the actor or task that waits. When a
system stands still, this record shows why: a cycle in it is a deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from protocol.describing import type_name


class Named(Protocol):
    """An actor, as far as this module needs to know it."""

    @property
    def path(self) -> str: ...

    @property
    def parent(self) -> Named | None: ...


current_actor: ContextVar[Named | None] = ContextVar("headgate_current_actor", default=None)
"""The actor on whose behalf this code runs, if any."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` has waited for ``for_s`` seconds for ``what`` ("space in", "an answer from") ``target``."""

    waiter: str
    what: str
    target: str
    message_type: str
    for_s: float


class WaitBoard:
    """The waits of one system. Recording one costs a tuple and a dict entry; names are looked up only for a dump."""

    __slots__ = ("_next", "_now", "_open")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next = 0
        self._open: dict[int, tuple[object, str, Named, object, float]] = {}

    def begin(self, what: str, target: Named, message: object) -> int:
        """Record that the current actor or task waits; returns the key for ``end``."""
        self._next = key = self._next + 1
        waiter = current_actor.get() or asyncio.current_task()
        self._open[key] = (waiter, what, target, message, self._now())
        return key

    def end(self, key: int) -> None:
        """The wait is over."""
        self._open.pop(key, None)

    @contextmanager
    def waiting(self, what: str, target: Named, message: object) -> Iterator[None]:
        """Keep a wait on record while the block runs."""
        key = self.begin(what, target, message)
        try:
            yield
        finally:
            self.end(key)

    def waits(self) -> list[Wait]:
        """All waits, the oldest first."""
        now = self._now()
        return [
            Wait(_name(waiter), what, target.path, type_name(message), now - since)
            for waiter, what, target, message, since in self._open.values()
        ]

    def cycles(self) -> list[tuple[str, ...]]:
        """Rings of actors that wait for one another. Each appears once and begins with its smallest name."""
        edges: dict[str, set[str]] = {}
        for wait in self.waits():
            edges.setdefault(wait.waiter, set()).add(wait.target)
        found: set[tuple[str, ...]] = set()
        for start in edges:
            _follow(edges, (start,), found)
        return sorted(found)

    def dump(self) -> str:
        """All waits, then all cycles, one a line."""
        lines = [
            f"{wait.waiter} waits for {wait.what} {wait.target}: {wait.message_type}, {wait.for_s:.3f} s"
            for wait in self.waits()
        ]
        lines += ["deadlock: " + " -> ".join((*ring, ring[0])) for ring in self.cycles()]
        return "\n".join(lines) if lines else "nobody waits"


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
