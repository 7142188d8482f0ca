# SPDX-License-Identifier: Apache-2.0

"""Frees a thread that is blocked in foreign code, such as a collective of another library.

Such a thread waits for its peers on TCP connections. A shutdown of these from another thread makes the library fail
with an error of its own, and the process lives on. Only connected sockets that were opened since the guard was entered
are shut down: a library may end the process if its *listening* socket fails. The connection to the sidecar is never
touched.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["SocketGuard"]

AGAIN_S = 0.05
"""Foreign code may connect again; so the sockets are looked at again until the guard is left."""


class SocketGuard:
    """The sockets that this process opens from now on. ``keep``: addresses of peers whose connections stay."""

    def __init__(self, keep: frozenset[tuple[str, int]]) -> None:
        self._keep = keep
        self._before = set(_open_sockets())
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def free(self) -> None:
        """Shut down these sockets, now and until ``leave``. Any thread; returns immediately."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headgate-guard", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """End. No socket is shut down after this has returned."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._left.is_set():
            for opened in _open_sockets():
                if opened not in self._before and not self._left.is_set():
                    with suppress(OSError):
                        self._shut_down(opened)
            self._left.wait(AGAIN_S)

    def _shut_down(self, opened: tuple[int, int]) -> None:
        descriptor = os.dup(opened[0])
        if (descriptor, os.fstat(descriptor).st_ino) != (descriptor, opened[1]):
            os.close(descriptor)  # it was closed, and another one has its number
            return
        with socket.socket(fileno=descriptor) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return
            host, port = one.getpeername()[:2]  # raises for one that listens
            if (host.removeprefix("::ffff:"), port) not in self._keep:
                one.shutdown(socket.SHUT_RDWR)


def addresses_of(host: str, port: int) -> frozenset[tuple[str, int]]:
    """The addresses that a connection to ``host`` may have as its peer."""
    return frozenset((str(found[4][0]), port) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _open_sockets() -> Iterator[tuple[int, int]]:
    """The descriptor and the inode of each open socket of this process."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError, ValueError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino
