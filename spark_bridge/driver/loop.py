# SPDX-License-Identifier: Apache-2.0

"""The event loop of a sidecar with its own thread, which no code that runs on it can end.

asyncio lets ``SystemExit`` and ``KeyboardInterrupt`` out of any task or callback end the whole loop, and a
``GeneratorExit`` that a future carries closes the task that awaits the future. Headgate contains these where it calls a
coordinator; the loop contains them in the tasks, callbacks and futures that a coordinator creates itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from actors.exits import as_exception
from actors.logs import get_logger
from protocol.describing import describe
from spark_bridge.driver.bounded_selector import BoundedSelector
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.errors import SidecarNotRunning
from spark_bridge.forks import let_go_in_forks

__all__ = ["SidecarLoop", "call_on_loop", "start_sidecar_loop"]

T = TypeVar("T")
log = get_logger("headgate.loop")

PORTAL_ENDED = "This portal is not running"
"""What anyio's portal raises, as a plain ``RuntimeError``."""


class SidecarLoop(asyncio.SelectorEventLoop):
    """Continues after a ``SystemExit`` or ``KeyboardInterrupt`` of its code, which reaches those who await the task.

    On the main thread a ``KeyboardInterrupt`` may be a real Ctrl-C, so there it ends the loop.
    """

    def __init__(self) -> None:
        super().__init__(BoundedSelector())
        self.set_task_factory(_make_task)
        let_go_in_forks(self)

    def descriptors(self) -> Iterable[int]:
        """See ``OwnsSockets``: the selector and what it watches, the loop's own sockets among them."""
        selector: Any = self._selector  # type: ignore[attr-defined]  # that of asyncio, which was given here
        watched = selector.get_map() or {}
        return [selector.fileno(), *watched] if watched else []

    def run_forever(self) -> None:
        while True:
            try:
                super().run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                log.error("exit raised by task or callback contained", error=describe(error), exc_info=error)


class _Steps:
    """A coroutine that is never closed by what it awaits: a ``GeneratorExit`` arrives as an ``ExitRaised``."""

    __slots__ = ("_coroutine", "close", "send")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.send = coroutine.send
        self.close = coroutine.close

    def throw(self, error: BaseException) -> Any:
        if isinstance(error, GeneratorExit):
            error = as_exception("an awaited future", error)
        return self._coroutine.throw(error)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # cr_frame and the like, for those who look at tasks


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_Steps(coroutine), loop=loop, **options)  # type: ignore[arg-type]


def start_sidecar_loop() -> AbstractContextManager[BlockingPortal]:
    """Start a thread with such a loop, and return the portal to it."""
    return start_blocking_portal("asyncio", backend_options={"loop_factory": SidecarLoop}, name="headgate-sidecar")


def call_on_loop(portal: BlockingPortal, function: Callable[[], Awaitable[T]]) -> T:
    """Call ``function`` on the loop of ``portal``, from another thread, and return its result.

    A ``KeyboardInterrupt`` meanwhile cancels the call, and is raised when that has ended; a second one is raised
    immediately, and the call ends later. Raises ``SidecarNotRunning`` if the loop has ended, or ends before the call.
    """
    cancelled = threading.Event()
    scopes: list[anyio.CancelScope] = []

    async def call() -> T:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            if not cancelled.is_set():
                return await function()
        raise concurrent.futures.CancelledError

    async def cancel() -> None:
        cancelled.set()
        for scope in scopes:
            scope.cancel()

    with _no_loop_is_not_running():
        with interrupts_held_back():
            future = portal.start_task_soon(call)
        try:
            return future.result()
        except KeyboardInterrupt as interrupt:
            if not future.done():
                portal.start_task_soon(cancel)
                concurrent.futures.wait([future])
            raise interrupt from future.exception() if future.done() and not future.cancelled() else None


@contextmanager
def _no_loop_is_not_running() -> Iterator[None]:
    """Turn what a portal raises when its loop has ended into ``SidecarNotRunning``."""
    try:
        yield
    except (RuntimeError, concurrent.futures.CancelledError) as error:
        if isinstance(error, RuntimeError) and str(error) != PORTAL_ENDED:
            raise
        raise SidecarNotRunning("the sidecar was closed before this call had ended") from error
