# SPDX-License-Identifier: Apache-2.0

"""An actor runtime for asyncio: typed messages, bounded mailboxes, supervision.

``actors.testing`` has a virtual clock, a repeatable order of delivery, and probes. ``headgate.actors`` has the same
names.

>>> async with ActorSystem("example") as system:  # doctest: +SKIP
...     counter = system.spawn(Counter, name="counter")
...     counter.tell(Increment(2))
...     total = await counter.ask(GetTotal, timeout_s=1.0)
"""

from actors.actor import (
    Actor,
    ActorContext,
    ChildFailed,
    DirectActor,
    Hook,
    Proceed,
    Signal,
    SlowHandler,
    Stopping,
    Terminated,
)
from actors.clock import Clock, Scheduled, Timers
from actors.dead_letters import DeadLetter, DeadLetterReason, DeadLetters
from actors.errors import (
    ActorCancelled,
    ActorError,
    ActorStopped,
    AskTimeout,
    ExitRaised,
    HandlerCancelled,
    HandlerFailed,
    MailboxFull,
    NameTaken,
    SystemNotRunning,
    WouldDeadlock,
)
from actors.mailbox import MailboxConfig, MailboxStatistics, OnFull
from actors.ref import ActorRef, Reply
from actors.stepping import Background
from actors.supervision import Decision, Directive, Supervision
from actors.system import ActorSystem

__all__ = [
    "Actor",
    "ActorCancelled",
    "ActorContext",
    "ActorError",
    "ActorRef",
    "ActorStopped",
    "ActorSystem",
    "AskTimeout",
    "Background",
    "ChildFailed",
    "Clock",
    "DeadLetter",
    "DeadLetterReason",
    "DeadLetters",
    "Decision",
    "DirectActor",
    "Directive",
    "ExitRaised",
    "HandlerCancelled",
    "HandlerFailed",
    "Hook",
    "MailboxConfig",
    "MailboxFull",
    "MailboxStatistics",
    "NameTaken",
    "OnFull",
    "Proceed",
    "Reply",
    "Scheduled",
    "Signal",
    "SlowHandler",
    "Stopping",
    "Supervision",
    "SystemNotRunning",
    "Terminated",
    "Timers",
    "WouldDeadlock",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
