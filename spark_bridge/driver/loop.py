# SPDX-License-Identifier: Apache-2.0

"""The event loop of a sidecar: its own thread, which no code that runs on it can end, and what keeps its turns short.

asyncio lets ``SystemExit`` and ``KeyboardInterrupt`` out of any task or callback end the whole loop, and a
``GeneratorExit`` that a future carries closes the task that awaits the future. Headgate contains these where it calls a
coordinator; the loop contains them in the tasks, callbacks and futures that a coordinator creates itself.

Three parts serve a loop of the user's as well: ``BoundedSelector`` limits what one turn reads, ``BlockedLoopWatch``
reports the line that blocks the loop, and ``FrozenHeap`` keeps the garbage collector from stopping it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import selectors
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

import anyio
import structlog

import actors
import protocol
import spark_bridge
from actors.coordination import OperatorStatistics
from actors.exits import as_exception
from actors.logs import get_logger
from actors.waiting_at import awaited_at, running_at
from protocol.describing import describe
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.common.forks import let_go_in_forks
from spark_bridge.driver.interrupts import holding_interrupts
from spark_bridge.observability.meters import LoopLag

__all__ = [
    "READY_MAX",
    "BlockedLoopWatch",
    "BoundedSelector",
    "FrozenHeap",
    "LoopCalls",
    "SidecarLoop",
    "bounded_loop",
    "call_on_loop",
    "enter_on_loop",
    "refuse_await",
]

T = TypeVar("T")
log = get_logger("headgate.loop")
heap_log = get_logger("headgate.heap")

READY_MAX = 32
"""The number of ready files that one turn of the loop gets: together they take about a millisecond."""

Ready = tuple[selectors.SelectorKey, int]


class BoundedSelector(selectors.DefaultSelector):
    """Like the system's best selector, but ``select`` returns at most ``READY_MAX`` files, each in its turn.

    Thousands of tasks may answer at one moment, such as at the end of a checkpoint. An asyncio loop reads all
    connections that are ready in the same turn: 700 take longer than 10 ms, in which nothing else runs. With this
    selector, it reads ``READY_MAX`` in one turn, and the others in the next turns, before it looks for news again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Ready] = deque()

    def select(self, timeout: float | None = None) -> list[Ready]:
        """The next files that are ready. Does not wait, and may return none, while files of an earlier look wait."""
        if not self._waiting:
            ready = super().select(timeout)
            if len(ready) <= READY_MAX:
                return ready
            self._waiting.extend(ready)
        share = [self._waiting.popleft() for _ in range(min(READY_MAX, len(self._waiting)))]
        # A key is replaced when the loop registers something else for its file, or another file with its number. If
        # that one is ready, the next look finds it.
        registered = self.get_map()
        return [one for one in share if registered.get(one[0].fd) is one[0]]


def bounded_loop() -> asyncio.AbstractEventLoop:
    """A new loop of asyncio's with such a selector."""
    return asyncio.SelectorEventLoop(BoundedSelector())


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


def refuse_await(otherwise: str) -> None:
    """Raise ``TypeError`` if the caller awaits a call that blocks, before it does anything."""
    if at := awaited_at():
        raise TypeError(
            f"this call blocks and returns its result, which cannot be awaited: write it without `await` at {at}, "
            f"{otherwise}"
        )


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


LOOK_S: Final = 0.25
LOOKS: Final = 4
"""A report is due when the loop has not turned between so many looks in a row.

Looks are counted, and not seconds, because a process that was stopped as a whole has missed its looks too.
"""
DEPTH_MAX: Final = 200
SHOWN_MAX: Final = 30
LOOP: Final = frozenset({"_run", "_run_once", "run_forever", "run_until_complete", "run"})
"""Functions of asyncio that call what is on the loop. Those of uvloop cannot be seen, but the one that runs it can."""
HINT_CALLERS_LOOP: Final = (
    "call a Spark action with `await sidecar.run(action)`, and other blocking work with `await asyncio.to_thread(...)`"
)
HINT_OWN_LOOP: Final = "a coordinator must not block: give such work to call_async"


def _folder(module: Any) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(str(module.__file__))), "")


_OURS = ("<frozen ", *(_folder(module) for module in (actors, protocol, spark_bridge, anyio, structlog)))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def _is_others(filename: str) -> bool:
    """Whether the code is the user's, or of a library that Headgate does not use on a loop, such as pyspark."""
    if filename.startswith(_OURS):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)  # what is installed may be in it


class BlockedLoopWatch:
    """Says which line blocks a loop, while it does, until ``close``. Make it on the loop that ``lag`` measures.

    A loop that is blocked serves no task. If it is blocked by a Spark action whose tasks need their coordinator, both
    wait for each other, and nothing on the loop can say so. Therefore another thread looks. It says nothing while the
    loop works for Headgate alone, as it may for long on a machine that is too busy.
    """

    def __init__(self, lag: LoopLag) -> None:
        self._lag = lag
        self._loop_thread_id = threading.get_ident()
        own_loop = isinstance(asyncio.get_running_loop(), SidecarLoop)
        self._hint = HINT_OWN_LOOP if own_loop else HINT_CALLERS_LOOP
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headgate-loop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which takes a moment. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        turns, looks, due = self._lag.turns, 0, LOOKS
        reported = False
        while not self._closed.wait(LOOK_S):
            if self._lag.turns != turns:
                if reported:
                    log.info("event loop unblocked", blocked_s=looks * LOOK_S)
                turns, looks, due, reported = self._lag.turns, 0, LOOKS, False
                continue
            looks += 1
            if looks >= due:
                due *= 2
                reported |= self._report(looks * LOOK_S)

    def _report(self, blocked_s: float) -> bool:
        frames = _frames_on_loop(sys._current_frames().get(self._loop_thread_id))
        if not any(_is_others(frame.f_code.co_filename) for frame in frames):
            return False
        shown = frames[:SHOWN_MAX]
        stack = (f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" for frame in shown)
        log.warning(
            "event loop blocked",
            blocked_s=blocked_s,
            at=running_at(frames[0]),
            hint=self._hint,
            stack=" < ".join(stack),
        )
        return True


def _frames_on_loop(frame: FrameType | None) -> list[FrameType]:
    """Where the loop's thread is, innermost first, up to the loop itself."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < DEPTH_MAX:
        code = frame.f_code
        if code.co_filename.startswith(asyncio.__path__[0]) and code.co_name in LOOP:
            break
        frames.append(frame)
        frame = frame.f_back
    return frames


SUBTASKS_MIN = 100
"""With fewer, a run of the collector takes no longer than other turns of the loop."""
GROWTH = 4
"""It is frozen again when a quarter as many attempts have become ready since: each time may freeze some garbage. A full
run is made when the process holds a quarter more blocks of memory."""
MIDDLE_RUN_AFTER = 2
"""As a threshold: more than so many runs of the youngest generation. Python's own is 10."""
NEVER = 2**31 - 1
"""As a threshold: after so many runs of the younger generations."""


class FrozenHeap:
    """Keeps Python's garbage collector from visiting what thousands of subtasks keep alive.

    A full run of the collector visits every object that may be in a cycle, and stops the event loop meanwhile: for
    0.2 s with 2,000 subtasks. These objects live as long as their attempts. So once the subtasks of a run are ready,
    everything is moved out of the collector's sight (``gc.freeze``), and back when no run is left.

    Frozen objects are freed as usual when nothing refers to them. Only those that are garbage in a cycle have to wait
    for the end of the runs.

    Python begins a full run when a quarter of all objects are new. It does not count the frozen ones, so it would visit
    the states of the latest checkpoints again and again. Instead, a full run is made when the process holds a quarter
    more than after the last one. A run of the middle generation visits what a few runs of the youngest one have left.
    While a checkpoint of thousands of subtasks is taken, almost everything is left, so the middle one is run earlier.
    Garbage in a cycle that outlives it waits for a full run.

    ``look`` is to be called about once a second. Loop only.
    """

    def __init__(self, running: RunningJobs, statistics: Callable[[], Iterable[OperatorStatistics]]) -> None:
        self._running = running
        self._statistics = statistics
        self._ready = 0
        self._frozen_at_ready = 0
        self._frozen = False
        self._own_thresholds: tuple[int, int] | None = None  # the program's, if this sidecar has replaced them
        self._blocks_min = 0

    def look(self) -> None:
        """Freeze once no attempt has become ready since the last look, and undo it when no run is left.

        Meanwhile, make a full run if the process has grown.
        """
        ready = sum(one.ready for one in self._statistics())
        settled, self._ready = ready == self._ready, ready
        if not self._running.operator_ids:
            self.close()
            self._frozen_at_ready = ready
        elif settled and ready - self._frozen_at_ready >= max(SUBTASKS_MIN, self._frozen_at_ready // GROWTH):
            self._freeze()
            self._frozen_at_ready = ready
            heap_log.info("heap frozen", attempts=ready)
        elif self._frozen:
            self._collect_if_grown()

    def _freeze(self) -> None:
        gc.freeze()
        self._blocks_min = sys.getallocatedblocks()
        self._frozen = True
        young, middle, full = gc.get_threshold()
        if full != NEVER:  # otherwise they are replaced already, by this sidecar or by another one of this process
            self._own_thresholds = middle, full
            gc.set_threshold(young, min(middle, MIDDLE_RUN_AFTER), NEVER)

    def _collect_if_grown(self) -> None:
        blocks = sys.getallocatedblocks()
        if blocks - self._blocks_min >= self._blocks_min // GROWTH and gc.isenabled():
            gc.collect()
            self._blocks_min = sys.getallocatedblocks()
        else:
            self._blocks_min = min(self._blocks_min, blocks)

    def close(self) -> None:
        """Let the collector see everything again. May be called more than once."""
        if self._frozen:
            self._frozen = False
            gc.unfreeze()
            if self._own_thresholds is not None:
                gc.set_threshold(gc.get_threshold()[0], *self._own_thresholds)
                self._own_thresholds = None
            heap_log.info("heap unfrozen")
