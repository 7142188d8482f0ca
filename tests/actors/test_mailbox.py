# SPDX-License-Identifier: Apache-2.0

"""Bounds, policies, statistics, and the guarantee that no accepted message is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import (
    ActorStopped,
    AskTimeout,
    DeadLetterReason,
    MailboxConfig,
    MailboxFull,
    OnFull,
)
from actors.mailbox import Mailbox
from actors.testing import VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import (
    Add,
    Counter,
    Diary,
    GetTotal,
    WaitFor,
    collect_dead_letters,
    running_system,
)


async def test_waiting_senders_are_served_in_order() -> None:
    diary, gate = Diary(), asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(2))
        counter.tell(WaitFor(gate))
        await settle()
        accepted: list[int] = []

        async def send(n: int) -> None:
            await counter.send(Add(n))
            accepted.append(n)

        async with anyio.create_task_group() as tasks:
            for n in range(5):
                tasks.start_soon(send, n)
            await settle()
            assert accepted == [0, 1]
            assert counter.statistics().waiting_senders == 3
            gate.set()
        assert accepted == [0, 1, 2, 3, 4]
        await counter.ask(GetTotal, timeout_s=60.0)
    assert diary.added == [0, 1, 2, 3, 4]


async def test_tell_does_not_overtake_a_waiting_sender() -> None:
    gate = asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counter.send, Add(2))
            await settle()
            with pytest.raises(MailboxFull, match="full at 1"):
                counter.tell(Add(3))
            gate.set()


async def test_waiting_sender_fails_when_the_target_stops() -> None:
    gate = asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(1))
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                with pytest.raises(ActorStopped):
                    await counter.send(Add(2))

            tasks.start_soon(send)
            await settle()
            tasks.start_soon(system.stop, counter)
            await settle()
            gate.set()


async def test_ask_without_room_times_out_and_withdraws_its_message() -> None:
    diary, gate, clock = Diary(), asyncio.Event(), VirtualClock()
    async with running_system(clock=clock) as system:
        counter = system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(1))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(AskTimeout):
                    await counter.ask(GetTotal, timeout_s=1.0)

            tasks.start_soon(ask)
            await settle()
            assert counter.statistics().waiting_senders == 1
            await clock.advance(1.0)
        assert counter.statistics().waiting_senders == 0
        gate.set()
        await settle()
        assert counter.statistics().accepted == 2


async def test_ask_that_waited_for_room_is_answered() -> None:
    gate = asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(7))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                assert await counter.ask(GetTotal, timeout_s=60.0) == 7

            tasks.start_soon(ask)
            await settle()
            gate.set()


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
    diary, gate = Diary(), asyncio.Event()
    async with running_system() as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(2, on_full))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(0))
        await counter.send(Add(1))
        counter.tell(Add(2))
        await counter.send(Add(3))
        assert counter.statistics().dropped == 2
        gate.set()
        await settle()
    assert diary.added == handled
    assert [(letter.message, letter.reason) for letter in letters] == [(Add(n), reason) for n, reason in lost]


@pytest.mark.parametrize("on_full", [OnFull.DROP_NEWEST, OnFull.DROP_OLDEST, OnFull.REFUSE])
async def test_ask_fails_immediately_when_its_message_is_dropped_or_refused(on_full: OnFull) -> None:
    gate = asyncio.Event()
    async with running_system(clock=VirtualClock()) as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(1, on_full))
        counter.tell(WaitFor(gate))
        await settle()
        if on_full is not OnFull.DROP_OLDEST:
            counter.tell(Add(0))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(MailboxFull):
                    await counter.ask(GetTotal, timeout_s=1.0)

            tasks.start_soon(ask)
            await settle()
            if on_full is OnFull.DROP_OLDEST:
                counter.tell(Add(0))
        gate.set()


async def test_refuse_raises_for_tell_and_send() -> None:
    gate = asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(1, OnFull.REFUSE))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(0))
        with pytest.raises(MailboxFull):
            counter.tell(Add(1))
        with pytest.raises(MailboxFull):
            await counter.send(Add(1))
        assert counter.statistics().refused == 2
        gate.set()


async def test_statistics_add_up() -> None:
    gate = asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(Counter, mailbox=MailboxConfig(10))
        counter.tell(WaitFor(gate))
        await settle()
        for n in range(7):
            counter.tell(Add(n))
        busy = counter.statistics()
        assert (busy.capacity, busy.queued, busy.high_water, busy.accepted, busy.handled) == (10, 7, 7, 8, 1)
        gate.set()
        await settle()
        idle = counter.statistics()
        assert (idle.queued, idle.high_water, idle.accepted, idle.handled, idle.restarts) == (0, 7, 8, 8, 0)
    assert counter.statistics().high_water == 7


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


async def test_cancelled_waiting_sender_withdraws_its_message() -> None:
    diary, gate = Diary(), asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counter.send, Add(1))
            await settle()
            tasks.cancel_scope.cancel()
        gate.set()
        await settle()
        await counter.ask(GetTotal, timeout_s=60.0)
    assert diary.added == [0]


async def test_sender_cancelled_as_room_appears_withdraws_its_message() -> None:
    diary, gate = Diary(), asyncio.Event()
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary), mailbox=MailboxConfig(1))
        counter.tell(WaitFor(gate))
        await settle()
        counter.tell(Add(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counter.send, Add(1))
            await settle()
            gate.set()  # the reader runs first, and finds a sender that is cancelled but not yet gone
            tasks.cancel_scope.cancel()
        assert await counter.ask(GetTotal, timeout_s=60.0) == 0
    assert diary.added == [0]


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
