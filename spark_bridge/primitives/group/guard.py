# SPDX-License-Identifier: Apache-2.0

"""Frees a thread that is blocked in foreign code, such as a collective of another library.

Such a thread waits for its peers on TCP connections. A shutdown of these from another thread makes the library fail
with an error that is not ours, and the process lives on. Only connected sockets that were opened since the guard was
entered are shut down: a library may end the process if its *listening* socket fails. The connection to the sidecar is
never touched.

A library may also wait in ``accept`` for a peer that will never come. One that survives it is woken by a connection
that is closed immediately. If nothing helps, the process is ended on request, so that the task is retried: its
peers would wait for it as long as it stays in the foreign code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

AGAIN_S = 0.05
"""Foreign code may connect again; so the sockets are looked at again until the guard is left."""

STUCK_S = 3.0
"""A thread that has not moved for this long, although its sockets were shut down, will not return."""

STUCK_CPU_S = 0.03
"""A thread that has used less processor time than this in ``STUCK_S`` has stood still."""

_log = logging.getLogger(__name__)


class SocketGuard:
    """The sockets that this process opens from now on. The thread that makes it is the one to be freed.

    Args:
        keep: addresses of peers whose connections stay.
        wake_with: each listening socket gets a connection with these bytes, which is closed immediately. None: they
            are left alone.
        may_end: whether the process may be ended now if the thread stands still. None: never.

    Attributes:
        only_port: shut down only the connections that came to this port. None: all.
    """

    def __init__(
        self,
        keep: frozenset[tuple[str, int]],
        *,
        wake_with: bytes | None = None,
        may_end: Callable[[], bool] | None = None,
    ) -> None:
        self.only_port: int | None = None
        self._keep = keep
        self._wake_with = wake_with
        self._may_end = may_end
        self._clock = _clock_of_this_thread()
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

    def wake(self) -> None:
        """Give each listening socket that is still open a connection, so that a thread that waits there returns."""
        self._for_each(self._wake)

    def _run(self) -> None:
        moved_at, cpu_s = time.monotonic(), self._cpu_s()
        while not self._left.is_set():
            self._for_each(self._shut_down)
            if self._cpu_s() - cpu_s > STUCK_CPU_S or self._may_end is None or not self._may_end():
                moved_at, cpu_s = time.monotonic(), self._cpu_s()
            elif time.monotonic() - moved_at > STUCK_S and not self._left.is_set():
                _log.error(
                    "a peer was lost, and this task did not return from another library's code within %g s, although "
                    "its connections were shut down: ending the process, so that Spark retries the task",
                    STUCK_S,
                )
                os.kill(os.getpid(), signal.SIGKILL)
            self._left.wait(AGAIN_S)

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._clock) if self._clock is not None else time.monotonic()

    def _for_each(self, act: Callable[[socket.socket], object]) -> None:
        for opened in _open_sockets():
            if opened not in self._before and not self._left.is_set():
                with suppress(OSError):
                    self._on_one(opened, act)

    def _on_one(self, opened: tuple[int, int], act: Callable[[socket.socket], object]) -> None:
        descriptor = os.dup(opened[0])
        if os.fstat(descriptor).st_ino != opened[1]:
            os.close(descriptor)  # it was closed, and another one has its number
            return
        with socket.socket(fileno=descriptor) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                act(one)

    def _shut_down(self, one: socket.socket) -> None:
        if self._wake(one):
            return
        if self.only_port not in (None, one.getsockname()[1]):
            return
        host, port = one.getpeername()[:2]  # raises for one that listens
        if (host.removeprefix("::ffff:"), port) not in self._keep:
            one.shutdown(socket.SHUT_RDWR)

    def _wake(self, one: socket.socket) -> bool:
        """Connect to it if it listens and may be woken, and return whether that is so."""
        if self._wake_with is None or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        host, port = one.getsockname()[:2]
        with socket.socket(one.family, socket.SOCK_STREAM) as caller:
            caller.settimeout(0.1)
            caller.connect(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port))
            caller.sendall(self._wake_with)
        return True


def _clock_of_this_thread() -> int | None:
    """The clock of the processor time that this thread uses; None where there is none, as on macOS."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return None if clock_of is None else int(clock_of(threading.get_ident()))


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
