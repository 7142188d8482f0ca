"""How one thread gets another out of its wait for a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Interrupted", "Waker"]


class Interrupted(Exception):
    """The attempt is being closed: stop waiting."""


class Waker:
    """A socket that becomes readable on ``wake()``. ``stopping`` says whether that means the end.

    ``wake`` may be called by any thread, and after ``close``; the rest belongs to the thread that waits.
    """

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """What a selector waits for."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Get the waiting thread out of its wait, or the next one."""
        with suppress(OSError):  # full: it is awake anyway; closed: nobody is left to wake
            self._writer.send(b"\0")

    def answer(self) -> None:
        """Take the wake-ups so far. Raises ``Interrupted`` if they mean the end; else the wait goes on."""
        with suppress(BlockingIOError, InterruptedError):
            self._reader.recv(4096)
        if self._stopping():
            raise Interrupted

    def close(self) -> None:
        """Give both ends back. Safe to call twice."""
        self._reader.close()
        self._writer.close()
