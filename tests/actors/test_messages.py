# SPDX-License-Identifier: Apache-2.0

"""tell, send and ask."""

# ruff: noqa: PT012 - the exit of the whole `async with` raises

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from actors import (
    Actor,
    ActorContext,
    ActorRef,
    ActorStopped,
    AskTimeout,
    DeadLetterReason,
    Directive,
    HandlerFailed,
    MailboxConfig,
    MailboxFull,
    OnFull,
    Reply,
    Supervision,
    WouldDeadlock,
)
from actors.testing import VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import (
    Add,
    Counter,
    CounterMessage,
    Diary,
    Explode,
    GetTotal,
    Ignore,
    busy_counter,
    collect_dead_letters,
    meanwhile,
    running_system,
)


async def test_messages_of_one_sender_are_handled_in_order() -> None:
    diary = Diary()
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary), name="counter")
        for n in range(600):  # more than one slice of the reader
            counter.tell(Add(n))
        assert await counter.ask(GetTotal, timeout_s=60.0) == sum(range(600))
    assert diary.added == list(range(600))


@dataclass(frozen=True, slots=True)
class Double:
    reply_to: Reply[int]


class Doubler(Actor[Double]):
    """Asks another actor from inside its own handler."""

    def __init__(self, counter: ActorRef[CounterMessage]) -> None:
        self.counter = counter

    async def receive(self, context: ActorContext[Double], message: Double) -> None:
        message.reply_to.answer(2 * await self.counter.ask(GetTotal, timeout_s=60.0))


async def test_handler_can_ask_another_actor() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter)
        doubler = system.spawn(lambda: Doubler(counter))
        counter.tell(Add(21))
        assert await doubler.ask(Double, timeout_s=60.0) == 42


async def test_ask_without_an_answer_times_out() -> None:
    async with deterministic_system() as kit:
        counter = kit.system.spawn(Counter, name="counter")
        async with meanwhile(counter.ask(Ignore, timeout_s=2.0), AskTimeout) as errors:
            await kit.advance(1.999)
            assert errors == []
            await kit.advance(0.001)
        assert (
            str(errors[0])
            == "actor 'counter' did not answer Ignore within 2.0 s. Raise timeout_s, or have it answer sooner"
        )


async def test_ask_fails_immediately_when_the_target_stops() -> None:
    async with running_system(clock=VirtualClock()) as system:  # no deadline can pass, because the clock stands still
        counter = system.spawn(Counter)
        async with meanwhile(counter.ask(Ignore, timeout_s=1.0), ActorStopped):
            await system.stop(counter)


async def test_queued_ask_fails_when_the_target_stops() -> None:
    async with busy_counter(MailboxConfig(), clock=VirtualClock()) as busy:
        stop = busy.system.stop(busy.counter)
        async with meanwhile(busy.counter.ask(GetTotal, timeout_s=1.0), ActorStopped), meanwhile(stop):
            busy.gate.set()


async def test_ask_of_a_stopped_actor_fails_immediately() -> None:
    async with running_system() as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(Counter)
        await system.stop(counter)
        with pytest.raises(ActorStopped):
            await counter.ask(GetTotal, timeout_s=60.0)
        assert [letter.reason for letter in letters] == [DeadLetterReason.STOPPED]


async def test_ask_fails_when_the_target_restarts_before_answering() -> None:
    async with running_system(clock=VirtualClock()) as system:
        counter = system.spawn(Counter, supervision=Supervision(Directive.RESTART))
        async with meanwhile(counter.ask(Ignore, timeout_s=1.0), ActorStopped, "restarted") as errors:
            counter.tell(Explode(KeyError("boom")))
        assert isinstance(errors[0].__cause__, KeyError)


async def test_queued_ask_survives_a_restart() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter, supervision=Supervision(Directive.RESTART))
        counter.tell(Add(1))
        counter.tell(Explode(KeyError("boom")))
        assert await counter.ask(GetTotal, timeout_s=60.0) == 0


class Touchy(Actor[GetTotal]):
    async def receive(self, context: ActorContext[GetTotal], message: GetTotal) -> None:
        raise ValueError("no")


@pytest.mark.parametrize("directive", list(Directive))
async def test_ask_fails_with_the_cause_when_the_handler_raises(directive: Directive) -> None:
    if directive is Directive.ESCALATE:
        with pytest.raises(ValueError, match="no"):
            async with running_system() as system:
                touchy = system.spawn(Touchy)
                await touchy.ask(GetTotal, timeout_s=60.0)
        return
    async with running_system() as system:
        touchy = system.spawn(Touchy, name="touchy", supervision=Supervision(directive))
        with pytest.raises(HandlerFailed) as raised:
            await touchy.ask(GetTotal, timeout_s=60.0)
        assert (raised.value.actor, raised.value.message_type) == ("touchy", "GetTotal")
        assert isinstance(raised.value.__cause__, ValueError)


class Refuser(Actor[GetTotal]):
    async def receive(self, context: ActorContext[GetTotal], message: GetTotal) -> None:
        message.reply_to.fail(PermissionError("not for you"))


async def test_actor_can_answer_with_an_error() -> None:
    async with running_system() as system:
        with pytest.raises(PermissionError, match="not for you"):
            await system.spawn(Refuser).ask(GetTotal, timeout_s=60.0)


async def test_second_answer_is_a_dead_letter() -> None:
    class Twice(Actor[GetTotal]):
        async def receive(self, context: ActorContext[GetTotal], message: GetTotal) -> None:
            assert message.reply_to.answer(1)
            assert not message.reply_to.answer(2)
            assert not message.reply_to.fail(KeyError())

    async with running_system() as system:
        letters = collect_dead_letters(system)
        assert await system.spawn(Twice).ask(GetTotal, timeout_s=60.0) == 1
    assert [letter.reason for letter in letters] == [DeadLetterReason.ANSWER_TOO_LATE] * 2


async def test_message_to_a_stopped_actor_is_a_dead_letter() -> None:
    async with running_system() as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(Counter)
        await system.stop(counter)
        assert not counter.is_alive
        counter.tell(Add(1))
        with pytest.raises(ActorStopped):
            await counter.send(Add(2))
    assert [(letter.target, letter.message, letter.reason) for letter in letters] == [
        (counter, Add(1), DeadLetterReason.STOPPED)
    ]


async def test_reference_never_reaches_a_later_actor_with_the_same_name() -> None:
    async with running_system() as system:
        letters = collect_dead_letters(system)
        first = system.spawn(Counter, name="counter")
        await system.stop(first)
        second = system.spawn(Counter, name="counter")
        assert (first.name, first.incarnation) != (second.name, second.incarnation)
        assert first.incarnation < second.incarnation
        first.tell(Add(1))
        assert await second.ask(GetTotal, timeout_s=60.0) == 0
        assert len(letters) == 1


async def test_messages_from_a_thread_arrive_in_order() -> None:
    diary = Diary()
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary))

        def from_a_thread() -> None:
            for n in range(100):
                counter.tell_threadsafe(Add(n))

        thread = threading.Thread(target=from_a_thread)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        await counter.ask(GetTotal, timeout_s=60.0)
    assert diary.added == list(range(100))


async def test_message_from_a_thread_to_a_full_mailbox_is_a_dead_letter() -> None:
    async with busy_counter(MailboxConfig(1, OnFull.REFUSE)) as busy:
        letters = collect_dead_letters(busy.system)
        for n in (1, 2):
            await anyio.to_thread.run_sync(busy.counter.tell_threadsafe, Add(n))
        await settle()
    assert next((letter.message, letter.reason) for letter in letters) == (Add(2), DeadLetterReason.REFUSED)


@pytest.mark.parametrize("how", ["send", "ask"])
async def test_waiting_for_space_in_ones_own_mailbox_is_refused(how: str) -> None:
    refused: list[tuple[str, type]] = []

    class Narcissus(Actor[Any]):
        async def receive(self, context: ActorContext[Any], message: Any) -> None:
            context.self_ref.tell(2)
            try:
                if how == "send":
                    await context.self_ref.send(3)
                else:
                    await context.self_ref.ask(lambda reply: reply, timeout_s=60.0)
            except MailboxFull as error:
                refused.append((str(error), type(error.__cause__)))
            context.stop()

    async with running_system() as system:
        system.spawn(Narcissus, mailbox=MailboxConfig(1)).tell(1)
        await settle()
    ((text, cause),) = refused
    assert "its own handler would wait forever" in text
    assert cause is WouldDeadlock
