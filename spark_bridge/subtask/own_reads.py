# SPDX-License-Identifier: Apache-2.0

"""Lets the task's own thread read the socket while it waits, instead of being woken by the I/O thread.

Being woken by the I/O thread costs a second wake-up and a hand-over of the interpreter lock for each event. So a task
that waits again soon after something arrived takes over the reading. It gives it back when nothing arrives for a while,
or when the I/O thread notices that the task is doing something else. A task that waits rarely never takes it over.

    the I/O thread reads --(news came soon, and the task waits again)--> the task reads
                         <--(no news for IDLE_S; the task went away; the connection broke)--

If the previous wait took less than ``spin_s``, the next one starts by polling: a sleeping processor takes longer to
wake than the other end takes to answer. On a single core there is no polling, because the other end may need the core.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from contextlib import suppress
from typing import Final

from spark_bridge.subtask.waker import Waker

__all__ = ["OwnReads"]

SOON_S: Final = 0.005  # after a wait shorter than this, the task reads during the next one
IDLE_S: Final = 0.02  # after this long without news, the I/O thread reads again
WATCH_S: Final = (
    0.001  # while the task reads, the I/O thread checks on it this often; at the second check it takes over
)


class OwnReads:
    """Which thread reads the socket. Used under the channel's lock, except ``wait``.

    ``active``: the task's thread reads, and the I/O thread leaves the socket alone. ``waiting``: the task's thread is
    waiting now, and only ``wake`` can wake it.
    """

    __slots__ = ("_last_wait_s", "_poller", "_registered", "_seen", "_spin_s", "_waits", "_waker", "active", "waiting")

    def __init__(self, spin_s: float) -> None:
        self.active = False
        self.waiting = False
        self._spin_s = spin_s if _has_several_cores() else 0.0
        self._last_wait_s = math.inf
        self._waits = self._seen = 0
        self._waker = Waker(lambda: False)
        self._poller = select.poll()
        self._poller.register(self._waker.fileno(), select.POLLIN)
        self._registered = -1

    @property
    def are_worthwhile(self) -> bool:
        """Whether the next wait is likely to be short."""
        return self.active or self._last_wait_s < SOON_S

    def was_told(self, waited_s: float) -> None:
        """How long the task waited until the I/O thread woke it; ``math.inf`` if it was not woken."""
        self._last_wait_s = waited_s

    def begin(self, sock: socket.socket) -> None:
        """The task is about to call ``wait``."""
        if sock.fileno() != self._registered:
            if self._registered >= 0:
                self._poller.unregister(self._registered)
            self._registered = sock.fileno()
            self._poller.register(self._registered, select.POLLIN)
        self.active = self.waiting = True
        self._waits += 1

    def wait(self, timeout_s: float | None) -> bool:
        """Wait, without the lock, until data arrives or ``wake`` is called. False after ``IDLE_S`` or ``timeout_s``."""
        poll, began = self._poller.poll, time.monotonic()
        timeout_s = IDLE_S if timeout_s is None else min(IDLE_S, timeout_s)
        ready: list[tuple[int, int]] = []
        if self._last_wait_s < self._spin_s:
            spin_until = began + min(self._spin_s, timeout_s)
            while not (ready := poll(0)) and time.monotonic() < spin_until:
                pass
        if not ready:
            ready = poll(math.ceil(1000 * timeout_s))
        self._last_wait_s = time.monotonic() - began if ready else math.inf
        if ready and ready != [(self._registered, select.POLLIN)]:
            with suppress(OSError):  # closed meanwhile: the channel knows why
                self._waker.drain()
        return bool(ready)

    def has_been_away(self) -> bool:
        """Whether the task has not waited at all since the previous call."""
        away = not self.waiting and self._waits == self._seen
        self._seen = self._waits
        return away

    def wake(self) -> None:
        """Wake the task's thread."""
        self._waker.wake()

    def close(self) -> None:
        """Safe to call twice."""
        self._waker.close()


def _has_several_cores() -> bool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1
