"""What the runtime tells an actor about lives: its own, its children's, and those it watches.

Signals are not messages. They travel in a queue of their own, are delivered before any user message that
waits in the mailbox, do not count against its capacity, and only the runtime can send them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from actors.ref import ActorRef
    from actors.supervision import Decision


@dataclass(frozen=True, slots=True)
class Terminated:
    """A watched actor has ended; nothing more will ever be handled by it.

    ``cause`` is None after a normal stop, else the failure. Sent once for each watch, at once if it was
    already over.
    """

    ref: ActorRef[Any]
    cause: BaseException | None


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """A child raised. ``decision`` is what its supervision has decided; it is already being carried out."""

    ref: ActorRef[Any]
    cause: BaseException
    decision: Decision


@dataclass(frozen=True, slots=True)
class Stopping:
    """This actor will handle no more messages. Its children still live; ``stopped`` comes after they are
    gone."""


Signal: TypeAlias = Terminated | ChildFailed | Stopping


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Runtime only: end after the current message."""


@dataclass(frozen=True, slots=True)
class RestartCommand:
    """Runtime only: a sibling failed under one-for-all, and all are to begin anew."""

    cause: BaseException
    delay_s: float


@dataclass(frozen=True, slots=True)
class FailCommand:
    """Runtime only: fail with this cause, as if ``receive`` had raised it.

    ``outlives_restart``: it comes from a link. A child's escalation or background work belongs to one
    instance, and is void after a restart.
    """

    cause: BaseException
    outlives_restart: bool = False


Command: TypeAlias = StopCommand | RestartCommand | FailCommand
