# SPDX-License-Identifier: Apache-2.0

"""How to reach an actor, how to answer one, and who waits for whom.

An ``ActorRef`` names one life of an actor. It stays valid across supervised restarts. Once the actor has stopped, the
reference never becomes valid again, even if another actor takes the same name; ``incarnation`` tells the two apart.

Each unanswered ``ask`` and each ``send`` that waits for space is on record, with the actor or task that waits. When a
system stands still, this record shows why: a cycle in it is a deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from actors.clock import Deadlines
from actors.errors import AskTimeout, MailboxFull, WouldDeadlock
from actors.mailbox import DeadLetterReason, Envelope, Mailbox, MailboxStatistics, OnFull
from protocol.arguments import REAL, WAIT_MAX_S, check_wait
from protocol.describing import type_name

M_contra = TypeVar("M_contra", contravariant=True)
T = TypeVar("T")


current_actor: ContextVar[Recipient | None] = ContextVar("headgate_current_actor", default=None)
"""The actor on whose behalf this code runs, if any."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` has waited for ``for_s`` seconds for ``what`` ("space in", "an answer from") ``target``."""

    waiter: str
    what: str
    target: str
    message_type: str
    for_s: float


class WaitBoard:
    """The waits of one system. Recording one costs a tuple and a dict entry; names are looked up only for a dump."""

    __slots__ = ("_next", "_now", "_open")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next = 0
        self._open: dict[int, tuple[object, str, Recipient, object, float]] = {}

    def begin(self, what: str, target: Recipient, message: object) -> int:
        """Record that the current actor or task waits; returns the key for ``end``."""
        self._next = key = self._next + 1
        waiter = current_actor.get() or asyncio.current_task()
        self._open[key] = (waiter, what, target, message, self._now())
        return key

    def end(self, key: int) -> None:
        """The wait is over."""
        self._open.pop(key, None)

    def waits(self) -> list[Wait]:
        """All waits, the oldest first."""
        now = self._now()
        return [
            Wait(_name(waiter), what, target.path, type_name(message), now - since)
            for waiter, what, target, message, since in self._open.values()
        ]

    def cycles(self) -> list[tuple[str, ...]]:
        """Rings of actors that wait for one another. Each appears once and begins with its smallest name."""
        edges: dict[str, set[str]] = {}
        for wait in self.waits():
            edges.setdefault(wait.waiter, set()).add(wait.target)
        found: set[tuple[str, ...]] = set()
        for start in edges:
            _follow(edges, (start,), found)
        return sorted(found)

    def dump(self) -> str:
        """All waits, then all cycles, one a line."""
        lines = [
            f"{wait.waiter} waits for {wait.what} {wait.target}: {wait.message_type}, {wait.for_s:.3f} s"
            for wait in self.waits()
        ]
        lines += ["deadlock: " + " -> ".join((*ring, ring[0])) for ring in self.cycles()]
        return "\n".join(lines) if lines else "nobody waits"


def _follow(edges: dict[str, set[str]], path: tuple[str, ...], found: set[tuple[str, ...]]) -> None:
    for target in sorted(edges.get(path[-1], ())):
        if target in path:
            ring = path[path.index(target) :]
            at = ring.index(min(ring))
            found.add(ring[at:] + ring[:at])
        else:
            _follow(edges, (*path, target), found)


def _name(waiter: object) -> str:
    if isinstance(waiter, asyncio.Task):
        return f"task {waiter.get_name()}"
    return str(getattr(waiter, "path", "?"))


class Gate(Protocol):
    """Whose turn it is: decides when an actor may take its next message, so that a test kit delivers them one by one.

    A system without a gate never waits for one.

    Each method receives the ``ActorCell`` of the actor concerned.
    """

    async def turn(self, cell: Any) -> None:
        """Return when ``cell`` may handle one signal or message."""

    def direct(self, cell: Any, message: object) -> bool:
        """``tell_direct`` to an idle actor: True if ``cell`` may handle the message now, False to queue it."""
        ...


class Surroundings(Protocol):
    """The part of the actor system that a reference uses. ``ActorSystem`` implements it."""

    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    waits: WaitBoard
    gate: Gate | None

    def call_threadsafe(self, function: Callable[..., object], *args: Any) -> None: ...


class Recipient(Protocol):
    """The part of its actor that a reference uses. ``ActorCell`` implements it."""

    @property
    def path(self) -> str: ...

    @property
    def parent(self) -> Recipient | None: ...

    mailbox: Mailbox
    direct: Callable[[Any, Any], None] | None
    open_replies: dict[Reply[Any], None]
    restarts: int

    @property
    def system(self) -> Surroundings: ...

    def handle_direct(self, message: object) -> None: ...

    def bury(self, item: object, reason: DeadLetterReason) -> None: ...


class Reply(Generic[T]):
    """Where the answer to one ``ask`` goes. It travels inside the message; the first answer counts.

    The actor may keep it and answer later, or pass it on to another actor. Loop-only.
    """

    __slots__ = ("_asked", "_future")

    def __init__(self, asked: Recipient, future: asyncio.Future[T]) -> None:
        self._asked = asked
        self._future = future

    @property
    def open(self) -> bool:
        """Whether the ``ask`` still waits for the answer."""
        return not self._future.done()

    @property
    def answered(self) -> T | None:
        """The answer, which an ``ask`` that was cancelled meanwhile has not returned; None if there is none."""
        future = self._future
        return future.result() if future.done() and not future.cancelled() and future.exception() is None else None

    def answer(self, value: T) -> bool:
        """Give the answer. Returns False, and ``value`` becomes a dead letter, if the ``ask`` is over."""
        if self._future.done():
            self._asked.bury(value, DeadLetterReason.ANSWER_TOO_LATE)
            return False
        self._future.set_result(value)
        return True

    def fail(self, error: BaseException) -> bool:
        """Make the ``ask`` raise ``error``. Returns False, and ``error`` becomes a dead letter, if it is over."""
        if self._future.done():
            self._asked.bury(error, DeadLetterReason.ANSWER_TOO_LATE)
            return False
        self._future.set_exception(error)
        return True

    def __repr__(self) -> str:
        return f"<Reply of {self._asked.path!r}, {'open' if self.open else 'closed'}>"


class AskEnvelope(Envelope):
    """A message whose sender waits for an answer."""

    __slots__ = ("reply",)

    def __init__(self, message: object, reply: Reply[Any]) -> None:
        self.message = message
        self.reply = reply

    def open(self) -> bool:
        if not self.reply._future.done():
            self.reply._asked.open_replies[self.reply] = None
        return True

    def undeliverable(self, error: Exception) -> bool:
        if not self.reply._future.done():
            self.reply._future.set_exception(error)
        return True


class ActorRef(Generic[M_contra]):
    """A typed handle to an actor. Immutable, hashable by identity, safe to put into messages.

    All methods belong to the event loop's thread, except ``tell_threadsafe``.
    """

    __slots__ = ("_cell", "_mailbox", "incarnation", "name")

    def __init__(self, cell: Recipient, incarnation: int) -> None:
        self._cell = cell
        self._mailbox = cell.mailbox
        self.name: str = cell.path
        """The actor's path: the names of its ancestors and its own, joined by slashes."""
        self.incarnation = incarnation
        """A number that no other actor of this system has."""

    @property
    def is_alive(self) -> bool:
        """Whether the actor still accepts messages."""
        return not self._mailbox.closed

    def tell(self, message: M_contra) -> None:
        """Queue a message and return. Messages of one sender arrive in the order of the calls.

        If the mailbox is full: ``MailboxFull`` under WAIT and REFUSE, a dead letter under the DROP policies.
        If the actor has stopped: a dead letter, no error.
        """
        self._mailbox.offer(message)

    def tell_direct(self, message: M_contra) -> None:
        """``tell``, except that an idle ``DirectActor`` handles the message before this returns.

        Idle means that it waits and its mailbox is empty. Otherwise, and for every other actor, the message is queued;
        so one sender's messages keep their order whichever of the two calls it uses. An exception of the handler is a
        failure of that actor, never of the caller. The handler runs in the middle of the caller's step, so neither may
        rely on the other being between two messages. Further messages for the same actor are queued until the handler
        returns. The time counts as the caller's: a slow handler is reported under the caller's name.
        """
        cell, parked = self._cell, self._mailbox.parked
        if parked is None or parked.done() or cell.direct is None:
            self._mailbox.offer(message)
        elif (gate := cell.system.gate) is None:
            cell.handle_direct(message)
        elif not gate.direct(cell, message):
            self._mailbox.offer(message)

    def tell_threadsafe(self, message: M_contra) -> None:
        """``tell`` from any thread. Messages of one thread keep their order.

        A full mailbox cannot be reported here. Under DROP_OLDEST or DROP_NEWEST it drops a message, as for ``tell``;
        otherwise this message becomes a dead letter with the reason REFUSED.
        Raises ``SystemNotRunning`` once the event loop is closed.
        """
        self._cell.system.call_threadsafe(self._tell_or_bury, message)

    async def send(self, message: M_contra) -> None:
        """Queue a message, waiting for space under WAIT. Waiting senders are served in order.

        Raises ``ActorStopped`` if the actor has stopped or stops during the wait; ``MailboxFull`` under REFUSE, and
        if an actor's handler would wait for space in its own mailbox. After a cancellation during the wait, the message
        may or may not have been accepted.
        """
        mailbox = self._mailbox
        if mailbox.has_space():
            mailbox.offer(message)
            return
        if mailbox.closed or mailbox.config.on_full is not OnFull.WAIT:
            await mailbox.send(message)
            return
        self._refuse_self_send()
        waits = self._cell.system.waits
        wait = waits.begin("space in", self._cell, message)
        try:
            await mailbox.send(message)
        finally:
            waits.end(wait)

    async def ask(self, build: Callable[[Reply[T]], M_contra], *, timeout_s: float) -> T:
        """Send the message that ``build`` makes around a ``Reply``, and wait for the answer.

        An ask that ends without an answer withdraws its message only if that still waited for space.

        Args:
            build: Makes the message, for example the message's class if the reply is its only field.
            timeout_s: Seconds of the system's clock, counted from the call; the wait for space is included.

        Raises:
            AskTimeout: No answer came within ``timeout_s``.
            ActorStopped: The actor has stopped, stops, or restarts between taking the message and answering.
            HandlerFailed: The handler raised before it answered.
            MailboxFull: The mailbox's policy refused or dropped the message.
            Exception: Whatever the actor gave to ``Reply.fail``.
        """
        if type(timeout_s) not in REAL or not 0 <= timeout_s <= WAIT_MAX_S:
            check_wait("timeout_s", timeout_s)
        cell, mailbox = self._cell, self._mailbox
        system = cell.system
        future: asyncio.Future[T] = system.loop.create_future()
        reply = Reply(cell, future)
        message = build(reply)
        envelope = AskEnvelope(message, reply)
        take_back: Callable[[], object] | None = None
        if mailbox.config.on_full is not OnFull.WAIT or mailbox.closed or mailbox.has_space():
            mailbox.offer(envelope)
        else:
            self._refuse_self_send()
            take_back = mailbox.line_up(envelope)
        if future.done():
            return future.result()

        def expire() -> None:
            if not future.done():
                future.set_exception(AskTimeout(cell.path, type_name(message), timeout_s))

        deadline = system.deadlines.start(timeout_s, expire)
        wait = system.waits.begin("an answer from", cell, message)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.exception()  # marks it as seen; the cancellation came first
            raise
        finally:
            system.deadlines.cancel(timeout_s, deadline)
            cell.open_replies.pop(reply, None)
            system.waits.end(wait)
            if take_back is not None:
                take_back()

    def statistics(self) -> MailboxStatistics:
        """The figures of the mailbox now. They stay readable after the actor has stopped."""
        return self._mailbox.statistics(self._cell.restarts)

    def _refuse_self_send(self) -> None:
        if current_actor.get() is self._cell:
            capacity = self._mailbox.config.capacity or 0
            error = MailboxFull(self.name, capacity, "its own handler would wait forever")
            raise error from WouldDeadlock(self.name, "space in its own mailbox")

    def _tell_or_bury(self, message: M_contra) -> None:
        try:
            self._mailbox.offer(message)
        except MailboxFull:
            self._cell.bury(message, DeadLetterReason.REFUSED)

    def __repr__(self) -> str:
        return f"<ActorRef {self.name}#{self.incarnation}>"
