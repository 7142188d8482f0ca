# SPDX-License-Identifier: Apache-2.0

"""Keyed timers that belong to one actor.

A timer that was cancelled or replaced never delivers, even if its message is already in the mailbox: what is queued is
a ticket, and opening the ticket of a timer that is over yields nothing. A timer has at most one ticket in the mailbox;
ticks that come due in the meantime are skipped, so a slow actor is not flooded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from actors.clock import Clock, Scheduled
from actors.mailbox import Envelope, Mailbox
from protocol.arguments import WAIT, checked

M = TypeVar("M")


class Timers(Generic[M]):
    """The timers of one actor, on the system's clock. They end with the actor, and at each restart.

    Loop-only, from the actor's own code.
    """

    __slots__ = ("_by_key", "_clock", "_mailbox", "_refuse_if_over")

    def __init__(self, mailbox: Mailbox, clock: Clock, refuse_if_over: Callable[[str], None]) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._refuse_if_over = refuse_if_over
        self._by_key: dict[Hashable, _Timer] = {}

    @checked(delay_s=WAIT)
    def start(self, key: Hashable, message: M, *, delay_s: float | None = None, every_s: float | None = None) -> None:
        """Deliver ``message`` to this actor after ``delay_s`` seconds, and then every ``every_s`` seconds.

        Timer messages do not count against the mailbox's capacity. They are handled after the messages that are queued.
        Periods count from the due time, so they do not drift.

        Args:
            key: Names the timer; a running timer with the same key is replaced.
            message: What to deliver.
            delay_s: 0 or more; ``every_s`` if omitted.
            every_s: More than 0; if omitted, the timer delivers once.

        Raises:
            ValueError: Both times are omitted, or one is out of range.
            ActorStopped: The actor stops or restarts.
        """
        if delay_s is None and every_s is None:
            raise ValueError("a timer has no time: pass delay_s, every_s or both")
        self.cancel(key)
        self._refuse_if_over("timers")
        first_s = delay_s if delay_s is not None else every_s
        assert first_s is not None
        self._by_key[key] = _Timer(self, key, message, first_s, every_s)

    @checked()
    def cancel(self, key: Hashable) -> bool:
        """End the timer with this key; False if there is none. Its message is not delivered any more."""
        timer = self._by_key.pop(key, None)
        if timer is None:
            return False
        timer.cancel()
        return True

    def cancel_all(self) -> None:
        """End all timers."""
        for timer in self._by_key.values():
            timer.cancel()
        self._by_key.clear()

    @checked()
    def is_active(self, key: Hashable) -> bool:
        """Whether the timer with this key may still deliver."""
        return key in self._by_key


class _Timer(Envelope):
    """One timer, and at the same time the ticket that it queues."""

    __slots__ = ("_due_at", "_every_s", "_key", "_queued", "_scheduled", "_timers", "_void")

    def __init__(
        self, timers: Timers[Any], key: Hashable, message: object, first_s: float, every_s: float | None
    ) -> None:
        self.message = message
        self._timers = timers
        self._key = key
        self._every_s = every_s
        self._queued = False
        self._void = False
        clock = timers._clock
        self._due_at = clock.now() + first_s
        self._scheduled: Scheduled = clock.call_later(first_s, self._fire)

    def cancel(self) -> None:
        self._void = True
        self._scheduled.cancel()

    def open(self) -> bool:
        self._queued = False
        if self._void:
            return False
        if self._every_s is None:
            self._timers._by_key.pop(self._key, None)
        return True

    def undeliverable(self, error: Exception) -> bool:
        self._queued = False
        return False

    def _fire(self) -> None:
        if self._void:
            return
        if self._every_s is not None:
            clock = self._timers._clock
            now = clock.now()
            self._due_at += self._every_s
            if self._due_at <= now:  # whole periods were missed
                self._due_at += ((now - self._due_at) // self._every_s + 1) * self._every_s
            self._scheduled = clock.call_later(max(0.0, self._due_at - now), self._fire)
        if not self._queued:
            self._queued = True
            self._timers._mailbox.force(self)
