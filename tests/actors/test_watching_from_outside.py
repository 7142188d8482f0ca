# SPDX-License-Identifier: Apache-2.0

"""Hooks, dead letters, the dump of waiting actors, and the keys of log lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import structlog
from structlog.testing import LogCapture

from actors import (
    Actor,
    ActorContext,
    ActorRef,
    ActorStopped,
    AskTimeout,
    DeadLetter,
    DeadLetterReason,
    Decision,
    Directive,
    Hook,
    MailboxConfig,
    OnFull,
    Proceed,
    Reply,
    Supervision,
)
from actors.dead_letters import LOGGED_MAX
from actors.testing import VirtualClock, settle
from tests.actors.actors_under_test import Add, Counter, Diary, Explode, GetTotal, busy_counter, running_system


@pytest.fixture
def log_lines() -> Iterator[list[Any]]:
    capture = LogCapture()
    before = structlog.get_config()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, capture])
    yield capture.entries
    structlog.configure(**before)


class Recorder(Hook):
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        self.seen.append(f"{self.name} before {type(message).__name__} of {ref.name}")
        await proceed(message)
        self.seen.append(f"{self.name} after")

    def actor_started(self, ref: ActorRef[Any], restarts: int) -> None:
        self.seen.append(f"{self.name} started {ref.name} {restarts}")

    def actor_failed(self, ref: ActorRef[Any], cause: BaseException, decision: Decision) -> None:
        self.seen.append(f"{self.name} failed {type(cause).__name__} {decision.directive.value}")

    def actor_stopped(self, ref: ActorRef[Any], cause: BaseException | None) -> None:
        self.seen.append(f"{self.name} stopped {ref.name}")


async def test_hooks_nest_around_messages_and_observe_lives() -> None:
    seen: list[str] = []
    async with running_system(hooks=[Recorder("outer", seen), Recorder("inner", seen)]) as system:
        counter = system.spawn(Counter, name="counter")
        counter.tell(Add(1))
        await settle()
    assert seen == [
        "outer started counter 0",
        "inner started counter 0",
        "outer before Add of counter",
        "inner before Add of counter",
        "inner after",
        "outer after",
        "outer stopped counter",
        "inner stopped counter",
    ]


async def test_hooks_learn_who_failed_and_why_and_what_was_decided() -> None:
    seen: list[Any] = []

    class Ends(Hook):
        def actor_failed(self, ref: ActorRef[Any], cause: BaseException, decision: Decision) -> None:
            seen.append((ref, type(cause), decision.directive))

        def actor_stopped(self, ref: ActorRef[Any], cause: BaseException | None) -> None:
            seen.append((ref, type(cause)))

    async with running_system(hooks=[Ends()]) as system:
        fails = system.spawn(Counter, supervision=Supervision(Directive.STOP))
        fails.tell(Explode(ValueError("boom")))
        await settle()
        ends = system.spawn(Counter)
        await system.stop(ends)
    assert seen == [(fails, ValueError, Directive.STOP), (fails, ValueError), (ends, type(None))]


class Chaos(Hook):
    """Drops the first Add, doubles the second, and fails at the third."""

    def __init__(self) -> None:
        self.count = 0

    async def around_message(self, ref: ActorRef[Any], message: Any, proceed: Proceed) -> None:
        if not isinstance(message, Add):
            await proceed(message)
            return
        self.count += 1
        if self.count == 2:
            await proceed(message)
            await proceed(Add(message.n + 100))
        elif self.count == 3:
            raise ConnectionError("injected")


async def test_hook_can_swallow_double_change_and_fail_messages() -> None:
    diary = Diary()
    async with running_system(hooks=[Chaos()]) as system:
        counter = system.spawn(lambda: Counter(diary), supervision=Supervision(Directive.RESTART))
        for n in range(3):
            counter.tell(Add(n))
        await counter.ask(GetTotal, timeout_s=60.0)
        assert counter.statistics().restarts == 1
    assert diary.added == [1, 101]


async def test_dead_letters_are_counted_by_reason_until_unsubscribed() -> None:
    async with running_system() as system:
        first: list[DeadLetter] = []
        second: list[DeadLetter] = []
        end_first = system.dead_letters.subscribe(first.append)
        system.dead_letters.subscribe(second.append)
        counter = system.spawn(Counter)
        await system.stop(counter)
        counter.tell(Add(1))
        end_first()
        end_first()  # harmless
        counter.tell(Add(2))
        assert (len(first), len(second)) == (1, 2)
        assert system.dead_letters.counts == {DeadLetterReason.STOPPED: 2}


async def test_the_first_dead_letters_are_logged_the_last_of_them_says_so_and_all_are_counted(
    log_lines: list[Any],
) -> None:
    async with running_system() as system:
        counter = system.spawn(Counter, name="counter")
        await system.stop(counter)
        for _ in range(LOGGED_MAX + 5):
            counter.tell(Add(1))
        lines = [line for line in log_lines if line["event"] == "message not handled"]
        assert [line["more_are_only_counted"] for line in lines] == [False] * (LOGGED_MAX - 1) + [True]
        assert sum(system.dead_letters.counts.values()) == LOGGED_MAX + 5


async def test_failing_dead_letter_subscriber_harms_nobody() -> None:
    async with running_system() as system:

        def broken(_: DeadLetter) -> None:
            raise RuntimeError("subscriber")

        class Collector(Actor[DeadLetter]):
            async def receive(self, context: ActorContext[DeadLetter], message: DeadLetter) -> None:
                pass

        collector = system.spawn(Collector, mailbox=MailboxConfig(1, OnFull.DROP_NEWEST))
        system.dead_letters.subscribe(broken)
        system.dead_letters.subscribe(collector.tell)
        counter = system.spawn(Counter)
        await system.stop(counter)
        for n in range(5):
            counter.tell(Add(n))
        assert collector.statistics().dropped == 4


class Asker(Actor[str]):
    def __init__(self, name: str, refs: dict[str, ActorRef[Any]]) -> None:
        self.name, self.refs = name, refs

    async def receive(self, context: ActorContext[Any], message: Any) -> None:
        match message:
            case str():
                try:
                    await self.refs[message].ask(GetTotal, timeout_s=1.0)
                except (AskTimeout, ActorStopped):
                    context.stop()
            case GetTotal():
                pass


async def test_dump_says_who_waits_for_whom_and_names_a_deadlock() -> None:
    async with running_system(clock=(clock := VirtualClock())) as system:
        refs: dict[str, ActorRef[Any]] = {}
        for name in "ab":
            refs[name] = system.spawn(lambda name=name: Asker(name, refs), name=name)  # type: ignore[misc]
        assert system.dump_waits() == "nobody waits"
        refs["a"].tell("b")
        refs["b"].tell("a")
        await clock.advance(0.25)
        assert system.dump_waits().splitlines() == [
            "a waits for an answer from b: GetTotal, 0.250 s",
            "b waits for an answer from a: GetTotal, 0.250 s",
            "deadlock: a -> b -> a",
        ]
        await clock.advance(1.0)
        assert system.dump_waits() == "nobody waits"


async def test_dump_shows_senders_that_wait_for_space() -> None:
    async with busy_counter(MailboxConfig(1), Add(1), clock=VirtualClock()) as busy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(busy.counter.send, Add(2), name="sender")
            await settle()
            name = busy.counter.name
            assert busy.system.dump_waits() == f"task sender waits for space in {name}: Add, 0.000 s"
            busy.gate.set()


class Talker(Actor[Reply[None]]):
    async def receive(self, context: ActorContext[Reply[None]], message: Reply[None]) -> None:
        context.log.info("through the context")
        structlog.get_logger().info("through any logger")
        context.spawn(Counter, name="child", supervision=Supervision(Directive.STOP)).tell(Explode(KeyError()))
        message.answer(None)


async def test_every_log_line_names_actor_and_system(log_lines: list[Any]) -> None:
    async with running_system() as system:
        talker = system.spawn(Talker, name="talker", log_context={"operator_id": "w"})
        await talker.ask(lambda reply_to: reply_to, timeout_s=60.0)
        await settle()
    by_event = {line["event"]: line for line in log_lines}
    for event in ("through the context", "through any logger"):
        line = by_event[event]
        assert (line["system"], line["actor"], line["operator_id"]) == ("test", "talker", "w")
    failed = by_event["actor failed"]
    assert (failed["actor"], failed["operator_id"], failed["decision"]) == ("talker/child", "w", "stop")
