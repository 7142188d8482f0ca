# SPDX-License-Identifier: Apache-2.0

"""What stores the states in files of one attempt, while the task's own thread goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from protocol.wire.state_handles import StateHandle

__all__ = ["Upload", "UploadThread", "give_way"]

Stopped = Callable[[], bool]

LEFT_BEHIND_MAX = 4
"""How many uploads of one attempt may hang while another one goes on. Each has a thread and the files of a snapshot."""


def give_way() -> None:
    """Let the calling thread have a tenth of a core that another thread wants: ``python -m benchmarks.state_files``.

    A nice value is that of a thread on Linux only. There, ten steps are a tenth of the weight.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + 10)


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

    A thread starts with the first one, and ends with ``end``. If an upload is stopped while a request to the storage
    hangs, its thread is left behind, and another one goes on with the next upload. Everything happens under the
    channel's lock, except the uploads themselves and ``join``.

    ``report`` is given each outcome before ``end``, under the lock; none of an upload whose thread was left behind.
    ``idle``: whether no upload waits or runs.
    """

    __slots__ = ("_after", "_ended", "_name", "_queue", "_report", "_running", "_thread", "_threads", "_wanted")

    def __init__(self, lock: threading.Lock, name: str, report: Callable[[Outcome], None]) -> None:
        self._wanted = threading.Condition(lock)
        self._name = name
        self._report = report
        self._queue: deque[Upload] = deque()
        self._running: Upload | None = None
        self._thread: threading.Thread | None = None  # that which takes the next upload
        self._threads: set[threading.Thread] = set()  # all that have not ended
        self._ended = False
        self._after: Callable[[], None] | None = None

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None

    @property
    def on_this_thread(self) -> bool:
        """Whether the caller is one of the threads."""
        return threading.current_thread() in self._threads

    def put(self, upload: Upload) -> None:
        """Carry it out after those before it. Dropped after ``end``."""
        if self._ended:
            return
        self._queue.append(upload)
        if self._thread is None:
            self._start()
        else:
            self._wanted.notify()

    def _start(self) -> None:
        self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()  # it waits for the lock

    def stop(self, checkpoint_id: int) -> None:
        """The checkpoint is over. One that waits still comes up, to remove what it would have stored.

        One that runs holds up no other any more, unless too many hang already.
        """
        for upload in (*self._queue, self._running):
            if upload is not None and upload.checkpoint_id == checkpoint_id:
                upload.stopped = True
        if self._running is not None and self._running.stopped and len(self._threads) <= LEFT_BEHIND_MAX:
            self._running = self._thread = None
            if self._queue:
                self._start()

    def end(self) -> None:
        """The attempt is over: stop the one that runs, and drop the others."""
        self._ended = True
        self._queue.clear()
        if self._running is not None:
            self._running.stopped = True
        self._wanted.notify()

    def call_after(self, call: Callable[[], None]) -> bool:
        """After ``end``: have ``call`` called when all threads have ended. False if there is none; then it is not."""
        if not self._threads:
            return False
        self._after = call
        return True

    def join(self, timeout_s: float) -> bool:
        """After ``end``, without the lock: wait for the uploads that run. False if one did not end in time."""
        if self.on_this_thread:
            return True
        until = time.monotonic() + timeout_s
        with self._wanted:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        give_way()
        try:
            with self._wanted:
                self._carry_out()
        finally:
            with self._wanted:
                self._threads.discard(threading.current_thread())
                after = None if self._threads else self._after
            if after is not None:
                after()

    def _carry_out(self) -> None:
        while (upload := self._take()) is not None:
            self._wanted.release()
            try:
                result = upload.run()
            finally:
                self._wanted.acquire()
            if self._running is not upload:
                return  # it was left behind
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
