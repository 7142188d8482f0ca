# SPDX-License-Identifier: Apache-2.0

"""A raised object that is not an ``Exception`` fails only the job of its coordinator (H65)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors import ExitRaised
from actors.coordination import (
    CoordinatorContext,
    OperatorCoordinator,
    RecreateOnReset,
    SourceCoordinator,
    StaticSplitEnumerator,
    parts_of,
)
from actors.coordination.engine.messages import StartOperator
from protocol.attempts import GlobalFailureRaised
from protocol.ids import ExecutionAttempt
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    raising,
    running_operator,
    running_tasks,
)
from tests.actors.coordination.test_coordinator_calls import METHODS, provoke


class OwnExit(BaseException):
    """Not an ``Exception``, and unknown to asyncio."""


ESCAPES: list[BaseException] = [
    SystemExit(3),
    KeyboardInterrupt("by hand"),
    GeneratorExit("by hand"),
    MemoryError("by hand"),
    RecursionError("by hand"),
    OwnExit("by hand"),
    BaseExceptionGroup("several", [SystemExit(4), ValueError("one of them")]),
    BaseExceptionGroup("several", [asyncio.CancelledError()]),
]

escapes = pytest.mark.parametrize("error", ESCAPES, ids=[type(error).__name__ for error in ESCAPES])


def expect_failure(world: World, error: BaseException, method: str) -> None:
    """Check that the job failed with ``error`` itself, and that the operator is alive."""
    assert world.failures == [error]
    assert world.reported(GlobalFailureRaised) == [
        GlobalFailureRaised("words", f"{method}: {type(error).__name__}: {error}")
    ]
    assert world.tracker.is_alive


async def expect_life(world: World) -> None:
    """Check that the coordinator works as before after the reset."""
    coordinator_calls = world.statistics.operator_resets
    world.reset()
    (task,) = await world.running(1)
    task.send("after the reset")
    await world.settle()
    assert world.statistics.operator_resets == coordinator_calls + 1


@escapes
@pytest.mark.parametrize("method", METHODS)
async def test_an_exit_raised_by_any_method_fails_the_job_and_not_the_sidecar(  # H65
    method: str, error: BaseException
) -> None:
    coordinator = RecordingCoordinator(**{method: raising(error)})
    async with running_operator(coordinator) as world:
        await provoke(world, method)
        expect_failure(world, error, method)
        coordinator.methods.clear()
        await expect_life(world)
        assert coordinator.events[-1] == "after the reset"


@pytest.mark.parametrize("method", METHODS)
async def test_a_cancelled_error_raised_by_any_method_fails_the_job_and_not_the_sidecar(method: str) -> None:  # H65
    error = asyncio.CancelledError("by hand")
    coordinator = RecordingCoordinator(**{method: raising(error)})
    async with running_operator(coordinator) as world:
        await provoke(world, method)
        (failure,) = world.failures
        assert failure.__cause__ is error
        coordinator.methods.clear()
        await expect_life(world)
        assert coordinator.events[-1] == "after the reset"


@escapes
async def test_an_exit_raised_by_start_is_a_failed_start(error: BaseException) -> None:  # H65, H6
    async with running_operator(RecordingCoordinator(start=raising(error)), started=False) as world:
        with pytest.raises(Exception, match=r"by hand|3|several") as raised:
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))
        assert error in (raised.value, raised.value.__cause__)


@escapes
async def test_an_exit_given_to_fail_job_in_start_is_a_failed_start(error: BaseException) -> None:  # H65, H8
    async def fail(context: CoordinatorContext) -> None:
        context.fail_job(error)

    async with running_operator(RecordingCoordinator(start=fail), started=False) as world:
        with pytest.raises(Exception, match=r"by hand|3|several") as raised:
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))
        assert error in (raised.value, raised.value.__cause__)


@escapes
async def test_an_exit_raised_by_close_is_logged_and_the_operator_ends(  # H65, H6
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_operator(RecordingCoordinator(close=raising(error))) as world:
        await world.stop()
        assert not world.tracker.is_alive
    assert "coordinator close failed" in caplog.text


@escapes
async def test_an_exit_raised_by_handle_request_fails_the_job_and_answers_the_task(error: BaseException) -> None:  # H65
    coordinator = RecordingCoordinator(handle_request=raising(error))
    async with running_tasks(1, coordinator) as (world, (task,)):
        request_id = task.ask("how many?")
        await world.settle()
        expect_failure(world, error, "handle_request")
        assert type(error).__name__ in str(task.answers.get(request_id, type(error).__name__))


async def test_an_ordinary_error_of_handle_request_fails_only_the_request() -> None:  # H65, H33
    coordinator = RecordingCoordinator(handle_request=raising(ValueError("unknown word")))
    async with running_tasks(1, coordinator) as (world, (task,)):
        request_id = task.ask("how many?")
        await world.settle()
        assert "ValueError: unknown word" in str(task.answers[request_id])
        assert not world.failures


@escapes
async def test_an_exit_raised_by_handle_client_request_fails_the_job_and_the_request(error: BaseException) -> None:
    # H65
    coordinator = RecordingCoordinator(handle_client_request=raising(error))
    async with running_tasks(1, coordinator) as (world, _):
        answer = await world.ask_client_request("how many?")
        (told,) = answer.errors
        assert isinstance(told, Exception)
        assert error in (told, told.__cause__)
        expect_failure(world, error, "handle_client_request")


def call_async(context: CoordinatorContext, error: BaseException, handled: list[Any]) -> None:
    def in_thread() -> None:
        raise error

    async def handler(result: None, failure: Exception | None) -> None:
        handled.append(failure)

    context.call_async(in_thread, handler=handler)


def run_in_background(context: CoordinatorContext, error: BaseException, handled: list[Any]) -> None:
    async def handler(result: None, failure: Exception | None) -> None:
        handled.append(failure)

    context.run_in_background(raising(error), handler=handler)


@escapes
@pytest.mark.parametrize("begin", [call_async, run_in_background])
async def test_an_exit_raised_in_the_background_fails_the_job(begin: Any, error: BaseException) -> None:  # H65
    coordinator, handled = RecordingCoordinator(), list[Any]()
    async with running_tasks(1, coordinator) as (world, _):
        begin(coordinator.context, error, handled)
        await world.settle()
        expect_failure(world, error, begin.__name__)
        assert not handled
        await expect_life(world)


@escapes
async def test_an_exit_raised_by_a_handler_fails_the_job(error: BaseException) -> None:  # H65
    async with running_tasks(1) as (world, _):
        world.coordinator.context.call_later(1.0, raising(error))
        await world.advance(1.0)
        expect_failure(world, error, "call handler")
        await expect_life(world)


@escapes
async def test_an_exit_raised_by_inject_barrier_fails_the_job(error: BaseException) -> None:  # H65
    def inject(attempt: ExecutionAttempt, checkpoint_id: int, events_before: int) -> None:
        raise error

    async with running_tasks(1, inject_barrier=inject) as (world, _):
        answer = await world.checkpoint()
        assert "its barrier could not be sent" in answer.reason()
        expect_failure(world, error, "inject_barrier")


@escapes
async def test_an_exit_raised_by_the_storage_fails_the_checkpoint_alone(error: BaseException) -> None:  # H65, H45
    async with running_tasks(1) as (world, _):
        world.on_store = raising(error)
        answer = await world.checkpoint()
        assert type(error).__name__ in answer.reason()
        assert not world.failures
        assert world.tracker.is_alive


@escapes
@pytest.mark.parametrize("method", ["factory", "start", "reset_to_checkpoint", "handle_event_from_operator"])
async def test_an_exit_raised_by_a_later_incarnation_fails_the_job(method: str, error: BaseException) -> None:  # H65
    made = 0

    def make() -> OperatorCoordinator:
        nonlocal made
        made += 1
        if made == 2 and method == "factory":
            raise error
        return RecordingCoordinator(**{method: raising(error)} if made == 2 else {})

    async with running_tasks(1, RecreateOnReset(make)) as (world, _):
        world.reset()
        (task,) = await world.running(1)
        task.send("x")
        await world.settle()
        assert world.failures[0] is error
        await expect_life(world)
        assert made == 3


async def test_a_method_that_cancels_its_own_task_fails_the_job_and_not_the_sidecar() -> None:  # H65
    async def cancel_itself(*args: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    coordinator = RecordingCoordinator(handle_event_from_operator=cancel_itself)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("x")
        await world.settle()
        (report,) = world.reported(GlobalFailureRaised)
        assert "awaited something that was cancelled" in report.cause
        coordinator.methods.clear()
        await expect_life(world)
        assert coordinator.events[-1] == "after the reset"


async def test_a_timeout_left_open_in_an_async_generator_fails_the_job_and_not_the_sidecar() -> None:  # H65
    async def pages() -> AsyncIterator[int]:
        async with asyncio.timeout(1.0):  # fires long after the method has returned
            yield 1

    left_open: list[Any] = []

    async def read_one_page(*args: Any) -> None:
        left_open.append(generator := pages())
        await anext(generator)

    coordinator = RecordingCoordinator(handle_event_from_operator=read_one_page)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("x")
        await world.settle()
        coordinator.methods.clear()
        await world.advance(1.0)
        (report,) = world.reported(GlobalFailureRaised)
        assert "the coordinator's task was cancelled between two calls" in report.cause
        await expect_life(world)
        assert coordinator.events[-1] == "after the reset"
        left_open.clear()
        gc.collect()


async def test_an_error_that_cannot_be_printed_fails_the_job_and_not_the_sidecar() -> None:  # H65
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise SystemExit("in __str__")

    coordinator = RecordingCoordinator(handle_event_from_operator=raising(Unprintable()))
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("x")
        await world.settle()
        (report,) = world.reported(GlobalFailureRaised)
        assert report.cause.startswith("handle_event_from_operator: Unprintable: ")
        await expect_life(world)


def test_an_exit_names_the_call_and_keeps_what_was_raised() -> None:
    error = ExitRaised("start", "raised SystemExit: 3")
    assert str(error) == "start raised SystemExit: 3"


@escapes
async def test_whatever_one_raises_in_close_all_parts_and_enumerators_are_closed(error: BaseException) -> None:  # H80
    closed: list[str] = []

    def closing(name: str) -> Any:
        async def close() -> None:
            closed.append(name)
            raise error

        return close

    parts = {name: RecordingCoordinator() for name in ("main", "first", "second")}
    for name, part in parts.items():
        part.close = closing(name)  # type: ignore[method-assign]
    main = parts.pop("main")
    async with running_operator(parts_of(main, parts)) as world:
        await world.stop()
    assert closed == ["main", "second", "first"]


@escapes
async def test_an_exit_raised_by_close_of_an_enumerator_is_logged_and_another_one_begins(  # H65, H68
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaving(StaticSplitEnumerator):
        async def close(self) -> None:
            raise error

    built: list[Leaving] = []

    def build(state: bytes | None) -> Leaving:
        built.append(Leaving([1], state))
        return built[-1]

    async with running_operator(SourceCoordinator(build)) as world:
        world.reset()
        await world.settle()
        assert len(built) == 2
        assert not world.failures
    assert "split enumerator close failed" in caplog.text
