# SPDX-License-Identifier: Apache-2.0

"""The event loop of an async stage, stepped on the operator's thread in virtual time.

On a real task it has a separate thread, so anything may happen between two steps of a coroutine. Here the operator's
thread runs one step wherever it waits or looks for news, and a seed says which: of several coroutines that could go on,
any may be the next, and a coroutine may or may not go on before the operator does.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from contextvars import copy_context
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from actors.virtual_loop import VirtualLoop
from spark_bridge.subtask.coroutines.loop import TaskLoop

if TYPE_CHECKING:
    from headgate.testing._operator_task import OperatorTask
    from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["SteppedTaskLoop"]

T = TypeVar("T")

STEPS_MAX = 100_000
"""How many steps coroutines may take to end, once they are cancelled."""


class _SteppedLoop(asyncio.BaseEventLoop):
    """asyncio's loop without a thread, files or waits. Time and threads are those of a ``VirtualLoop``."""

    _ready: deque[asyncio.Handle]

    def __init__(self, virtual: Callable[[asyncio.AbstractEventLoop], VirtualLoop], dice: Random) -> None:
        super().__init__()
        self._virtual = virtual(self)
        self._dice = dice

    @property
    def has_ready(self) -> bool:
        while self._ready and self._ready[0].cancelled():
            self._ready.popleft()
        return bool(self._ready)

    def step(self) -> None:
        """Run one of those that are ready. Coroutines in any order; a callback neither overtakes, nor is overtaken."""
        first = next((k for k, one in enumerate(self._ready) if not _goes_on(one)), len(self._ready))
        chosen = self._dice.randrange(first) if first else 0
        handle = self._ready[chosen]
        del self._ready[chosen]
        if handle.cancelled():
            return
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        _set_running_loop(self)
        try:
            handle._run()
        finally:
            _set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def time(self) -> float:
        return self._virtual.now()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._virtual.call_at(when, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        with self._virtual.enter():  # so that threads of anyio are those of the virtual loop as well
            return super().create_task(coro, name=name, context=context or copy_context())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        done = self.create_future()
        try:
            done.set_result(self._virtual.run(func, *args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _write_to_self(self) -> None:
        """Nothing waits that a write would wake."""


def _goes_on(handle: asyncio.Handle) -> bool:
    """Whether it is the next step of a coroutine."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


class SteppedTaskLoop(TaskLoop):
    """A ``TaskLoop`` that ``OperatorTask`` steps."""

    loop: _SteppedLoop

    def __init__(self, channel: TaskChannel, task: OperatorTask, dice: Random) -> None:
        self._task = task
        super().__init__(channel, _SteppedLoop(lambda loop: VirtualLoop(loop, task._clock), dice), dice)

    def _begin(self) -> None:
        self._task.loops.append(self)

    def step(self) -> None:
        with nullcontext() if self._parts is None else self._parts.here():
            self.loop.step()

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await make()

        done = self.loop.create_task(run())
        self._task.wait(done.done)  # a kill passes, and ``close`` cancels
        try:
            return done.result()  # type: ignore[no-any-return]
        except BaseException:
            self._channel.check()
            raise

    def close(self) -> None:
        """Cancel what runs, and end the loop, while time stands still."""
        if self not in self._task.loops:
            return
        self._task.loops.remove(self)
        self._cancel_all()
        self._run_out()
        self.loop.create_task(self.loop.shutdown_asyncgens())
        self._run_out()
        self._name_those_left(asyncio.all_tasks(self.loop))
        self.loop.close()

    def _run_out(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.loop.has_ready:
                break
            self.step()
