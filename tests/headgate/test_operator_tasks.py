# SPDX-License-Identifier: Apache-2.0

"""What an operator finds in the test kit as in a real task: errors, limits, refusals, and what happens at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import GatewayLimits, OperatorCoordinator, Reply, SubtaskContext, SubtaskOperator
from headgate.errors import AttemptOver, GatewayFull, RequestFailed, TimedOut
from headgate.testing import RecordingCoordinator, running_operator
from protocol.errors import LocalProtocolError
from spark_bridge.subtask.coroutines.concurrently import concurrently
from spark_bridge.subtask.errors import RegistrationFailed

ONE_EVENT = GatewayLimits(upward_events_max=1)


class Desk(OperatorCoordinator):
    """Answers when the test does, except that it refuses ``"wrong"``."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.replies: list[Reply] = []

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Reply:
        if request == "wrong":
            raise KeyError("there is no such key")
        self.taken.append(request)
        self.replies.append(Reply())
        return self.replies[-1]

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.taken.append(event)


def asks(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
    for record in records:
        yield context.request(record)


async def asks_in_a_coroutine(context: Any, record: Any) -> Any:
    return await context.request(record)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [asks, concurrently(asks_in_a_coroutine)], ids=["operator", "coroutine"])
async def test_a_failed_request_has_the_text_and_the_traceback_of_the_coordinator(operator: Any) -> None:
    async with running_operator(Desk, parallelism=1) as world:
        task = await world.launch_operator(0, operator, ["wrong"])
        assert isinstance(task.error, RequestFailed)
        assert "there is no such key" in str(task.error)
        assert "in handle_request" in str(task.error.__cause__)


async def test_coroutines_ask_one_after_the_other_if_there_is_capacity_for_one() -> None:
    async def ask(context: Any, number: int) -> Any:
        try:
            return await context.request(number, timeout_s={1: 1.0, 2: 10.0}.get(number, 60.0))
        except TimedOut:
            return "late"

    desk = Desk()
    async with running_operator(desk, parallelism=1, gateway=ONE_EVENT) as world:
        task = await world.launch_operator(0, concurrently(ask, limit=4), range(4))
        assert desk.taken == [0]
        await world.advance(2.0)
        desk.replies[0].answer("zero")
        await world.settle()
        assert desk.taken == [0, 2]  # the coroutine that has given up has not asked
        await world.advance(9.0)
        assert [reply.over for reply in desk.replies] == [True, True, False]  # H85: nobody waits for the second
        assert desk.taken == [0, 2, 3]
        desk.replies[2].answer("three")
        await world.settle()
        assert task.outputs == ["zero", "late", "late", "three"]


async def test_a_coroutine_that_goes_on_after_the_end_gets_no_answer() -> None:
    async def ask(context: Any, record: int) -> None:
        while AttemptOver not in told:
            try:
                await context.request(record)
            except (AttemptOver, asyncio.CancelledError) as error:
                told.append(type(error))

    told: list[Any] = []
    desk = Desk()
    async with running_operator(desk, parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(ask), ["question"])
        await world.stop()
        assert isinstance(task.error, AttemptOver)
        assert desk.taken == ["question"]
        assert told[-1] is AttemptOver


# --- events -----------------------------------------------------------------------------------------------------------


async def test_an_event_without_capacity_waits_or_is_refused() -> None:
    def sends(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        context.send_event("first")
        with pytest.raises(GatewayFull):
            context.send_event_nowait("refused")
        context.send_event("second")
        yield context.request("third")

    desk = Desk()
    async with running_operator(desk, parallelism=1, gateway=ONE_EVENT) as world:
        await world.launch_operator(0, sends, [])
        assert desk.taken == ["first", "second", "third"]


class Urgent(SubtaskOperator):
    """Calls ``handle`` on the thread of urgent events."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.events: list[Any] = []

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        yield self.context.statistics.events_received

    def handle_event(self, event: Any) -> None:
        self.events.append(event)

    def handle_urgent(self, event: Any) -> None:
        self.handle(self.context, event)


async def test_the_handler_of_urgent_events_cannot_wait_for_capacity() -> None:
    def handle(context: SubtaskContext, event: Any) -> None:
        context.send_event(1)
        context.send_event(2)

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, gateway=ONE_EVENT) as world:
        task = await world.launch_operator(0, lambda: Urgent(handle))
        await coordinator.gateways[0].send_event("go", urgent=True)
        await world.settle()
        assert isinstance(task.error, TimedOut)
        assert "so send from process()" in str(task.error)


async def test_a_handler_of_urgent_events_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.testing._operator_task.TURN_LIMIT_S", 0.1)
    released = threading.Event()
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        await world.launch_operator(0, lambda: Urgent(lambda context, event: released.wait()))
        await coordinator.gateways[0].send_event("go", urgent=True)
        with pytest.raises(RuntimeError, match=r"handle_urgent\(\) .* has not returned within 0\.1 s"):
            await world.settle()
        released.set()


async def test_both_kinds_of_events_count_once_in_the_statistics() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, lambda: Urgent(lambda context, event: threading.Event().wait(0.02)))
        for event in range(3):
            await coordinator.gateways[0].send_event(event)
            await coordinator.gateways[0].send_event(event, urgent=True)
        await world.settle()
        task.end_records()
        await world.settle()
        assert task.outputs == [6]


async def test_another_thread_of_the_operator_may_not_use_the_context() -> None:
    """Unlike in a real task: the order of its messages would not be that of the seed."""

    def sends(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        found: list[Exception] = []

        def send() -> None:
            try:
                context.send_event("from a thread")
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        yield from found

    desk = Desk()
    async with running_operator(desk, parallelism=1) as world:
        task = await world.launch_operator(0, sends, [])
        (error,) = task.outputs
        assert isinstance(error, LocalProtocolError)
        assert "on the task's own thread only" in str(error)
        assert desk.taken == []


# --- the beginning and the end ----------------------------------------------------------------------------------------


async def test_an_operator_that_is_launched_after_the_end_is_refused() -> None:
    async with running_operator(parallelism=1) as world:
        await world.stop()
        task = await world.launch_operator(0, asks, [])
        assert task.outcome == "failed"
        assert isinstance(task.error, RegistrationFailed)
        assert "no coordinator for operator 'operator'" in str(task.error)


async def test_an_operator_ends_when_no_checkpoint_holds_its_events() -> None:
    def sends(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        context.send_event("held")

    desk = Desk()
    async with running_operator(desk, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, sends)
        task.silent = True
        checkpoint = world.begin_checkpoint()
        await world.settle()  # events are held from now on, and the barrier waits until the coordinator knows it
        task.end_records()
        await world.settle()
        assert (task.exit_status(), task.outcome, desk.taken) == (None, "", [])
        task.silent = False
        await world.settle()
        assert checkpoint.value == 1
        assert len(world.checkpoints[0].subtask_states[0].held) == 1
        assert (task.outcome, desk.taken) == ("success", ["held"])
