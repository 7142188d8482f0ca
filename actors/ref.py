"""How to reach an actor, and how to answer one.

An ``ActorRef`` names one life of an actor: it stays valid across supervised restarts, and once the actor has
stopped it is over for ever, even if another actor takes the same name. ``incarnation`` tells the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actors.dead_letters import DeadLetter, DeadLetterReason
from actors.errors import AskTimeout, MailboxFull, WouldDeadlock
from actors.mailbox import Envelope, MailboxStatistics, OnFull

if TYPE_CHECKING:
    from actors.cell import ActorCell

M_contra = TypeVar("M_contra", contravariant=True)
T = TypeVar("T")


class Reply(Generic[T]):
    """Where the answer to one ``ask`` goes. Travels inside the message; the first answer counts.

    May be kept and answered later, or passed on to another actor. Loop-only.
    """

    __slots__ = ("_asked", "_future")

    def __init__(self, asked: ActorCell[Any], future: asyncio.Future[T]) -> None:
        self._asked = asked
        self._future = future

    @property
    def open(self) -> bool:
        """Whether somebody still waits for the answer."""
        return not self._future.done()

    def answer(self, value: T) -> bool:
        """Give the answer. False (and a dead letter) if nobody waits any more."""
        if self._future.done():
            self._too_late(value)
            return False
        self._future.set_result(value)
        return True

    def fail(self, error: BaseException) -> bool:
        """Make the ``ask`` raise ``error``. False (and a dead letter) if nobody waits any more."""
        if self._future.done():
            self._too_late(error)
            return False
        self._future.set_exception(error)
        return True

    def _too_late(self, answer: object) -> None:
        cell = self._asked
        cell.system.dead_letters.publish(DeadLetter(cell.ref, answer, DeadLetterReason.ANSWER_TOO_LATE))

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

    All methods belong to the event loop's thread, but for ``tell_threadsafe``.
    """

    __slots__ = ("_cell", "_mailbox", "incarnation", "name")

    def __init__(self, cell: ActorCell[Any], incarnation: int) -> None:
        self._cell = cell
        self._mailbox = cell.mailbox
        self.name: str = cell.path
        self.incarnation = incarnation

    @property
    def is_alive(self) -> bool:
        """Whether messages are still taken in."""
        return not self._mailbox.closed

    def tell(self, message: M_contra) -> None:
        """Queue a message and go on; messages of one sender arrive in the order of the calls.

        Full mailbox: ``MailboxFull`` under WAIT and REFUSE, a dead letter under the DROP policies.
        Stopped target: a dead letter, no error.
        """
        self._mailbox.offer(message)

    def tell_direct(self, message: M_contra) -> None:
        """``tell``, but a ``DirectActor`` that is idle handles the message before this returns.

        Idle: it waits for something to come, and nothing has. Else, and for every other actor, the message is queued,
        so the order of one sender's messages is that of its calls, whichever of the two it uses. What the handler
        raises is a failure of that actor, never of the caller; what it does happens in the middle of what the caller
        does, so neither may rely on the other's being between two messages. While a message is handled so, further
        ones for the same actor are queued. The time is the caller's: a slow handler is reported as the caller's own.
        """
        cell, parked = self._cell, self._mailbox.parked
        if parked is None or parked.done() or cell.direct is None:
            self._mailbox.offer(message)
        elif (gate := cell.system.gate) is None:
            cell.handle_direct(message)
        elif not gate.direct(cell, message):
            self._mailbox.offer(message)

    def tell_threadsafe(self, message: M_contra) -> None:
        """``tell`` from any thread. The order of one thread's calls is kept.

        A full mailbox cannot be reported here: the message becomes a dead letter with the reason REFUSED.
        ``SystemNotRunning`` once the event loop is closed.
        """
        self._cell.system.call_threadsafe(self._tell_or_bury, message)

    async def send(self, message: M_contra) -> None:
        """Queue a message, waiting for room under WAIT; waiting senders are served in order.

        Raises ``ActorStopped`` if the target is stopped or stops while this waits, ``MailboxFull`` under
        REFUSE and when an actor's own handler would have to wait for room in its own mailbox. If it is
        cancelled while it waits, the message may or may not have been accepted.
        """
        mailbox = self._mailbox
        if mailbox.has_room():
            mailbox.offer(message)
            return
        if mailbox.closed or mailbox.config.on_full is not OnFull.WAIT:
            await mailbox.send(message)
            return
        self._refuse_self_send()
        with self._cell.system.waits.waiting("room for", self._cell, message):
            await mailbox.send(message)

    async def ask(self, build: Callable[[Reply[T]], M_contra], *, timeout_s: float) -> T:
        """Send the message that ``build`` makes around a reply, and wait for the answer.

        timeout_s: seconds of the system's clock, counted from the call, waiting for room included;
            ``AskTimeout`` after that. ``ActorStopped`` at once if the target is stopped, stops, or is
            restarted after it took the message and before it answered; ``HandlerFailed`` if its handler
            raised and it was resumed. What the target gives to ``Reply.fail`` is raised here. ``MailboxFull``
            if the policy refuses or drops the message. An ask that ends without an answer takes back its
            message only if that still waited for room.
        """
        cell, mailbox = self._cell, self._mailbox
        system = cell.system
        future: asyncio.Future[T] = system.loop.create_future()
        reply = Reply(cell, future)
        message = build(reply)
        envelope = AskEnvelope(message, reply)
        take_back: Callable[[], None] | None = None
        if mailbox.config.on_full is not OnFull.WAIT or mailbox.closed or mailbox.has_room():
            mailbox.offer(envelope)
        else:
            self._refuse_self_send()
            take_back = mailbox.line_up(envelope)
        if future.done():
            return future.result()

        def expire() -> None:
            if not future.done():
                future.set_exception(AskTimeout(cell.path, type(message).__name__, timeout_s))

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
        """The figures of the mailbox now; they stay readable after the actor has stopped."""
        return self._mailbox.statistics(self._cell.restarts)

    def _refuse_self_send(self) -> None:
        if self._cell.system.waits.current_cell() is self._cell:
            capacity = self._mailbox.config.capacity or 0
            error = MailboxFull(self.name, capacity, "its own handler would wait for ever")
            raise error from WouldDeadlock(self.name, "room in its own mailbox")

    def _tell_or_bury(self, message: M_contra) -> None:
        try:
            self._mailbox.offer(message)
        except MailboxFull:
            self._cell.bury(message, DeadLetterReason.REFUSED)

    def __repr__(self) -> str:
        return f"<ActorRef {self.name}#{self.incarnation}>"
