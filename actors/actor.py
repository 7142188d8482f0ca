# SPDX-License-Identifier: Apache-2.0

"""What users of actors write and are given: the base classes, signals, the context that an actor acts through, hooks.

Signals tell an actor about its own life, its children's, and those of the actors that it watches. They are not
messages. They have their own queue, overtake all messages that wait, do not count against the mailbox's capacity, and
only the runtime sends them.

Hooks observe what actors do, or interfere with it, for metrics, tracing and fault injection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

from actors.clock import Clock, Timers
from actors.mailbox import MailboxConfig
from actors.ref import ActorRef
from actors.stepping import Background
from actors.supervision import Decision, Supervision
from protocol.describing import type_name
from protocol.machine import TimePassed

M = TypeVar("M")
N = TypeVar("N")
T = TypeVar("T")


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


class Actor(Generic[M]):
    """The base class of all actors. ``M`` is the type, usually a union, of the messages that the actor understands.

    The constructor is yours. The factory given to ``spawn`` builds an instance, and another one at each restart. The
    methods of one actor run one at a time. While one of them awaits, other actors run, but this one handles nothing
    else. An exception from ``started``, ``receive`` or ``signal`` is a failure, and supervision decides what to do.
    """

    async def started(self, context: ActorContext[M]) -> None:
        """Called before the first message of this instance, and so again after a restart."""

    async def receive(self, context: ActorContext[M], message: M) -> None:
        """Handle one message."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement receive(): define async def receive(self, context, message)"
        )

    async def signal(self, context: ActorContext[M], signal: Signal) -> None:
        """Handle one signal. Signals overtake all messages that wait."""

    async def stopped(self, context: ActorContext[M], cause: BaseException | None) -> None:
        """Called last, once for each instance, after its children and background work have ended.

        Must return within the deadline of the stop. An exception is logged and goes no further.

        Args:
            context: The actor's context.
            cause: None for a normal stop, else the failure; also a failure before a restart.
        """

    def called_for(self, message: object) -> str:
        """The name under which the log and hooks speak of the code that handles ``message``: by default, its type."""
        return type_name(message)

    def outlives_cancellation(self, context: ActorContext[M]) -> bool:
        """Whether to continue after foreign code has cancelled the actor's task between two messages.

        Code that survives a handler can do that, for example ``asyncio.timeout`` in an async generator that was never
        closed. By default, the actor ends as if it had been cut off.
        """
        return False


class DirectActor(Actor[M]):
    """An actor that handles each message without awaiting.

    So if it is idle, it can take a message within the very call that sends it: see ``ActorRef.tell_direct``. In
    everything else it is an actor like any other.
    """

    def handle(self, context: ActorContext[M], message: M) -> None:
        """Handle one message, in a separate turn or in the middle of the sender's."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement handle(): define def handle(self, context, message)"
        )

    async def receive(self, context: ActorContext[M], message: M) -> None:
        self.handle(context, message)


class ActorContext(ABC, Generic[M]):
    """The actions of an actor, other than handling messages. One context serves all instances of an actor. Loop-only.

    Once the actor is over, ``spawn``, ``run``, ``run_in_thread`` and ``timers.start`` raise ``ActorStopped``.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def self_ref(self) -> ActorRef[M]:
        """The reference of this actor."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The actor's path: the names of its ancestors and its own, joined by slashes."""

    @property
    @abstractmethod
    def log(self) -> Any:
        """A structlog logger bound to the system, the actor and the ``log_context`` given to ``spawn``."""

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """The system's clock."""

    @property
    @abstractmethod
    def timers(self) -> Timers[M]:
        """The timers of this actor."""

    @property
    @abstractmethod
    def children(self) -> tuple[ActorRef[Any], ...]:
        """The living children, in the order in which they were spawned."""

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often this actor has been restarted."""

    @abstractmethod
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

    @abstractmethod
    def stop(self, ref: ActorRef[Any] | None = None) -> None:
        """Stop this actor, or the actor ``ref``, after the message that it is handling. Returns immediately.

        Messages that still wait become dead letters. If the actor has not ended within the system's
        ``shutdown_timeout_s`` (real seconds), it is cancelled.
        """

    @abstractmethod
    def watch(self, ref: ActorRef[Any]) -> None:
        """Get a ``Terminated`` signal when ``ref`` ends; immediately if it has ended. Watching twice is watching once.

        A watch survives restarts of both actors.
        """

    @abstractmethod
    def unwatch(self, ref: ActorRef[Any]) -> None:
        """Take ``watch`` back. A signal that already waits is not delivered."""

    @abstractmethod
    def run(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        """Run ``coroutine_function(*args)`` concurrently with the actor, for as long as the actor's instance lives.

        The function must not touch the actor's state: it runs between the actor's messages. The message made of its
        outcome is queued regardless of the mailbox's capacity.

        Args:
            coroutine_function: What to run.
            args: Its arguments.
            on_result: Makes a message of the result; without it, the result is discarded.
            on_error: Makes a message of an exception; without it, an exception is a failure of the actor.
        """

    @abstractmethod
    def run_in_thread(
        self,
        function: Callable[..., T],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        """Run a blocking function in a worker thread; otherwise like ``run``.

        Each call has a thread immediately, however many others wait in theirs. A thread cannot be cancelled: if the
        actor ends first, the thread runs to its own end and its result is discarded.
        """


Proceed: TypeAlias = Callable[[Any], Awaitable[None]]
Receive: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class SlowHandler:
    """A handler blocked the event loop for ``held_s`` seconds without awaiting.

    ``what`` names it: a message type, ``started``, ``stopped``, a signal, or background work.
    """

    ref: ActorRef[Any]
    what: str
    held_s: float


class Hook:
    """Override what you need, and give instances to ``ActorSystem(hooks=...)``; the first is the outermost.

    All methods are called on the loop and must not block. Only ``around_message`` may await or raise. It costs time on
    each message, but only if it is overridden.
    """

    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        """Runs in place of the handler; ``await proceed(message)`` runs the next hook, or the handler.

        Not proceeding swallows the message, proceeding twice doubles it, and raising is a failure of the actor.
        """
        await proceed(message)

    def actor_started(self, ref: ActorRef[Any], restarts: int) -> None:
        """An instance has completed ``started``. ``restarts``: how often the actor was restarted before."""

    def actor_failed(self, ref: ActorRef[Any], cause: BaseException, decision: Decision) -> None:
        """An actor has failed, and its supervision has decided what to do."""

    def actor_stopped(self, ref: ActorRef[Any], cause: BaseException | None) -> None:
        """An actor has ended. ``cause``: None after a normal stop, else the failure."""

    def slow_handler(self, slow: SlowHandler) -> None:
        """A handler held the loop longer than the system's ``slow_handler_limit_s``."""


def overriding(hooks: tuple[Hook, ...]) -> list[Hook]:
    """The hooks that override ``around_message``."""
    return [hook for hook in hooks if type(hook).around_message is not Hook.around_message]


def around(hooks: tuple[Hook, ...], ref: ActorRef[Any], context: Any, receive: Receive) -> Receive:
    """``receive`` inside every overridden ``around_message``; ``receive`` itself if there is none."""
    wanting = overriding(hooks)
    if not wanting:
        return receive

    def innermost(message: Any) -> Awaitable[None]:
        return receive(context, message)

    proceed: Proceed = innermost
    for hook in reversed(wanting):
        proceed = _wrapped(hook, ref, proceed)
    outermost = cast("Callable[[Any], Coroutine[Any, Any, None]]", proceed)
    return lambda _, message: outermost(message)


def _wrapped(hook: Hook, ref: ActorRef[Any], proceed: Proceed) -> Proceed:
    async def handler(message: Any) -> None:
        await hook.around_message(ref, message, proceed)

    return handler


class DeadlineTimer:
    """Sends the actor a ``TimePassed`` when its machine's deadline has come.

    If a deadline moves later, the timer stays as it is: it fires early once and is armed again. So a machine whose
    deadline moves with every message does not need a timer per message.
    """

    __slots__ = ("_armed_for",)

    def __init__(self) -> None:
        self._armed_for: float | None = None

    def fired(self) -> None:
        """The actor has received the ``TimePassed``."""
        self._armed_for = None

    def arm(self, context: ActorContext[Any], deadline: float | None, now: float) -> None:
        """Call after each step of the machine. ``now`` and ``deadline`` are readings of ``context.clock``."""
        if deadline is None or (self._armed_for is not None and self._armed_for <= deadline):
            return
        self._armed_for = deadline
        context.timers.start("deadline", TimePassed(), delay_s=max(0.0, deadline - now))
