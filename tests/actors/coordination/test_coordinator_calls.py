# SPDX-License-Identifier: Apache-2.0

"""How and when a coordinator's methods are called (H3, H5 to H9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from actors.coordination import CoordinatorContext
from actors.coordination.engine.messages import StartOperator
from protocol.attempts import FailureKind, GlobalFailureRaised
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    raising,
    running_operator,
    running_tasks,
)

# --- H5 -----------------------------------------------------------------------------------------------------------


async def test_methods_are_called_one_at_a_time_in_order() -> None:  # H5
    gate, inside, most_inside = asyncio.Event(), 0, 0

    async def wait_inside(*args: Any) -> None:
        nonlocal inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        await gate.wait()
        inside -= 1

    coordinator = RecordingCoordinator(handle_event_from_operator=wait_inside, subtask_failed=wait_inside)
    async with running_tasks(2, coordinator) as (world, (one, two)):
        for number in range(3):
            one.send(number)
            two.send(number)
        await world.settle()
        world.fail(two)
        await world.settle()
        assert len(coordinator.calls_of("handle_event_from_operator")) == 1
        assert not coordinator.calls_of("subtask_failed")
        gate.set()
        await world.settle()
        assert most_inside == 1
        assert [call[3] for call in coordinator.calls_of("handle_event_from_operator") if call[1] == 0] == [0, 1, 2]
        assert coordinator.calls_of("subtask_failed", "subtask_reset") == [
            ("subtask_failed", 1, 0, FailureKind.FAILED),
            ("subtask_reset", 1, -1),
        ]


async def test_what_is_sent_inside_a_method_leaves_in_the_order_of_the_calls() -> None:  # H5, H22
    async def reply_thrice(subtask: int, attempt: int, event: Any) -> None:
        for number in range(3):
            coordinator.gateways[subtask].send_event_nowait([event, number])

    coordinator = RecordingCoordinator(handle_event_from_operator=reply_thrice)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("a")
        task.send("b")
        await world.settle()
        assert task.events == [["a", 0], ["a", 1], ["a", 2], ["b", 0], ["b", 1], ["b", 2]]


# --- H6 -----------------------------------------------------------------------------------------------------------


async def test_start_comes_first_and_close_once_at_the_end() -> None:  # H6
    async with running_tasks(1) as (world, _):
        await world.stop()
        assert world.coordinator.calls[0] == ("start",)
        assert world.coordinator.calls[-1] == ("close",)
    assert len(world.coordinator.calls_of("close")) == 1


async def test_a_failure_in_start_is_raised_with_its_cause_and_what_was_built_is_closed() -> None:  # H6
    cause = ValueError("no such topic")
    coordinator = RecordingCoordinator(start=raising(cause))
    async with running_operator(coordinator, started=False) as world:
        with pytest.raises(ValueError, match="no such topic") as caught:
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))
        assert caught.value is cause
        await world.stop()
        assert coordinator.calls == [("start",), ("close",)]
        assert not world.reports  # no job exists yet that could fail


async def test_fail_job_inside_start_fails_the_start() -> None:  # H6, H8
    async def give_up(context: Any) -> None:
        context.fail_job("the input is gone")

    async with running_operator(RecordingCoordinator(start=give_up), started=False) as world:
        with pytest.raises(RuntimeError, match="the input is gone"):
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))


async def test_a_failure_in_close_is_logged_and_has_no_other_effect(  # H6
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = RecordingCoordinator(close=raising(ValueError("still open")))
    async with running_operator(coordinator) as world:
        await world.stop()
        assert len(coordinator.calls_of("close")) == 1
    assert "still open" in caplog.text


# --- H7, H8 -------------------------------------------------------------------------------------------------------


async def provoke(world: World, method: str) -> None:
    """Make the operator call ``method``."""
    (task,) = await world.running(0)
    if method == "handle_event_from_operator":
        task.send("x")
    elif method == "handle_request":
        task.ask("x")
    elif method == "handle_client_request":
        await world.ask_client_request("x")
    elif method in ("subtask_failed", "subtask_reset"):
        world.fail(task)
    elif method in ("subtask_suspected", "subtask_responsive"):
        task.lose_connection()
        await world.settle()
        task.reconnect(world.connection())
    elif method == "subtask_finished":
        task.finish()
        await world.settle()
        world.finish(task)
    elif method == "reset_to_checkpoint":
        world.reset()
    elif method == "run_ended":
        world.end_run()
    elif method in ("notify_checkpoint_aborted", "notify_checkpoint_discarded"):
        task.declines = "not now"
        world.begin_checkpoint()
    elif method in ("checkpoint_coordinator", "notify_checkpoint_complete"):
        world.begin_checkpoint()
    await world.settle()


METHODS = (
    "handle_event_from_operator",
    "subtask_ready",
    "subtask_suspected",
    "subtask_responsive",
    "subtask_failed",
    "subtask_finished",
    "subtask_reset",
    "checkpoint_coordinator",
    "notify_checkpoint_complete",
    "notify_checkpoint_aborted",
    "notify_checkpoint_discarded",
    "reset_to_checkpoint",
    "run_ended",
)


@pytest.mark.parametrize("method", METHODS)
async def test_an_exception_in_any_method_is_one_global_failure_with_its_cause(method: str) -> None:  # H7
    cause = ValueError("the books do not balance")
    coordinator = RecordingCoordinator(**{method: raising(cause)})
    async with running_operator(coordinator) as world:
        await provoke(world, method)
        assert world.reported(GlobalFailureRaised) == [
            GlobalFailureRaised("words", f"{method}: ValueError: the books do not balance")
        ]
        assert world.failures == [cause]


@pytest.mark.parametrize("method", METHODS)
async def test_a_method_with_the_wrong_arguments_fails_the_job_and_not_the_driver(method: str) -> None:  # H7
    coordinator = RecordingCoordinator()

    def takes_nothing() -> Awaitable[None]:
        raise AssertionError("never called")

    setattr(coordinator, method, takes_nothing)
    async with running_operator(coordinator) as world:
        await provoke(world, method)
        (failure,) = world.reported(GlobalFailureRaised)
        assert "TypeError" in failure.cause
        assert world.tracker.is_alive


async def wait_for_what_is_cancelled(*args: Any) -> None:
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone


@pytest.mark.parametrize("method", METHODS)
async def test_a_method_that_awaits_what_was_cancelled_fails_the_job_and_not_the_driver(method: str) -> None:  # H7
    coordinator = RecordingCoordinator(**{method: wait_for_what_is_cancelled})
    async with running_operator(coordinator) as world:
        await provoke(world, method)
        (failure,) = world.reported(GlobalFailureRaised)
        assert failure.cause == f"{method}: RuntimeError: {method} awaited something that was cancelled"
        assert world.tracker.is_alive


async def test_a_start_that_awaits_what_was_cancelled_is_a_failed_start() -> None:  # H6
    async with running_operator(RecordingCoordinator(start=wait_for_what_is_cancelled), started=False) as world:
        with pytest.raises(RuntimeError, match="start awaited something that was cancelled"):
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))


async def test_the_first_cause_stays_until_the_reset() -> None:  # H7, H8
    coordinator = RecordingCoordinator(
        handle_event_from_operator=raising(ValueError("first")), subtask_failed=raising(ValueError("second"))
    )
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("x")
        await world.settle()
        world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        await world.settle()
        assert [str(failure) for failure in world.failures] == ["first"]
        world.reset()
        (again,) = await world.running(0)
        again.send("y")
        await world.settle()
        assert [str(failure) for failure in world.failures] == ["first", "first"]
        assert len(world.reported(GlobalFailureRaised)) == 2


async def test_too_many_failed_checkpoints_are_a_global_failure_whose_cause_is_known() -> None:  # H45
    async with running_tasks(1, tolerated_failures=1) as (world, (task,)):
        task.declines = "disk full"
        for _ in range(2):
            await world.checkpoint()
        (report,) = world.reported(GlobalFailureRaised)
        assert "disk full" in report.cause
        assert [str(failure) for failure in world.failures] == [report.cause]


# --- H9 -----------------------------------------------------------------------------------------------------------


async def test_the_context_tells_who_and_where_the_coordinator_is() -> None:
    async with running_operator(parallelism=3, mode=RestoreMode.BATCH) as world:
        context = world.coordinator.context
        assert (context.operator_id, context.parallelism, context.mode) == ("words", 3, RestoreMode.BATCH)
        context.log.debug("a world.coordinator may log")
        assert context.clock.now() == world.kit.clock.now()


async def test_the_store_is_there_before_the_start() -> None:  # R100
    async def put(context: CoordinatorContext) -> None:
        context.store.put_if_absent("broker", "one for all")

    coordinator = RecordingCoordinator(start=put)
    async with running_operator(coordinator):
        assert coordinator.context.store.get("broker") == "one for all"


async def test_the_result_of_blocking_work_comes_in_the_coordinators_order() -> None:  # H9
    heard: list[Any] = []
    gate = asyncio.Event()

    async def take(result: int | None, error: Exception | None) -> None:
        heard.append((result, error))

    async def ask_and_stay(*args: Any) -> None:
        coordinator.context.call_async(divmod, 7, 2, handler=take)
        await gate.wait()
        heard.append("method over")

    coordinator = RecordingCoordinator(subtask_ready=ask_and_stay)
    async with running_tasks(1, coordinator) as (world, _):
        assert heard == []
        gate.set()
        await world.settle()
        assert heard == ["method over", ((3, 1), None)]


async def test_an_error_of_blocking_work_goes_to_its_handler() -> None:  # H9
    heard: list[Any] = []

    async def take(result: Any, error: Exception | None) -> None:
        heard.append((result, type(error)))

    async with running_operator() as world:
        world.coordinator.context.call_async(int, "no number", handler=take)
        await world.settle()
        assert heard == [(None, ValueError)]
        assert not world.reports


async def test_work_in_the_background_holds_no_method_up_and_comes_back_in_their_order() -> None:  # H5, H9
    heard: list[Any] = []
    over, gate = asyncio.Event(), asyncio.Event()

    async def work(what: str) -> str:
        await over.wait()
        return what.upper()

    async def take(result: str | None, error: Exception | None) -> None:
        heard.append(result)

    async def stay(subtask: int, attempt: int, event: Any) -> None:
        await gate.wait()
        heard.append(event)

    coordinator = RecordingCoordinator(handle_event_from_operator=stay)
    async with running_tasks(1, coordinator) as (world, (task,)):
        coordinator.context.run_in_background(work, "done", handler=take)
        task.send("an event")
        await world.settle()
        over.set()
        await world.settle()
        assert heard == []
        gate.set()
        await world.settle()
        assert heard == ["an event", "DONE"]


async def test_an_error_in_the_background_goes_to_its_handler() -> None:  # H9
    heard: list[Any] = []

    async def take(result: Any, error: Exception | None) -> None:
        heard.append((result, str(error)))

    async with running_operator() as world:
        world.coordinator.context.run_in_background(raising(ValueError("no broker")), handler=take)
        await world.settle()
        assert heard == [(None, "no broker")]
        assert not world.reports


async def test_work_in_the_background_is_cancelled_before_close() -> None:  # H6, H9
    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            world.coordinator.calls.append(("cancelled",))

    async with running_operator() as world:
        world.coordinator.context.run_in_background(forever, handler=raising(AssertionError("after close")))
        await world.settle()
        await world.stop()
        assert world.coordinator.calls[-2:] == [("cancelled",), ("close",)]


async def test_a_handler_that_raises_is_a_global_failure() -> None:  # H7, H9
    async with running_operator() as world:
        world.coordinator.context.call_async(int, "1", handler=raising(ValueError("cannot use it")))
        await world.settle()
        (failure,) = world.reported(GlobalFailureRaised)
        assert "cannot use it" in failure.cause


async def test_a_delayed_call_comes_when_its_time_has_come() -> None:  # H9
    heard: list[str] = []

    async def ring(name: str) -> None:
        heard.append(name)

    async with running_operator() as world:
        world.coordinator.context.call_later(2.0, lambda: ring("late"))
        world.coordinator.context.call_later(1.0, lambda: ring("early"))
        await world.advance(0.9)
        assert heard == []
        await world.advance(0.2)
        assert heard == ["early"]
        await world.advance(1.0)
        assert heard == ["early", "late"]


async def test_a_delayed_call_is_dropped_at_the_end() -> None:  # H9
    async with running_operator() as world:
        world.coordinator.context.call_later(1.0, raising(AssertionError("after close")))
        await world.stop()
        await world.advance(2.0)
        assert world.coordinator.calls[-1] == ("close",)
        assert not world.failures
