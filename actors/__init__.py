"""An actor runtime for asyncio: typed messages, bounded mailboxes, supervision, and a test kit in
``actors.testing``.

>>> async with ActorSystem("example") as system:  # doctest: +SKIP
...     counter = system.spawn(Counter, name="counter")
...     counter.tell(Increment(2))
...     total = await counter.ask(GetTotal, timeout_s=1.0)
"""

from actors.actor import Actor, ActorContext, DirectActor
from actors.background import Background
from actors.clock import Clock, LoopClock, Scheduled
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
from actors.hooks import Hook, Proceed, SlowHandler
from actors.mailbox import MailboxConfig, MailboxStatistics, OnFull
from actors.ref import ActorRef, Reply
from actors.signals import ChildFailed, Signal, Stopping, Terminated
from actors.supervision import Decision, Directive, Failure, Supervision, decide
from actors.system import ActorSystem
from actors.timers import Timers
from actors.waits import Wait

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
    "Failure",
    "HandlerCancelled",
    "HandlerFailed",
    "Hook",
    "LoopClock",
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
    "Wait",
    "WouldDeadlock",
    "decide",
]
