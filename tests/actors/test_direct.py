# SPDX-License-Identifier: Apache-2.0

"""With ``tell_direct``, an idle actor takes a message within the call, and otherwise behaves like any other actor."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    """Records the messages that it handles, and calls those that are functions."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    async def started(self, context: ActorContext[Any]) -> None:
        self._seen.append("started")

    def handle(self, context: ActorContext[Any], message: Any) -> None:
        if callable(message):
            message(context)
        else:
            self._seen.append(message)


@asynccontextmanager
async def idle_recorder(
    supervision: Supervision | None = None, **options: Any
) -> AsyncIterator[tuple[ActorRef[Any], list[Any], list[DeadLetter]]]:
    """Yield a recorder that has started, the list of what it sees from now on, and the dead letters."""
    seen: list[Any] = []
    lost: list[DeadLetter] = []
    async with ActorSystem("t", **options) as system:
        system.dead_letters.subscribe(lost.append)
        ref = system.spawn(lambda: Recorder(seen), name="recorder", supervision=supervision)
        await settle()
        assert seen == ["started"]
        seen.clear()
        yield ref, seen, lost


def fail(context: ActorContext[Any]) -> None:
    raise ValueError("broken")


async def test_idle_direct_actor_handles_a_message_within_the_call() -> None:
    async with idle_recorder() as (ref, seen, _):
        ref.tell_direct(1)
        assert seen == [1]
        ref.tell(2)
        assert seen == [1]
        await settle()
        assert seen == [1, 2]
        assert ref.statistics().accepted == ref.statistics().handled == 2


async def test_direct_message_before_the_start_is_queued() -> None:
    seen: list[Any] = []
    async with ActorSystem("t") as system:
        system.spawn(lambda: Recorder(seen)).tell_direct(1)
        assert seen == []
        await settle()
        assert seen == ["started", 1]


async def test_direct_message_during_a_handler_is_queued() -> None:  # H5
    async with idle_recorder() as (ref, seen, _):

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


async def test_failure_in_a_direct_call_fails_the_actor_not_the_caller() -> None:
    async with idle_recorder(Supervision(Directive.RESTART)) as (ref, seen, lost):
        ref.tell_direct(fail)
        ref.tell_direct("after")  # queued: supervision must decide about the failure first
        assert seen == []
        await settle()
        assert seen == ["started", "after"]
        assert [letter.reason for letter in lost] == [DeadLetterReason.HANDLER_FAILED]
        ref.tell_direct("again")
        assert seen[-1] == "again"


async def test_direct_message_during_a_restart_is_queued() -> None:
    clock = VirtualClock()
    async with idle_recorder(Supervision(Directive.RESTART, backoff_s=1.0), clock=clock) as (ref, seen, _):
        ref.tell_direct(fail)
        await settle()
        ref.tell_direct("meanwhile")
        assert seen == []
        await clock.advance(1.0)
        await settle()
        assert seen == ["started", "meanwhile"]


async def test_unhandled_failure_in_a_direct_call_ends_the_system() -> None:
    async def run() -> None:
        async with idle_recorder() as (ref, _, _):
            ref.tell_direct(fail)
            await settle()

    with pytest.raises(ValueError, match="broken"):
        await run()


async def test_direct_message_to_a_stopped_actor_is_a_dead_letter() -> None:
    async with idle_recorder() as (ref, seen, lost):
        ref.tell_direct(lambda context: context.stop())
        ref.tell_direct("after the stop")
        await settle()
        ref.tell_direct("over")
        assert seen == []
        assert [letter.reason for letter in lost] == [DeadLetterReason.LEFT_BEHIND, DeadLetterReason.STOPPED]


class Doubling(Hook):
    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        await proceed(2 * message)


async def test_message_hooks_wrap_direct_messages_too() -> None:
    async with idle_recorder(hooks=[Doubling()]) as (ref, seen, _):
        ref.tell_direct(1)
        assert seen == []
        await settle()
        assert seen == [2]


async def test_deterministic_system_queues_direct_messages() -> None:
    seen: list[Any] = []
    async with deterministic_system() as kit:
        ref = kit.system.spawn(lambda: Recorder(seen))
        await kit.run_until_idle()
        ref.tell_direct(1)
        assert seen == ["started"]
        await kit.run_until_idle()
        assert seen == ["started", 1]


@pytest.mark.parametrize("seed", range(20))
async def test_tell_and_tell_direct_keep_the_order_of_the_calls(seed: int) -> None:
    dice = random.Random(seed)
    async with idle_recorder() as (ref, seen, _):
        for number in range(100):
            (ref.tell_direct if dice.random() < 0.6 else ref.tell)(number)
            if dice.random() < 0.3:
                await settle()
        await settle()
        assert seen == list(range(100)), f"seed {seed}"
