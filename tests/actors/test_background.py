# SPDX-License-Identifier: Apache-2.0

"""Background work, worker threads, and reports of handlers that hold the loop (H9)."""

# ruff: noqa: PT012 - the exit of the whole `async with` raises

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from actors import Actor, ActorContext, Background, Directive, Hook, SlowHandler, Supervision
from actors.testing import VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import running_system


@dataclass(frozen=True, slots=True)
class Work:
    function: Callable[[], Any]
    in_thread: bool = False
    report_errors: bool = True


@dataclass(frozen=True, slots=True)
class Fail:
    pass


@dataclass(frozen=True, slots=True)
class Pause:
    gate: asyncio.Event


@dataclass(frozen=True, slots=True)
class CancelAll:
    pass


class Worker(Actor[Any]):
    def __init__(self, heard: list[object]) -> None:
        self.heard = heard
        self.works: list[Background] = []

    async def receive(self, context: ActorContext[Any], message: Any) -> None:
        match message:
            case Work(function, in_thread, report_errors):
                run = context.run_in_thread if in_thread else context.run
                on_error = (lambda error: error) if report_errors else None
                self.works.append(run(function, on_result=lambda value: value, on_error=on_error))
            case CancelAll():
                for work in self.works:
                    work.cancel()
            case Fail():
                raise OSError("worker")
            case Pause(gate):
                await gate.wait()
            case other:
                self.heard.append(other)


async def hello() -> str:
    await asyncio.sleep(0)
    return "hello"


async def oh_no() -> str:
    raise LookupError("oh no")


async def test_background_error_comes_back_as_a_message() -> None:
    heard: list[object] = []
    async with running_system() as system:
        system.spawn(lambda: Worker(heard)).tell(Work(oh_no))
        await settle()
    assert [repr(error) for error in heard] == ["LookupError('oh no')"]


async def test_background_error_without_on_error_fails_the_actor() -> None:
    with pytest.raises(LookupError, match="oh no"):
        async with running_system() as system:
            system.spawn(lambda: Worker([])).tell(Work(oh_no, report_errors=False))
            await asyncio.Event().wait()


async def test_actor_handles_messages_while_its_background_work_waits() -> None:
    heard: list[object] = []
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "late"

    async with running_system() as system:
        worker = system.spawn(lambda: Worker(heard))
        worker.tell(Work(wait))
        worker.tell("early")
        await settle()
        gate.set()
        await settle()
    assert heard == ["early", "late"]


@pytest.mark.parametrize("end", ["stop", "restart", "cancel"])
async def test_background_work_ends_with_its_actor_without_a_message(end: str) -> None:
    heard: list[object] = []
    ended: list[str] = []

    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return "never"

    async with running_system() as system:
        worker = system.spawn(lambda: Worker(heard), supervision=Supervision(Directive.RESTART))
        worker.tell(Work(wait))
        await settle()
        match end:
            case "stop":
                await system.stop(worker)
            case "restart":
                worker.tell(Fail())
            case _:
                worker.tell(CancelAll())
        await settle()
        assert ended == ["cancelled"]
    assert heard == []


async def test_queued_result_is_void_after_its_work_is_cancelled() -> None:
    heard: list[object] = []
    workers: list[Worker] = []
    gate = asyncio.Event()

    def build() -> Worker:
        workers.append(Worker(heard))
        return workers[-1]

    async with running_system() as system:
        worker = system.spawn(build)
        worker.tell(Work(hello))
        worker.tell(Pause(gate))
        await settle()
        assert worker.statistics().queued == 1
        workers[0].works[0].cancel()
        gate.set()
        await settle()
        assert worker.statistics().handled == 2
    assert heard == []


async def test_blocking_work_runs_in_a_thread_and_comes_back_as_a_message() -> None:  # H9
    both = asyncio.Event()

    class Heard(list[object]):
        def append(self, item: object) -> None:
            super().append(item)
            if len(self) == 2:
                both.set()

    heard = Heard()
    come_back = threading.Event()
    loop_thread = threading.get_ident()

    def block() -> str:
        assert threading.get_ident() != loop_thread
        assert come_back.wait(60.0)
        return "from a thread"

    async with running_system() as system:
        worker = system.spawn(lambda: Worker(heard))
        worker.tell(Work(block, in_thread=True))
        worker.tell("meanwhile")
        await settle()
        assert heard == ["meanwhile"]
        come_back.set()
        with anyio.fail_after(60.0):
            await both.wait()
    assert heard == ["meanwhile", "from a thread"]


async def test_hanging_thread_does_not_delay_the_shutdown() -> None:
    release = threading.Event()
    async with running_system() as system:
        system.spawn(lambda: Worker([])).tell(Work(release.wait, in_thread=True))
        await settle()
    release.set()


async def test_deterministic_system_runs_thread_functions_to_their_end_in_one_step() -> None:
    heard: list[object] = []
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: Worker(heard)).tell(Work(threading.get_ident, in_thread=True))
        await kit.run_until_idle()
    (thread,) = heard
    assert thread != threading.get_ident()


class FakeTimer:
    """Replaces perf_counter: the loop counts as held exactly when a handler says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowWatch(Hook):
    def __init__(self) -> None:
        self.seen: list[SlowHandler] = []

    def slow_handler(self, slow: SlowHandler) -> None:
        self.seen.append(slow)


@dataclass(frozen=True, slots=True)
class Hold:
    before_s: float
    after_s: float = 0.0


class Holder(Actor[Hold]):
    def __init__(self, timer: FakeTimer, gate: asyncio.Event, start_s: float = 0.0) -> None:
        self.timer, self.gate, self.start_s = timer, gate, start_s

    async def started(self, context: ActorContext[Hold]) -> None:
        self.timer.now += self.start_s

    async def receive(self, context: ActorContext[Hold], message: Hold) -> None:
        self.timer.now += message.before_s
        if message.after_s:
            await self.gate.wait()
            self.timer.now += message.after_s


async def test_handler_that_holds_the_loop_is_reported_with_its_name() -> None:  # H9
    timer, watch = FakeTimer(), SlowWatch()
    async with running_system(hooks=[watch], loop_timer=timer, slow_handler_limit_s=0.1) as system:
        holder = system.spawn(lambda: Holder(timer, asyncio.Event()), name="holder")
        for before_s in (0.09, 0.2, 0.01):
            holder.tell(Hold(before_s))
        await settle()
        assert system.slow_handlers == 1
    assert [(slow.ref, slow.what) for slow in watch.seen] == [(holder, "Hold")]
    assert watch.seen[0].held_s == pytest.approx(0.2)


async def test_awaited_time_does_not_count_as_holding_the_loop() -> None:  # H9
    timer, watch, gate = FakeTimer(), SlowWatch(), asyncio.Event()
    async with running_system(hooks=[watch], loop_timer=timer) as system:
        patient = system.spawn(lambda: Holder(timer, gate), name="patient")
        patient.tell(Hold(0.0, after_s=0.01))
        await settle()
        system.spawn(lambda: Holder(timer, gate), name="culprit").tell(Hold(5.0))
        await settle()
        gate.set()
        await settle()
    assert [slow.ref.name for slow in watch.seen] == ["culprit"]


async def test_step_after_an_await_counts_too() -> None:  # H9
    timer, watch, gate = FakeTimer(), SlowWatch(), asyncio.Event()
    async with running_system(hooks=[watch], loop_timer=timer) as system:
        system.spawn(lambda: Holder(timer, gate), name="late").tell(Hold(0.0, after_s=3.0))
        await settle()
        gate.set()
        await settle()
    assert [(slow.ref.name, slow.what, slow.held_s) for slow in watch.seen] == [("late", "Hold", 3.0)]


async def test_started_and_background_work_are_timed_too() -> None:  # H9
    timer, watch = FakeTimer(), SlowWatch()

    async def compute() -> None:
        timer.now += 2.0

    async with running_system(hooks=[watch], loop_timer=timer) as system:
        system.spawn(lambda: Holder(timer, asyncio.Event(), start_s=1.0), name="starter")
        await settle()
        system.spawn(lambda: Worker([]), name="worker").tell(Work(compute))
        await settle()
    assert [(slow.ref.name, slow.held_s) for slow in watch.seen] == [("starter", 1.0), ("worker", 2.0)]
    assert watch.seen[0].what == "started"
    assert watch.seen[1].what.endswith("compute")


async def test_busy_actor_lets_others_run_in_between() -> None:
    order: list[str] = []

    class Writer(Actor[int]):
        def __init__(self, name: str) -> None:
            self.name = name

        async def receive(self, context: ActorContext[int], message: int) -> None:
            order.append(self.name)

    async with running_system(clock=VirtualClock()) as system:
        many, few = system.spawn(lambda: Writer("many")), system.spawn(lambda: Writer("few"))
        await settle()
        for n in range(1000):
            many.tell(n)
        few.tell(0)
        await settle()
    assert len(order) == 1001
    assert order.index("few") < 1000
