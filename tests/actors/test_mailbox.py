# SPDX-License-Identifier: Apache-2.0

"""Bounds, policies, statistics, and the guarantee that no accepted message is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import ActorStopped, AskTimeout, DeadLetterReason, MailboxConfig, MailboxFull, OnFull
from actors.mailbox import Mailbox
from actors.testing import VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import (
    Add,
    Counter,
    Diary,
    GetTotal,
    busy_counter,
    collect_dead_letters,
    meanwhile,
    running_system,
)


async def test_waiting_senders_are_served_in_order() -> None:
    async with busy_counter(MailboxConfig(2)) as busy:
        accepted: list[int] = []

        async def send(n: int) -> None:
            await busy.counter.send(Add(n))
            accepted.append(n)

        async with anyio.create_task_group() as tasks:
            for n in range(5):
                tasks.start_soon(send, n)
            await settle()
            assert accepted == [0, 1]
            assert busy.counter.statistics().waiting_senders == 3
            busy.gate.set()
        assert accepted == [0, 1, 2, 3, 4]
        await busy.counter.ask(GetTotal, timeout_s=60.0)
    assert busy.diary.added == [0, 1, 2, 3, 4]


async def test_tell_does_not_overtake_a_waiting_sender() -> None:
    async with busy_counter(MailboxConfig(1), Add(1)) as busy, meanwhile(busy.counter.send(Add(2))):
        with pytest.raises(MailboxFull, match=r"full at 1 messages .await send.. to wait for space"):
            busy.counter.tell(Add(3))
        busy.gate.set()


async def test_waiting_sender_fails_when_the_target_stops() -> None:
    async with busy_counter(MailboxConfig(1), Add(1)) as busy:
        async with meanwhile(busy.counter.send(Add(2)), ActorStopped), meanwhile(busy.system.stop(busy.counter)):
            busy.gate.set()


async def test_ask_without_space_times_out_and_withdraws_its_message() -> None:
    clock = VirtualClock()
    async with busy_counter(MailboxConfig(1), Add(1), clock=clock) as busy:
        async with meanwhile(busy.counter.ask(GetTotal, timeout_s=1.0), AskTimeout):
            assert busy.counter.statistics().waiting_senders == 1
            await clock.advance(1.0)
        assert busy.counter.statistics().waiting_senders == 0
        busy.gate.set()
        await settle()
        assert busy.counter.statistics().accepted == 2


async def test_ask_that_waited_for_space_is_answered() -> None:
    async with busy_counter(MailboxConfig(1), Add(7)) as busy:
        async with meanwhile(busy.counter.ask(GetTotal, timeout_s=60.0)) as answers:
            busy.gate.set()
        assert answers == [7]


@pytest.mark.parametrize(
    ("on_full", "handled", "lost"),
    [
        (OnFull.DROP_NEWEST, [0, 1], [(2, DeadLetterReason.DROPPED_NEWEST), (3, DeadLetterReason.DROPPED_NEWEST)]),
        (OnFull.DROP_OLDEST, [2, 3], [(0, DeadLetterReason.DROPPED_OLDEST), (1, DeadLetterReason.DROPPED_OLDEST)]),
    ],
)
async def test_full_mailbox_drops_what_its_policy_names(
    on_full: OnFull, handled: list[int], lost: list[tuple[int, DeadLetterReason]]
) -> None:
    async with busy_counter(MailboxConfig(2, on_full), Add(0)) as busy:
        letters = collect_dead_letters(busy.system)
        await busy.counter.send(Add(1))
        busy.counter.tell(Add(2))
        await busy.counter.send(Add(3))
        assert busy.counter.statistics().dropped == 2
    assert busy.diary.added == handled
    assert [(letter.message, letter.reason) for letter in letters] == [(Add(n), reason) for n, reason in lost]


@pytest.mark.parametrize("on_full", [OnFull.DROP_NEWEST, OnFull.DROP_OLDEST, OnFull.REFUSE])
async def test_ask_fails_immediately_when_its_message_is_dropped_or_refused(on_full: OnFull) -> None:
    drops_oldest = on_full is OnFull.DROP_OLDEST
    queued = [] if drops_oldest else [Add(0)]
    async with busy_counter(MailboxConfig(1, on_full), *queued, clock=VirtualClock()) as busy:
        async with meanwhile(busy.counter.ask(GetTotal, timeout_s=1.0), MailboxFull, "is full at 1 messages"):
            if drops_oldest:
                busy.counter.tell(Add(0))


async def test_refuse_raises_for_tell_and_send() -> None:
    async with busy_counter(MailboxConfig(1, OnFull.REFUSE), Add(0)) as busy:
        with pytest.raises(MailboxFull, match=r"send less at a time, or raise its capacity"):
            busy.counter.tell(Add(1))
        with pytest.raises(MailboxFull):
            await busy.counter.send(Add(1))
        assert busy.counter.statistics().refused == 2


async def test_statistics_add_up() -> None:
    async with busy_counter(MailboxConfig(10), *map(Add, range(7))) as busy:
        figures = busy.counter.statistics()
        assert (figures.capacity, figures.queued, figures.high_water) == (10, 7, 7)
        assert (figures.accepted, figures.handled) == (8, 1)
        busy.gate.set()
        await settle()
        idle = busy.counter.statistics()
        assert (idle.queued, idle.high_water, idle.accepted, idle.handled, idle.restarts) == (0, 7, 8, 8, 0)
    assert busy.counter.statistics().high_water == 7


async def test_unbounded_mailbox_accepts_everything() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(capacity=None))
        for _ in range(5000):
            counter.tell(Add(1))
        assert await counter.ask(GetTotal, timeout_s=60.0) == 5000


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        MailboxConfig(capacity)


@pytest.mark.parametrize("space_appears", [False, True])  # then the reader finds a sender that is not yet gone
async def test_cancelled_waiting_sender_withdraws_its_message(space_appears: bool) -> None:
    async with busy_counter(MailboxConfig(1), Add(0)) as busy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(busy.counter.send, Add(1))
            await settle()
            if space_appears:
                busy.gate.set()
            tasks.cancel_scope.cancel()
        busy.gate.set()
        assert await busy.counter.ask(GetTotal, timeout_s=60.0) == 0
    assert busy.diary.added == [0]


@pytest.mark.parametrize("seed", range(40))
async def test_cancelling_senders_at_any_moment_neither_loses_nor_doubles_messages(seed: int) -> None:
    """Check that a message is handled once, unless its sender was cancelled before acceptance."""
    diary = Diary()
    async with deterministic_system(seed=seed) as kit:
        counter = kit.system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(2))
        sent: set[int] = set()
        scopes = [anyio.CancelScope() for _ in range(12)]

        async def send(n: int) -> None:
            with scopes[n]:
                await counter.send(Add(n))
                sent.add(n)

        async with anyio.create_task_group() as tasks:
            for n in range(12):
                tasks.start_soon(send, n)
            await settle()
            for n in range(seed % 3, 12, 3):
                scopes[n].cancel()
                if n % 2:
                    await kit.step()
            await kit.run_until_idle()
        await kit.run_until_idle()
    assert len(diary.added) == len(set(diary.added))
    assert sent <= set(diary.added)
    assert diary.added == sorted(diary.added)


@given(
    capacity=st.integers(1, 4),
    on_full=st.sampled_from(OnFull),
    takes=st.lists(st.booleans(), max_size=40),
)
def test_each_message_is_either_queued_dropped_or_refused(
    capacity: int, on_full: OnFull, takes: Sequence[bool]
) -> None:
    loop = asyncio.new_event_loop()
    try:
        dead: list[object] = []
        mailbox = Mailbox(MailboxConfig(capacity, on_full), loop, "it", lambda item, _: dead.append(item))
        taken: list[object] = []
        refused: list[object] = []
        for n, take in enumerate(takes):
            if take and mailbox.queue:
                taken.append(mailbox.queue.popleft())
            try:
                mailbox.offer(n)
            except MailboxFull:
                refused.append(n)
            assert len(mailbox.queue) <= capacity
        everything = [*taken, *mailbox.queue, *dead, *refused]
        assert sorted(everything, key=repr) == sorted(range(len(takes)), key=repr)
        kept = [n for n in range(len(takes)) if n not in dead and n not in refused]
        assert [*taken, *mailbox.queue] == kept
        statistics = mailbox.statistics(0)
        assert statistics.dropped == len(dead)
        assert statistics.refused == len(refused)
        mailbox.close()
        assert mailbox.closed
        assert not mailbox.queue
    finally:
        loop.close()
