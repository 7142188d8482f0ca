"""The actor's one door to the world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actors.background import Background
from actors.mailbox import MailboxConfig
from actors.signals import StopCommand
from actors.supervision import Supervision
from actors.timers import Timers

if TYPE_CHECKING:
    from actors.actor import Actor
    from actors.cell import ActorCell
    from actors.clock import Clock
    from actors.ref import ActorRef
    from actors.system import ActorSystem

M = TypeVar("M")
N = TypeVar("N")
T = TypeVar("T")


class ActorContext(Generic[M]):
    """What an actor can do beside handling messages. Belongs to one actor, for all of its instances.
    Loop-only.

    Once the actor is over, ``spawn``, ``run``, ``run_in_thread`` and ``timers.start`` raise ``ActorStopped``.
    """

    __slots__ = ("_cell", "_timers")

    def __init__(self, cell: ActorCell[M]) -> None:
        self._cell = cell
        self._timers: Timers[M] | None = None

    @property
    def timers(self) -> Timers[M]:
        """The timers of this actor."""
        if self._timers is None:
            self._timers = Timers(self._cell)
        return self._timers

    def cancel_timers(self) -> None:
        """End all timers: the runtime does so when the instance ends."""
        if self._timers is not None:
            self._timers.cancel_all()

    @property
    def self_ref(self) -> ActorRef[M]:
        """The reference of this actor."""
        return self._cell.ref

    @property
    def system(self) -> ActorSystem:
        """The system in which it lives."""
        return self._cell.system

    @property
    def name(self) -> str:
        """Its path: the names of its ancestors and its own, joined by slashes."""
        return self._cell.path

    @property
    def log(self) -> Any:
        """A structlog logger bound to the system, the actor and the ``log_context`` given to ``spawn``."""
        return self._cell.log

    @property
    def clock(self) -> Clock:
        """The system's clock."""
        return self._cell.system.clock

    @property
    def children(self) -> tuple[ActorRef[Any], ...]:
        """The children that are not over, in the order in which they were spawned."""
        return tuple(child.ref for child in self._cell.children.values())

    @property
    def restarts(self) -> int:
        """How often this actor has been restarted."""
        return self._cell.restarts

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        *,
        name: str | None = None,
        mailbox: MailboxConfig | None = None,
        supervision: Supervision | None = None,
        log_context: Mapping[str, object] | None = None,
    ) -> ActorRef[N]:
        """Start a child; see ``ActorSystem.spawn``. It is stopped before this actor stops or restarts."""
        return self._cell.system.spawn_child(self._cell, factory, name, mailbox, supervision, log_context)

    def stop(self, ref: ActorRef[Any] | None = None) -> None:
        """Stop this actor (or ``ref``) after the message that it is handling. Returns at once.

        Messages that still wait become dead letters. If it does not come to its end within the system's
        ``shutdown_timeout_s``, it is cancelled.
        """
        cell = self._cell if ref is None else ref._cell
        if cell is self._cell:
            cell.mailbox.signal(StopCommand())
        else:
            cell.system.request_stop(cell)

    def watch(self, ref: ActorRef[Any]) -> None:
        """Get a ``Terminated`` signal when ``ref`` is over; at once if it is already. Watching twice is
        once."""
        self._cell.bonds.watch(ref._cell)

    def unwatch(self, ref: ActorRef[Any]) -> None:
        """Take ``watch`` back; a signal that waits already is not delivered any more."""
        self._cell.bonds.unwatch(ref._cell)

    def link(self, ref: ActorRef[Any]) -> None:
        """Tie the two together: if either ends with a failure, the other fails with ``LinkedActorFailed``.

        A normal stop does not travel along a link. Linking to one that has already failed fails this one at
        once.
        """
        self._cell.bonds.link(ref._cell)

    def unlink(self, ref: ActorRef[Any]) -> None:
        """Take ``link`` back."""
        self._cell.bonds.unlink(ref._cell)

    def run(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        """Run an async function beside the actor, for as long as the actor's instance lives.

        What ``on_result`` or ``on_error`` makes of the outcome comes back as a message, beyond the mailbox's
        capacity. Without ``on_result`` the result is let go; without ``on_error`` an exception is a failure
        of the actor. Must not touch the actor's state: it runs between the actor's messages.
        """
        return self._cell.run_background(coroutine_function, args, on_result, on_error)

    def run_in_thread(
        self,
        function: Callable[..., T],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        """Run a blocking function in a worker thread; everything else is as with ``run`` (H9).

        A thread cannot be cancelled: if the actor ends first, the thread runs on to its own end and what it
        returns is let go.
        """

        async def in_thread() -> T:
            result: T = await self._cell.system.run_blocking(function, *args)
            return result

        in_thread.__qualname__ = f"thread {getattr(function, '__qualname__', function)}"
        return self._cell.run_background(in_thread, (), on_result, on_error)
