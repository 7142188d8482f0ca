"""Who is told when an actor ends: watchers get a signal, linked actors fail with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.errors import LinkedActorFailed
from actors.signals import FailCommand, Terminated

if TYPE_CHECKING:
    from actors.cell import ActorCell


class Bonds:
    """The watches and links of one actor, in both directions. They outlive its restarts."""

    __slots__ = ("_cell", "_linked", "_watchers", "_watching")

    def __init__(self, cell: ActorCell[Any]) -> None:
        self._cell = cell
        self._watchers: dict[ActorCell[Any], None] = {}
        self._watching: set[ActorCell[Any]] = set()
        self._linked: dict[ActorCell[Any], None] = {}

    def watch(self, target: ActorCell[Any]) -> None:
        """This actor is to get ``Terminated`` of ``target``."""
        if target in self._watching:
            return
        self._watching.add(target)
        if target.finished:
            self._cell.mailbox.signal(Terminated(target.ref, target.ended_with))
        else:
            target.bonds._watchers[self._cell] = None

    def unwatch(self, target: ActorCell[Any]) -> None:
        """Take ``watch`` back."""
        self._watching.discard(target)
        target.bonds._watchers.pop(self._cell, None)

    def take_terminated(self, target: ActorCell[Any]) -> bool:
        """A ``Terminated`` is about to be delivered; False if it has been unwatched meanwhile."""
        if target not in self._watching:
            return False
        self._watching.discard(target)
        return True

    def link(self, other: ActorCell[Any]) -> None:
        """Tie the two together."""
        if other is self._cell:
            return
        if not other.finished:
            self._linked[other] = None
            other.bonds._linked[self._cell] = None
        elif other.ended_with is not None:
            self._cell.mailbox.signal(_link_failure(other, other.ended_with))

    def unlink(self, other: ActorCell[Any]) -> None:
        """Take ``link`` back."""
        self._linked.pop(other, None)
        other.bonds._linked.pop(self._cell, None)

    def end(self, cause: BaseException | None) -> None:
        """This actor is over: tell all, once."""
        for target in tuple(self._watching):
            self.unwatch(target)
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher.mailbox.signal(Terminated(self._cell.ref, cause))
        for other in tuple(self._linked):
            self.unlink(other)
            if cause is not None:
                other.mailbox.signal(_link_failure(self._cell, cause))


def _link_failure(failed: ActorCell[Any], cause: BaseException) -> FailCommand:
    error = LinkedActorFailed(failed.path)
    error.__cause__ = cause
    return FailCommand(error, outlives_restart=True)
