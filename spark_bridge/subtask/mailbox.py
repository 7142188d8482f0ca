# SPDX-License-Identifier: Apache-2.0

"""What a task has received and its operator has not yet handled: a queue, and a thread for what is urgent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from protocol.subtask.types import MailboxAborted, MailboxBarrier, MailboxEvent, MailboxItem, UrgentBegan, UrgentHandled

__all__ = ["MailboxCall", "OperatorMailbox", "UrgentThread"]


class MailboxCall(NamedTuple):
    """Something that a coroutine has the task's own thread do."""

    call: Callable[[], object]


class OperatorMailbox:
    """A queue that knows its size in bytes and how many barriers it holds. Not thread-safe: the channel locks it.

    The items in it are confirmed, so the sender's window no longer bounds them (H27). ``full`` is the bound: the I/O
    thread stops reading at it. Urgent events, and items that wait for them, are not in this queue, but count.
    """

    __slots__ = ("_beside_bytes", "_beside_items", "_bytes", "_bytes_max", "_items", "_items_max", "barriers")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items: deque[MailboxItem | MailboxCall] = deque()
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._beside_items = self._beside_bytes = 0
        self.barriers = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def starts_with_barrier(self) -> bool:
        """Whether the first item is a barrier."""
        return self.barriers > 0 and isinstance(self._items[0], MailboxBarrier)

    @property
    def full(self) -> bool:
        """Whether one of the two bounds is reached."""
        return (
            len(self._items) + self._beside_items >= self._items_max
            or self._bytes + self._beside_bytes >= self._bytes_max
        )

    @property
    def half_empty(self) -> bool:
        """Whether it is at or below half of both bounds: time to read again."""
        items, size = len(self._items) + self._beside_items, self._bytes + self._beside_bytes
        return 2 * items <= self._items_max and 2 * size <= self._bytes_max

    def count_beside(self, items: int, size_bytes: int) -> None:
        """So much has arrived that waits elsewhere."""
        self._beside_items, self._beside_bytes = items, size_bytes

    def put(self, item: MailboxItem | MailboxCall) -> None:
        """Append an item. An aborted checkpoint removes its barrier, which no longer counts."""
        if isinstance(item, MailboxEvent):
            self._bytes += len(item.payload)
        elif isinstance(item, MailboxBarrier):
            self.barriers += 1
        elif isinstance(item, MailboxAborted) and self.barriers:
            self._remove(MailboxBarrier(item.checkpoint_id))
        self._items.append(item)

    def take(self, *, events_only: bool) -> MailboxItem | MailboxCall | None:
        """Remove and return the first item. None if there is none, or with ``events_only`` if it is not an event."""
        if not self._items or (events_only and not isinstance(self._items[0], MailboxEvent)):
            return None
        item = self._items.popleft()
        if isinstance(item, MailboxEvent):
            self._bytes -= len(item.payload)
        elif isinstance(item, MailboxBarrier):
            self.barriers -= 1
        return item

    def take_barriers(self) -> list[MailboxBarrier]:
        """Remove and return all barriers, wherever they are in the queue."""
        barriers = [item for item in self._items if isinstance(item, MailboxBarrier)]
        for barrier in barriers:
            self._remove(barrier)
        return barriers

    def _remove(self, barrier: MailboxBarrier) -> None:
        if barrier in self._items:
            self._items.remove(barrier)
            self.barriers -= 1


class UrgentThread:
    """One attempt's queue of urgent events, and the thread that handles them one at a time, in order.

    So they are handled while the task's own thread computes or blocks in foreign code. The thread starts with the first
    event and ends with ``stop``, or when a handler raises. Everything happens under the channel's lock, except the
    handler's own work and ``join``.

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
