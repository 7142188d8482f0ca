# SPDX-License-Identifier: Apache-2.0

"""Handles urgent events on a separate thread, while the task's own thread computes or blocks in foreign code."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from protocol.subtask.types import UrgentBegan, UrgentHandled

__all__ = ["UrgentThread"]


class UrgentThread:
    """One attempt's queue of urgent events, and the thread that handles them one at a time, in order.

    The thread starts with the first event and ends with ``stop``, or when a handler raises. Everything happens under
    the channel's lock, except the handler's own work and ``join``.

    ``handle`` takes a payload and the index of its part, and calls the operator. ``report`` gives the machine what
    happened, under the lock. ``failure``: what a handler has raised. ``running``: whether one runs now.
    """

    __slots__ = (
        "_name",
        "_queue",
        "_report",
        "_thread",
        "_wanted",
        "events",
        "failure",
        "handle",
        "queued_bytes",
        "running",
        "stopped",
    )

    def __init__(
        self, lock: threading.Lock, name: str, report: Callable[[UrgentBegan | UrgentHandled | None], None]
    ) -> None:
        self._wanted = threading.Condition(lock)
        self._name = name
        self._report = report
        self._queue: deque[tuple[bytes, int]] = deque()
        self._thread: threading.Thread | None = None
        self.handle: Callable[[bytes, int], None] = lambda payload, part: None
        self.events = 0
        self.queued_bytes = 0
        self.running = False
        self.stopped = False
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def on_this_thread(self) -> bool:
        """Whether the caller is the handler."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def put(self, payload: bytes, part: int) -> None:
        """Have the event handled after those before it. Dropped after ``stop``: the attempt ends."""
        if self.stopped:
            return
        self.events += 1
        self._queue.append((payload, part))
        self.queued_bytes += len(payload)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # it waits for the lock
        else:
            self._wanted.notify()

    def stop(self) -> None:
        """Begin no more handlers. One that runs continues; see ``join``."""
        self.stopped = True
        self._queue.clear()
        self.queued_bytes = 0
        self._wanted.notify()

    def join(self, timeout_s: float) -> bool:
        """After ``stop``, without the lock: wait for the handler that runs. False if it did not return in time."""
        thread = self._thread
        if thread is None or self.on_this_thread:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        with self._wanted:
            while (event := self._take()) is not None:
                self.running = True
                self._report(UrgentBegan())
                self._wanted.release()
                failure = None
                try:
                    self.handle(*event)
                except BaseException as error:
                    failure = error
                finally:
                    self._wanted.acquire()
                self.running = False
                if failure is not None and not self.stopped:  # otherwise the operator ends for another reason
                    self.failure = failure
                    self.stop()
                self._report(None if self.stopped else UrgentHandled())

    def _take(self) -> tuple[bytes, int] | None:
        while not (self._queue or self.stopped):
            self._wanted.wait()
        if self.stopped:
            return None
        event = self._queue.popleft()
        self.queued_bytes -= len(event[0])
        return event
