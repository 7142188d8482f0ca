# SPDX-License-Identifier: Apache-2.0

"""Who acts: one part of an operator, and one of the coordinators that it has had.

The context and the gateways of a coordinator carry its ``Incarnation``. Whether they may still act is decided here and
nowhere else, by a comparison of two numbers. So a coordinator that was replaced has no effect any more, however late it
acts: on the loop, in a thread, in a queued handler, or in a send that waited for capacity (G16).

All parts of an operator have one cut, although their snapshots are taken one after the other (H80): it is where the
last snapshot is taken. Meanwhile, code of an earlier part may run on the loop, outside of its coordinator's methods,
and send an event or give an answer that the snapshot of that part does not have. If that left before the cut, a restore
would send it again. So it is held until the cut, and leaves right behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

__all__ = ["Incarnation", "Sender"]

T = TypeVar("T")


class Sender:
    """A part as its context and its gateways see it. ``name`` is empty for the user's own part, whose index is 0.

    ``acting`` is the number of the incarnation that may act; 0 once none may any more. Any thread may read it;
    everything else is loop-only.
    """

    __slots__ = ("acting", "held", "index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.acting = 1
        self.held: list[Callable[[], None]] | None = None
        """None, except between the part's snapshot and the cut: what the parts have sent there, in its order."""

    def submit(self, send: Callable[[], None]) -> None:
        """Send now, or right behind the cut if the state of this part is taken already."""
        if self.held is None:
            send()
        else:
            self.held.append(send)


class Incarnation:
    """One coordinator of a part, counted from 1. It may act until the next one replaces it, or it has ended."""

    def __init__(self, part: Sender, number: int) -> None:
        self.part = part
        self.number = number
        self.failure: Exception | None = None  # why it never took calls
        self.begun = anyio.Event()  # started, or failed to
        self._guarded: set[anyio.CancelScope] = set()

    def may_act(self) -> bool:
        """Whether anything that it does still has an effect. Any thread."""
        return self.part.acting == self.number

    async def takes_calls(self) -> bool:
        """Wait until it has started, and return whether it has."""
        if not self.begun.is_set():  # otherwise the wait would give the loop a turn, in each handler
            await self.begun.wait()
        return self.failure is None

    async def guard(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of ``call``. If the incarnation is replaced first, cancel ``call`` and return None."""
        if not self.may_act():
            return None
        with anyio.CancelScope() as scope:
            self._guarded.add(scope)
            try:
                return await call()
            finally:
                self._guarded.discard(scope)
        return None

    def cancel_guarded(self) -> None:
        """It may no longer act: cancel what it has left behind."""
        for scope in tuple(self._guarded):
            scope.cancel()

    def fenced(self, handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """The handler, as this incarnation's: called after its ``start``, if it may still act then."""

        async def fenced(*args: object) -> None:
            if await self.takes_calls() and self.may_act():
                await handler(*args)

        return fenced
