# SPDX-License-Identifier: Apache-2.0

"""Lets one thread wake another that is waiting for a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Interrupted", "Waker"]


class Interrupted(Exception):
    """The attempt is being closed: the thread must stop waiting."""


class Waker:
    """A socket that becomes readable on ``wake()``. ``stopping`` tells whether the waiting thread must end.

    Any thread may call ``wake``, even after ``close``. Everything else belongs to the thread that waits.
    """

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor for a selector."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the thread's current wait, or its next one."""
        with suppress(OSError):  # full: a wake-up is pending; closed: nothing waits any more
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Consume the wake-ups so far. Raises ``Interrupted`` if the thread must end; otherwise its wait continues."""
        with suppress(BlockingIOError, InterruptedError):
            self._reader.recv(4096)
        if self._stopping():
            raise Interrupted

    def close(self) -> None:
        """Close both ends. Safe to call twice."""
        self._reader.close()
        self._writer.close()
