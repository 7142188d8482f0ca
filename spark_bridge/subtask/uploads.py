# SPDX-License-Identifier: Apache-2.0

"""The thread that stores the states in files of one attempt, while the task's own thread goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from protocol.wire.state_handles import StateHandle

__all__ = ["Upload", "UploadThread"]

Stopped = Callable[[], bool]


class Upload:
    """One state that is to be stored for a checkpoint.

    ``store`` does that, in any thread. It asks now and then whether it was stopped, and then raises.
    """

    __slots__ = ("_store", "checkpoint_id", "stopped")

    def __init__(self, checkpoint_id: int, store: Callable[[Stopped], StateHandle]) -> None:
        self.checkpoint_id = checkpoint_id
        self.stopped = False
        self._store = store

    def run(self) -> StateHandle | BaseException:
        """The handle, or the failure, also if it was stopped."""
        try:
            return self._store(lambda: self.stopped)
        except BaseException as error:
            return error


class Outcome(NamedTuple):
    """How an upload has ended."""

    checkpoint_id: int
    result: StateHandle | BaseException


class UploadThread:
    """Carries out uploads, one at a time, in the order in which they came.

    The thread starts with the first one, and ends with ``end``. Everything happens under the channel's lock, except
    the uploads themselves and ``join``.

    ``report`` is given each outcome before ``end``, under the lock. ``idle``: whether no upload waits or runs.
    """

    __slots__ = ("_after", "_ended", "_name", "_over", "_queue", "_report", "_running", "_thread", "_wanted")

    def __init__(self, lock: threading.Lock, name: str, report: Callable[[Outcome], None]) -> None:
        self._wanted = threading.Condition(lock)
        self._name = name
        self._report = report
        self._queue: deque[Upload] = deque()
        self._running: Upload | None = None
        self._thread: threading.Thread | None = None
        self._ended = self._over = False
        self._after: Callable[[], None] | None = None

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None

    @property
    def on_this_thread(self) -> bool:
        """Whether the caller is the thread."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def put(self, upload: Upload) -> None:
        """Carry it out after those before it. Dropped after ``end``."""
        if self._ended:
            return
        self._queue.append(upload)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # it waits for the lock
        else:
            self._wanted.notify()

    def stop(self, checkpoint_id: int) -> None:
        """The checkpoint is over. One that waits still comes up, to remove what it would have stored."""
        for upload in (*self._queue, self._running):
            if upload is not None and upload.checkpoint_id == checkpoint_id:
                upload.stopped = True

    def end(self) -> None:
        """The attempt is over: stop the one that runs, and drop the others."""
        self._ended = True
        self._queue.clear()
        if self._running is not None:
            self._running.stopped = True
        self._wanted.notify()

    def call_after(self, call: Callable[[], None]) -> bool:
        """After ``end``: have ``call`` called when the thread has ended. False if there is none; then it is not."""
        if self._thread is None or self._over:
            return False
        self._after = call
        return True

    def join(self, timeout_s: float) -> bool:
        """After ``end``, without the lock: wait for the upload that runs. False if it did not end in time."""
        thread = self._thread
        if thread is None or self.on_this_thread:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            with self._wanted:
                self._carry_out()
        finally:
            with self._wanted:
                self._over, after = True, self._after
            if after is not None:
                after()

    def _carry_out(self) -> None:
        while (upload := self._take()) is not None:
            self._wanted.release()
            try:
                result = upload.run()
            finally:
                self._wanted.acquire()
            self._running = None
            if not self._ended:
                self._report(Outcome(upload.checkpoint_id, result))

    def _take(self) -> Upload | None:
        while not (self._queue or self._ended):
            self._wanted.wait()
        if self._ended:
            return None
        self._running = self._queue.popleft()
        return self._running
