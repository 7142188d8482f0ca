# SPDX-License-Identifier: Apache-2.0

"""Bounds how many connections one turn of an event loop reads.

Thousands of tasks may answer at one moment, such as at the end of a checkpoint. An asyncio loop reads all connections
that are ready in the same turn: 700 take longer than 10 ms, in which nothing else runs. With this selector, it reads
``READY_MAX`` in one turn, and the others in the next turns, before it looks for news again.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque

__all__ = ["READY_MAX", "BoundedSelector", "bounded_loop"]

READY_MAX = 32
"""The number of ready files that one turn of the loop gets: together they take about a millisecond."""

Ready = tuple[selectors.SelectorKey, int]


class BoundedSelector(selectors.DefaultSelector):
    """Like the system's best selector, but ``select`` returns at most ``READY_MAX`` files, each in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Ready] = deque()

    def select(self, timeout: float | None = None) -> list[Ready]:
        """The next files that are ready. Does not wait, and may return none, while files of an earlier look wait."""
        if not self._waiting:
            ready = super().select(timeout)
            if len(ready) <= READY_MAX:
                return ready
            self._waiting.extend(ready)
        share = [self._waiting.popleft() for _ in range(min(READY_MAX, len(self._waiting)))]
        # A key is replaced when the loop registers something else for its file, or another file with its number. If
        # that one is ready, the next look finds it.
        registered = self.get_map()
        return [one for one in share if registered.get(one[0].fd) is one[0]]


def bounded_loop() -> asyncio.AbstractEventLoop:
    """A new loop of asyncio's with such a selector."""
    return asyncio.SelectorEventLoop(BoundedSelector())
