"""What has come for an operator and is not handled yet."""

from __future__ import annotations

from collections import deque

from protocol.subtask.types import MailboxAborted, MailboxBarrier, MailboxEvent, MailboxItem

__all__ = ["Mailbox"]


class Mailbox:
    """A queue that knows its size in bytes, and how many barriers lie in it. Not thread-safe: the valve
    locks it.

    What is in here was confirmed, so the sender's window no longer bounds it (H27); ``full`` is the bound,
    and the I/O thread stops reading at it.
    """

    __slots__ = ("_bytes", "_bytes_max", "_items", "_items_max", "barriers")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items: deque[MailboxItem] = deque()
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self.barriers = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """At one of the two bounds."""
        return len(self._items) >= self._items_max or self._bytes >= self._bytes_max

    @property
    def half_empty(self) -> bool:
        """Below half of both bounds: it is worth reading again."""
        return 2 * len(self._items) <= self._items_max and 2 * self._bytes <= self._bytes_max

    def put(self, item: MailboxItem) -> None:
        """Append. The end of a checkpoint takes its barrier away, if that is still here: it means nothing
        now.
        """
        if isinstance(item, MailboxEvent):
            self._bytes += len(item.payload)
        elif isinstance(item, MailboxBarrier):
            self.barriers += 1
        elif isinstance(item, MailboxAborted) and self.barriers:
            self._remove(MailboxBarrier(item.checkpoint_id))
        self._items.append(item)

    def take(self, *, events_only: bool) -> MailboxItem | None:
        """Remove and return the first item; None if there is none, or with ``events_only`` if it is no
        event.
        """
        if not self._items or (events_only and not isinstance(self._items[0], MailboxEvent)):
            return None
        item = self._items.popleft()
        if isinstance(item, MailboxEvent):
            self._bytes -= len(item.payload)
        elif isinstance(item, MailboxBarrier):
            self.barriers -= 1
        return item

    def take_barriers(self) -> list[MailboxBarrier]:
        """Remove and return all barriers, wherever they lie."""
        barriers = [item for item in self._items if isinstance(item, MailboxBarrier)]
        for barrier in barriers:
            self._remove(barrier)
        return barriers

    def _remove(self, barrier: MailboxBarrier) -> None:
        if barrier in self._items:
            self._items.remove(barrier)
            self.barriers -= 1
