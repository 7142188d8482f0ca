# SPDX-License-Identifier: Apache-2.0

"""What happens when a display fails: the tab, gauges, notes, a trace, spans, the observer, a page, a progress bar.

No failure leaves the display (H155). The first one of each kind is logged, all are counted, and ``explain`` says that
the display is not available. After ``FAILURES_MAX`` failures in a row the display pauses, so that one that is broken
permanently costs nothing; then one more attempt shows whether it works again. Ends of the process and of the task, such
as ``KeyboardInterrupt`` and ``CancelledError``, are not failures of a display.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from actors import Actor, ActorContext, ActorRef, ActorSystem, Directive, Supervision
from actors.errors import ActorError
from actors.logs import failures as log_failures
from actors.logs import get_logger
from actors.mailbox import MailboxConfig
from protocol.describing import describe, type_name
from spark_bridge.observability.status_server import Content, Request, Route, Unavailable

M = TypeVar("M")
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger("headgate.observability")

FAILURES_MAX = 5
"""After so many failures in a row, a display pauses."""
PAUSE_S = 60.0


@dataclass(slots=True)
class _Display:
    failures: int = 0
    in_a_row: int = 0
    paused_until: float = 0.0
    told: set[str] = field(default_factory=set)  # the types of the exceptions that were logged


class Displays:
    """The displays of one sidecar by their names; see the module. Any thread.

    ``now`` is a clock in seconds. Names are fixed words, because they are labels of a figure.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._displays: dict[str, _Display] = {}
        self._lock = threading.Lock()
        self._log_failures_before = log_failures.count  # the log is that of the process

    def failures(self) -> dict[str, int]:
        """How often each display has failed, without those that never have."""
        counts = {name: one.failures for name, one in list(self._displays.items())}
        counts["log"] = counts.get("log", 0) + log_failures.count - self._log_failures_before
        return {name: count for name, count in sorted(counts.items()) if count}

    def may_run(self, name: str) -> bool:
        """Whether the display does not pause."""
        display = self._displays.get(name)
        return display is None or not display.paused_until or self._now() >= display.paused_until

    def worked(self, name: str) -> None:
        """The display has done what it should."""
        display = self._displays.get(name)
        if display is not None and display.in_a_row:
            display.in_a_row, display.paused_until = 0, 0.0

    def failed(self, name: str, error: BaseException) -> None:
        """The display has raised ``error``."""
        kind = type_name(error)
        with self._lock:
            display = self._displays.setdefault(name, _Display())
            display.failures += 1
            display.in_a_row += 1
            is_new = kind not in display.told
            display.told.add(kind)
            pauses = display.in_a_row >= FAILURES_MAX
            if pauses:
                display.paused_until = self._now() + PAUSE_S
            tells_pause = display.in_a_row == FAILURES_MAX
        if is_new:
            log.warning("display failed, jobs not affected", display=name, error=describe(error), exc_info=error)
        if tells_pause:
            log.warning("display paused", display=name, failures=display.failures, pause_s=PAUSE_S)

    def run(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``function`` for the display. None if that fails, or if the display pauses."""
        if not self.may_run(name):
            return None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.failed(name, error)
            return None
        self.worked(name)
        return result

    async def run_async(
        self, name: str, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Like ``run``, for an async function that ends the display: it is called even while the display pauses."""
        try:
            await function(*args, **kwargs)
        except Exception as error:
            self.failed(name, error)

    def spawn(
        self, system: ActorSystem, factory: Callable[[], Actor[M]], name: str, mailbox: MailboxConfig | None = None
    ) -> ActorRef[M]:
        """Start an actor that is a display. What it raises is its failure, and it goes on with its next message."""
        # The wrapper lets no exception out. The policy is for what is none, such as SystemExit.
        policy = Supervision(on_failure=Directive.RESUME, when_exhausted=Directive.STOP)
        return system.spawn(lambda: _DisplayActor(self, name, factory), name=name, mailbox=mailbox, supervision=policy)

    def route(self, name: str, route: Route) -> Route:
        """The same answer of the status server; a failure is answered with the status 503."""

        def answer(request: Request) -> Content:
            try:
                content = route(request)
            except Unavailable:
                raise
            except Exception as error:
                self.failed(name, error)
                raise Unavailable("not available: this display has failed, and the sidecar's log says why") from None
            self.worked(name)
            return content

        return answer


class _DisplayActor(Actor[M]):
    """An actor inside the boundary of its display."""

    def __init__(self, displays: Displays, name: str, factory: Callable[[], Actor[M]]) -> None:
        self._displays = displays
        self._name = name
        self._factory = factory
        self._actor: Actor[M] | None = None

    async def started(self, context: ActorContext[M]) -> None:
        self._actor = self._displays.run(self._name, self._factory)
        if self._actor is not None:
            await self._contained(self._actor.started, context)

    async def receive(self, context: ActorContext[M], message: M) -> None:
        if self._actor is not None and self._displays.may_run(self._name):
            await self._contained(self._actor.receive, context, message)

    async def stopped(self, context: ActorContext[M], cause: BaseException | None) -> None:
        if self._actor is not None:
            await self._contained(self._actor.stopped, context, cause)

    async def _contained(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await method(*args)
        except ActorError:  # an operator is just being released, or everything is
            return
        except Exception as error:
            self._displays.failed(self._name, error)
        else:
            self._displays.worked(self._name)
