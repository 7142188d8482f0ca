"""``tell_direct``: an idle actor takes a message within the call, and in everything else is an actor like any other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors import (
    ActorContext,
    ActorRef,
    ActorSystem,
    DeadLetter,
    DeadLetterReason,
    DirectActor,
    Directive,
    Hook,
    Proceed,
    Supervision,
)
from actors.testing import VirtualClock, deterministic_system, settle


class Recorder(DirectActor[Any]):
    """Writes down what it handles; a function is called."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    async def started(self, context: ActorContext[Any]) -> None:
        self._seen.append("started")

    def handle(self, context: ActorContext[Any], message: Any) -> None:
        if callable(message):
            message(context)
        else:
            self._seen.append(message)


async def idle(system: ActorSystem, seen: list[Any], supervision: Supervision | None = None) -> ActorRef[Any]:
    ref = system.spawn(lambda: Recorder(seen), name="recorder", supervision=supervision)
    await settle()
    assert seen == ["started"]
    seen.clear()
    return ref


async def test_an_idle_actor_handles_it_within_the_call() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen)
        ref.tell_direct(1)
        assert seen == [1]
        ref.tell(2)
        assert seen == [1]
        await settle()
        assert seen == [1, 2]
        assert ref.statistics().accepted == ref.statistics().handled == 2


async def test_one_that_has_not_started_finds_it_in_its_mailbox() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        system.spawn(lambda: Recorder(seen)).tell_direct(1)
        assert seen == []
        await settle()
        assert seen == ["started", 1]


async def test_nothing_overtakes_what_waits() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen)
        ref.tell(1)
        ref.tell_direct(2)
        assert seen == []
        await settle()
        ref.tell_direct(3)
        assert seen == [1, 2, 3]


async def test_what_it_is_told_meanwhile_waits_for_its_turn() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen)

        def more(context: ActorContext[Any]) -> None:
            seen.append("began")
            ref.tell_direct("inner")
            context.self_ref.tell("told")
            seen.append("ended")

        ref.tell_direct(more)
        ref.tell_direct("outer")
        assert seen == ["began", "ended"]
        await settle()
        assert seen == ["began", "ended", "inner", "told", "outer"]


async def test_a_failure_is_the_actors_own() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen, Supervision(Directive.RESTART))
        lost: list[DeadLetter] = []
        system.dead_letters.subscribe(lost.append)

        def fail(context: ActorContext[Any]) -> None:
            raise ValueError("broken")

        ref.tell_direct(fail)
        ref.tell_direct("behind")  # queued: the failure is to be decided about first
        assert seen == []
        await settle()
        assert seen == ["started", "behind"]
        assert [letter.reason for letter in lost] == [DeadLetterReason.HANDLER_FAILED]
        ref.tell_direct("again")
        assert seen[-1] == "again"


async def test_between_two_instances_nobody_is_there_to_take_it() -> None:
    seen: list[Any] = []
    clock = VirtualClock()

    def fail(context: ActorContext[Any]) -> None:
        raise ValueError("broken")

    async with ActorSystem("t", clock=clock) as system:
        ref = await idle(system, seen, Supervision(Directive.RESTART, backoff_s=1.0))
        ref.tell_direct(fail)
        await settle()
        ref.tell_direct("meanwhile")
        assert seen == []
        await clock.advance(1.0)
        await settle()
        assert seen == ["started", "meanwhile"]


async def test_a_failure_that_nobody_handles_ends_the_system() -> None:
    seen: list[Any] = []

    def fail(context: ActorContext[Any]) -> None:
        raise ValueError("broken")

    async def run() -> None:
        async with ActorSystem("t") as system:
            (await idle(system, seen)).tell_direct(fail)
            await settle()

    with pytest.raises(ValueError, match="broken"):
        await run()


async def test_one_that_has_stopped_takes_nothing() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen)
        lost: list[DeadLetter] = []
        system.dead_letters.subscribe(lost.append)
        ref.tell_direct(lambda context: context.stop())
        ref.tell_direct("behind the stop")
        await settle()
        ref.tell_direct("over")
        assert seen == []
        assert [letter.reason for letter in lost] == [DeadLetterReason.LEFT_BEHIND, DeadLetterReason.STOPPED]


class Doubling(Hook):
    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        await proceed(2 * message)


async def test_a_hook_around_messages_is_around_these_too() -> None:
    seen: list[Any] = []
    async with ActorSystem("t", hooks=[Doubling()]) as system:
        ref = await idle(system, seen)
        ref.tell_direct(1)
        assert seen == []
        await settle()
        assert seen == [2]


async def test_in_a_deterministic_system_it_waits_for_its_turn() -> None:
    seen: list[Any] = []
    async with deterministic_system() as kit:
        ref = kit.system.spawn(lambda: Recorder(seen))
        await kit.run_until_idle()
        ref.tell_direct(1)
        assert seen == ["started"]
        await kit.run_until_idle()
        assert seen == ["started", 1]


@pytest.mark.parametrize("seed", range(20))
async def test_the_order_is_that_of_the_calls_whichever_they_are(seed: int) -> None:
    dice = random.Random(seed)
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        ref = await idle(system, seen)
        for number in range(100):
            (ref.tell_direct if dice.random() < 0.6 else ref.tell)(number)
            if dice.random() < 0.3:
                await settle()
        await settle()
        assert seen == list(range(100)), f"seed {seed}"
