"""The task's own thread reads the socket while it waits, instead of being told by the I/O thread.

To be told costs a second wake-up for each event, and the interpreter's lock goes from hand to hand. So a task that
waits again soon after something came takes the reading over, and gives it back when nothing comes for a while, or when
the I/O thread sees that it does something else. Whoever waits only now and then never takes it over.

    the I/O thread reads --(news came soon, and the task waits again)--> the task reads
                         <--(no news for IDLE_S; it has been away; the connection broke)--

Where one thing follows the other within ``spin_s``, the wait begins with looking again and again: a processor that goes
to sleep takes longer to wake than the other end to answer. Not where there is one core only: there the other end may
need it.
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

SOON_S: Final = 0.005  # a wait that was shorter makes it worth reading during the next one
IDLE_S: Final = 0.02  # without news for so long, the reading goes back
WATCH_S: Final = 0.001  # between two looks of the I/O thread, while the task reads; it takes over at the second one


class OwnReads:
    """Whose turn it is to read. Used under the valve's lock, but for ``wait``.

    ``active``: the task's thread reads, and the I/O thread leaves the socket alone. ``waiting``: it waits right now,
    and must be woken by ``wake``.
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
        """Whether the next wait is likely to be a short one."""
        return self.active or self._last_wait_s < SOON_S

    def was_told(self, waited_s: float) -> None:
        """The task has waited so long for the I/O thread to tell it of something; ``math.inf``: of nothing."""
        self._last_wait_s = waited_s

    def begin(self, sock: socket.socket) -> None:
        """The task is about to ``wait``."""
        if sock.fileno() != self._registered:
            if self._registered >= 0:
                self._poller.unregister(self._registered)
            self._registered = sock.fileno()
            self._poller.register(self._registered, select.POLLIN)
        self.active = self.waiting = True
        self._waits += 1

    def wait(self, timeout_s: float | None) -> bool:
        """Wait, without the lock, until something has come or ``wake``; False if that takes ``IDLE_S`` or longer."""
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
            with suppress(OSError):  # closed meanwhile: the valve says why
                self._waker.answer()
        return bool(ready)

    def has_been_away(self) -> bool:
        """Whether the task has done something else since the last time this was asked, and not waited in between."""
        away = not self.waiting and self._waits == self._seen
        self._seen = self._waits
        return away

    def wake(self) -> None:
        """Get the task out of its wait."""
        self._waker.wake()

    def close(self) -> None:
        """Safe to call twice."""
        self._waker.close()


def _has_several_cores() -> bool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1
