"""One actor at work: the task that drains its mailbox and carries out what supervision decides.

The life of a cell::

    start instance -> drain -> (failure: decide) -> resume: drain on
                                                 -> restart: end instance, back off, start instance
                                                 -> stop, escalate: close
                   -> StopCommand -> close: Stopping, mailbox closed, children, background work, stopped(),
                   finish

``finish`` is synchronous and always happens, however the task ends: it is what watchers, links, parents and
waiting callers rely on. The order in it matters: nothing can be queued any more before anybody is told that
the actor is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
import structlog

from actors.actor import DirectActor
from actors.background import Background, run_background
from actors.bonds import Bonds
from actors.context import ActorContext
from actors.dead_letters import DeadLetter, DeadLetterReason
from actors.errors import (
    ActorCancelled,
    ActorError,
    ActorStopped,
    HandlerFailed,
    MailboxFull,
)
from actors.exits import as_exception, forget_cancellations
from actors.failing import Verdict, carry_out, own_failure
from actors.hooks import Receive, SlowHandler, around, overriding
from actors.mailbox import Envelope, Mailbox, MailboxConfig
from actors.ref import ActorRef, AskEnvelope, Reply
from actors.signals import FailCommand, RestartCommand, StopCommand, Stopping, Terminated
from actors.stepping import Steps
from actors.supervision import Failure, Supervision, decide
from actors.waits import current_cell

if TYPE_CHECKING:
    from actors.actor import Actor
    from actors.system import ActorSystem

M = TypeVar("M")

SLICE_MESSAGES = 256
SLICE_S = 0.005
"""An actor with a full mailbox lets others run after so many messages or so much time, whichever comes
first."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What is being handled, where that is not a message."""

    what: str


_STARTED = _Call("started")


class ActorCell(Generic[M]):
    """The inside of one actor. Only the runtime touches it."""

    __slots__ = (
        "_abandoned",
        "_background_idle",
        "_bonds",
        "_closing_scope",
        "_cut_off",
        "_done_waiters",
        "_ending",
        "_history",
        "_instance",
        "_log",
        "_scope",
        "_steps",
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
        system: ActorSystem,
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
        self.context: ActorContext[M] = ActorContext(self)
        self.children: dict[str, ActorCell[Any]] = {}
        self.background: dict[Background, None] = {}
        self.open_replies: dict[Reply[Any], None] = {}
        self.restarts = 0
        self.finished = False
        self.ended_with: BaseException | None = None
        self.handling: object = None
        self.direct: Callable[[Any, Any], None] | None = None  # what takes a message at once, while nothing forbids it
        self._bonds: Bonds | None = None
        self._ending = False
        self._history: tuple[float, ...] = ()
        self._instance: Actor[M] | None = None
        self._log: Any = None
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
        current_cell.set(self)
        structlog.contextvars.bind_contextvars(system=self.system.name, actor=self.path, **self.log_context)
        cause: BaseException | None = None
        cancelled = True
        try:
            with self._scope:
                cause = await self._live()
                cancelled = False
        except asyncio.CancelledError:
            pass  # the whole system is being cancelled, or this task is, by name: it ends as if cut off
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

    async def _start_instance(self) -> Verdict | None:
        try:
            self._instance = instance = self.factory()
            self.handling = _STARTED
            await instance.started(self.context)
        except BaseException as failure:
            return self._failed(own_failure(self, failure, "started"), while_starting=True)
        for hook in self.system.hooks:
            hook.actor_started(self.ref, self.restarts)
        if isinstance(instance, DirectActor) and not overriding(self.system.hooks):
            self.direct = instance.handle
        return None

    async def _drain(self) -> Verdict:
        """Handle signals and messages until a verdict."""
        mailbox, gate, handler = self.mailbox, self.system.gate, self._handler()
        queue, signals = mailbox.queue, mailbox.signals
        while True:
            if not signals and not queue:
                mailbox.parked = parked = self.system.loop.create_future()
                await parked
                continue
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
        """Whether the actor goes on after its idle task was cancelled, which the runtime did not do."""
        if self.cancel_called or self.system.cancelled:
            return False
        instance = self._instance
        assert instance is not None
        if not instance.outlives_cancellation(self.context):
            return False
        forget_cancellations()
        return True

    async def _drain_slice(self, handler: Receive, messages_max: int) -> Verdict | None:
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
            # After a slow message the step must end: a slow step is blamed on the last message in it.
            if signals or not queue or timer() - steps.began_at > SLICE_S:
                return None
        return None

    def handle_direct(self, message: object) -> None:
        """Let an idle actor handle a message here and now."""
        handle = self.direct
        assert handle is not None
        self.direct = None  # what comes meanwhile waits for its turn
        self.mailbox.accepted += 1
        try:
            handle(self.context, message)
        except BaseException as error:
            failure = as_exception(f"actor {self.path!r}: {type(message).__name__}", error)
            self.system.dead_letters.publish(DeadLetter(self.ref, message, DeadLetterReason.HANDLER_FAILED))
            self.mailbox.signal(FailCommand(failure))
        finally:
            self.direct = handle

    def _handler(self) -> Receive:
        instance = self._instance
        assert instance is not None
        return around(self.system.hooks, self.ref, self.context, cast(Receive, instance.receive))

    async def _take_signal(self, signal: Any) -> Verdict | None:
        match signal:
            case StopCommand():
                return Verdict(None)
            case RestartCommand(cause, delay_s):
                return Verdict(cause, delay_s)
            case FailCommand(cause):
                return self._failed(cause)
            case Terminated(ref):
                if not self.bonds.take_terminated(ref._cell):
                    return None
        instance = self._instance
        assert instance is not None
        try:
            self.handling = _Call(type(signal).__name__)
            await instance.signal(self.context, signal)
        except BaseException as failure:
            return self._failed(own_failure(self, failure, type(signal).__name__))
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
        """Several children, or siblings, may have failed at once; one restart answers them all."""
        signals = self.mailbox.signals
        void = [
            signal
            for signal in signals
            if isinstance(signal, RestartCommand) or (isinstance(signal, FailCommand) and not signal.outlives_restart)
        ]
        for signal in void:
            signals.remove(signal)

    # ------------------------------------------------------------- failure

    def _message_failed(self, item: Any, message: Any, failure: BaseException) -> Verdict | None:
        name = type(message).__name__
        try:
            cause = own_failure(self, failure, name)
        except asyncio.CancelledError:
            self.bury(item, DeadLetterReason.CUT_OFF)
            raise
        if isinstance(item, AskEnvelope) and item.reply.open:
            error = HandlerFailed(self.path, name)
            error.__cause__ = cause
            item.reply.fail(error)
        self.system.dead_letters.publish(DeadLetter(self.ref, message, DeadLetterReason.HANDLER_FAILED))
        return self._failed(cause)

    def _failed(self, cause: BaseException, *, while_starting: bool = False) -> Verdict | None:
        failure = Failure(cause, while_starting)
        decision = decide(self.supervision, self._history, failure, self.system.clock.now())
        self._history = decision.history
        return carry_out(self, cause, decision)

    # ----------------------------------------------------------------- end

    async def _close(self, cause: BaseException | None) -> None:
        if self._instance is not None and not self._scope.cancel_called:
            try:
                self.handling = _Call("Stopping")
                await self._instance.signal(self.context, Stopping())
            except BaseException as failure:
                self.log.error("stopping_failed", exc_info=own_failure(self, failure, "Stopping"))
        await self._end_instance(cause, "is stopped", for_good=True)

    async def _end_instance(self, cause: BaseException | None, detail: str, *, for_good: bool = False) -> None:
        """Take down what belongs to one instance, children first, then the instance itself. Runs once for
        each."""
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
            self.log.error("stopped_failed", exc_info=own_failure(self, failure, "stopped"))

    async def _background_over(self) -> None:
        while self.background:
            self._background_idle = self.system.loop.create_future()
            await self._background_idle

    def finish(self, cause: BaseException | None) -> None:
        """Tell the world that this actor is over. Synchronous, idempotent."""
        if self.finished:
            return
        self.finished = True
        self.ended_with = cause
        self.context.cancel_timers()
        self.mailbox.close()
        self.mailbox.signals.clear()
        for reply in tuple(self.open_replies):
            reply.fail(ActorStopped(self.path))
        self.open_replies.clear()
        self.system.forget(self)
        if self._bonds is not None:
            self._bonds.end(cause)
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
        """Cancel what it does, and its children. Softly: ``stopped`` may still run. Hard: that is cancelled
        too."""
        for child in tuple(self.children.values()):
            child.cut_off(hard=hard)
        self._scope.cancel()
        if hard:
            self._cut_off = True
            if self._closing_scope is not None:
                self._closing_scope.cancel()

    def abandon(self) -> None:
        """Leave code that has ignored its cancellation where it stands. What its actor holds is not closed.

        First that of its children, then that of its background work: the actor itself only waits for these.
        """
        children = [child for child in self.children.values() if not child.finished]
        for child in children:
            child.abandon()
        if children or self.finished:
            return
        for work in tuple(self.background):
            work.abandon(self.log)
        if self.background:
            return
        if self._abandoned:
            return
        self._abandoned = True
        self.log.error("actor ignored its cancellation", what=self._handled, waiting_at=self._steps.place)
        self._steps.abandon()

    # ------------------------------------------------------------- the rest

    @property
    def bonds(self) -> Bonds:
        """Who watches it, and whom it watches; made when that is first asked for."""
        if self._bonds is None:
            self._bonds = Bonds(self)
        return self._bonds

    @property
    def cancel_called(self) -> bool:
        """Whether it is being cut off."""
        return self._scope.cancel_called

    @property
    def log(self) -> Any:
        """The bound logger, made when it is first used."""
        if self._log is None:
            self._log = structlog.get_logger("actors").bind(
                system=self.system.name, actor=self.path, **self.log_context
            )
        return self._log

    def bury(self, item: object, reason: DeadLetterReason) -> None:
        """Make a dead letter of an item that will not be handled, and let its asker know."""
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
        work = Background(getattr(function, "__qualname__", repr(function)))
        self.background[work] = None
        self.system.start_task(
            run_background, self, work, function, args, on_result, on_error, name=f"{self.path} {work.name}"
        )
        return work

    def background_ended(self, work: Background) -> None:
        """One piece of background work is over."""
        self.background.pop(work, None)
        idle = self._background_idle
        if not self.background and idle is not None and not idle.done():
            idle.set_result(None)

    def held(self, what: str, held_s: float) -> None:
        """A step of this actor's code held the loop for too long (H9): count it, log it, tell the hooks."""
        self.system.slow_handlers += 1
        self.log.warning("slow_handler", what=what, held_s=round(held_s, 6))
        for hook in self.system.hooks:
            hook.slow_handler(SlowHandler(self.ref, what, held_s))

    def _held(self, held_s: float) -> None:
        self.held(self._handled, held_s)

    @property
    def _handled(self) -> str:
        """What its code runs for: the name of a message, or of a stage of its life."""
        handling = self.handling
        return handling.what if isinstance(handling, _Call) else type(handling).__name__
