# SPDX-License-Identifier: Apache-2.0

"""Keyed timers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from actors import Actor, ActorContext, Directive, MailboxConfig, Supervision
from actors.testing import VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import running_system


@dataclass(frozen=True, slots=True)
class Start:
    key: str
    message: str
    delay_s: float | None = None
    every_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    key: str


@dataclass(frozen=True, slots=True)
class Fail:
    pass


class Alarm(Actor[Start | Cancel | Fail | str]):
    def __init__(self, heard: list[tuple[float, str]]) -> None:
        self.heard = heard

    async def receive(self, context: ActorContext[Any], message: Start | Cancel | Fail | str) -> None:
        match message:
            case Start(key, text, delay_s, every_s):
                context.timers.start(key, text, delay_s=delay_s, every_s=every_s)
                assert context.timers.is_active(key)
            case Cancel(key):
                active = context.timers.is_active(key)
                assert context.timers.cancel(key) is active
                assert not context.timers.is_active(key)
            case Fail():
                raise OSError("broken alarm")
            case str():
                self.heard.append((context.clock.now(), message))


async def test_timer_delivers_once_after_its_delay() -> None:
    heard: list[tuple[float, str]] = []
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: Alarm(heard)).tell(Start("a", "ring", delay_s=2.0))
        await kit.advance(1.9)
        assert heard == []
        await kit.advance(10.0)
    assert heard == [(2.0, "ring")]


class Sleeper(Actor[str]):
    async def receive(self, context: ActorContext[str], message: str) -> None:
        if message == "sleep":
            for key in "abc":
                context.timers.start(key, "ring", delay_s=1.0)
            await asyncio.sleep(2.0)


async def test_messages_of_timers_count_in_the_figures_of_the_mailbox() -> None:
    async with deterministic_system() as kit:
        sleeper = kit.system.spawn(Sleeper)
        sleeper.tell("sleep")
        await kit.advance(3.0)
        figures = sleeper.statistics()
        assert (figures.high_water, figures.accepted, figures.handled) == (3, 4, 4)


async def test_periodic_timer_does_not_drift() -> None:
    heard: list[tuple[float, str]] = []
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: Alarm(heard)).tell(Start("a", "tick", delay_s=0.5, every_s=1.0))
        for _ in range(7):
            await kit.advance(0.5)
    assert [at for at, _ in heard] == [0.5, 1.5, 2.5, 3.5]


async def test_first_tick_comes_after_one_period_without_a_delay() -> None:
    heard: list[tuple[float, str]] = []
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: Alarm(heard)).tell(Start("a", "tick", every_s=3.0))
        await kit.advance(7.0)
    assert [at for at, _ in heard] == [3.0, 6.0]


async def test_cancelled_timer_never_delivers_even_a_queued_message() -> None:
    heard: list[tuple[float, str]] = []
    async with running_system(clock=(clock := VirtualClock())) as system:
        alarm = system.spawn(lambda: Alarm(heard))
        alarm.tell(Start("a", "ring", delay_s=1.0))
        await settle()
        # No await between the two: the ticket is queued after the cancellation.
        alarm.tell(Cancel("a"))
        clock.between = no_pause
        await clock.advance(1.0)
        assert alarm.statistics().queued == 2
        await settle()
        assert heard == []


async def no_pause() -> None:
    pass


async def test_replaced_timer_delivers_only_the_new_message() -> None:
    heard: list[tuple[float, str]] = []
    async with running_system(clock=(clock := VirtualClock())) as system:
        alarm = system.spawn(lambda: Alarm(heard))
        alarm.tell(Start("a", "old", delay_s=1.0))
        await settle()
        alarm.tell(Start("a", "new", delay_s=1.0))
        clock.between = no_pause
        await clock.advance(1.0)
        clock.between = settle
        await clock.advance(1.0)
    assert [text for _, text in heard] == ["new"]


async def test_ticks_due_while_one_is_queued_are_skipped() -> None:
    heard: list[tuple[float, str]] = []
    async with running_system(clock=(clock := VirtualClock())) as system:
        alarm = system.spawn(lambda: Alarm(heard), mailbox=MailboxConfig(1))
        alarm.tell(Start("a", "tick", every_s=1.0))
        await settle()
        clock.between = no_pause
        await clock.advance(5.0)
        assert alarm.statistics().queued == 1
        await settle()
        assert len(heard) == 1
        clock.between = settle
        await clock.advance(1.0)
        assert len(heard) == 2


async def test_timers_end_at_a_restart_and_with_the_actor() -> None:
    heard: list[tuple[float, str]] = []
    async with running_system(clock=(clock := VirtualClock())) as system:
        alarm = system.spawn(lambda: Alarm(heard), supervision=Supervision(Directive.RESTART))
        alarm.tell(Start("a", "tick", every_s=1.0))
        await clock.advance(1.0)
        alarm.tell(Fail())
        await clock.advance(5.0)
        assert len(heard) == 1
        alarm.tell(Start("a", "tick", every_s=1.0))
        await settle()
        await system.stop(alarm)
        await clock.advance(5.0)
        assert len(heard) == 1
        assert clock.next_due_s() is None


@pytest.mark.parametrize(
    "options", [{}, {"delay_s": -1.0}, {"every_s": 0.0}, {"every_s": -1.0}], ids=["none", "delay", "zero", "every"]
)
async def test_invalid_timer_is_refused(options: dict[str, float]) -> None:
    async with running_system() as system:
        probe: list[ActorContext[Any]] = []

        class Holder(Actor[Any]):
            async def started(self, context: ActorContext[Any]) -> None:
                probe.append(context)

        system.spawn(Holder)
        await settle()
        with pytest.raises(ValueError, match=r"delay_s|every_s"):
            probe[0].timers.start("t", "x", **options)
