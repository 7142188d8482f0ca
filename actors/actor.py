"""What a user writes: a plain class with ``receive``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from actors.context import ActorContext
    from actors.signals import Signal

M = TypeVar("M")


class Actor(Generic[M]):
    """The base of all actors; ``M`` is the type, usually a union, of the messages it understands.

    The constructor is yours. An instance is built by the factory given to ``spawn``, and anew on each
    restart. All methods of one actor run one at a time; while one of them awaits, other actors run, but this
    one handles nothing else. An exception out of ``started``, ``receive`` or ``signal`` is a failure, for
    supervision to decide about.
    """

    async def started(self, context: ActorContext[M]) -> None:
        """Called before the first message of this instance, so also after a restart."""

    async def receive(self, context: ActorContext[M], message: M) -> None:
        """Handle one message."""
        raise NotImplementedError(f"{type(self).__name__} does not implement receive()")

    async def signal(self, context: ActorContext[M], signal: Signal) -> None:
        """Handle one signal. Signals overtake all messages that wait."""

    async def stopped(self, context: ActorContext[M], cause: BaseException | None) -> None:
        """Called once, last, for each instance that was built, when its children and background work are
        gone.

        cause: None for a normal stop, else the failure; also before a restart. Must come to its end within
            the deadline of the stop. An exception out of here is logged and goes no further.
        """

    def outlives_cancellation(self, context: ActorContext[M]) -> bool:
        """Whether to go on after the actor's task was cancelled between two messages, and not by the runtime.

        Code that outlived a call does that, such as an ``asyncio.timeout`` in an async generator that nobody closed.
        By default the actor ends like one that is cut off.
        """
        return False


class DirectActor(Actor[M]):
    """An actor that handles each message without awaiting.

    So one that is idle can take a message within the very call that tells it: see ``ActorRef.tell_direct``. In
    everything else it is an actor like any other.
    """

    def handle(self, context: ActorContext[M], message: M) -> None:
        """Handle one message. Runs either in a turn of its own, or in the middle of somebody else's."""
        raise NotImplementedError(f"{type(self).__name__} does not implement handle()")

    async def receive(self, context: ActorContext[M], message: M) -> None:
        self.handle(context, message)
