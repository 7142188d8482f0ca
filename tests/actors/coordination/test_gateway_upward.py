# SPDX-License-Identifier: Apache-2.0

"""Events and requests from one attempt (H30, H33)."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from actors.coordination import OperatorCoordinator, RecreateOnReset
from actors.coordination.user_calls import TRACEBACK_BYTES_MAX, traceback_text
from tests.actors.coordination.operator_world import RecordingCoordinator, running_operator, running_tasks, waiting_for

# --- up ---------------------------------------------------------------------------------------------------------------


async def test_events_of_one_attempt_come_in_order_and_after_it_is_ready() -> None:  # H30, H10
    async with running_operator() as world:
        task = world.accept(0)
        task.opens_immediately = False
        await world.settle()
        task.send("before it opened")
        task.open()
        for number in range(10):
            task.send(number)
        await world.settle()
        assert world.coordinator.calls[1] == ("subtask_ready", 0, 0)
        assert world.coordinator.events == ["before it opened", *range(10)]
        assert task.machine.all_confirmed


async def test_an_event_is_confirmed_to_the_task_only_when_the_coordinator_has_handled_it() -> None:  # H30, H27
    gate = anyio.Event()

    coordinator = RecordingCoordinator(handle_event_from_operator=waiting_for(gate))
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("slow")
        await world.settle()
        assert not task.machine.all_confirmed
        gate.set()
        await world.settle()
        assert task.machine.all_confirmed


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_gets_its_answer_in_the_order_of_the_events_around_it() -> None:  # H33
    async def double(subtask: int, attempt: int, request: Any) -> Any:
        coordinator.gateways[subtask].send_event_nowait("sent before the answer")
        return request * 2

    coordinator = RecordingCoordinator(handle_request=double)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("before")
        request_id = task.ask(21)
        task.send("after")
        await world.settle()
        assert [call[0] for call in coordinator.calls[2:]] == [
            "handle_event_from_operator",
            "handle_request",
            "handle_event_from_operator",
        ]
        assert task.answers == {request_id: 42}
        assert task.events == ["sent before the answer"]


@pytest.mark.parametrize("answer", [object(), ValueError("no such split")], ids=["no value", "an exception"])
async def test_a_request_that_fails_is_the_askers_trouble_only(answer: Any) -> None:  # H33
    async def fail(*args: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    coordinator = RecordingCoordinator(handle_request=fail)
    async with running_tasks(1, coordinator) as (world, (task,)):
        request_id = task.ask("please")
        await world.settle()
        assert isinstance(task.answers[request_id], RuntimeError)
        assert not world.failures
        task.send("we go on")
        await world.settle()
        assert coordinator.events == ["we go on"]


async def test_a_coordinator_that_answers_no_requests_says_so() -> None:  # H33
    async with running_tasks(1) as (world, (task,)):
        request_id = task.ask("please")
        await world.settle()
        assert "override handle_request" in str(task.answers[request_id])
        assert not world.failures


async def test_an_answer_to_an_attempt_that_is_over_is_dropped() -> None:  # H33
    gate = anyio.Event()

    async def late(*args: Any) -> str:
        await gate.wait()
        return "too late"

    coordinator = RecordingCoordinator(handle_request=late)
    async with running_tasks(1, coordinator) as (world, (task,)):
        request_id = task.ask("hurry")
        await world.settle()
        world.fail(task)
        await world.settle()
        gate.set()
        await world.settle()
        assert "over" in str(task.answers[request_id])
        assert not world.failures


async def test_a_failed_request_brings_the_end_of_its_traceback_to_the_task_and_the_log() -> None:  # H33
    async def look_up(*args: Any) -> Any:
        return dict[str, int]()["n\udce4chster " + "long " * 4000]  # invalid Unicode, and larger than the sent part

    coordinator = RecordingCoordinator(handle_request=look_up)
    with capture_logs() as logs:
        async with running_tasks(1, coordinator) as (world, (task,)):
            request_id = task.ask("please")
            await world.settle()
            assert not world.failures
    traceback = task.tracebacks[request_id]
    assert len(traceback) <= TRACEBACK_BYTES_MAX
    assert traceback.decode().endswith("long '\n")
    (line,) = [line for line in logs if line["event"] == "request failed"]
    assert "KeyError" in line["exception"]  # as a text, because not every log can write that of the error


@pytest.mark.parametrize("text", ["short \udce4", "\N{EURO SIGN}" * 5000, "x\N{EURO SIGN}" * 5000])
def test_the_text_of_a_traceback_can_always_be_encoded_and_has_a_bound(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        encoded = traceback_text(error).encode()
    assert len(encoded) <= TRACEBACK_BYTES_MAX
    assert encoded.decode().rstrip().endswith(text.encode("utf-8", "backslashreplace").decode()[-100:])


@pytest.mark.parametrize("recreated", [False, True])
async def test_events_that_nothing_handles_are_counted_and_told_once(recreated: bool) -> None:  # H59
    coordinator = RecreateOnReset(OperatorCoordinator) if recreated else OperatorCoordinator()
    with capture_logs() as logs:
        async with running_tasks(1, coordinator) as (world, (task,)):
            task.send("anybody")
            task.send("there?")
            await world.settle()
            assert world.statistics.events_unhandled == 2
            assert not world.failures
    (line,) = [line for line in logs if line["event"] == "events from subtasks not handled"]
    assert "override handle_event_from_operator" in line["hint"]


async def test_events_that_are_handled_are_not_told_as_unhandled() -> None:  # H59
    for coordinator in (RecordingCoordinator(), RecreateOnReset(RecordingCoordinator)):
        async with running_tasks(1, coordinator) as (world, (task,)):
            task.send("here")
            await world.settle()
            assert world.statistics.events_received == 1
            assert world.statistics.events_unhandled == 0
