# SPDX-License-Identifier: Apache-2.0

"""Signals tell an actor about its own life, its children's, and those of the actors that it watches.

Signals are not messages. They have their own queue, overtake all messages that wait, do not count against the
mailbox's capacity, and only the runtime sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from actors.ref import ActorRef
from actors.supervision import Decision


@dataclass(frozen=True, slots=True)
class Terminated:
    """A watched actor has ended; it will never handle anything again.

    ``cause`` is None after a normal stop, else the failure. Sent once for each watch; immediately if the actor had
    ended before.
    """

    ref: ActorRef[Any]
    cause: BaseException | None


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """A child raised. ``decision`` is what its supervision decided, and is already being carried out."""

    ref: ActorRef[Any]
    cause: BaseException
    decision: Decision


@dataclass(frozen=True, slots=True)
class Stopping:
    """This actor will handle no more messages. Its children are still alive; ``stopped`` runs after they have ended."""


Signal: TypeAlias = Terminated | ChildFailed | Stopping


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Runtime only: end after the current message."""


@dataclass(frozen=True, slots=True)
class FailCommand:
    """Runtime only: fail with this cause, as if ``receive`` had raised it.

    It comes from a child that escalated or from background work. Both belong to one instance, so a restart voids it.
    """

    cause: BaseException
