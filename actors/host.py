# SPDX-License-Identifier: Apache-2.0

"""Something that is entered in one task and may be left in another.

A task group belongs to the task that has entered it: anyio refuses to leave it in any other. But the two halves of an
asynchronous fixture, and two cells of a notebook, often run in different tasks (H163). So what owns a task group lives
in a separate task, its host, and those who enter and leave only tell the host so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import anyio

__all__ = ["Host"]

T = TypeVar("T")

ExitArguments = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class Host(Generic[T]):
    """Calls ``entering`` and, later, ``leaving`` in one task, for those who ``enter`` and ``leave``. Loop only.

    Both are what ``__aenter__`` and ``__aexit__`` of an asynchronous context manager are. A task that enters or leaves
    waits for the host, however often it is cancelled. The host is cancelled in the same way: by a cancellation of the
    task, or by a cancelled scope around it, which shielded code does not notice. Errors are raised where a task waits.

    If the host fails in between, or calls ``cancel_body``, the task that has entered is cancelled, if it still runs,
    and ``leave`` raises the error of the host.
    """

    def __init__(
        self,
        name: str,
        entering: Callable[[], Awaitable[T]],
        leaving: Callable[
            [type[BaseException] | None, BaseException | None, TracebackType | None], Awaitable[bool | None]
        ],
    ) -> None:
        self._name = name
        self._entering = entering
        self._leaving = leaving
        self._scope: anyio.CancelScope
        self._task: asyncio.Task[bool | None]
        self._body: asyncio.Task[object] | None = None
        self._body_cancelled = False
        self._entered: asyncio.Future[T]
        self._left: asyncio.Future[ExitArguments]

    async def enter(self) -> T:
        """Start the host. If this is cancelled, what it has entered is left before the cancellation is raised."""
        loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._entered, self._left = loop.create_future(), loop.create_future()
        self._task = loop.create_task(self._run(), name=self._name)
        _hosts[self._task] = self
        cancelled = await self._wait_for(self._entered, self._task)
        if not self._entered.done():
            return self._ended_early(cancelled)
        if cancelled is not None:  # it came too late, or somebody has swallowed it
            await self.leave(type(cancelled), cancelled, cancelled.__traceback__)
            raise cancelled
        self._body = asyncio.current_task()
        self._task.add_done_callback(lambda task: self.cancel_body())
        return self._entered.result()

    async def leave(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave, in any task, and wait for the end of the host. Returns whether the exception is swallowed."""
        own = self._is_own_cancellation(exc)
        self._forward_scope()
        if not self._left.done():
            self._left.set_result((None, None, None) if own else (exc_type, exc, traceback))
        cancelled = await self._wait_for(self._task)
        if self._task.cancelled():
            raise cancelled or asyncio.CancelledError
        error = self._task.exception()
        if error is not None:
            raise error
        if cancelled is not None:
            raise cancelled
        return own or self._task.result()

    def cancel_body(self) -> None:
        """Cancel the task that has entered, unless it has ended or somebody leaves already. ``leave`` swallows that."""
        body, self._body = self._body, None
        if body is None or body.done() or self._left.done():
            return
        host = _hosts.get(body)
        if host is None:
            self._body_cancelled = body.cancel()
        else:  # this one was entered by another host, which fails with it
            host._fail()

    def _fail(self) -> None:
        if self._entered.done():
            self.cancel_body()
        else:
            self._scope.cancel()

    async def _run(self) -> bool | None:
        with self._scope:
            entered = await self._entering()
            self._entered.set_result(entered)
            try:
                arguments = await asyncio.shield(self._left)
            except asyncio.CancelledError as error:  # of the loop, which ends, or of a task group that has failed
                await self._leaving(type(error), error, error.__traceback__)
                raise
            return await self._leaving(*arguments)
        return None

    async def _wait_for(self, *futures: asyncio.Future[T] | asyncio.Task[bool | None]) -> asyncio.CancelledError | None:
        """Wait for the first of these, and pass on each cancellation; return the last one."""
        cancelled: asyncio.CancelledError | None = None
        while not any(future.done() for future in futures):
            try:
                with anyio.CancelScope(shield=self._scope.cancel_called):  # it has been passed on
                    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error
                if self._scope.cancel_called or not self._forward_scope():
                    self._task.cancel()
        return cancelled

    def _forward_scope(self) -> bool:
        """Cancel the host if a scope around the caller is cancelled; return whether one is."""
        if anyio.current_effective_deadline() != -math.inf:
            return False
        self._scope.cancel()
        return True

    def _ended_early(self, cancelled: asyncio.CancelledError | None) -> T:
        """Raise why nothing was entered."""
        error = None if self._task.cancelled() else self._task.exception()
        if cancelled is not None:
            raise cancelled from error
        raise error or asyncio.CancelledError

    def _is_own_cancellation(self, exc: BaseException | None) -> bool:
        """Take back what ``cancel_body`` has done; return whether ``exc`` is that, and no other cancellation."""
        self._body = None
        if not self._body_cancelled:
            return False
        self._body_cancelled = False
        task = asyncio.current_task()
        others = 0 if task is None else task.uncancel()
        return isinstance(exc, asyncio.CancelledError) and not others


_hosts: WeakKeyDictionary[asyncio.Task[Any], Host[Any]] = WeakKeyDictionary()
