# SPDX-License-Identifier: Apache-2.0

"""Death watch: an actor that watches another one gets a ``Terminated`` signal when that one has ended."""

from __future__ import annotations

from typing import Any

from actors.mailbox import Mailbox
from actors.ref import ActorRef
from actors.signals import Terminated


class Watches:
    """The watches of one actor, in both directions. They survive its restarts."""

    __slots__ = ("_cause", "_mailbox", "_over", "_ref", "_watchers", "_watching")

    def __init__(self, ref: ActorRef[Any], mailbox: Mailbox) -> None:
        self._ref = ref
        self._mailbox = mailbox
        self._over = False
        self._cause: BaseException | None = None
        self._watchers: dict[Watches, None] = {}
        self._watching: set[Watches] = set()

    def watch(self, target: Watches) -> None:
        """Signal ``Terminated`` to this actor when ``target`` ends; immediately if it has ended."""
        if target in self._watching:
            return
        self._watching.add(target)
        if target._over:
            self._mailbox.signal(Terminated(target._ref, target._cause))
        else:
            target._watchers[self] = None

    def unwatch(self, target: Watches) -> None:
        """Take ``watch`` back."""
        self._watching.discard(target)
        target._watchers.pop(self, None)

    def take_terminated(self, target: Watches) -> bool:
        """A ``Terminated`` is about to be delivered; False if ``target`` has been unwatched since."""
        if target not in self._watching:
            return False
        self._watching.discard(target)
        return True

    def end(self, cause: BaseException | None) -> None:
        """Signal each watcher once, because this actor is over."""
        self._over, self._cause = True, cause
        for target in tuple(self._watching):
            self.unwatch(target)
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher._mailbox.signal(Terminated(self._ref, cause))
