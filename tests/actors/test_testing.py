# SPDX-License-Identifier: Apache-2.0

"""The test kit itself: tests that use it prove something only if its guarantees hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from actors import Actor, ActorContext, ActorRef, AskTimeout, ChildFailed
from actors.testing import Candidate, Delivery, TestProbe, VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import Add, Counter, Diary, GetTotal, Ignore, running_system


class Relay(Actor[int]):
    """Counts down by passing the message on."""

    def __init__(self, seen: list[tuple[str, int]], others: list[ActorRef[int]]) -> None:
        self.seen, self.others = seen, others

    async def receive(self, context: ActorContext[int], message: int) -> None:
        self.seen.append((context.name, message))
        if message:
            for other in self.others:
                other.tell(message - 1)


async def a_run(seed: int = 0, schedule: Sequence[str] | None = None) -> tuple[list[tuple[str, int]], list[Delivery]]:
    seen: list[tuple[str, int]] = []
    others: list[ActorRef[int]] = []
    async with deterministic_system(seed=seed, schedule=schedule) as kit:
        for name in ("a", "b", "c"):
            others.append(kit.system.spawn(lambda: Relay(seen, others), name=name))
        others[0].tell(3)
        await kit.run_until_idle()
        return seen, kit.trace


async def test_same_seed_gives_the_same_order() -> None:
    runs = [await a_run(seed) for seed in range(6)]
    assert runs == [await a_run(seed) for seed in range(6)]
    assert len({tuple(seen) for seen, _ in runs}) > 1
    assert all(len(seen) == 40 for seen, _ in runs)


async def test_trace_is_a_schedule_that_replays_its_run() -> None:
    seen, trace = await a_run(seed=11)
    assert await a_run(schedule=[step.actor for step in trace]) == (seen, trace)


async def test_schedule_that_does_not_match_says_so() -> None:
    with pytest.raises(AssertionError, match="turn of 'b', but only"):
        await a_run(schedule=["b"])
    with pytest.raises(AssertionError, match="used up"):
        await a_run(schedule=["a"])


async def test_function_can_choose_the_next_receiver() -> None:
    offered: list[list[str]] = []

    def last(candidates: Sequence[Candidate]) -> int:
        offered.append([f"{candidate.actor} {candidate.item}" for candidate in candidates])
        return len(candidates) - 1

    diary = Diary()
    async with deterministic_system(schedule=last) as kit:
        first, second = (kit.system.spawn(lambda: Counter(diary), name=name) for name in ("first", "second"))
        first.tell(Add(1))
        second.tell(Add(2))
        await kit.run_until_idle()
    assert diary.added == [2, 1]
    assert offered == [["first Add(n=1)", "second Add(n=2)"], ["first Add(n=1)"]]


async def test_one_step_delivers_one_message() -> None:
    diary = Diary()
    async with deterministic_system() as kit:
        counter = kit.system.spawn(lambda: Counter(diary), name="counter")
        for n in range(3):
            counter.tell(Add(n))
        assert await kit.step() == Delivery("counter", "Add")
        assert diary.added == [0]
        assert await kit.run_until_idle() == 2
        assert await kit.step() is None


async def test_failing_run_names_its_seed() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with deterministic_system(seed=4711):
            raise ZeroDivisionError
    assert raised.value.__notes__ == ["replay with deterministic_system(seed=4711)"]


async def test_drive_runs_a_coroutine_and_fails_when_nothing_moves() -> None:
    async with deterministic_system() as kit:
        counter = kit.system.spawn(Counter, name="counter")
        counter.tell(Add(2))
        assert await kit.drive(counter.ask(GetTotal, timeout_s=1.0)) == 2
        with pytest.raises(AssertionError, match="driven by the test waits for an answer from counter: Ignore"):
            await kit.drive(counter.ask(Ignore, timeout_s=1.0))


async def test_actors_that_keep_one_another_busy_are_reported() -> None:
    class Restless(Actor[int]):
        async def receive(self, context: ActorContext[int], message: int) -> None:
            context.self_ref.tell(message)

    async with deterministic_system() as kit:
        kit.system.spawn(Restless).tell(1)
        with pytest.raises(AssertionError, match="not idle after 50 steps"):
            await kit.run_until_idle(50)


async def test_virtual_clock_makes_calls_in_the_order_of_their_times() -> None:
    clock = VirtualClock(100.0)
    calls: list[tuple[float, str]] = []
    for delay_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.call_later(delay_s, lambda name=name: calls.append((clock.now(), name)))  # type: ignore[misc]
    clock.call_later(1.5, lambda: calls.append((clock.now(), "never"))).cancel()
    assert clock.next_due_s() == 101.0
    await clock.advance(5.0)
    assert calls == [(101.0, "a"), (101.0, "b"), (102.0, "c")]
    assert clock.now() == 105.0
    with pytest.raises(ValueError, match="by_s must be"):
        await clock.advance(-1.0)


async def test_call_scheduled_during_an_advance_comes_within_it() -> None:
    clock = VirtualClock()
    times: list[float] = []

    def again() -> None:
        times.append(clock.now())
        clock.call_later(1.0, again)

    again()
    await clock.advance(3.5)
    assert times == [0.0, 1.0, 2.0, 3.0]


async def test_sleeping_on_the_virtual_clock_takes_no_real_time() -> None:
    diary: list[str] = []

    class Sleeper(Actor[float]):
        async def receive(self, context: ActorContext[float], message: float) -> None:
            await context.clock.sleep(message)
            diary.append(f"slept until {context.clock.now()}")

    async with deterministic_system() as kit:
        kit.system.spawn(Sleeper).tell(86400.0)
        await kit.advance(86400.0)
    assert diary == ["slept until 86400.0"]


async def test_probe_takes_messages_in_order_and_reports_unexpected_ones() -> None:
    async with deterministic_system() as kit:
        probe: TestProbe[object] = kit.probe()
        for message in (Add(1), "x", Add(2)):
            probe.ref.tell(message)
        assert await probe.expect(Add) == Add(1)
        assert await probe.expect_equal("x") == "x"
        with pytest.raises(AssertionError, match="expected 5, got Add"):
            await probe.expect_equal(5)
        await probe.expect_nothing()
        with pytest.raises(AssertionError, match="nothing moves"):
            await probe.expect(ChildFailed)


async def test_probe_outside_the_kit_waits_at_most_its_timeout() -> None:
    async with running_system() as system:
        probe: TestProbe[int] = TestProbe(system, timeout_s=0.01)
        await probe.expect_nothing()
        with pytest.raises(AssertionError, match="nothing within"):
            await probe.expect(int)
        probe.ref.tell(3)
        assert await probe.expect(int) == 3
        probe.ref.tell(4)
        with pytest.raises(AssertionError, match="expected nothing"):
            await probe.expect_nothing()


async def test_ask_deadline_follows_the_kits_clock() -> None:
    async with deterministic_system() as kit:
        counter = kit.system.spawn(Counter)
        outcome: list[str] = []

        class Impatient(Actor[str]):
            async def receive(self, context: ActorContext[str], message: str) -> None:
                try:
                    await counter.ask(Ignore, timeout_s=30.0)
                except AskTimeout:
                    outcome.append(f"timed out at {context.clock.now()}")

        kit.system.spawn(Impatient).tell("go")
        await kit.advance(60.0)
        assert outcome == ["timed out at 30.0"]


async def test_settle_runs_everything_that_is_ready() -> None:
    done: list[int] = []
    loop = asyncio.get_running_loop()

    def chain(n: int) -> None:
        done.append(n)
        if n < 50:
            loop.call_soon(chain, n + 1)

    chain(0)
    await settle()
    assert done == list(range(51))
