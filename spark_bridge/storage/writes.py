# SPDX-License-Identifier: Apache-2.0

"""The write of one checkpoint in a worker thread, which may be stopped up to a certain point."""

from __future__ import annotations

from enum import Enum
from threading import Event, Lock

from spark_bridge.storage.errors import StorageError


class WriteStopped(StorageError):
    """The checkpoint is no longer wanted, and has not appeared."""


class _WriteState(Enum):
    WAITING = "not started"
    WRITING = "under a temporary name"
    APPEARING = "about to get its name: too late to stop"
    OVER = "over"


class PendingWrite:
    """Decides whether the thread that writes or the event loop that gives up comes first.

    The thread calls ``begin``, ``permit`` and ``end``, the loop calls ``stop``, and any other thread ``wait_over``.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = _WriteState.WAITING
        self._stopped = False
        self._over = Event()

    def begin(self) -> None:
        """The thread starts to write. Raises ``WriteStopped``."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.WRITING

    def permit(self) -> None:
        """The checkpoint is about to appear, and cannot be stopped after this. Raises ``WriteStopped``."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.APPEARING

    def end(self) -> None:
        """The thread has finished, and changes nothing any more."""
        with self._lock:
            self._finish()

    def stop(self) -> None:
        """Keep the checkpoint from appearing, unless it is appearing at this moment. Never blocks."""
        with self._lock:
            self._stopped = True
            if self._state is _WriteState.WAITING:  # its thread may never start
                self._finish()

    def wait_over(self, timeout_s: float) -> bool:
        """Block until nothing is written any more; False after ``timeout_s`` seconds."""
        return self._over.wait(timeout_s)

    def _require_wanted(self) -> None:
        if self._stopped:
            raise WriteStopped("the checkpoint is no longer wanted")

    def _finish(self) -> None:
        self._state = _WriteState.OVER
        self._over.set()
