"""Places to look at, and to meddle with, what actors do: metrics, tracing, fault injection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from actors.context import ActorContext
    from actors.ref import ActorRef
    from actors.supervision import Decision

Proceed: TypeAlias = Callable[[Any], Awaitable[None]]
Receive: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class SlowHandler:
    """A handler held the event loop for ``held_s`` seconds on end, without awaiting. ``what`` names it: a
    message type, ``started``, ``stopped``, a signal or background work."""

    ref: ActorRef[Any]
    what: str
    held_s: float


class Hook:
    """Override what you need. Hooks are given to the system; the first one is the outermost.

    Only ``around_message`` may await or raise, and costs something where it is overridden.
    """

    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        """Runs in place of the handler; ``await proceed(message)`` runs what is inside.

        Not proceeding swallows the message, proceeding twice doubles it, raising is a failure of the actor.
        """
        await proceed(message)

    def actor_started(self, ref: ActorRef[Any], restarts: int) -> None:
        """An instance has completed ``started``."""

    def actor_failed(self, ref: ActorRef[Any], cause: BaseException, decision: Decision) -> None:
        """An actor has failed, and this was decided."""

    def actor_stopped(self, ref: ActorRef[Any], cause: BaseException | None) -> None:
        """An actor is over."""

    def slow_handler(self, slow: SlowHandler) -> None:
        """A handler held the loop longer than the system's limit."""


def overriding(hooks: tuple[Hook, ...]) -> list[Hook]:
    """Those that want to be around each message."""
    return [hook for hook in hooks if type(hook).around_message is not Hook.around_message]


def around(hooks: tuple[Hook, ...], ref: ActorRef[Any], context: ActorContext[Any], receive: Receive) -> Receive:
    """``receive`` with every ``around_message`` that is overridden put around it; itself if there is none."""
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
