# SPDX-License-Identifier: Apache-2.0

"""An exception that would end the loop fails only the actor whose code raised it (H65)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import anyio
import pytest

from actors import Actor, ActorContext, DirectActor, Directive, ExitRaised, Supervision, Terminated
from actors.actor import Signal
from actors.errors import ScopeLeftOpen
from actors.testing import TestProbe
from tests.actors.actors_under_test import running_system

EXITS: list[BaseException] = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseExceptionGroup("", [SystemExit()]),
]
exits = pytest.mark.parametrize("error", EXITS, ids=[type(error).__name__ for error in EXITS])
STOP = Supervision(Directive.STOP)


class Raising(Actor[object]):
    """Raises in ``where``."""

    def __init__(self, where: str, error: BaseException) -> None:
        self._where = where
        self._error = error

    def _raise(self, here: str) -> None:
        if here == self._where:
            raise self._error

    async def started(self, context: ActorContext[object]) -> None:
        self._raise("started")

    async def receive(self, context: ActorContext[object], message: object) -> None:
        self._raise("receive")
        if self._where == "background":
            context.run(self._in_background)
        if self._where == "thread":
            context.run_in_thread(self._raise, "thread")

    async def _in_background(self) -> None:
        raise self._error

    async def signal(self, context: ActorContext[object], signal: Any) -> None:
        self._raise("signal")

    async def stopped(self, context: ActorContext[object], cause: BaseException | None) -> None:
        self._raise("stopped")


@exits
@pytest.mark.parametrize("where", ["started", "receive", "background", "thread"])
async def test_exit_fails_only_the_actor_that_raised_it(where: str, error: BaseException) -> None:
    async with running_system() as system:
        neighbour: TestProbe[object] = TestProbe(system)
        ref = system.spawn(lambda: Raising(where, error), supervision=STOP)
        neighbour.watch(ref)
        ref.tell("go")
        cause = await neighbour.expect_terminated(ref)
        assert isinstance(cause, ExitRaised)
        assert cause.__cause__ is error


@exits
@pytest.mark.parametrize("where", ["signal", "stopped"])
async def test_exit_while_stopping_is_contained(where: str, error: BaseException) -> None:
    async with running_system() as system:
        await system.stop(system.spawn(lambda: Raising(where, error)))


@exits
async def test_exit_in_a_direct_call_fails_the_actor_not_the_caller(error: BaseException) -> None:
    class Direct(DirectActor[object]):
        def handle(self, context: ActorContext[object], message: object) -> None:
            raise error

    async with running_system() as system:
        neighbour: TestProbe[object] = TestProbe(system)
        ref = system.spawn(Direct, supervision=STOP)
        neighbour.watch(ref)
        await asyncio.sleep(0)
        ref.tell_direct("go")
        cause = await neighbour.expect_terminated(ref)
        assert cause is not None
        assert cause.__cause__ is error


@exits
async def test_exit_in_a_call_from_a_thread_is_its_outcome(error: BaseException) -> None:
    async def call() -> None:
        raise error

    async with running_system() as system:
        future = await asyncio.to_thread(partial(system.run_from_thread, call))
        with pytest.raises(ExitRaised):
            await asyncio.wrap_future(future)
        assert system.spawn(lambda: Raising("nowhere", error)).is_alive


@exits
async def test_unhandled_exit_leaves_the_system_as_an_ordinary_exception(error: BaseException) -> None:
    async def run() -> None:
        async with running_system() as system:
            system.spawn(lambda: Raising("receive", error)).tell("go")
            await asyncio.Event().wait()

    with pytest.raises(ExitRaised):
        await run()


class Abandoning(Actor[str]):
    """Reads the first item of an async generator that yields inside a cancel scope, and keeps the generator."""

    def __init__(self, deadline_s: float, stopped: list[str]) -> None:
        self._deadline_s = deadline_s
        self._stopped = stopped
        self.kept: list[AsyncGenerator[int, None]] = []

    async def _numbers(self) -> AsyncGenerator[int, None]:
        with anyio.move_on_after(self._deadline_s):
            yield 1
            yield 2

    async def receive(self, context: ActorContext[str], message: str) -> None:
        if message == "stop":
            context.stop()
            return
        numbers = self._numbers()
        self.kept.append(numbers)
        assert await anext(numbers) == 1

    async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
        await asyncio.sleep(0)  # the cancelled scope is around it, too
        self._stopped.append("to its end")


@pytest.mark.parametrize("deadline_s", [0.0, 3600.0], ids=["cancelled by its deadline", "when it stops"])
async def test_cancel_scope_that_is_never_left_fails_its_actor_and_no_other(deadline_s: float) -> None:
    causes: list[BaseException | None] = []
    stopped: list[str] = []

    class Watching(Actor[str]):
        async def started(self, context: ActorContext[str]) -> None:
            child = context.spawn(
                lambda: Abandoning(deadline_s, stopped), name="careless", supervision=Supervision(Directive.STOP)
            )
            context.watch(child)
            child.tell("go")
            if deadline_s:
                child.tell("stop")

        async def signal(self, context: ActorContext[str], signal: Signal) -> None:
            if isinstance(signal, Terminated):
                causes.append(signal.cause)
                over.set()

        async def receive(self, context: ActorContext[str], message: str) -> None:
            pass

    over = asyncio.Event()
    async with running_system() as system:
        system.spawn(Watching, name="watching")
        await over.wait()
        assert system.actor_count == 1
    assert stopped == ["to its end"]
    assert isinstance(causes[0], ScopeLeftOpen)
    assert "watching/careless" in str(causes[0])


async def test_cancel_scope_that_is_never_left_ends_the_system_with_the_name_of_the_actor() -> None:
    with pytest.raises(ScopeLeftOpen, match="'careless'"):  # noqa: PT012 - the exit of the `async with` raises
        async with running_system() as system:
            system.spawn(lambda: Abandoning(0.0, []), name="careless").tell("go")
            await asyncio.Event().wait()
