# SPDX-License-Identifier: Apache-2.0

"""Hooks: observe what actors do, or interfere with it, for metrics, tracing and fault injection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from actors.ref import ActorRef
from actors.supervision import Decision

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
