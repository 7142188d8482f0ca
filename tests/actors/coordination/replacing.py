# SPDX-License-Identifier: Apache-2.0

"""Helpers for tests of a part that is built anew: an actor that calls it like an operator, and its coordinators.

The system is deterministic. Calls are made one at a time, in the order in which the test requests them, each awaited
before the next (H5). A test finds their results in ``outcomes``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from actors import Actor, ActorContext, ActorRef, MailboxConfig
from actors.coordination.host.context import Outcome
from actors.coordination.host.gateway import GatewayTable
from actors.coordination.host.incarnation import Sender
from actors.coordination.host.part import Part, RecreateOnReset
from actors.coordination.store import CoordinatorStore
from actors.testing import DeterministicKit, deterministic_system
from protocol.facts import StageLook
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import Call, Method, RecordingCoordinator

MethodsOf = Callable[[int], dict[str, Method]]
"""Returns the methods of the coordinator with this number, counted from 1; see ``RecordingCoordinator``."""

Step = Callable[[], Awaitable[object]]


class Caller(Actor[Step]):
    """Makes one call after the other, and is the host of the part with its own context."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def started(self, context: ActorContext[Step]) -> None:
        self._bench.context = BenchHost(self._bench, context)

    async def receive(self, context: ActorContext[Step], message: Step) -> None:
        await message()

    async def stopped(self, context: ActorContext[Step], cause: BaseException | None) -> None:
        await self._bench.part.close()


class BenchHost:
    """A ``Host`` over the caller's context; ``failures`` collects the errors that fail the job."""

    operator_id = "words"
    parallelism = 3
    mode = RestoreMode.STREAMING
    checkpoints_in_doubt = frozenset({7})
    input_begins_again = False

    def __init__(self, bench: Bench, context: ActorContext[Step]) -> None:
        self._bench = bench
        self._context = context
        self._timers = 0
        self.failures: list[BaseException] = []
        self.store = CoordinatorStore()
        self.log, self.clock = context.log, context.clock
        self.gateways = GatewayTable(3, lambda handler: None, lambda: False, DEFAULT_LIMITS, lambda: False)

    def events_taken(self, part: Sender, subtask: int) -> int:
        return 40 + subtask

    def handles_restored(self, part: Sender) -> bool:
        return False

    async def look_at_run(self) -> StageLook:
        return StageLook()

    def fail_job(self, error: BaseException) -> None:
        self.failures.append(error)

    def run_in_thread(self, function: Callable[..., Any], *args: Any, handler: Outcome) -> None:
        self._begin(self._context.run_in_thread, function, args, handler)

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any, handler: Outcome) -> None:
        self._begin(self._context.run, function, args, handler)

    def _begin(self, begin: Callable[..., object], function: Callable[..., Any], args: Any, handler: Any) -> None:
        begin(
            function,
            *args,
            on_result=lambda result: self._bench.step("handler", lambda: handler(result, None)),
            on_error=lambda error: self._bench.step("handler", lambda: handler(None, error)),
        )

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self._timers += 1
        step = self._bench.step("handler", handler)
        self._context.timers.start(f"call_later-{self._timers}", step, delay_s=delay_s)

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._context.self_ref.tell_threadsafe(self._bench.step("handler", handler))


class Bench:
    """A part under test, which is built anew. ``coordinators``: everything that its factory has created, in order."""

    def __init__(self, kit: DeterministicKit, methods: MethodsOf, close_timeout_s: float) -> None:
        self.kit = kit
        self.coordinators: list[RecordingCoordinator] = []
        self.outcomes: list[tuple[str, Any]] = []  # (method, its result or error), except handlers that succeed
        self.factory_fails: Exception | None = None
        self.context: BenchHost
        self._methods_of = methods
        given = RecreateOnReset(self.make_coordinator, close_timeout_s=close_timeout_s, name="under test")
        self.part = Part("", 0, given)
        self.caller: ActorRef[Step] = kit.system.spawn(
            lambda: Caller(self), name="caller", mailbox=MailboxConfig(capacity=None)
        )

    def make_coordinator(self) -> RecordingCoordinator:
        if self.factory_fails is not None:
            raise self.factory_fails
        coordinator = RecordingCoordinator(**self._methods_of(len(self.coordinators) + 1))
        self.coordinators.append(coordinator)
        return coordinator

    def step(self, method: str, call: Step) -> Step:
        async def made() -> None:
            try:
                result = await call()
            except Exception as error:
                self.outcomes.append((method, error))
            else:
                if method != "handler":
                    self.outcomes.append((method, result))

        return made

    def ask(self, method: str, *args: Any) -> None:
        """Request a call of a method, after all calls requested before."""

        async def call() -> Any:
            own = method in ("start", "reset_to_checkpoint", "close")  # what the part does with several coordinators
            return await (getattr(self.part, method) if own else self.part.method(method))(*args)

        self.caller.tell(self.step(method, call))

    async def settle(self) -> None:
        await self.kit.run_until_idle()

    async def call(self, method: str, *args: Any) -> None:
        """Request a call of a method, and let everything happen that needs no time to pass."""
        self.ask(method, *args)
        await self.settle()

    async def start(self) -> None:
        await self.settle()
        await self.call("start", self.context)

    async def stop(self) -> None:
        """Stop as an operator does: background work is cancelled, then ``close`` is called."""
        await self.kit.drive(self.kit.system.stop(self.caller))

    def calls(self, number: int) -> list[Call]:
        """Return the calls that the coordinator with this number received, counted from 1."""
        return self.coordinators[number - 1].calls

    @property
    def errors(self) -> list[tuple[str, Exception]]:
        return [(method, outcome) for method, outcome in self.outcomes if isinstance(outcome, Exception)]


@asynccontextmanager
async def bench(
    methods: MethodsOf = lambda number: {}, *, close_timeout_s: float = 60.0, started: bool = True
) -> AsyncIterator[Bench]:
    """Yield a part, started unless the test does that itself."""
    async with deterministic_system() as kit:
        under_test = Bench(kit, methods, close_timeout_s)
        if started:
            await under_test.start()
        yield under_test


def doing_in(number: int, **methods: Method) -> MethodsOf:
    """Give only the coordinator with this number methods that do something."""
    return lambda made: methods if made == number else {}
