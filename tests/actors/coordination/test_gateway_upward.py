"""Events and requests from one attempt (H30, H33)."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.actors.coordination.operator_world import RecordingCoordinator, running_operator

# --- up ---------------------------------------------------------------------------------------------------------------


async def test_events_of_one_attempt_come_in_order_and_after_it_is_ready() -> None:  # H30, H10
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task = world.accept(0)
        task.opens_at_once = False
        await world.settle()
        task.send("before it opened")
        task.open()
        for number in range(10):
            task.send(number)
        await world.settle()
        assert coordinator.calls[1] == ("subtask_ready", 0, 0)
        assert coordinator.events == ["before it opened", *range(10)]
        assert task.machine.all_confirmed


async def test_an_event_is_confirmed_to_the_task_only_when_the_coordinator_has_handled_it() -> None:  # H30, H27
    gate = anyio.Event()

    async def stay(*args: Any) -> None:
        await gate.wait()

    coordinator = RecordingCoordinator(handle_event_from_operator=stay)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
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
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
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
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        request_id = task.ask("please")
        await world.settle()
        assert isinstance(task.answers[request_id], RuntimeError)
        assert not world.failures
        task.send("we go on")
        await world.settle()
        assert coordinator.events == ["we go on"]


async def test_a_coordinator_that_answers_no_requests_says_so() -> None:  # H33
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
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
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        request_id = task.ask("hurry")
        await world.settle()
        world.fail(task)
        await world.settle()
        gate.set()
        await world.settle()
        assert "over" in str(task.answers[request_id])
        assert not world.failures
