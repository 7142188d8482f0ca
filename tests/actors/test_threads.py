# SPDX-License-Identifier: Apache-2.0

"""Calls from other threads."""

# ruff: noqa: PT012 - the exit of the whole `async with` raises

from __future__ import annotations

import asyncio
import functools

import anyio
import pytest

from actors import Actor, ActorContext, ActorRef, SystemNotRunning
from actors.errors import ExitRaised
from actors.testing import settle
from tests.actors.actors_under_test import Add, Counter, CounterMessage, Explode, GetTotal, Ignore, running_system


@pytest.mark.parametrize("error", [LookupError("nothing here"), SystemExit(3), KeyboardInterrupt()])
async def test_what_a_function_in_a_thread_raises_fails_the_actor_that_has_started_it(error: BaseException) -> None:
    def fail() -> None:
        raise error

    class Starting(Actor[str]):
        async def receive(self, context: ActorContext[str], message: str) -> None:
            if message == "told":
                context.run_in_thread(fail, on_error=repr)
            elif message == "not told":
                context.run_in_thread(fail)
            else:
                told.append(message)
                arrived.set()

    told: list[str] = []
    arrived = asyncio.Event()
    with pytest.raises(Exception, match=r"nothing here|SystemExit|KeyboardInterrupt") as raised:
        async with running_system() as system:
            starting = system.spawn(Starting)
            starting.tell("told")
            await arrived.wait()
            starting.tell("not told")
            await asyncio.Event().wait()
    assert type(error).__name__ in told[0]
    assert raised.value is error or raised.value.__cause__ is error or isinstance(raised.value, ExitRaised)


async def test_thread_can_ask() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter)

        def in_a_thread() -> int:
            counter.tell_threadsafe(Add(5))
            ask = functools.partial(counter.ask, GetTotal, timeout_s=60.0)
            return system.run_from_thread(ask).result(10.0)

        assert await anyio.to_thread.run_sync(in_a_thread) == 5


async def test_error_comes_back_to_the_thread() -> None:
    async def fail() -> None:
        raise LookupError("nothing here")

    async with running_system() as system:

        def in_a_thread() -> None:
            system.run_from_thread(fail).result(10.0)

        with pytest.raises(LookupError, match="nothing here"):
            await anyio.to_thread.run_sync(in_a_thread)


async def test_pending_call_fails_when_system_stops() -> None:
    async with running_system(shutdown_timeout_s=0.1) as system:
        pending = system.run_from_thread(asyncio.Event().wait)
        await settle()
    with pytest.raises(SystemNotRunning, match="ended before"):
        pending.result(0)
    late = system.run_from_thread(asyncio.Event().wait)
    await settle()
    with pytest.raises(SystemNotRunning):
        late.result(0)


def test_call_from_thread_fails_after_loop_closes() -> None:
    async def main() -> ActorRef[CounterMessage]:
        async with running_system() as system:
            return system.spawn(Counter)

    ref = asyncio.run(main())
    with pytest.raises(SystemNotRunning, match="loop is closed"):
        ref.tell_threadsafe(Add(1))


async def test_call_from_thread_fails_when_its_actor_fails_the_system() -> None:
    with pytest.raises(KeyError):
        async with running_system() as system:
            counter = system.spawn(Counter)
            ask = functools.partial(counter.ask, Ignore, timeout_s=60.0)
            pending = system.run_from_thread(ask)
            await settle()
            counter.tell(Explode(KeyError("boom")))
            await asyncio.Event().wait()
    assert "is stopped" in str(pending.exception(0))
