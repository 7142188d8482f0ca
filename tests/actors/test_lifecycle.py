# SPDX-License-Identifier: Apache-2.0

"""Spawn, stop, watch, signals, and one shutdown deadline."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from actors import (
    Actor,
    ActorCancelled,
    ActorContext,
    ActorRef,
    ActorStopped,
    ActorSystem,
    DeadLetterReason,
    Directive,
    MailboxConfig,
    NameTaken,
    Signal,
    Stopping,
    Supervision,
    SystemNotRunning,
    Terminated,
    WouldDeadlock,
)
from actors.cell import Watches
from actors.testing import TestProbe, VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import (
    Add,
    Counter,
    CounterMessage,
    Diary,
    Explode,
    GetTotal,
    WaitFor,
    collect_dead_letters,
    running_system,
)

STOP = Supervision(Directive.STOP)


async def test_stop_comes_after_the_current_message_and_before_queued_ones() -> None:
    diary, gate = Diary(), asyncio.Event()
    async with running_system() as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(lambda: Counter(diary))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(system.stop, counter)
            await settle()
            assert diary.lines == ["started", "waiting"]
            gate.set()
        assert diary.lines == ["started", "waiting", "waited", "stopped"]
        assert diary.signals == [Stopping()]
    assert [(letter.message, letter.reason) for letter in letters] == [(Add(1), DeadLetterReason.LEFT_BEHIND)]


async def test_actor_can_stop_itself() -> None:
    class Once(Actor[str]):
        async def receive(self, context: ActorContext[str], message: str) -> None:
            context.stop()

    async with running_system() as system:
        once = system.spawn(Once)
        once.tell("go")
        await settle()
        assert not once.is_alive
        await system.stop(once)  # stopping a stopped actor is harmless


@dataclass(frozen=True, slots=True)
class Spawn:
    name: str


class Nest(Actor[Spawn]):
    """An actor with children like itself, which records the actors that stop."""

    def __init__(self, stops: list[str], depth: int = 0) -> None:
        self.stops, self.depth = stops, depth

    async def started(self, context: ActorContext[Spawn]) -> None:
        if self.depth:
            for name in "ab":
                context.spawn(lambda: Nest(self.stops, self.depth - 1), name=name)

    async def receive(self, context: ActorContext[Spawn], message: Spawn) -> None:
        context.spawn(lambda: Nest(self.stops), name=message.name)

    async def stopped(self, context: ActorContext[Spawn], cause: BaseException | None) -> None:
        assert context.children == ()
        self.stops.append(context.name)


async def test_children_stop_before_their_parent() -> None:
    stops: list[str] = []
    async with running_system() as system:
        top = system.spawn(lambda: Nest(stops, 2), name="top")
        await settle()
        assert system.actor_count == 7
        await system.stop(top)
        assert system.actor_count == 0
    assert len(stops) == 7
    for name in stops:
        assert all(stops.index(name) > stops.index(child) for child in stops if child.startswith(f"{name}/"))


async def test_name_is_taken_while_its_actor_lives() -> None:
    async with running_system() as system:
        first = system.spawn(Counter, name="counter")
        with pytest.raises(NameTaken, match="counter"):
            system.spawn(Counter, name="counter")
        await system.stop(first)
        system.spawn(Counter, name="counter")


@pytest.mark.parametrize("name", ["", "a/b"])
async def test_name_that_is_not_a_path_segment_is_refused(name: str) -> None:
    async with running_system() as system:
        with pytest.raises(ValueError, match="name"):
            system.spawn(Counter, name=name)


async def test_watcher_gets_the_cause_once() -> None:
    cause = KeyError("boom")
    async with running_system() as system:
        probe: TestProbe[object] = TestProbe(system)
        await settle()
        normal, failing = system.spawn(Counter), system.spawn(Counter, supervision=STOP)
        for ref in (normal, failing, failing):
            probe.watch(ref)
        await system.stop(normal)
        assert await probe.expect_terminated(normal) is None
        failing.tell(Explode(cause))
        assert await probe.expect_terminated(failing) is cause
        await settle()
        assert not probe.signals


async def test_watching_a_stopped_actor_reports_immediately() -> None:
    cause = KeyError("boom")
    async with running_system() as system:
        probe: TestProbe[object] = TestProbe(system)
        failing = system.spawn(Counter, supervision=STOP)
        failing.tell(Explode(cause))
        await settle()
        probe.watch(failing)
        assert await probe.expect_terminated(failing) is cause


class Watcher(Actor[str]):
    def __init__(self, target: ActorRef[CounterMessage], gate: asyncio.Event, seen: list[object]) -> None:
        self.target, self.gate, self.seen = target, gate, seen

    async def started(self, context: ActorContext[str]) -> None:
        context.watch(self.target)

    async def receive(self, context: ActorContext[str], message: str) -> None:
        self.seen.append(message)
        if message == "wait":
            await self.gate.wait()
        if message == "unwatch":
            await self.gate.wait()
            context.unwatch(self.target)

    async def signal(self, context: ActorContext[str], signal: Signal) -> None:
        self.seen.append(type(signal))


async def test_signals_overtake_queued_messages() -> None:
    seen: list[object] = []
    gate = asyncio.Event()
    async with running_system() as system:
        target = system.spawn(Counter)
        watcher = system.spawn(lambda: Watcher(target, gate, seen))
        watcher.tell("wait")
        for n in range(3):
            watcher.tell(str(n))
        await settle()
        await system.stop(target)
        gate.set()
        await settle()
    assert seen == ["wait", Terminated, "0", "1", "2", Stopping]


async def test_unwatch_discards_a_signal_that_is_already_queued() -> None:
    seen: list[object] = []
    gate = asyncio.Event()
    async with running_system() as system:
        target = system.spawn(Counter)
        system.spawn(lambda: Watcher(target, gate, seen)).tell("unwatch")
        await settle()
        await system.stop(target)
        gate.set()
        await settle()
    assert seen == ["unwatch", Stopping]


@pytest.mark.parametrize("ends", ["unwatch", "end"])
def test_an_actor_forgets_those_that_watch_it_no_more(ends: str) -> None:
    """An actor that lives long may be watched by many that do not."""
    target, watcher = (Watches(cast(Any, name), cast(Any, SimpleNamespace())) for name in ("target", "watcher"))
    watcher.watch(target)
    if ends == "unwatch":
        watcher.unwatch(target)
    else:
        watcher.end(None)
    assert not target._watchers
    assert not watcher._watching


class Dependent(Actor[str]):
    """Depends on ``other``: fails when that one has failed."""

    def __init__(self, other: ActorRef[CounterMessage]) -> None:
        self.other = other

    async def started(self, context: ActorContext[str]) -> None:
        context.watch(self.other)

    async def signal(self, context: ActorContext[str], signal: Signal) -> None:
        if isinstance(signal, Terminated) and signal.cause is not None:
            raise signal.cause


async def test_watcher_can_fail_together_with_the_actor_it_watches() -> None:
    async with running_system() as system:
        probe: TestProbe[object] = TestProbe(system)
        counter = system.spawn(Counter, supervision=STOP)
        dependent = system.spawn(lambda: Dependent(counter), supervision=STOP)
        probe.watch(dependent)
        await settle()
        counter.tell(Explode(KeyError("boom")))
        assert isinstance(await probe.expect_terminated(dependent), KeyError)


async def test_watching_an_actor_that_has_failed_reports_its_cause() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter, supervision=STOP)
        counter.tell(Explode(KeyError("boom")))
        await settle()
        dependent = system.spawn(lambda: Dependent(counter), supervision=STOP)
        await settle()
        assert not dependent.is_alive


async def test_shutdown_deadline_cancels_a_hanging_handler_and_runs_stopped() -> None:
    diary = Diary()
    async with running_system(shutdown_timeout_s=0.1) as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(lambda: Counter(diary))
        counter.tell(WaitFor(asyncio.Event()))
        await settle()
    assert diary.lines == ["started", "waiting", "stopped"]
    assert isinstance(diary.causes[0], ActorCancelled)
    assert [letter.reason for letter in letters] == [DeadLetterReason.CUT_OFF]


class NeverEnds(Actor[str]):
    async def receive(self, context: ActorContext[str], message: str) -> None:
        context.spawn(NeverEnds, name="child")

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        await asyncio.Event().wait()


async def test_shutdown_deadline_covers_stopped_at_any_depth() -> None:
    async with running_system(shutdown_timeout_s=0.1) as system:
        parent = system.spawn(NeverEnds)
        parent.tell("spawn")
        await settle()
        assert system.actor_count == 2


async def test_stopping_one_actor_has_the_same_deadline() -> None:
    async with running_system(shutdown_timeout_s=0.1) as system:
        never = system.spawn(NeverEnds)
        await system.stop(never)
        assert system.actor_count == 0


async def test_exception_from_stopped_is_only_logged() -> None:
    class Clumsy(Actor[str]):
        async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
            raise OSError("cannot close")

    async with running_system() as system:
        await system.stop(system.spawn(Clumsy))


async def test_cancellation_from_outside_stops_every_child_in_order() -> None:
    stops: list[str] = []
    with anyio.CancelScope() as scope:
        async with running_system() as system:
            system.spawn(lambda: Nest(stops, 2), name="top")
            await settle()
            scope.cancel()
            await asyncio.Event().wait()
    assert scope.cancelled_caught
    assert len(stops) == 7
    assert stops[-1] == "top"


async def test_actor_whose_task_is_cancelled_ends_as_if_cut_off() -> None:
    diary = Diary()
    async with running_system() as system:
        probe: TestProbe[object] = TestProbe(system)
        counter = system.spawn(lambda: Counter(diary), name="counter")
        probe.watch(counter)
        await settle()
        task = next(task for task in asyncio.all_tasks() if task.get_name() == "actor counter")
        task.cancel()
        assert isinstance(await probe.expect_terminated(counter), ActorCancelled)
        assert diary.lines == ["started", "stopped"]
        assert system.actor_count == 1  # the rest stays alive


async def test_nothing_starts_before_or_after_the_system_runs() -> None:
    system = ActorSystem("late")
    with pytest.raises(SystemNotRunning):
        system.spawn(Counter)
    async with system:
        counter = system.spawn(Counter)
    with pytest.raises(SystemNotRunning):
        system.spawn(Counter)
    with pytest.raises(SystemNotRunning):
        async with system:
            pass
    letters = collect_dead_letters(system)
    counter.tell(Add(1))
    assert len(letters) == 1
    with pytest.raises(ActorStopped):
        await counter.ask(GetTotal, timeout_s=1.0)


async def test_actor_that_waits_for_its_own_end_gets_would_deadlock() -> None:
    errors: list[Exception] = []

    class Suicidal(Actor[str]):
        async def receive(self, context: ActorContext[str], message: str) -> None:
            try:
                await system.stop(context.self_ref)
            except WouldDeadlock as error:
                errors.append(error)

    async with running_system() as system:
        system.spawn(Suicidal).tell("go")
        await settle()
    assert len(errors) == 1


async def test_stopped_actor_can_start_nothing() -> None:
    contexts: list[ActorContext[CounterMessage]] = []

    class Leaky(Counter):
        async def started(self, context: ActorContext[CounterMessage]) -> None:
            contexts.append(context)

    async with running_system() as system:
        await system.stop(system.spawn(Leaky))
        with pytest.raises(ActorStopped):
            contexts[0].spawn(Counter)
        with pytest.raises(ActorStopped):
            contexts[0].timers.start("t", Add(1), delay_s=0.0)
        with pytest.raises(ActorStopped):
            contexts[0].run(anyio.sleep, 0)


async def test_children_are_listed_while_they_live() -> None:
    children: list[tuple[str, ...]] = []

    class Lister(Actor[str]):
        async def receive(self, context: ActorContext[str], message: str) -> None:
            if message == "spawn":
                self.child = context.spawn(Counter, name="child")
            else:
                context.stop(self.child)
            children.append(tuple(child.name for child in context.children))

    async with running_system() as system:
        lister = system.spawn(Lister, name="lister")
        lister.tell("spawn")
        await settle()
        lister.tell("stop")
        await settle()
        assert system.actor_count == 1
    assert children == [("lister/child",), ("lister/child",)]


async def test_system_with_a_stopped_clock_still_shuts_down() -> None:
    async with running_system(clock=VirtualClock()) as system:
        system.spawn(Counter, mailbox=MailboxConfig(1))


@pytest.mark.parametrize("seed", range(25))
async def test_watcher_gets_messages_sent_before_the_end_in_any_order(seed: int) -> None:
    async with deterministic_system(seed=seed) as kit:
        probe: TestProbe[object] = kit.probe("probe")
        refs = [kit.system.spawn(Counter, name=f"c{n}", supervision=STOP) for n in range(4)]
        for ref in refs:
            probe.watch(ref)
        await kit.run_until_idle()
        for n, ref in enumerate(refs):
            ref.tell(Add(n))
            ref.tell(Explode(KeyError(n)))
        await kit.run_until_idle()
        ended = [signal for signal in probe.signals if isinstance(signal, Terminated)]
        assert {signal.ref for signal in ended} == set(refs)
        assert len(ended) == 4


class Tidy(Actor[str]):
    """Hangs in its handler, and needs to await while it closes."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    async def receive(self, context: ActorContext[str], message: str) -> None:
        await asyncio.Event().wait()

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        await asyncio.sleep(0)
        self.lines.append("tidied up")


async def test_part_of_the_shutdown_time_is_reserved_for_stopped() -> None:
    lines: list[str] = []
    async with running_system(shutdown_timeout_s=0.3) as system:
        system.spawn(lambda: Tidy(lines)).tell("hang")
        await settle()
    assert lines == ["tidied up"]


async def test_stopped_is_shielded_from_outside_cancellation() -> None:
    lines: list[str] = []
    with anyio.CancelScope() as scope:
        async with running_system() as system:
            system.spawn(lambda: Tidy(lines)).tell("hang")
            await settle()
            scope.cancel()
            await asyncio.Event().wait()
    assert lines == ["tidied up"]


class SomeActor(Actor[str]):
    async def receive(self, context: ActorContext[str], message: str) -> None:
        pass


async def makes_one_later() -> SomeActor:
    return SomeActor()


@pytest.mark.parametrize(
    ("factory", "returned"),
    [
        (lambda: None, "returned None,"),
        (lambda: "x", "returned 'x',"),
        (lambda: SomeActor, "returned <class .*SomeActor'>,"),
        (makes_one_later, "makes_one_later .* returned <coroutine object makes_one_later .*>,"),
        (dict, "the factory dict .*returned {},"),
    ],
)
@pytest.mark.parametrize("parent", [False, True], ids=["top", "child"])
async def test_a_factory_that_makes_no_actor_is_named_with_what_it_returned(
    factory: Any, returned: str, parent: bool
) -> None:  # H165
    class Parent(SomeActor):
        async def started(self, context: ActorContext[str]) -> None:
            context.spawn(factory, name="wrong")

    async def run() -> None:
        async with deterministic_system() as kit:
            kit.system.spawn(Parent if parent else factory, name="parent" if parent else "wrong")
            await settle()

    if not parent and factory in (makes_one_later, dict):
        with pytest.raises(TypeError, match=r"factory must be a function .*, not an async one, that returns an Actor"):
            await run()  # H165: it can be seen where it is given
        return
    with pytest.raises(TypeError, match=r"wrong' .*which is not an Actor: pass a subclass of Actor") as raised:
        await run()
    assert re.search(returned, str(raised.value))
