# SPDX-License-Identifier: Apache-2.0

"""Bounds the frames of a server's connections of which only a part has arrived (H62, H157).

Their bytes wait in memory, and a peer need not send the rest. So there are two limits. All of them together take about
``bytes_max``: beyond that, only the connection whose frame began first is read, until enough frames are complete. The
others wait at their own sockets and lose nothing, because a thousand honest tasks may send their states at the same
time. And each frame has to grow by ``PROGRESS_BYTES`` in each ``timeout_s``, or be completed. A fixed time for a whole
frame alone would either be too short for a large state on a slow network, or long enough to hold much memory. A whole
frame may take ``TIMEOUTS_MAX`` times ``timeout_s``, however it grows (H158). A connection that the server itself does
not read is given time. If the frames exceed the limit for a whole ``timeout_s``, the largest one is dropped, so that a
slow peer cannot keep out the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PROGRESS_BYTES", "TIMEOUTS_MAX", "IncompleteFrames", "WithFrame"]

PROGRESS_BYTES = 2**20
TIMEOUTS_MAX = 20
"""With the usual 60 s, 20 minutes: a state of 1 GiB needs a megabyte in a second."""


class WithFrame(Protocol):
    """A connection, as far as it has an incomplete frame."""

    @property
    def is_read(self) -> bool:
        """Whether the server reads what the peer sends."""
        ...

    def hold(self) -> None:
        """Do not read it until ``release``."""
        ...

    def release(self) -> None:
        """Read it again, unless something else forbids that."""
        ...

    def drop(self, why: str) -> None:
        """Close the connection, and log why."""
        ...


@dataclass(slots=True)
class _Frame:
    """``checked_bytes``: its size at the last check; None if it began later, or was not read at that time.

    ``checks``: how often it had grown enough.
    """

    size: int = 0
    checked_bytes: int | None = None
    checks: int = 0


class IncompleteFrames:
    """The incomplete frames of one server, in the order in which they began. Loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int, timeout_s: float) -> None:
        self._loop = loop
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._frames: dict[WithFrame, _Frame] = {}
        self._total = 0
        self._over = False
        self._over_at_check = False  # and never below the limit since
        self._timer: asyncio.TimerHandle | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes that wait for the rest of their frames."""
        return self._total

    def changed(self, connection: WithFrame, size: int, *, another: bool) -> None:
        """``size`` bytes of the connection's incomplete frame have arrived; ``another`` if one was completed before.

        With 0, the connection has none any more.
        """
        if another or not size:
            self.forget(connection)
        if not size:
            return
        frame = self._frames.setdefault(connection, _Frame())
        self._total += size - frame.size
        frame.size = size
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check)
        if self._total <= self._bytes_max:
            return
        first, *others = self._frames if not self._over else (next(iter(self._frames)), connection)
        self._over = True
        for other in others:
            if other is not first:
                other.hold()

    def forget(self, connection: WithFrame) -> None:
        """The connection has no incomplete frame any more. Idempotent."""
        frame = self._frames.pop(connection, None)
        if frame is None:
            return
        self._total -= frame.size
        if not self._over:
            return
        self._over = self._total > self._bytes_max
        self._over_at_check &= self._over
        connection.release()
        for waiting in list(self._frames):
            waiting.release()
            if self._over:  # only the first one
                return

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        assert self._timer is not None
        late_s = self._loop.time() - self._timer.when()
        stalled, endless = [], []
        for connection, frame in self._frames.items():
            before, frame.checked_bytes = frame.checked_bytes, frame.size if connection.is_read else None
            # If the loop itself was held up, nothing could arrive in that time.
            if before is None or frame.checked_bytes is None or late_s > self._timeout_s / 2:
                continue
            frame.checks += 1
            if frame.size - before < PROGRESS_BYTES:
                stalled.append(connection)
            elif frame.checks >= TIMEOUTS_MAX:
                endless.append(connection)
        largest = max(self._frames, key=lambda c: self._frames[c].size) if self._over and self._over_at_check else None
        self._over_at_check = self._over
        self._timer = self._loop.call_later(self._timeout_s, self._check) if self._frames else None
        for connection in stalled:
            connection.drop(
                f"the rest of a frame did not arrive: less than {PROGRESS_BYTES} bytes in {self._timeout_s:g} s"
            )
        for connection in endless:
            connection.drop(f"the rest of a frame did not arrive within {TIMEOUTS_MAX} times {self._timeout_s:g} s")
        if largest is not None and self._over:
            largest.drop(
                f"the incomplete frames of all peers exceeded {self._bytes_max} bytes for {self._timeout_s:g} s, and "
                "this one is the largest"
            )
