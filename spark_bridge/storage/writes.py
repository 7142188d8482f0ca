"""One checkpoint's write in a worker thread, and who may still stop it."""

from __future__ import annotations

from enum import Enum
from threading import Event, Lock

from spark_bridge.storage.errors import StorageError


class WriteStopped(StorageError):
    """The checkpoint is not wanted any more; nothing of it appeared."""


class _WriteState(Enum):
    WAITING = "not begun"
    WRITING = "under a temporary name"
    APPEARING = "about to get its name: too late to stop"
    OVER = "over"


class PendingWrite:
    """Decides between the thread that writes and the event loop that gives up: exactly one of them is first.

    ``begin``, ``permit`` and ``end`` are called by the thread, ``stop`` by the loop, ``wait_over`` by any other thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = _WriteState.WAITING
        self._stopped = False
        self._over = Event()

    def begin(self) -> None:
        """Raises ``WriteStopped``."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.WRITING

    def permit(self) -> None:
        """The checkpoint is about to appear. Raises ``WriteStopped``; after this it can no longer be stopped."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.APPEARING

    def end(self) -> None:
        """The thread touches nothing any more."""
        with self._lock:
            self._finish()

    def stop(self) -> None:
        """Not wanted any more: it will not appear, unless it is appearing at this moment. Never blocks."""
        with self._lock:
            self._stopped = True
            if self._state is _WriteState.WAITING:  # its thread may never come
                self._finish()

    def wait_over(self, timeout_s: float) -> bool:
        """Blocks until nothing is written any more; False if that takes longer."""
        return self._over.wait(timeout_s)

    def _require_wanted(self) -> None:
        if self._stopped:
            raise WriteStopped("the checkpoint is not wanted any more")

    def _finish(self) -> None:
        self._state = _WriteState.OVER
        self._over.set()
