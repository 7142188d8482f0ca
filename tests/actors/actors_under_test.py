# SPDX-License-Identifier: Apache-2.0

"""Small actors and messages that many tests use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from actors import Actor, ActorContext, ActorRef, ActorSystem, DeadLetter, Hook, MailboxConfig, Reply, Signal
from actors.testing import settle


@dataclass(frozen=True, slots=True)
class Add:
    n: int


@dataclass(frozen=True, slots=True)
class GetTotal:
    reply_to: Reply[int]


@dataclass(frozen=True, slots=True)
class Explode:
    cause: BaseException


@dataclass(frozen=True, slots=True)
class Ignore:
    """Asks for an answer that never comes."""

    reply_to: Reply[int]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Keep the handler waiting until the event is set."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class ExplodeAfter:
    """Keep the handler waiting until the event is set, then fail."""

    event: asyncio.Event
    cause: BaseException


CounterMessage = Add | GetTotal | Explode | ExplodeAfter | Ignore | WaitFor


@dataclass(slots=True)
class Diary:
    """A record of what happened to the instances of one actor, in order."""

    lines: list[str] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    causes: list[BaseException | None] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


class Counter(Actor[CounterMessage]):
    def __init__(self, diary: Diary | None = None) -> None:
        self.diary = diary if diary is not None else Diary()
        self.total = 0

    async def started(self, context: ActorContext[CounterMessage]) -> None:
        self.diary.lines.append("started")

    async def receive(self, context: ActorContext[CounterMessage], message: CounterMessage) -> None:
        match message:
            case Add(n):
                self.total += n
                self.diary.added.append(n)
            case GetTotal(reply_to):
                reply_to.answer(self.total)
            case Explode(cause):
                raise cause
            case ExplodeAfter(event, cause):
                await event.wait()
                raise cause
            case Ignore():
                pass
            case WaitFor(event):
                self.diary.lines.append("waiting")
                await event.wait()
                self.diary.lines.append("waited")

    async def signal(self, context: ActorContext[CounterMessage], signal: Signal) -> None:
        self.diary.signals.append(signal)

    async def stopped(self, context: ActorContext[CounterMessage], cause: BaseException | None) -> None:
        self.diary.lines.append("stopped")
        self.diary.causes.append(cause)


@asynccontextmanager
async def running_system(
    *, hooks: Sequence[Hook] = (), shutdown_timeout_s: float = 5.0, **options: Any
) -> AsyncIterator[ActorSystem]:
    """Yield a running system, and check at the end that none of its tasks is left."""
    before = asyncio.all_tasks()
    try:
        async with ActorSystem("test", hooks=hooks, shutdown_timeout_s=shutdown_timeout_s, **options) as system:
            yield system
    finally:
        assert asyncio.all_tasks() - before == set()
        assert system.actor_count == 0


def collect_dead_letters(system: ActorSystem) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    system.dead_letters.subscribe(letters.append)
    return letters


@dataclass
class Busy:
    """A counter whose handler waits for ``gate``, so that its messages stay in the mailbox."""

    system: ActorSystem
    counter: ActorRef[CounterMessage]
    diary: Diary
    gate: asyncio.Event


@asynccontextmanager
async def busy_counter(mailbox: MailboxConfig, *queued: CounterMessage, **options: Any) -> AsyncIterator[Busy]:
    """Yield a busy counter with these messages in its mailbox. Its gate opens at the end, if not before."""
    diary, gate = Diary(), asyncio.Event()
    async with running_system(**options) as system:
        counter = system.spawn(lambda: Counter(diary), mailbox=mailbox)
        counter.tell(WaitFor(gate))
        await settle()
        for message in queued:
            counter.tell(message)
        yield Busy(system, counter, diary, gate)
        gate.set()
        await settle()


@asynccontextmanager
async def meanwhile(
    coroutine: Coroutine[Any, Any, Any], raises: type[Exception] | None = None, match: str | None = None
) -> AsyncIterator[list[Any]]:
    """Await a coroutine in a separate task while the body runs, and wait for its end.

    Its result, or the error that it must raise, is then in the list.
    """
    outcome: list[Any] = []

    async def run() -> None:
        if raises is None:
            outcome.append(await coroutine)
        else:
            with pytest.raises(raises, match=match) as raised:
                await coroutine
            outcome.append(raised.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await settle()
        yield outcome
