# SPDX-License-Identifier: Apache-2.0

"""Time, as actors see it: the clock, the deadlines of asks, and the timers of an actor.

Everything in this package that waits for *logical* time (timers, ask deadlines, restart back-off) uses a ``Clock``,
so that a test can replace it. Two things deliberately do not: the shutdown deadline and the slow-handler watch. They
guard the real process, and a virtual clock that is not advanced must not switch them off.

``Deadlines`` are nearly always met, and so must cost nearly nothing. An event loop pays for each timer, even for one
that is cancelled a moment later. Most asks of a program share a few timeouts, and deadlines with the same timeout come
due in the order in which they were set. So there is one lane for each timeout: a dictionary in that order, and one
timer of the clock, for its first entry.

A timer of an actor that was cancelled or replaced never delivers, even if its message is already in the mailbox: what
is queued is a ticket, and opening the ticket of a timer that is over yields nothing. A timer has at most one ticket in
the mailbox; ticks that come due in the meantime are skipped, so a slow actor is not flooded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from actors.mailbox import Envelope, Mailbox
from protocol.arguments import WAIT, checked

M = TypeVar("M")


class Scheduled(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Take the call back. Does nothing if it has run or was cancelled before."""


class Clock(Protocol):
    """A monotonic clock that can call back. Loop-only: call it from the event loop's thread."""

    def now(self) -> float:
        """Seconds from an arbitrary fixed point; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Scheduled:
        """Call ``callback`` on the loop after ``delay_s`` seconds. Calls due at the same time keep their order."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds of this clock."""
        ...


class LoopClock:
    """The event loop's own clock. Needs a running loop when it is built."""

    __slots__ = ("_loop", "now")

    now: Callable[[], float]

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Scheduled:
        return self._loop.call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


IDLE_LANES_MAX = 64
"""With more lanes than this, an empty lane is dropped immediately (for timeouts that never repeat)."""
ROUNDING_S = 1e-9
"""A timer that fires this much too early is on time; floats do not add up exactly."""


class _Lane:
    __slots__ = ("entries", "scheduled")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[float, Callable[[], object]]] = {}
        self.scheduled: Scheduled | None = None


class Deadlines:
    """All deadlines of one system, on its clock. Loop-only."""

    __slots__ = ("_clock", "_lanes", "_next")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[float, _Lane] = {}
        self._next = 0

    def start(self, timeout_s: float, expire: Callable[[], object]) -> int:
        """Call ``expire`` after ``timeout_s`` seconds, unless cancelled; returns the key for ``cancel``."""
        lane = self._lanes.get(timeout_s)
        if lane is None:
            lane = self._lanes[timeout_s] = _Lane()
        self._next = key = self._next + 1
        lane.entries[key] = (self._clock.now() + timeout_s, expire)
        if lane.scheduled is None:
            lane.scheduled = self._clock.call_later(timeout_s, lambda: self._fire(timeout_s))
        return key

    def cancel(self, timeout_s: float, key: int) -> None:
        """The deadline was met. Does nothing if it has expired."""
        lane = self._lanes.get(timeout_s)
        if lane is None:
            return
        lane.entries.pop(key, None)
        if not lane.entries and len(self._lanes) > IDLE_LANES_MAX:
            self._give_up(timeout_s, lane)

    def close(self) -> None:
        """Cancel every timer; nothing expires any more."""
        for timeout_s, lane in tuple(self._lanes.items()):
            self._give_up(timeout_s, lane)

    def _give_up(self, timeout_s: float, lane: _Lane) -> None:
        if lane.scheduled is not None:
            lane.scheduled.cancel()
        del self._lanes[timeout_s]

    def _fire(self, timeout_s: float) -> None:
        lane = self._lanes[timeout_s]
        lane.scheduled = None
        now = self._clock.now()
        while lane.entries:
            key, (due_at, expire) = next(iter(lane.entries.items()))
            if due_at > now + ROUNDING_S:
                lane.scheduled = self._clock.call_later(due_at - now, lambda: self._fire(timeout_s))
                return
            del lane.entries[key]
            expire()
        del self._lanes[timeout_s]


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
