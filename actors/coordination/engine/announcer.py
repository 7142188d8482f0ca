# SPDX-License-Identifier: Apache-2.0

"""Tell many gateways the same, without a turn of the event loop that works through all of them.

A checkpoint is cut, over or begun for every subtask at one moment. To tell thousands of gateways in one turn would hold
up every event for as long. So only the first few are told immediately, and the others a few in each turn.

The moment is kept nevertheless. A gateway has its *line*, and everything goes through it whose order the coordinator or
a checkpoint decides. What is put off waits in the line, and what is told through it later comes after it. So an event
that the coordinator sends after its cut follows the cut, and one that it has sent before, and that the gateway has not
handled yet, precedes it (H41, H79).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from actors import ActorRef

M = TypeVar("M")

GATEWAYS_PER_TURN = 16


class GatewayLine(Generic[M]):
    """The way to one gateway. Loop only."""

    __slots__ = ("_put_off", "ref")

    def __init__(self) -> None:
        self.ref: ActorRef[M]  # set as soon as its actor is spawned
        self._put_off: list[M] = []

    def tell_direct(self, message: M) -> None:
        """``ActorRef.tell_direct``, after everything that was put off."""
        if self._put_off:
            self.catch_up()
        self.ref.tell_direct(message)

    def put_off(self, message: M) -> None:
        """Tell this later, but before anything that is told after it."""
        self._put_off.append(message)

    def catch_up(self) -> bool:
        """Tell what was put off. Returns whether there was anything."""
        put_off = self._put_off
        if not put_off:
            return False
        while put_off:
            self.ref.tell_direct(put_off.pop(0))
        return True

    def end(self) -> None:
        """The gateway is closed: what was put off no longer matters."""
        self._put_off.clear()


class Announcer(Generic[M]):
    """Tells ``per_turn`` gateways in each turn. Loop only.

    ``next_turn``: has ``go_on`` called in a later turn of the loop, once for each call.
    """

    def __init__(self, per_turn: int, next_turn: Callable[[], None]) -> None:
        self._per_turn = per_turn
        self._next_turn = next_turn
        self._after: deque[GatewayLine[M]] = deque()

    def announce(self, lines: Sequence[GatewayLine[M]], message: M) -> None:
        """Tell ``message`` through each line: some immediately, the others soon."""
        first = 0
        if not self._after:
            first = self._per_turn
            for line in lines[:first]:
                line.tell_direct(message)
        if len(lines) <= first:
            return
        for line in lines[first:]:
            line.put_off(message)
        idle = not self._after
        self._after.extend(lines[first:])
        if idle:
            self._next_turn()

    def go_on(self) -> None:
        """Tell the next ones."""
        after, left = self._after, self._per_turn
        while after and left:
            if after.popleft().catch_up():
                left -= 1
        if after:
            self._next_turn()


__all__ = ["GATEWAYS_PER_TURN", "Announcer", "GatewayLine"]
