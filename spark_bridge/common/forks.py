# SPDX-License-Identifier: Apache-2.0

"""Lets go of the sidecar's sockets in a forked process.

A child that ``os.fork`` or ``multiprocessing`` makes has copies of all sockets, and none of the threads that serve
them. Through the copies it would keep the sidecar's ports after the parent has ended, and connections whose peers
believe that somebody is there. A child that runs another program has none of them: Python closes them on ``exec``.

The child must not close them: the objects that own them would close their numbers again later, and these may belong to
other files by then. So each number refers to the null device from then on. What a selector watches is shared with the
parent, so its number is replaced first, and nothing that the child does to the selector has an effect on the parent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

__all__ = ["OwnsSockets", "let_go_in_forks"]


class OwnsSockets(Protocol):
    """What has sockets, and lives no longer than they are open."""

    def descriptors(self) -> Iterable[int]:
        """The numbers of its sockets and selectors; negative for those that are closed."""


_owners: WeakSet[OwnsSockets] = WeakSet()


def let_go_in_forks(owner: OwnsSockets) -> None:
    """From now on, forked processes have no copy of what ``owner`` has open at that moment."""
    _owners.add(owner)


def _in_the_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for owner in tuple(_owners):
            for descriptor in tuple(owner.descriptors()):
                if descriptor >= 0:
                    with suppress(OSError):
                        os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_child)
