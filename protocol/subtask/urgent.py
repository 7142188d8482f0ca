# SPDX-License-Identifier: Apache-2.0

"""The place of urgent events among the items of a ``SubtaskMachine``.

An urgent event does not go into the mailbox: the shell handles it on a separate thread, one at a time, in the order of
arrival, and reports when a handler begins and when it has returned. What came before it may still wait in the mailbox,
and is overtaken. What comes after it may have to wait here for it:

    | item                  | goes into the mailbox when, of all urgent events that came before it, |
    |-----------------------|------------------------------------------------------------------------|
    | an event, a notice    | each handler has begun (H91)                                           |
    | a barrier             | each handler has returned, so the snapshot includes what it did (H92)  |
    | the word to begin     | each handler has returned (H66, H92)                                   |

Items that wait here keep their order, so one that waits holds back those after it.

If checkpoints hold nothing back (H79), an urgent event may come after a barrier that is not met. It was sent after the
cut, so its handler must not begin before the snapshot: it waits until each barrier before it is met, declined or over.
One of a part outside of checkpoints does not (H152): it counts as if it had come before those that wait.
"""

from __future__ import annotations

from collections import deque

from protocol.errors import LocalProtocolError
from protocol.subtask.types import (
    HandleUrgent,
    MailboxBarrier,
    MailboxEvent,
    MailboxItem,
    MailboxStart,
    PutInMailbox,
    SubtaskEffect,
)

Effects = list[SubtaskEffect]


class UrgentOrder:
    """Counts the urgent events of one attempt, and keeps back what must not overtake them.

    ``idle``: each urgent event has been handled, so nothing waits.
    """

    __slots__ = ("_after", "_begun", "_came", "_handled", "_waiting", "_waiting_bytes", "idle")

    def __init__(self) -> None:
        self.idle = True
        self._came = self._begun = self._handled = 0
        self._waiting: deque[tuple[int, MailboxItem]] = deque()  # with how many urgent events came before
        self._waiting_bytes = 0  # of both queues
        self._after: deque[tuple[int, bytes, int]] = deque()  # urgent events with their parts, each after a barrier

    @property
    def came(self) -> int:
        """How many urgent events have come so far."""
        return self._came

    @property
    def waiting(self) -> tuple[int, int]:
        """How many items wait here, and the bytes of the events among them."""
        return len(self._waiting) + len(self._after), self._waiting_bytes

    def come(self, payload: bytes, part: int, after: int | None, effects: Effects) -> None:
        """An urgent event has come. ``after``: the last barrier before it that is not met; None if it waits for none.

        That one waits for no barrier is so if all are met, or if its part is outside of checkpoints.
        """
        self._came += 1
        self.idle = False
        if after is None:
            if self._after:
                self._overtake()
            effects.append(HandleUrgent(payload, part))
        else:
            self._after.append((after, payload, part))
            self._waiting_bytes += len(payload)

    def _overtake(self) -> None:
        """The event that has just come is handled before those that wait for a barrier, as if it had come before them.

        What came after these still waits for them, so the number of urgent events before it is one more.
        """
        given = self._came - 1 - len(self._after)
        self._waiting = deque((before + (before > given), item) for before, item in self._waiting)

    def barrier_met(self, first_unmet: int | None, effects: Effects) -> None:
        """A barrier no longer counts. ``first_unmet``: the lowest one that does; None if there is none."""
        while self._after and (first_unmet is None or first_unmet > self._after[0][0]):
            _, payload, part = self._after.popleft()
            self._waiting_bytes -= len(payload)
            effects.append(HandleUrgent(payload, part))

    def put(self, item: MailboxItem, effects: Effects) -> None:
        """Put the item into the mailbox, now or when the urgent events before it allow that."""
        if not self._waiting and self._may_pass(self._came, item):
            effects.append(PutInMailbox(item))
            return
        self._waiting.append((self._came, item))
        if isinstance(item, MailboxEvent):
            self._waiting_bytes += len(item.payload)

    def begin(self, effects: Effects) -> None:
        """The handler of the next urgent event begins."""
        if self._begun > self._handled:
            raise LocalProtocolError("an urgent event was begun before the handler of the previous one had returned")
        if self._begun == self._came - len(self._after):
            raise LocalProtocolError("an urgent event was begun that has not arrived, or still waits for a barrier")
        self._begun += 1
        self._release(effects)

    def end(self, effects: Effects) -> None:
        """The handler has returned."""
        if self._handled == self._begun:
            raise LocalProtocolError("an urgent event was handled before it was begun")
        self._handled += 1
        self._release(effects)
        self.idle = self._handled == self._came

    def holds_barrier(self, checkpoint_id: int) -> bool:
        """Whether this barrier waits here."""
        return any(item == MailboxBarrier(checkpoint_id) for _, item in self._waiting)

    def drop_barrier(self, checkpoint_id: int, effects: Effects) -> None:
        """The checkpoint is over: its barrier no longer counts, and holds back nothing."""
        if self.holds_barrier(checkpoint_id):
            self._waiting = deque(entry for entry in self._waiting if entry[1] != MailboxBarrier(checkpoint_id))
            self._release(effects)

    def forget(self) -> None:
        """The operator has ended, and handles nothing more."""
        self._begun = self._handled = self._came
        self._waiting.clear()
        self._after.clear()
        self._waiting_bytes = 0
        self.idle = True

    def _release(self, effects: Effects) -> None:
        while self._waiting and self._may_pass(*self._waiting[0]):
            _, item = self._waiting.popleft()
            if isinstance(item, MailboxEvent):
                self._waiting_bytes -= len(item.payload)
            effects.append(PutInMailbox(item))

    def _may_pass(self, came_before: int, item: MailboxItem) -> bool:
        awaits_return = isinstance(item, MailboxBarrier | MailboxStart)
        return came_before <= (self._handled if awaits_return else self._begun)

    def check_invariants(self) -> None:
        assert self._handled <= self._begun <= min(self._came, self._handled + 1)
        assert self.idle == (self._handled == self._came)
        assert not (self.idle and self._waiting), "an item waits, and nothing will ever release it"
        assert not (self._waiting and self._may_pass(*self._waiting[0])), "an item waits, though it may pass"
        events = sum(len(item.payload) for _, item in self._waiting if isinstance(item, MailboxEvent))
        assert self._waiting_bytes == events + sum(len(payload) for _, payload, _ in self._after)
        assert len(self._after) <= self._came - self._begun, "an urgent event was begun before a barrier ahead of it"
