# SPDX-License-Identifier: Apache-2.0

"""A bounded mailbox: a queue of messages, a list of signals, one reader, and the senders that wait for space.

Only the actor's own task reads. It takes an item in the same step in which it begins to handle it, so a cancellation
while it is parked loses nothing.

A sender that has to wait leaves its message with the mailbox. The reader moves that message into the queue as soon as
there is space, so waiting senders are served in order and none is overtaken. If the sender is cancelled before the
move, its message goes with it; after the move, the message is accepted.

Loop-only, like everything in this package that does not say otherwise.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from actors.errors import ActorStopped, MailboxFull
from protocol.arguments import AT_LEAST_1, check_fields


class DeadLetterReason(Enum):
    """Why a message was not handled."""

    STOPPED = "the target had already stopped"
    LEFT_BEHIND = "it was still in the mailbox when the target stopped"
    DROPPED_NEWEST = "the mailbox was full and drops new messages"
    DROPPED_OLDEST = "the mailbox was full and dropped its oldest message"
    REFUSED = "the mailbox was full and the sender could not be told"
    HANDLER_FAILED = "the handler raised"
    CUT_OFF = "the handler was cancelled because the target did not stop in time"
    ANSWER_TOO_LATE = "nobody waits for this answer any more"


class OnFull(Enum):
    """What happens to a message for which there is no space."""

    WAIT = "wait"
    """``send`` waits; ``tell``, which cannot, raises ``MailboxFull``."""
    REFUSE = "refuse"
    """``send`` and ``tell`` raise ``MailboxFull``."""
    DROP_NEWEST = "drop-newest"
    """The message becomes a dead letter."""
    DROP_OLDEST = "drop-oldest"
    """The message that has waited longest becomes a dead letter, and the new one takes its place."""


@dataclass(frozen=True, slots=True)
class MailboxConfig:
    """How many messages may wait in a mailbox, and what happens to one more.

    Signals, timers and the results of an actor's own background work do not count: what the actor itself has started
    bounds each of them.

    Args:
        capacity: Messages, at least 1; None for no bound.
        on_full: What happens to a message for which there is no space.

    Raises:
        ValueError: The capacity is less than 1.
    """

    capacity: int | None = 1024
    on_full: OnFull = OnFull.WAIT

    def __post_init__(self) -> None:
        check_fields(self, capacity=AT_LEAST_1)


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """A mailbox at one moment.

    Args:
        capacity: As configured.
        queued: Messages that wait.
        high_water: The most messages that ever waited.
        waiting_senders: Senders that wait for space.
        accepted: Messages taken in so far.
        handled: Messages given to the actor so far.
        dropped: Messages dropped by a DROP policy so far.
        refused: Messages refused with ``MailboxFull`` so far.
        restarts: Restarts of the actor so far.
    """

    capacity: int | None
    queued: int
    high_water: int
    waiting_senders: int
    accepted: int
    handled: int
    dropped: int
    refused: int
    restarts: int


class Envelope:
    """A queued item that is more than a message. The reader opens it before handling it."""

    __slots__ = ("message",)

    def __init__(self, message: object) -> None:
        self.message = message

    def open(self) -> bool:
        """The item was taken out to be handled; False if it is void and must be skipped."""
        return True

    def undeliverable(self, error: Exception) -> bool:
        """The item will not be handled, because of ``error``. False if no caller waits for it."""
        return True


class _WaitingSender:
    __slots__ = ("item", "space")

    def __init__(self, item: object, space: asyncio.Future[None] | None) -> None:
        self.item = item
        self.space = space


class Mailbox:
    """See the module. ``dead`` is called with each item that will not be handled."""

    __slots__ = (
        "_dead",
        "_highest",
        "_limit",
        "_loop",
        "_owner",
        "accepted",
        "config",
        "dropped",
        "high_water",
        "parked",
        "queue",
        "refused",
        "senders",
        "signals",
        "taken_back",
        "void",
    )

    def __init__(
        self,
        config: MailboxConfig,
        loop: asyncio.AbstractEventLoop,
        owner: str,
        dead: Callable[[object, DeadLetterReason], None],
    ) -> None:
        self.config = config
        self.queue: deque[object] = deque()
        self.signals: list[object] = []  # few, and for most actors never one: an empty deque takes 600 bytes
        self.senders: dict[_WaitingSender, None] = {}
        self.parked: asyncio.Future[None] | None = None
        self.accepted = 0
        # Accepted but not handled: void when opened; dropped, or still queued when the actor stopped.
        self.void = 0
        self.taken_back = 0
        self.dropped = 0
        self.refused = 0
        # The most that ever waited; 0 once closed, so that offer looks at the limit then (_highest keeps it).
        self.high_water = 0
        self._highest = 0
        # -1 once closed: no length is below that, so one comparison tells both "full" and "closed".
        self._limit = sys.maxsize if config.capacity is None else config.capacity
        self._loop = loop
        self._owner = owner
        self._dead = dead

    @property
    def closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._limit < 0

    def offer(self, item: object) -> None:
        """Take an item without waiting. If full, follow the policy; if closed, make it a dead letter."""
        queue = self.queue
        length = len(queue)
        if length >= self.high_water:
            if length >= self._limit:
                self._overflow(item)
                return
            self.high_water = length + 1
        queue.append(item)
        self.accepted += 1
        parked = self.parked
        if parked is not None:
            self.parked = None
            if not parked.done():
                parked.set_result(None)

    def has_space(self) -> bool:
        """Whether ``offer`` would neither refuse nor drop."""
        return len(self.queue) < self._limit

    def force(self, item: object) -> None:
        """Take an item regardless of the bound (a timer, a result). If closed, make it a dead letter."""
        if self.closed:
            self._dead(item, DeadLetterReason.STOPPED)
            return
        self.queue.append(item)
        self.high_water = max(self.high_water, len(self.queue))
        self.accepted += 1
        self.wake()

    def signal(self, signal: object) -> None:
        """Queue a signal or a command ahead of all messages. If closed, do nothing."""
        if self.closed:
            return
        self.signals.append(signal)
        self.wake()

    def wake(self) -> None:
        """Make the reader look again."""
        parked = self.parked
        if parked is not None:
            self.parked = None
            if not parked.done():
                parked.set_result(None)

    async def send(self, item: object) -> None:
        """Take an item, waiting for space under WAIT. Raises ``ActorStopped`` if closed before or during the wait."""
        if self.closed:
            raise ActorStopped(self._owner)
        if self.has_space() or self.config.on_full is not OnFull.WAIT:
            self.offer(item)
            return
        space: asyncio.Future[None] = self._loop.create_future()
        sender = _WaitingSender(item, space)
        self.senders[sender] = None
        try:
            await space
        finally:
            self.senders.pop(sender, None)

    def line_up(self, item: object) -> Callable[[], object]:
        """Put an item among those of the waiting senders; returns the function that withdraws it if still there."""
        sender = _WaitingSender(item, None)
        self.senders[sender] = None
        return lambda: self.senders.pop(sender, None)

    def admit(self) -> None:
        """There is space: move the items of waiting senders into the queue, in their order."""
        queue = self.queue
        while self.senders and len(queue) < self._limit:
            sender = next(iter(self.senders))
            del self.senders[sender]
            space = sender.space
            if space is not None:
                if space.done():
                    continue  # cancelled while it waited
                space.set_result(None)
            queue.append(sender.item)
            self.high_water = max(self.high_water, len(queue))
            self.accepted += 1

    def close(self) -> None:
        """Accept nothing more. What is queued becomes dead letters; waiting senders get ``ActorStopped``."""
        if self.closed:
            return
        self._limit = -1
        self._highest, self.high_water = self.high_water, 0
        senders = tuple(self.senders)
        self.senders.clear()
        for sender in senders:
            if sender.space is None:
                self._dead(sender.item, DeadLetterReason.STOPPED)
            elif not sender.space.done():
                sender.space.set_exception(ActorStopped(self._owner, "stopped before there was space in its mailbox"))
        while self.queue:
            self.taken_back += 1
            self._dead(self.queue.popleft(), DeadLetterReason.LEFT_BEHIND)

    def statistics(self, restarts: int) -> MailboxStatistics:
        """The figures now."""
        return MailboxStatistics(
            capacity=self.config.capacity,
            queued=len(self.queue),
            high_water=max(self.high_water, self._highest),
            waiting_senders=len(self.senders),
            accepted=self.accepted,
            handled=self.accepted - len(self.queue) - self.void - self.taken_back,
            dropped=self.dropped,
            refused=self.refused,
            restarts=restarts,
        )

    def _overflow(self, item: object) -> None:
        if self.closed:
            self._dead(item, DeadLetterReason.STOPPED)
            return
        match self.config.on_full:
            case OnFull.WAIT | OnFull.REFUSE:
                self.refused += 1
                waits = self.config.on_full is OnFull.WAIT
                hint = "await send() to wait for space" if waits else "send less at a time, or raise its capacity"
                raise MailboxFull(self._owner, self._limit, hint)
            case OnFull.DROP_NEWEST:
                self.dropped += 1
                self._dead(item, DeadLetterReason.DROPPED_NEWEST)
            case OnFull.DROP_OLDEST:
                self.dropped += 1
                self.taken_back += 1
                oldest = self.queue.popleft()
                self.queue.append(item)
                self.accepted += 1
                self._dead(oldest, DeadLetterReason.DROPPED_OLDEST)
