# SPDX-License-Identifier: Apache-2.0

"""The root of all actors: one place for their tasks, one clock, one shutdown deadline.

Each actor has a plain asyncio task, kept here; everything else (background work, calls from threads) runs in one anyio
task group. The system waits for both, so no task outlives the ``async with``. On exit, the top-level actors are
stopped, their children before them. After four fifths of ``shutdown_timeout_s``, handlers that still run are cancelled;
the rest of the time belongs to ``stopped``; at its end everything is cancelled. Code that ignores even that is
abandoned a second later: it is logged, and run no further.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.abc

from actors.actor import Actor, Hook
from actors.cell import ActorCell, StopCommand, cell_of
from actors.clock import Clock, Deadlines, LoopClock
from actors.dead_letters import DeadLetters
from actors.errors import ActorStopped, NameTaken, SystemNotRunning, WouldDeadlock
from actors.exits import as_exception, contained
from actors.host import Host
from actors.logs import get_logger
from actors.mailbox import MailboxConfig
from actors.ref import ActorRef, Gate, WaitBoard, current_actor
from actors.stepping import Background
from actors.supervision import Supervision
from actors.threads import USER
from protocol.arguments import ACTOR_NAME, NAME, checked
from protocol.describing import name_of

M = TypeVar("M")
T = TypeVar("T")

HANDLERS_SHARE = 0.8
"""The share of a stop's time after which handlers that still run are cancelled; the rest is for ``stopped``."""

ABANDON_S = 1.0
"""This many seconds after the end of a stop's time, code that has ignored its cancellation is abandoned."""


class ActorSystem:
    """All actors that belong together. Use it with ``async with``; afterwards none of its tasks is left.

    A failure that no policy handles ends the system: the body of the ``async with`` is cancelled, all actors are
    stopped, and the ``async with`` raises the first such cause. An exception of the body wins if it came first.

    All methods belong to the loop's thread unless they say otherwise. A system can be entered only once.

    Args:
        name: Appears in the log lines of all actors.
        clock: The time for timers, ask deadlines and back-off; the loop's own by default.
        hooks: See ``Hook``; the first is the outermost.
        shutdown_timeout_s: The deadline, in real seconds, for the whole shutdown, and for the stop of any actor.
        slow_handler_limit_s: A handler that holds the loop for more real seconds than this, without awaiting, is
            logged, counted in ``slow_handlers``, and reported to the hooks.
        loop_timer: What measures that, in seconds; for tests.
        gate: Decides whose turn it is; for test kits.
    """

    @checked(name=NAME)
    def __init__(
        self,
        name: str = "actors",
        *,
        clock: Clock | None = None,
        hooks: Sequence[Hook] = (),
        shutdown_timeout_s: float = 10.0,
        slow_handler_limit_s: float = 0.1,
        loop_timer: Callable[[], float] = time.perf_counter,
        gate: Gate | None = None,
    ) -> None:
        self.name = name
        self.hooks = tuple(hooks)
        self.shutdown_timeout_s = shutdown_timeout_s
        self.slow_handler_limit_s = slow_handler_limit_s
        self.slow_handlers = 0
        self.loop_timer = loop_timer
        self.gate = gate
        self.log: Any = get_logger("headgate.actors").bind(system=name)
        self.dead_letters = DeadLetters(self.log)
        self.clock: Clock
        self.loop: asyncio.AbstractEventLoop
        self.waits: WaitBoard
        self.deadlines: Deadlines
        self._given_clock = clock
        self._top: dict[str, ActorCell[Any]] = {}
        self._cells: dict[ActorCell[Any], None] = {}
        self._incarnations = 0
        self._failure: BaseException | None = None
        self._failed_before = False  # before the body has ended
        self._entered = False
        self._running = False
        self._over = False
        self._hurried = False
        self._actor_tasks: set[asyncio.Task[None]] = set()
        self.works: set[Background] = set()
        self._tasks: anyio.abc.TaskGroup
        self._host = Host(f"actor system {name}", self._enter, self._leave)

    async def __aenter__(self) -> ActorSystem:
        if self._entered:
            raise SystemNotRunning(self.name, "can be entered only once: make a new ActorSystem")
        self._entered = True
        return await self._host.enter()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        self._stop_all()
        return await self._host.leave(exc_type, exc, tb)

    def _stop_all(self) -> None:
        """The body has ended: accept no new actors, and let the others stop. Idempotent."""
        if self._running:
            self._running = False
            self._failed_before = self._failure is not None
            for cell in reversed(self._top.values()):
                cell.mailbox.signal(StopCommand())

    async def _enter(self) -> ActorSystem:
        self.loop = asyncio.get_running_loop()
        self.clock = self._given_clock if self._given_clock is not None else LoopClock()
        self.waits = WaitBoard(self.clock.now)
        self.deadlines = Deadlines(self.clock)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._running = True
        return self

    async def _leave(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop_all()
        body_failed = exc is not None
        try:
            if anyio.current_effective_deadline() == -math.inf:  # a scope around the system is cancelled
                self._cut_off_all()
            with anyio.CancelScope(shield=True):
                await self.join(list(self._top.values()))
        except BaseException:
            self._cut_off_all()
            raise
        finally:
            try:
                await self._end_actor_tasks()
            finally:
                await self._end_other_tasks()
        if self._failure is not None and (self._failed_before or not body_failed):
            raise self._failure

    def _cut_off_all(self, *, hard: bool = False) -> None:
        for cell in tuple(self._cells):
            cell.cut_off(hard=hard)

    def _abandon_all(self) -> None:
        for cell in tuple(self._cells):
            cell.abandon()
        for work in tuple(self.works):
            work.abandon(self.log)

    async def _end_other_tasks(self) -> None:
        self._tasks.cancel_scope.cancel()
        abandon = self.loop.call_later(ABANDON_S, self._abandon_all)
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            abandon.cancel()
            self._over = True
            for cell in tuple(self._cells):
                cell.finish(ActorStopped(cell.path, "was never started"))
            self.deadlines.close()

    async def _end_actor_tasks(self) -> None:
        """Wait until no actor's task is left, however often the caller is cancelled."""
        cancelled: asyncio.CancelledError | None = None
        while self._actor_tasks:
            try:
                with anyio.CancelScope(shield=True):
                    _, still_there = await asyncio.wait(self._actor_tasks, timeout=ABANDON_S)
                    if still_there:  # what waited for them was cut off itself
                        self._abandon_all()
            except asyncio.CancelledError as again:
                cancelled = again
                self._cut_off_all()
        if cancelled is not None:
            raise cancelled

    @checked(name=ACTOR_NAME)
    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        *,
        name: str | None = None,
        mailbox: MailboxConfig | None = None,
        supervision: Supervision | None = None,
        log_context: Mapping[str, object] | None = None,
    ) -> ActorRef[M]:
        """Start a top-level actor and return its reference, which accepts messages immediately.

        Args:
            factory: Builds the instance, in the actor's own task, and again at each restart.
            name: Without a slash, and free among living siblings; None generates one.
            mailbox: Its bound and what happens when it is full; by default, 1024 messages, and senders wait.
            supervision: What to do about its failures; escalate by default, so that nothing fails silently.
            log_context: Bound to each of its log lines, and to those of its children.

        Raises:
            NameTaken: A living sibling has this name.
            ValueError: The name is empty or contains a slash.
            SystemNotRunning: Outside the ``async with``, and during the shutdown.
        """
        return self.spawn_child(
            None, factory, name=name, mailbox=mailbox, supervision=supervision, log_context=log_context
        )

    @checked()
    async def stop(self, ref: ActorRef[Any]) -> None:
        """Stop an actor after the message that it is handling, and wait until it is over.

        Messages that still wait become dead letters. After ``shutdown_timeout_s`` (real seconds), the actor is
        cancelled. Returns immediately if it is over. Raises ``WouldDeadlock`` if called from inside that actor or one
        of its descendants: use ``context.stop`` there.
        """
        cell = cell_of(ref)
        caller = current_actor.get()
        while caller is not None:
            if caller is cell:
                raise WouldDeadlock(ref.name, "system.stop() of itself or of an ancestor; use context.stop() there")
            caller = caller.parent
        cell.mailbox.signal(StopCommand())
        await self.join([cell])

    @property
    def actor_count(self) -> int:
        """How many actors are alive."""
        return len(self._cells)

    def dump_waits(self) -> str:
        """Who waits for whom now, the oldest first, then every ring of actors that wait for one another."""
        return self.waits.dump()

    # ----------------------------------------------- for the rest of the runtime

    @property
    def cancelled(self) -> bool:
        """Whether everything is being cancelled."""
        return self._tasks.cancel_scope.cancel_called

    def spawn_child(
        self,
        parent: ActorCell[Any] | None,
        factory: Callable[[], Actor[M]],
        *,
        name: str | None = None,
        mailbox: MailboxConfig | None = None,
        supervision: Supervision | None = None,
        log_context: Mapping[str, object] | None = None,
    ) -> ActorRef[M]:
        """See ``spawn``."""
        if not self._running and (parent is None or self._over):
            raise SystemNotRunning(self.name)
        if parent is not None:
            parent.refuse_if_over("children")
        self._incarnations += 1
        if name is None:
            name = f"${self._incarnations}"
        if not name or "/" in name:
            raise ValueError(f"an actor's name must be non-empty and without a slash: {name!r}")
        siblings = self._top if parent is None else parent.children
        path = name if parent is None else f"{parent.path}/{name}"
        if name in siblings:
            raise NameTaken(path)
        context = {**(parent.log_context if parent is not None else {}), **(log_context or {})}
        cell: ActorCell[M] = ActorCell(
            self,
            parent,
            path,
            self._incarnations,
            factory,
            mailbox or _MAILBOX,
            supervision or _SUPERVISION,
            context,
        )
        siblings[name] = cell
        self._cells[cell] = None
        task = self.loop.create_task(cell.run(), name=f"actor {path}")
        self._actor_tasks.add(task)
        task.add_done_callback(self._actor_task_ended)
        return cell.ref

    def _actor_task_ended(self, task: asyncio.Task[None]) -> None:
        self._actor_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def start_task(self, function: Callable[..., Coroutine[Any, Any, object]], *args: Any, name: str) -> None:
        """Start a task that is not an actor."""
        self._tasks.start_soon(function, *args, name=name)

    def forget(self, cell: ActorCell[Any]) -> None:
        """Free the name of an actor that is over."""
        family = self._top if cell.parent is None else cell.parent.children
        family.pop(cell.path.rpartition("/")[2], None)
        self._cells.pop(cell, None)

    def fail(self, cause: BaseException) -> None:
        """Handle a failure that has reached the top. Only the first one counts."""
        if self._failure is None:
            self._failure = cause
            self.log.error("actor system failed", exc_info=cause)
            self._host.cancel_body()

    def request_stop(self, cell: ActorCell[Any]) -> None:
        """Stop an actor, and ensure in the background that it ends within the deadline."""
        if cell.finished:
            return
        cell.mailbox.signal(StopCommand())
        self.start_task(self.join, [cell], name=f"stop {cell.path}")

    async def join(self, cells: list[ActorCell[Any]]) -> None:
        """Wait until these actors are over; cancel them when their time is up."""
        cells = [cell for cell in cells if not cell.finished]
        if not cells:
            return

        def cut_off(hard: bool) -> None:
            for cell in cells:
                cell.cut_off(hard=hard)

        def abandon() -> None:
            for cell in cells:
                cell.abandon()
            timers.append(self.loop.call_later(ABANDON_S, abandon))  # next, those that waited for it

        timers = [
            self.loop.call_later(self.shutdown_timeout_s * HANDLERS_SHARE, cut_off, False),
            self.loop.call_later(self.shutdown_timeout_s, cut_off, True),
            self.loop.call_later(self.shutdown_timeout_s + ABANDON_S, abandon),
        ]
        try:
            for cell in cells:
                await cell.ended()
        finally:
            for timer in timers:
                timer.cancel()

    @checked()
    def cut_off(self, ref: ActorRef[Any], *, hard: bool = False) -> None:
        """Cancel what an actor and its children are doing. They end; ``stopped`` still runs, unless ``hard``."""
        cell_of(ref).cut_off(hard=hard)

    def hurry(self) -> None:
        """Cancel what all actors are doing; the second call also cancels what they do in ``stopped``."""
        self._cut_off_all(hard=self._hurried)
        self._hurried = True

    @checked()
    def call_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop, from any thread. Raises ``SystemNotRunning`` once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as closed:
            raise SystemNotRunning(self.name, "is gone, because its event loop is closed: enter a new one") from closed

    @checked()
    def run_from_thread(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Future[T]:
        """Run ``function(*args)``, an async function, in this system; call it from any other thread.

        ``system.run_from_thread(functools.partial(ref.ask, GetTotal, timeout_s=1.0)).result()`` asks from a thread.
        Returns a ``concurrent.futures.Future`` with the outcome. Cancelling the future does not cancel the call. If
        the system ends first, the call is cancelled and the future fails with ``SystemNotRunning``; it fails with
        that immediately if the system is over. Raises ``SystemNotRunning`` once the event loop is closed.
        """
        outcome: Future[T] = Future()

        async def call() -> None:
            try:
                result = await function(*args)
            except BaseException as error:
                try:
                    failure = contained("the call from a thread", error)
                except BaseException:
                    outcome.set_exception(SystemNotRunning(self.name, "ended before the call did"))
                    raise
                outcome.set_exception(failure)
            else:
                outcome.set_result(result)

        def begin() -> None:
            if self._over or not self._running:
                outcome.set_exception(SystemNotRunning(self.name))
            elif outcome.set_running_or_notify_cancel():
                self.start_task(call, name="call from a thread")

        self.call_threadsafe(begin)
        return outcome

    @checked()
    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a worker thread. A cancellation leaves the thread to end by itself."""

        def call() -> T:
            try:
                return function(*args)
            except Exception:
                raise
            except BaseException as error:  # a future that carries a GeneratorExit closes the coroutine that awaits it
                raise as_exception(name_of(function), error) from error

        return await USER.run(call, abandon_on_cancel=True)


_MAILBOX = MailboxConfig()
_SUPERVISION = Supervision()
