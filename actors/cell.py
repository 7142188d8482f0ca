# SPDX-License-Identifier: Apache-2.0

"""One actor at work: the task that drains its mailbox and carries out what supervision decides.

The life of a cell::

    start instance -> drain -> (failure: decide) -> resume: drain on
                                                 -> restart: end instance, back off, start instance
                                                 -> stop, escalate: close
                   -> StopCommand -> close: Stopping, mailbox closed, children, background work, stopped(),
                   finish

``finish`` is synchronous and always happens, however the task ends: watchers, parents and waiting callers rely on it.
The order in it matters: the mailbox is closed before anything learns that the actor is over.

The file has five parts: commands and watches, what a cell needs of its system, the cell, the context that it gives to
the actor's code, and the background work that it runs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio
import structlog

from actors.actor import (
    Actor,
    ActorContext,
    ChildFailed,
    DirectActor,
    Hook,
    Receive,
    SlowHandler,
    Stopping,
    Terminated,
    around,
    overriding,
)
from actors.clock import Clock, Timers
from actors.dead_letters import DeadLetter, DeadLetterReason, DeadLetters
from actors.errors import (
    ActorCancelled,
    ActorError,
    ActorStopped,
    HandlerCancelled,
    HandlerFailed,
    MailboxFull,
    ScopeLeftOpen,
)
from actors.exits import as_exception, contained, forget_cancellations
from actors.logs import LimitedLog, get_logger
from actors.mailbox import Envelope, Mailbox, MailboxConfig
from actors.ref import ActorRef, AskEnvelope, Reply, Surroundings, current_actor
from actors.stepping import Background, ResultEnvelope, Steps
from actors.supervision import Decision, Directive, Failure, Supervision, decide
from protocol.arguments import checked
from protocol.describing import is_a, name_of, show, text_of, type_name

M = TypeVar("M")
N = TypeVar("N")
T = TypeVar("T")

SLICE_MESSAGES = 256
SLICE_S = 0.005
"""An actor with a full mailbox lets others run after this many messages or this much time, whichever comes first."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """End after the current message. A command travels as a signal, but the actor's code never sees it."""


@dataclass(frozen=True, slots=True)
class FailCommand:
    """Fail with this cause, as if ``receive`` had raised it.

    It comes from a child that escalated or from background work. Both belong to one instance, so a restart voids it.
    """

    cause: BaseException


class Watches:
    """Who watches one actor, and whom it watches. They survive its restarts.

    An actor that watches another one gets a ``Terminated`` signal when that one has ended.
    """

    __slots__ = ("_cause", "_mailbox", "_over", "_ref", "_watchers", "_watching")

    def __init__(self, ref: ActorRef[Any], mailbox: Mailbox) -> None:
        self._ref = ref
        self._mailbox = mailbox
        self._over = False
        self._cause: BaseException | None = None
        self._watchers: dict[Watches, None] = {}
        self._watching: set[Watches] = set()

    def watch(self, target: Watches) -> None:
        """Signal ``Terminated`` to this actor when ``target`` ends; immediately if it has ended."""
        if target in self._watching:
            return
        self._watching.add(target)
        if target._over:
            self._mailbox.signal(Terminated(target._ref, target._cause))
        else:
            target._watchers[self] = None

    def unwatch(self, target: Watches) -> None:
        """Take ``watch`` back."""
        self._watching.discard(target)
        target._watchers.pop(self, None)

    def take_terminated(self, target: Watches) -> bool:
        """A ``Terminated`` is about to be delivered; False if ``target`` has been unwatched since."""
        if target not in self._watching:
            return False
        self._watching.discard(target)
        return True

    def end(self, cause: BaseException | None) -> None:
        """Signal each watcher once, because this actor is over."""
        self._over, self._cause = True, cause
        for target in tuple(self._watching):
            self.unwatch(target)
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher._mailbox.signal(Terminated(self._ref, cause))


class System(Surroundings, Protocol):
    """The part of the actor system that a cell uses. ``ActorSystem`` implements it, and says what each method does."""

    name: str
    clock: Clock
    hooks: tuple[Hook, ...]
    dead_letters: DeadLetters
    loop_timer: Callable[[], float]
    slow_handler_limit_s: float
    slow_handlers: int
    works: set[Background]

    @property
    def cancelled(self) -> bool: ...

    @property
    def spawn_child(self) -> Callable[..., ActorRef[Any]]: ...

    def start_task(self, function: Callable[..., Coroutine[Any, Any, object]], *args: Any, name: str) -> None: ...

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T: ...

    async def join(self, cells: list[ActorCell[Any]]) -> None: ...

    def request_stop(self, cell: ActorCell[Any]) -> None: ...

    def forget(self, cell: ActorCell[Any]) -> None: ...

    def fail(self, cause: BaseException) -> None: ...


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How an instance ends. ``restart_after_s`` is None for a stop."""

    cause: BaseException | None
    restart_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A stage of an actor's life that is being handled in place of a message."""

    what: str


_STARTED = _Call("started")


class ActorCell(Generic[M]):
    """The implementation of one actor. Only the runtime uses it."""

    __slots__ = (
        "_abandoned",
        "_background_idle",
        "_closing_scope",
        "_cut_off",
        "_done_waiters",
        "_ending",
        "_history",
        "_instance",
        "_log",
        "_repeated",
        "_scope",
        "_steps",
        "_watches",
        "background",
        "children",
        "context",
        "direct",
        "ended_with",
        "factory",
        "finished",
        "handling",
        "log_context",
        "mailbox",
        "open_replies",
        "parent",
        "path",
        "ref",
        "restarts",
        "supervision",
        "system",
    )

    def __init__(
        self,
        system: System,
        parent: ActorCell[Any] | None,
        path: str,
        incarnation: int,
        factory: Callable[[], Actor[M]],
        mailbox: MailboxConfig,
        supervision: Supervision,
        log_context: Mapping[str, object],
    ) -> None:
        self.system = system
        self.parent = parent
        self.path = path
        self.factory = factory
        self.supervision = supervision
        self.log_context = log_context
        self.mailbox = Mailbox(mailbox, system.loop, path, self.bury)
        self.ref: ActorRef[M] = ActorRef(self, incarnation)
        self.context: _Context[M] = _Context(self)
        self.children: dict[str, ActorCell[Any]] = {}
        self.background: dict[Background, None] = {}
        self.open_replies: dict[Reply[Any], None] = {}
        self.restarts = 0
        self.finished = False
        self.ended_with: BaseException | None = None
        self.handling: object = None
        self.direct: Callable[[Any, Any], None] | None = None  # takes a message immediately if nothing prevents that
        self._watches: Watches | None = None
        self._ending = False
        self._history: tuple[float, ...] = ()
        self._instance: Actor[M] | None = None
        self._log: Any = None
        self._repeated: LimitedLog | None = None
        self._scope = anyio.CancelScope()
        self._closing_scope: anyio.CancelScope | None = None
        self._steps: Steps[None]
        self._cut_off = False
        self._abandoned = False
        self._done_waiters: list[asyncio.Future[None]] | None = None
        self._background_idle: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """The actor's task. No failure of the actor comes out of it: that would tear down the task group."""
        system = self.system
        self._steps = Steps(self._run(), system.loop_timer, system.slow_handler_limit_s, self._held)
        await self._steps
        if self._abandoned:
            self.finish(ActorCancelled(self.path))

    async def _run(self) -> None:
        current_actor.set(self)
        structlog.contextvars.bind_contextvars(system=self.system.name, actor=self.path, **self.log_context)
        cause: BaseException | None = None
        cancelled = True
        try:
            with self._scope:
                cause = await self._live()
                cancelled = False
        except asyncio.CancelledError:
            pass  # the whole system is being cancelled, or just this task: it ends as if cut off
        except RuntimeError as error:  # anyio's: a cancel scope of the actor's code is still open
            cancelled, cause = False, self._left_open(error)
        finally:
            if cancelled:
                cause = ActorCancelled(self.path)
            try:
                if not self._abandoned:
                    with anyio.CancelScope(shield=True) as self._closing_scope:
                        if self._cut_off:
                            self._closing_scope.cancel()
                        await self._close(cause)
            except asyncio.CancelledError:
                pass
            finally:
                self.finish(cause)

    def _left_open(self, error: RuntimeError) -> BaseException:
        """Fail because of a cancel scope that was not left: in a generator that was not read to its end, say."""
        if "cancel scope" not in text_of(error):
            raise error
        failure = ScopeLeftOpen(self.path)
        failure.__cause__ = error
        if not self._cut_off and not self.mailbox.closed:
            self._failed(failure)
        return failure

    async def _live(self) -> BaseException | None:
        while True:
            verdict = await self._start_instance()
            while verdict is None:
                try:
                    verdict = await self._drain()
                except asyncio.CancelledError:
                    if not self._outlives_cancellation():
                        raise
            if verdict.restart_after_s is None:
                return verdict.cause
            await self._end_instance(verdict.cause, "was restarted before it answered")
            if not await self._back_off(verdict.restart_after_s):
                return verdict.cause
            self._forget_commands_to_the_last_instance()
            self._ending = False
            self.restarts += 1

    async def _start_instance(self) -> _Verdict | None:
        try:
            self._instance = instance = self._made()
            self.handling = _STARTED
            await instance.started(self.context)
        except BaseException as failure:
            return self._failed(self._own_failure(failure, "started"), while_starting=True)
        for hook in self.system.hooks:
            hook.actor_started(self.ref, self.restarts)
        if isinstance(instance, DirectActor) and not overriding(self.system.hooks):
            self.direct = instance.handle
        return None

    def _made(self) -> Actor[M]:
        made: Any = self.factory()
        if isinstance(made, Actor):
            return made
        if inspect.iscoroutine(made):
            made.close()  # otherwise Python warns that it was never awaited, which says less
        raise TypeError(
            f"the factory {name_of(self.factory)} of actor {self.path!r} returned {show(made)}, which is not an Actor: "
            "pass a subclass of Actor, or a function (not async) that returns an instance of one"
        )

    async def _drain(self) -> _Verdict:
        """Handle signals and messages until a verdict."""
        mailbox, gate, handler = self.mailbox, self.system.gate, self._handler()
        queue, signals = mailbox.queue, mailbox.signals
        while True:
            while not signals and not queue:
                mailbox.parked = parked = self.system.loop.create_future()
                await parked
            if gate is not None:
                await gate.turn(self)
            if signals:
                verdict = await self._take_signal(signals.pop(0))
            elif queue:
                verdict = await self._drain_slice(handler, SLICE_MESSAGES if gate is None else 1)
                if verdict is None and queue and not signals and gate is None:
                    await asyncio.sleep(0)
            else:
                continue
            if verdict is not None:
                return verdict

    def _outlives_cancellation(self) -> bool:
        """Whether the actor continues after foreign code has cancelled its idle task."""
        if self.cancel_called or self.system.cancelled:
            return False
        instance = self._instance
        assert instance is not None
        if not instance.outlives_cancellation(self.context):
            return False
        forget_cancellations()
        return True

    async def _drain_slice(self, handler: Receive, messages_max: int) -> _Verdict | None:
        """Handle messages until there is none, a signal comes, or it is time to let others run. The hot loop.

        Between taking an item out and the first step of its handler there is no await: nothing can be lost.
        """
        mailbox, context, steps, timer = self.mailbox, self.context, self._steps, self.system.loop_timer
        queue, signals, senders = mailbox.queue, mailbox.signals, mailbox.senders
        for _ in range(messages_max):
            item: Any = queue.popleft()
            if senders:
                mailbox.admit()
            message: Any = item
            if isinstance(item, Envelope):
                if not item.open():
                    mailbox.void += 1
                    if signals or not queue:
                        return None
                    continue
                message = item.message
            self.handling = message
            try:
                await handler(context, message)
            except BaseException as failure:
                return self._message_failed(item, message, failure)
            # After a slow message the step must end: a slow step is reported under its last message.
            if signals or not queue or timer() - steps.began_at > SLICE_S:
                return None
        return None

    def handle_direct(self, message: object) -> None:
        """Let an idle actor handle a message within this call."""
        handle = self.direct
        assert handle is not None
        self.direct = None  # further messages wait for their turn
        self.mailbox.accepted += 1
        try:
            handle(self.context, message)
        except BaseException as error:
            failure = as_exception(f"actor {self.path!r}: {type_name(message)}", error)
            self.system.dead_letters.publish(DeadLetter(self.ref, message, DeadLetterReason.HANDLER_FAILED))
            self.mailbox.signal(FailCommand(failure))
        finally:
            self.direct = handle

    def _handler(self) -> Receive:
        instance = self._instance
        assert instance is not None
        return around(self.system.hooks, self.ref, self.context, cast(Receive, instance.receive))

    async def _take_signal(self, signal: Any) -> _Verdict | None:
        match signal:
            case StopCommand():
                return _Verdict(None)
            case FailCommand(cause):
                return self._failed(cause)
            case Terminated(ref):
                if not self.watches.take_terminated(cell_of(ref).watches):
                    return None
        instance = self._instance
        assert instance is not None
        try:
            self.handling = _Call(type_name(signal))
            await instance.signal(self.context, signal)
        except BaseException as failure:
            return self._failed(self._own_failure(failure, type_name(signal)))
        return None

    async def _back_off(self, delay_s: float) -> bool:
        """Wait before a restart; False if a stop comes first. Other signals wait for the new instance."""
        mailbox = self.mailbox
        signals = mailbox.signals
        clock = self.system.clock
        due_at = clock.now() + delay_s
        wake = clock.call_later(delay_s, mailbox.wake) if delay_s > 0 else None
        try:
            while True:
                if any(isinstance(signal, StopCommand) for signal in signals):
                    return False
                if clock.now() >= due_at:
                    return True
                mailbox.parked = parked = self.system.loop.create_future()
                await parked
        finally:
            if wake is not None:
                wake.cancel()

    def _forget_commands_to_the_last_instance(self) -> None:
        """Drop failures reported to the last instance: one restart answers all that failed together."""
        signals = self.mailbox.signals
        signals[:] = [signal for signal in signals if not isinstance(signal, FailCommand)]

    # ------------------------------------------------------------- failure

    def _message_failed(self, item: Any, message: Any, failure: BaseException) -> _Verdict | None:
        name = type_name(message)
        try:
            cause = self._own_failure(failure, name)
        except asyncio.CancelledError:
            self.bury(item, DeadLetterReason.CUT_OFF)
            raise
        if isinstance(item, AskEnvelope) and item.reply.open:
            error = HandlerFailed(self.path, name)
            error.__cause__ = cause
            item.reply.fail(error)
        self.system.dead_letters.publish(DeadLetter(self.ref, message, DeadLetterReason.HANDLER_FAILED))
        return self._failed(cause)

    def _failed(self, cause: BaseException, *, while_starting: bool = False) -> _Verdict | None:
        failure = Failure(cause, while_starting)
        decision = decide(self.supervision, self._history, failure, self.system.clock.now())
        self._history = decision.history
        return self._carry_out(cause, decision)

    def _carry_out(self, cause: BaseException, decision: Decision) -> _Verdict | None:
        """Report the decision to hooks and parent, and return what this task must do; None means continue."""
        self.log.warning("actor failed", decision=decision.directive.value, exc_info=cause)
        for hook in self.system.hooks:
            hook.actor_failed(self.ref, cause, decision)
        if self.parent is not None:
            self.parent.mailbox.signal(ChildFailed(self.ref, cause, decision))
        match decision.directive:
            case Directive.RESUME:
                return None
            case Directive.RESTART:
                return _Verdict(cause, decision.delay_s)
            case Directive.ESCALATE:
                if self.parent is None:
                    self.system.fail(cause)
                else:
                    self.parent.mailbox.signal(FailCommand(cause))
        return _Verdict(cause)

    def _own_failure(self, failure: BaseException, what: str) -> BaseException:
        """Re-raise a cancellation of this actor; turn one that a handler let out into a failure.

        Otherwise a handler that awaits something that others cancelled would end its actor silently, and a
        ``SystemExit`` would end the event loop with all actors on it.
        """
        if not is_a(failure, asyncio.CancelledError):
            return contained(f"actor {self.path!r}: {what}", failure)
        task = asyncio.current_task()
        if self.cancel_called or self.system.cancelled or (task is not None and task.cancelling()):
            raise failure
        error = HandlerCancelled(self.path, what)
        error.__cause__ = failure
        return error

    # ----------------------------------------------------------------- end

    async def _close(self, cause: BaseException | None) -> None:
        if self._instance is not None and not self._scope.cancel_called:
            try:
                self.handling = _Call("Stopping")
                await self._instance.signal(self.context, Stopping())
            except BaseException as failure:
                self.log.error("Stopping handler failed", exc_info=self._own_failure(failure, "Stopping"))
        await self._end_instance(cause, "is stopped", for_good=True)

    async def _end_instance(self, cause: BaseException | None, detail: str, *, for_good: bool = False) -> None:
        """Take down what belongs to one instance, children first, then the instance itself. Runs once for each."""
        self._ending = True
        self.direct = None
        self.context.cancel_timers()
        if for_good:
            self.mailbox.close()
        for reply in tuple(self.open_replies):
            error = ActorStopped(self.path, detail)
            error.__cause__ = cause
            reply.fail(error)
        self.open_replies.clear()
        for work in self.background:
            work.cancel()
        for child in reversed(self.children.values()):
            child.mailbox.signal(StopCommand())
        await self.system.join(list(self.children.values()))
        await self._background_over()
        instance, self._instance = self._instance, None
        if instance is None:
            return
        try:
            self.handling = _Call("stopped")
            await instance.stopped(self.context, cause)
        except BaseException as failure:
            self.log.error("stopped method failed", exc_info=self._own_failure(failure, "stopped"))

    async def _background_over(self) -> None:
        while self.background:
            self._background_idle = self.system.loop.create_future()
            await self._background_idle

    def finish(self, cause: BaseException | None) -> None:
        """Notify watchers, parent and waiting callers that this actor is over. Synchronous, idempotent."""
        if self.finished:
            return
        self.finished = True
        self.ended_with = cause
        self.context.cancel_timers()
        if self._repeated is not None:
            self._repeated.close()
        self.mailbox.close()
        self.mailbox.signals.clear()
        for reply in tuple(self.open_replies):
            reply.fail(ActorStopped(self.path))
        self.open_replies.clear()
        self.system.forget(self)
        if self._watches is not None:
            self._watches.end(cause)
        for hook in self.system.hooks:
            hook.actor_stopped(self.ref, cause)
        for waiter in self._done_waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        self._done_waiters = None

    async def ended(self) -> None:
        """Wait until ``finish`` has happened."""
        if not self.finished:
            waiter: asyncio.Future[None] = self.system.loop.create_future()
            if self._done_waiters is None:
                self._done_waiters = []
            self._done_waiters.append(waiter)
            await waiter

    def cut_off(self, *, hard: bool) -> None:
        """Cancel its handler, and its children. ``stopped`` may still run, unless ``hard``, which cancels that too."""
        for child in tuple(self.children.values()):
            child.cut_off(hard=hard)
        self._scope.cancel()
        if hard:
            self._cut_off = True
            if self._closing_scope is not None:
                self._closing_scope.cancel()

    def abandon(self) -> None:
        """Leave code that has ignored its cancellation where it stands. What its actor holds is not closed.

        The code of its children comes first, then that of its background work: the actor itself only waits for these.
        """
        children = [child for child in self.children.values() if not child.finished]
        for child in children:
            child.abandon()
        if children or self.finished:
            return
        for work in tuple(self.background):
            work.abandon(self.log)
        if self.background or self._abandoned:
            return
        self._abandoned = True
        self.log.error("actor ignored its cancellation", what=self._handled, waiting_at=self._steps.place)
        self._steps.abandon()

    # ------------------------------------------------------------- the rest

    @property
    def watches(self) -> Watches:
        """The actor's watches, in both directions. Created when first used, because most actors never need them."""
        if self._watches is None:
            self._watches = Watches(self.ref, self.mailbox)
            if self.finished:
                self._watches.end(self.ended_with)
        return self._watches

    @property
    def cancel_called(self) -> bool:
        """Whether it is being cut off."""
        return self._scope.cancel_called

    @property
    def log(self) -> Any:
        """The bound logger, made when it is first used."""
        if self._log is None:
            self._log = get_logger("headgate.actors").bind(system=self.system.name, actor=self.path, **self.log_context)
        return self._log

    def bury(self, item: object, reason: DeadLetterReason) -> None:
        """Make a dead letter of an item that will not be handled, and tell its asker."""
        message = item
        if isinstance(item, Envelope):
            error: ActorError = ActorStopped(self.path)
            if reason in (DeadLetterReason.DROPPED_NEWEST, DeadLetterReason.DROPPED_OLDEST):
                error = MailboxFull(self.path, self.mailbox.config.capacity or 0, "the message was dropped")
            if not item.undeliverable(error):
                return
            message = item.message
        self.system.dead_letters.publish(DeadLetter(self.ref, message, reason))

    def refuse_if_over(self, what: str) -> None:
        """Raise ``ActorStopped`` if this instance cannot start anything any more."""
        if self._ending or self.mailbox.closed:
            raise ActorStopped(self.path, f"is stopped: no more {what}")

    def run_background(
        self,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        on_result: Callable[[Any], Any] | None,
        on_error: Callable[[Exception], Any] | None,
    ) -> Background:
        """Start background work; see ``ActorContext.run``."""
        self.refuse_if_over("background work")
        work = Background(name_of(function))
        self.background[work] = None
        self.system.start_task(
            _run_background, self, work, function, args, on_result, on_error, name=f"{self.path} {work.name}"
        )
        return work

    def background_ended(self, work: Background) -> None:
        """Handle the end of one piece of background work."""
        self.background.pop(work, None)
        idle = self._background_idle
        if not self.background and idle is not None and not idle.done():
            idle.set_result(None)

    def held(self, what: str, held_s: float) -> None:
        """A step of this actor's code held the loop for too long: count it, log it, tell the hooks."""  # H9
        self.system.slow_handlers += 1
        if self._repeated is None:
            self._repeated = LimitedLog(self.log, self.system.clock)
        self._repeated.warning("handler blocked the event loop", what=what, held_s=round(held_s, 6))
        for hook in self.system.hooks:
            hook.slow_handler(SlowHandler(self.ref, what, held_s))

    def _held(self, held_s: float) -> None:
        self.held(self._handled, held_s)

    @property
    def _handled(self) -> str:
        """The reason why the actor's code runs: the type of a message, or a stage of its life."""
        handling, instance = self.handling, self._instance
        if isinstance(handling, _Call):
            return handling.what
        return type_name(handling) if instance is None else instance.called_for(handling)


def cell_of(ref: ActorRef[Any]) -> ActorCell[Any]:
    """The cell of a reference."""
    return cast("ActorCell[Any]", ref._cell)


class _Context(ActorContext[M]):
    """The context of one cell."""

    __slots__ = ("_cell", "_timers")

    def __init__(self, cell: ActorCell[M]) -> None:
        self._cell = cell
        self._timers: Timers[M] | None = None

    @property
    def self_ref(self) -> ActorRef[M]:
        return self._cell.ref

    @property
    def name(self) -> str:
        return self._cell.path

    @property
    def log(self) -> Any:
        return self._cell.log

    @property
    def clock(self) -> Clock:
        return self._cell.system.clock

    @property
    def timers(self) -> Timers[M]:
        if self._timers is None:
            cell = self._cell
            self._timers = Timers(cell.mailbox, cell.system.clock, cell.refuse_if_over)
        return self._timers

    def cancel_timers(self) -> None:
        """Cancel all timers, because the instance ends."""
        if self._timers is not None:
            self._timers.cancel_all()

    @property
    def children(self) -> tuple[ActorRef[Any], ...]:
        return tuple(child.ref for child in self._cell.children.values())

    @property
    def restarts(self) -> int:
        return self._cell.restarts

    def spawn(self, factory: Callable[[], Actor[N]], **options: Any) -> ActorRef[N]:
        return self._cell.system.spawn_child(self._cell, factory, **options)

    @checked()
    def stop(self, ref: ActorRef[Any] | None = None) -> None:
        cell = self._cell if ref is None else cell_of(ref)
        if cell is self._cell:
            cell.mailbox.signal(StopCommand())
        else:
            cell.system.request_stop(cell)

    @checked()
    def watch(self, ref: ActorRef[Any]) -> None:
        self._cell.watches.watch(cell_of(ref).watches)

    @checked()
    def unwatch(self, ref: ActorRef[Any]) -> None:
        self._cell.watches.unwatch(cell_of(ref).watches)

    @checked()
    def run(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        return self._cell.run_background(coroutine_function, args, on_result, on_error)

    @checked()
    def run_in_thread(
        self,
        function: Callable[..., T],
        *args: Any,
        on_result: Callable[[T], M] | None = None,
        on_error: Callable[[Exception], M] | None = None,
    ) -> Background:
        async def in_thread() -> T:
            result: T = await self._cell.system.run_blocking(function, *args)
            return result

        in_thread.__qualname__ = f"thread {name_of(function)}"
        return self._cell.run_background(in_thread, (), on_result, on_error)


async def _run_background(
    cell: ActorCell[Any],
    work: Background,
    function: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    on_result: Callable[[Any], Any] | None,
    on_error: Callable[[Exception], Any] | None,
) -> None:
    """Run one piece of work to its end and pass the outcome to the actor. Raises nothing but its own cancellation."""
    current_actor.set(cell)
    system = cell.system
    system.works.add(work)
    try:
        with work.scope:

            async def call() -> Any:
                return await function(*args)

            try:
                work.steps = Steps(
                    call(), system.loop_timer, system.slow_handler_limit_s, lambda s: cell.held(work.name, s)
                )
                result = await work.steps
                if work.steps.abandoned:
                    return
                message = None if on_result is None else on_result(result)
            except BaseException as error:
                failure = contained(work.name, error)
                if on_error is None:
                    cell.mailbox.signal(FailCommand(failure))
                    return
                on_result = on_error
                message = on_error(failure)
            if on_result is not None and not work.cancelled:
                cell.mailbox.force(ResultEnvelope(message, work))
    except BaseException as error:  # on_error itself raised
        cell.mailbox.signal(FailCommand(contained(work.name, error)))
    finally:
        work.done = True
        system.works.discard(work)
        cell.background_ended(work)
