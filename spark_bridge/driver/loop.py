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
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio

from actors.exits import as_exception
from actors.logs import get_logger
from protocol.describing import describe
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.common.forks import let_go_in_forks
from spark_bridge.driver.bounded_selector import BoundedSelector
from spark_bridge.driver.interrupts import holding_interrupts

__all__ = ["LoopCalls", "SidecarLoop", "call_on_loop", "enter_on_loop"]

T = TypeVar("T")
log = get_logger("headgate.loop")


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


class LoopCalls:
    """A thread with such a loop, while it is entered, and the calls of other threads on it. It ends after they have.

    No generator: a forked process collects the copies of what its parent has entered, and a generator would then try to
    leave it.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="headgate-sidecar", daemon=True)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._ended = False
        self._closed = False

    def __enter__(self) -> LoopCalls:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        def end() -> None:
            self._ended = True
            self._end.set()
            for task in self._tasks if exc_type is not None else ():
                task.cancel()

        with suppress(SidecarNotRunning):
            self.soon(end)
        self._thread.join()

    def _run(self) -> None:
        try:
            anyio.run(self._live, backend="asyncio", backend_options={"loop_factory": SidecarLoop})
        except BaseException as error:  # for those who wait
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._closed = True
            for outcome in tuple(self._waiting):  # what the loop was told in its last moment, and has not begun
                outcome.cancel()

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._started.set_result(None)
        await self._end.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def start(self, function: Callable[[], Awaitable[T]]) -> tuple[concurrent.futures.Future[T], Callable[[], None]]:
        """Have the loop call ``function``. Return its result, and what cancels it. Any thread; does not wait.

        If it is cancelled before it has begun, it begins all the same: up to its first wait it cannot be interrupted.

        Raises ``SidecarNotRunning`` if the loop has ended.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        scopes: list[anyio.CancelScope] = []
        cancelled = False

        async def carry_out() -> None:
            try:
                with anyio.CancelScope() as scope:
                    scopes.append(scope)
                    if cancelled:
                        scope.cancel()
                    outcome.set_result(await function())
            except BaseException as error:
                if not isinstance(error, asyncio.CancelledError):
                    outcome.set_exception(error)
            finally:
                if not outcome.done():
                    outcome.cancel()

        def begin() -> None:
            if self._ended:
                outcome.cancel()
                return
            task = self._loop.create_task(carry_out())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            for scope in scopes:
                scope.cancel()

        self._waiting.add(outcome)
        outcome.add_done_callback(self._waiting.discard)
        self.soon(begin)
        if self._closed:
            outcome.cancel()
        return outcome, partial(self.soon, cancel)

    def soon(self, function: Callable[[], object]) -> None:
        """Have the loop call ``function``. Any thread. Raises ``SidecarNotRunning`` if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError as error:  # the loop is closed
            raise _not_running() from error


def call_on_loop(calls: LoopCalls, function: Callable[[], Awaitable[T]]) -> T:
    """Call ``function`` on the loop of ``calls``, from another thread, and return its result.

    A Ctrl-C meanwhile cancels the call at its first wait, and is raised when it has ended; after a second one, it is
    raised immediately, and the call ends later. Raises ``SidecarNotRunning`` if the loop has ended, or ends before.
    """
    with holding_interrupts() as interrupts:
        outcome, cancel = calls.start(function)
        interrupt = interrupts.wait(outcome)
        if interrupt is not None:
            with suppress(SidecarNotRunning):
                cancel()
            interrupts.wait(outcome)
            raise interrupt from outcome.exception() if outcome.done() and not outcome.cancelled() else None
        return _result_of(outcome)


def enter_on_loop(calls: LoopCalls, manager: AbstractAsyncContextManager[T]) -> tuple[T, Callable[..., bool | None]]:
    """Enter ``manager`` on the loop of ``calls``. Returns what it returns, and what leaves it: its ``__exit__``.

    One task enters and leaves it, and lives in between: it is what ``manager`` may cancel to leave early. A Ctrl-C
    cancels entering, and is raised when that has ended.
    """
    entered: concurrent.futures.Future[T] = concurrent.futures.Future()
    leaving: list[asyncio.Future[tuple[Any, ...]]] = []

    async def live() -> bool | None:
        raised: tuple[Any, ...] = (None, None, None)
        leaving.append(asyncio.get_running_loop().create_future())
        value = await manager.__aenter__()
        try:
            entered.set_result(value)
            raised = await leaving[0]
        finally:
            swallowed = await manager.__aexit__(*raised)
        return swallowed

    def leave(*raised: Any) -> bool | None:
        with suppress(SidecarNotRunning):
            calls.soon(partial(_settle, leaving[0], raised))
        return _result_of(outcome)

    with holding_interrupts() as interrupts:
        outcome, cancel = calls.start(live)
        outcome.add_done_callback(lambda _: entered.cancel())
        interrupt = interrupts.wait(entered)
        if interrupt is not None:
            cancel()
            interrupts.wait(outcome)
            raise interrupt from None
        if entered.cancelled():
            _result_of(outcome)  # raises why
        return entered.result(), leave


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _result_of(outcome: concurrent.futures.Future[T]) -> T:
    try:
        return outcome.result()
    except concurrent.futures.CancelledError as error:
        raise _not_running() from error


def _not_running() -> SidecarNotRunning:
    return SidecarNotRunning("the sidecar was closed before this call had ended")
