# SPDX-License-Identifier: Apache-2.0

"""A public kit for testing actors: virtual time, probes, and an order of delivery that can be repeated.

>>> async with deterministic_system(seed=7) as kit:  # doctest: +SKIP
...     counter = kit.system.spawn(Counter, name="counter")
...     counter.tell(Increment(1))
...     assert await kit.drive(counter.ask(GetTotal, timeout_s=1.0)) == 1
...     await kit.advance(5.0)

The actors' own code runs unchanged; the kit decides whose turn it is. It delivers one signal or message at a time, runs
everything that follows from it until nothing is left to do, and then chooses the next receiver: with a seed, from a
list of names, or with a function. The same seed gives the same order.
Timers and deadlines follow the kit's clock, which stands still until it is advanced. So do ``anyio.sleep``,
``asyncio.sleep`` and timeouts inside actors and driven coroutines; the test itself keeps real time.

Functions that actors hand to a worker thread (``context.run_in_thread``, ``asyncio.to_thread``,
``anyio.to_thread.run_sync``) run in a thread to their end while nothing else moves, so no order depends on a race.
They have 30 real seconds each, then the call raises ``RuntimeError``.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import anyio

from actors.actor import Actor, ActorContext, Hook, Signal, Terminated
from actors.cell import ActorCell
from actors.mailbox import Envelope, MailboxConfig
from actors.ref import ActorRef
from actors.system import ActorSystem
from actors.virtual_loop import VirtualClock, VirtualLoop, settle, virtual_loop
from protocol.arguments import ANY, AT_LEAST_1, NAME, WAIT, checked
from protocol.describing import type_name

__all__ = [
    "Candidate",
    "Delivery",
    "DeterministicKit",
    "Schedule",
    "TestProbe",
    "TurnGate",
    "VirtualClock",
    "deterministic_system",
    "next_item",
    "settle",
]

T = TypeVar("T")
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An actor whose turn it could be, and what it would be given."""

    actor: str
    item: object


@dataclass(frozen=True, slots=True)
class Delivery:
    """One step: the actor, and the type of the signal or message that it was given."""

    actor: str
    what: str


Schedule: TypeAlias = Sequence[str] | Callable[[Sequence[Candidate]], int]


class TurnGate:
    """Where the actors of one system wait for their turn; give it to ``ActorSystem(gate=...)``. Loop-only.

    ``waiting`` holds the actors that have something to handle, in the order in which they got it.
    """

    def __init__(self) -> None:
        self._open = False
        self.waiting: dict[ActorCell[Any], asyncio.Future[None]] = {}

    async def turn(self, cell: ActorCell[Any]) -> None:
        if self._open:
            return
        turn: asyncio.Future[None] = cell.system.loop.create_future()
        self.waiting[cell] = turn
        try:
            await turn
        finally:
            self.waiting.pop(cell, None)

    def direct(self, cell: ActorCell[Any], message: object) -> bool:
        """Always False: each message gets its own turn, and no handler runs in the middle of another."""
        return False

    def release(self, cell: ActorCell[Any]) -> None:
        """Let ``cell`` handle one signal or message."""
        turn = self.waiting.pop(cell)
        if not turn.done():
            turn.set_result(None)

    def open(self) -> None:
        """Let every actor run freely from now on."""
        self._open = True
        for cell in tuple(self.waiting):
            self.release(cell)


class _DeterministicSystem(ActorSystem):
    """A system whose tasks use the virtual time of ``virtual``, which is set before it is entered."""

    virtual: VirtualLoop

    def spawn_child(self, *args: Any, **settings: Any) -> ActorRef[Any]:
        with self.virtual.enter():
            return super().spawn_child(*args, **settings)

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        return self.virtual.run(function, *args)


class DeterministicKit:
    """Drives one system step by step; made by ``deterministic_system``.

    ``step``, ``run_until_idle``, ``advance`` and ``drive`` move the system. Only one of them runs at a time: another
    call meanwhile, from an actor, from a driven coroutine or from a second task of the test, raises ``RuntimeError``.
    """

    def __init__(
        self, system: ActorSystem, clock: VirtualClock, gate: TurnGate, choose: _Chooser, virtual: VirtualLoop
    ) -> None:
        self.system = system
        self.clock = clock
        self.trace: list[Delivery] = []
        """All steps so far. ``[step.actor for step in kit.trace]`` is a schedule that replays them."""
        self.outside: Callable[[], bool] = lambda: False
        """Called when no actor has anything to do: moves what surrounds the system, such as a simulated network, and
        returns whether anything moved."""
        self._gate = gate
        self._choose = choose
        self._virtual = virtual
        self._moved_by = ""
        clock.between = self._between

    async def candidates(self) -> list[Candidate]:
        """The actors whose turn it could be now, in the order in which they were spawned."""
        await settle()
        return [Candidate(cell.path, next_item(cell)) for cell in self._cells()]

    async def step(self) -> Delivery | None:
        """Deliver one signal or message and run what follows from it. Returns None if there is nothing to deliver."""
        with self._moving("step()"):
            return await self._step()

    @checked(steps_max=AT_LEAST_1)
    async def run_until_idle(self, steps_max: int = 1_000_000) -> int:
        """Step until there is nothing to deliver; returns the number of steps.

        Raises ``AssertionError`` after ``steps_max`` steps: the actors then probably keep one another busy forever.
        """
        with self._moving("run_until_idle()"):
            return await self._run_until_idle(steps_max)

    @checked(by_s=WAIT)
    async def advance(self, by_s: float) -> None:
        """Let ``by_s`` seconds pass. After each timer that comes due, run everything that follows from it."""
        with self._moving("advance()"):
            await self.clock.advance(by_s)

    @checked()
    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine (an ``ask``, a ``send``) and step until it is done. It sees virtual time, as actors do.

        Raises what the coroutine raises. Raises ``AssertionError``, with a dump of who waits for whom, if everything is
        idle before the coroutine is done: then the actors need time to pass (``advance``), or they have a deadlock.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        async def run() -> None:
            try:
                results.append(await coroutine)
            except Exception as error:
                errors.append(error)

        try:
            moving = self._moving("drive()")
            moving.__enter__()
        except RuntimeError:
            coroutine.close()
            raise
        try:
            async with anyio.create_task_group() as tasks:
                with self._virtual.enter():
                    tasks.start_soon(run, name="driven by the test")
                while not results and not errors:
                    if await self._step() is None and not results and not errors:
                        errors.append(AssertionError(f"nothing moves any more:\n{self.system.dump_waits()}"))
                        tasks.cancel_scope.cancel()
        finally:
            moving.__exit__(None, None, None)
        if errors:
            raise errors[0]
        return results[0]

    @checked(name=NAME)
    def probe(self, name: str | None = None) -> TestProbe[Any]:
        """A probe in this system. Instead of waiting, it steps."""
        return TestProbe(self.system, name=name, kit=self)

    @contextmanager
    def _moving(self, by: str) -> Iterator[None]:
        if self._moved_by:
            raise RuntimeError(
                f"{by} was called while {self._moved_by} is moving the same system. Only the test moves it, one call "
                "at a time: inside an actor or a driven coroutine, await the message itself, or return and step later"
            )
        self._moved_by = by
        try:
            yield
        finally:
            self._moved_by = ""

    async def _step(self) -> Delivery | None:
        candidates = await self.candidates()
        while not candidates and self.outside():
            candidates = await self.candidates()
        if not candidates:
            return None
        chosen = self._choose(candidates)
        cell, item = self._cells()[chosen], candidates[chosen].item
        delivery = Delivery(cell.path, type_name(item))
        self.trace.append(delivery)
        self._gate.release(cell)
        await settle()
        return delivery

    async def _run_until_idle(self, steps_max: int = 1_000_000) -> int:
        for steps in range(steps_max):
            if await self._step() is None:
                return steps
        raise AssertionError(
            f"still not idle after {steps_max} steps, of which the last one was {self.trace[-1]}: look for actors that "
            "answer each other without end, or raise steps_max"
        )

    async def _between(self) -> None:
        """What the clock awaits around each call that comes due."""
        if self._moved_by == "advance()":
            await self._run_until_idle()
        else:
            await self.run_until_idle()

    def _cells(self) -> list[ActorCell[Any]]:
        return sorted(self._gate.waiting, key=lambda cell: cell.ref.incarnation)


_Chooser: TypeAlias = Callable[[Sequence[Candidate]], int]


@checked(seed=ANY)
def deterministic_system(
    name: str = "deterministic",
    *,
    seed: int = 0,
    schedule: Schedule | None = None,
    hooks: Sequence[Hook] = (),
    clock: VirtualClock | None = None,
    shutdown_timeout_s: float = 10.0,
) -> AbstractAsyncContextManager[DeterministicKit]:
    """A running system that delivers messages one by one, in an order that can be repeated.

    At the end of the block the actors run freely again, and stop.

    Args:
        name: The system's name.
        seed: Chooses the receivers if there is no schedule. An exception that leaves the block names it in a note.
        schedule: The names of the receivers in turn, or a function that picks an index from the candidates.
        hooks: As for ``ActorSystem``.
        clock: The virtual clock; a new one by default.
        shutdown_timeout_s: As for ``ActorSystem``, in real seconds.
    """
    return kit_of("deterministic_system", name, seed, schedule, hooks, clock, shutdown_timeout_s)


@asynccontextmanager
async def kit_of(
    used: str,
    name: str,
    seed: int,
    schedule: Schedule | None = None,
    hooks: Sequence[Hook] = (),
    clock: VirtualClock | None = None,
    shutdown_timeout_s: float = 10.0,
) -> AsyncIterator[DeterministicKit]:
    """What ``deterministic_system`` returns. ``used`` is the function that the test called, for the hint."""
    gate, clock = TurnGate(), clock or VirtualClock()
    system = _DeterministicSystem(
        name,
        clock=clock,
        hooks=hooks,
        shutdown_timeout_s=shutdown_timeout_s,
        gate=gate,
        loop_timer=lambda: 0.0,
    )
    try:
        with virtual_loop(clock) as system.virtual:
            async with system:
                try:
                    yield DeterministicKit(system, clock, gate, _chooser(seed, schedule), system.virtual)
                finally:
                    system.virtual.close()
                    gate.open()
    except BaseException as error:
        if schedule is None:
            error.add_note(f"replay with {used}(seed={seed})")
        raise


def _chooser(seed: int, schedule: Schedule | None) -> _Chooser:
    if schedule is None:
        dice = random.Random(seed)
        return lambda candidates: dice.randrange(len(candidates))
    if callable(schedule):
        return schedule
    names = deque(schedule)

    def by_name(candidates: Sequence[Candidate]) -> int:
        actors = [candidate.actor for candidate in candidates]
        if not names:
            raise AssertionError(f"the schedule is used up, and {actors} still have something to do: name what follows")
        wanted = names.popleft()
        if wanted not in actors:
            raise AssertionError(
                f"it is the turn of {wanted!r}, but only {actors} have something to do: correct the schedule"
            )
        return actors.index(wanted)

    return by_name


def next_item(cell: ActorCell[Any]) -> object:
    """The signal or message that ``cell`` gets when its turn comes."""
    mailbox = cell.mailbox
    if mailbox.signals:
        return mailbox.signals[0]
    item = mailbox.queue[0] if mailbox.queue else None
    return item.message if isinstance(item, Envelope) else item


class TestProbe(Generic[M]):
    """An actor that records what it receives, for a test to inspect. Its mailbox has no bound.

    Each expectation takes the next message or signal, and raises ``AssertionError`` if that is another one. In a
    deterministic system, an expectation steps until something has come, and fails as soon as nothing moves any more. In
    any other system, it waits up to ``timeout_s`` real seconds.
    """

    __test__ = False  # not a test class, although its name begins with Test

    @checked(name=NAME)
    def __init__(
        self,
        system: ActorSystem,
        *,
        name: str | None = None,
        kit: DeterministicKit | None = None,
        timeout_s: float = 3.0,
    ) -> None:
        self.messages: deque[M] = deque()
        """The messages that no expectation has taken yet."""
        self.signals: deque[Signal] = deque()
        """The signals that no expectation has taken yet."""
        self._kit = kit
        self._timeout_s = timeout_s
        self._context: ActorContext[M] | None = None
        self._to_watch: list[ActorRef[Any]] = []
        self._news = asyncio.Event()
        self.ref: ActorRef[M] = system.spawn(lambda: _ProbeActor(self), name=name, mailbox=MailboxConfig(capacity=None))

    @checked()
    def watch(self, ref: ActorRef[Any]) -> None:
        """Watch another actor, for ``expect_terminated``."""
        if self._context is not None:
            self._context.watch(ref)
        else:
            self._to_watch.append(ref)

    async def expect(self, expected: type[T]) -> T:
        """Take the next message; it must be of this type, or of one of a union's types (``expect(A | B)``)."""
        message = await self._next(self.messages)
        assert isinstance(message, expected), f"expected {expected}, got {message!r}"
        return message

    async def expect_equal(self, expected: M) -> M:
        """Take the next message; it must equal ``expected``."""
        message = await self._next(self.messages)
        assert message == expected, f"expected {expected!r}, got {message!r}"
        return message

    @checked()
    async def expect_terminated(self, ref: ActorRef[Any]) -> BaseException | None:
        """Take the next signal; it must be the ``Terminated`` of ``ref``. Returns its cause."""
        signal = await self._next(self.signals)
        assert isinstance(signal, Terminated), f"expected Terminated, got {signal!r}"
        assert signal.ref is ref, f"expected the end of {ref}, got {signal!r}"
        return signal.cause

    async def expect_nothing(self) -> None:
        """Fail if a message has come, or comes without time passing."""
        if self._kit is not None:
            await self._kit.run_until_idle()
        else:
            await settle()
        assert not self.messages, f"expected nothing, got {list(self.messages)!r}"

    async def _next(self, inbox: deque[T]) -> T:
        if self._kit is not None:
            while not inbox:
                if await self._kit.step() is None:
                    raise AssertionError(
                        f"the probe got nothing, and nothing moves any more:\n{self._kit.system.dump_waits()}"
                    )
            return inbox.popleft()
        with anyio.move_on_after(self._timeout_s):
            while not inbox:
                self._news.clear()
                await self._news.wait()
            return inbox.popleft()
        raise AssertionError(f"the probe got nothing within {self._timeout_s:g} s (timeout_s of the probe)")


class _ProbeActor(Actor[M]):
    def __init__(self, probe: TestProbe[M]) -> None:
        self._probe = probe

    async def started(self, context: ActorContext[M]) -> None:
        self._probe._context = context
        for ref in self._probe._to_watch:
            context.watch(ref)

    async def receive(self, context: ActorContext[M], message: M) -> None:
        self._probe.messages.append(message)
        self._probe._news.set()

    async def signal(self, context: ActorContext[M], signal: Signal) -> None:
        self._probe.signals.append(signal)
        self._probe._news.set()
