# SPDX-License-Identifier: Apache-2.0

"""The items that an operator has received and not yet handled."""

from __future__ import annotations

from collections import deque

from protocol.subtask.types import MailboxAborted, MailboxBarrier, MailboxEvent, MailboxItem

__all__ = ["OperatorMailbox"]


class OperatorMailbox:
    """A queue that knows its size in bytes and how many barriers it holds. Not thread-safe: the channel locks it.

    The items in it are confirmed, so the sender's window no longer bounds them (H27). ``full`` is the bound: the I/O
    thread stops reading at it. Urgent events, and items that wait for them, are not in this queue, but count.
    """

    __slots__ = ("_beside_bytes", "_beside_items", "_bytes", "_bytes_max", "_items", "_items_max", "barriers")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items: deque[MailboxItem] = deque()
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

    def put(self, item: MailboxItem) -> None:
        """Append an item. An aborted checkpoint removes its barrier, which no longer counts."""
        if isinstance(item, MailboxEvent):
            self._bytes += len(item.payload)
        elif isinstance(item, MailboxBarrier):
            self.barriers += 1
        elif isinstance(item, MailboxAborted) and self.barriers:
            self._remove(MailboxBarrier(item.checkpoint_id))
        self._items.append(item)

    def take(self, *, events_only: bool) -> MailboxItem | None:
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
