# SPDX-License-Identifier: Apache-2.0

"""A coordinator method that does not return is reported with its name, and the waiting tasks are notified (H70)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

import anyio
import pytest
from structlog.testing import capture_logs

from actors import Reply
from actors.coordination import OperatorConfig
from actors.coordination.engine.messages import StartOperator
from actors.coordination.host.part import RecreateOnReset
from actors.coordination.user_calls import CallWatch, call_user, current_watch
from tests.actors.coordination.operator_world import (
    Answer,
    RecordingCoordinator,
    World,
    running_operator,
    running_tasks,
)
from tests.actors.coordination.test_coordinator_calls import provoke

Reports = list[MutableMapping[str, Any]]


def reports(logged: Reports) -> list[dict[str, Any]]:
    """Return the reports, without the place in the code."""
    hidden = {"event", "log_level", "waiting_at", "actor", "system", "operator_id"}
    return [
        {key: value for key, value in line.items() if key not in hidden}
        for line in logged
        if line["event"] == "coordinator method has not returned"
    ]


class Meeting:
    """A method that waits until the test ends it."""

    def __init__(self) -> None:
        self.over = anyio.Event()

    async def __call__(self, *args: Any) -> Any:
        await self.over.wait()
        return b""

    async def end(self, world: World) -> None:
        """End the wait, so that the operator stops before its time limit, which is in real seconds."""
        self.over.set()
        await world.settle()


class Gates:
    """A handler that holds each event until its gate is opened."""

    def __init__(self) -> None:
        self.made: list[anyio.Event] = []

    async def __call__(self, subtask: int, attempt: int, event: Any) -> None:
        self.made.append(gate := anyio.Event())
        await gate.wait()

    def open_last(self) -> None:
        self.made[-1].set()


MEET = f"{__file__}:{Meeting.__call__.__code__.co_firstlineno + 1} in Meeting.__call__ (inside "


METHODS: dict[str, dict[str, Any]] = {
    "subtask_ready": {"subtask": 0, "attempt": 0},
    "handle_event_from_operator": {"subtask": 0, "attempt": 0},
    "handle_request": {"subtask": 0, "attempt": 0},
    "handle_client_request": {},
    "checkpoint_coordinator": {"checkpoint_id": 1},
    "notify_checkpoint_complete": {"checkpoint_id": 1},
    "notify_checkpoint_aborted": {"checkpoint_id": 1},
    "subtask_failed": {"subtask": 0, "attempt": 0},
    "subtask_reset": {"subtask": 0, "checkpoint_id": -1},
    "reset_to_checkpoint": {"checkpoint_id": -1},
    "run_ended": {"run_id": 1, "succeeded": True},
}
"""The methods, each with the arguments that its report names."""


@pytest.mark.parametrize("method", METHODS)
async def test_a_method_that_stays_awaited_is_reported_by_name_at_growing_intervals(method: str) -> None:  # H70
    meet = Meeting()
    coordinator = RecordingCoordinator(**{method: meet})
    with capture_logs() as logged:
        async with running_operator(coordinator, snapshot_timeout_s=1000.0, checkpoint_timeout_s=1000.0) as world:
            await provoke(world, method)
            await world.advance(9.9)
            assert reports(logged) == []
            await world.advance(0.2)
            assert reports(logged) == [{"method": method, "awaited_s": 10.0, **METHODS[method]}]
            await world.advance(70.0)
            assert [report["awaited_s"] for report in reports(logged)] == [10.0, 20.0, 40.0, 80.0]
            (place,) = {line["waiting_at"] for line in logged if "waiting_at" in line}
            assert place.startswith(MEET)
            await meet.end(world)


async def test_start_is_watched_too() -> None:  # H70
    meet = Meeting()
    coordinator = RecordingCoordinator(start=meet)
    with capture_logs() as logged:
        async with running_operator(coordinator, started=False) as world:
            world.tracker.tell(StartOperator(cast("Reply[None]", Answer())))
            await world.advance(15.0)
            await meet.end(world)
    assert reports(logged) == [{"method": "start", "awaited_s": 10.0}]


async def test_a_handler_of_the_context_is_watched_too() -> None:  # H70
    meet = Meeting()
    coordinator = RecordingCoordinator()
    with capture_logs() as logged:
        async with running_operator(coordinator) as world:
            await world.settle()
            coordinator.context.call_later(1.0, meet)
            await world.advance(12.0)
            await meet.end(world)
    assert [report["awaited_s"] for report in reports(logged)] == [10.0]


async def test_many_calls_that_each_return_are_never_reported() -> None:  # H70
    gates = Gates()
    coordinator = RecordingCoordinator(handle_event_from_operator=gates)
    with capture_logs() as logged:
        async with running_tasks(1, coordinator) as (world, (task,)):
            for number in range(10):
                task.send(number)
                await world.advance(6.0)
                gates.open_last()
                await world.settle()
    assert len(gates.made) == 10
    assert reports(logged) == []


async def test_a_call_after_one_that_took_long_is_reported_in_time() -> None:  # H70
    gates = Gates()
    coordinator = RecordingCoordinator(handle_event_from_operator=gates)
    with capture_logs() as logged:
        async with running_tasks(1, coordinator) as (world, (task,)):
            for awaited_s in (45.0, 15.0):
                task.send("an event")
                await world.advance(awaited_s)
                gates.open_last()
                await world.settle()
    assert [report["awaited_s"] for report in reports(logged)] == [10.0, 20.0, 40.0, 10.0]


async def test_a_call_beside_one_that_still_hangs_is_reported_in_time() -> None:  # H70
    meet = Meeting()
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator(**({} if made else {"close": meet})))
        return made[-1]

    with capture_logs() as logged:
        async with running_operator(RecreateOnReset(make, close_timeout_s=3600.0)) as world:
            world.reset()
            await world.settle()
            await world.advance(45.0)  # the next report about the first one's close is due after 80 s
            await world.running(0)
            await world.advance(10.0)
            await meet.end(world)
    assert [(report["method"], report["awaited_s"]) for report in reports(logged)] == [
        ("close", 10.0),
        ("close", 20.0),
        ("close", 40.0),
        ("subtask_ready", 10.0),
    ]


async def test_the_tasks_are_told_what_the_coordinator_waits_for_and_when_that_is_over() -> None:  # H70
    gate = anyio.Event()

    async def until_open(subtask: int, attempt: int, request: Any) -> str:
        await gate.wait()
        return "at last"

    coordinator = RecordingCoordinator(handle_request=until_open)
    with capture_logs() as logged:
        async with running_tasks(2, coordinator) as (world, (first, other)):
            other.ask("a request")
            await world.settle()
            await world.advance(21.0)
            for task in (first, other):
                assert [(note.call, note.awaited_s) for note in task.notes] == [
                    ("handle_request(subtask=1, attempt=0)", 10.0),
                    ("handle_request(subtask=1, attempt=0)", 20.0),
                ]
                assert " in " in task.notes[0].place
            gate.set()
            await world.settle()
            assert other.answers == {1: "at last"}
            for task in (first, other):
                assert task.notes[-1].call == ""
    (returned,) = [line for line in logged if line["event"] == "coordinator method returned"]
    assert (returned["method"], returned["awaited_s"]) == ("handle_request", 21.0)


async def test_the_start_of_a_coordinator_that_was_recreated_is_what_is_blamed() -> None:  # H70
    meet = Meeting()
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator(**({"start": meet} if made else {})))
        return made[-1]

    with capture_logs() as logged:
        async with running_operator(RecreateOnReset(make)) as world:
            world.reset()
            (task,) = await world.running(0)
            await world.advance(10.0)
            assert {report["method"] for report in reports(logged)} == {"start", "subtask_ready"}
            assert task.notes[-1].call == "start()"
            assert task.notes[-1].place.startswith(MEET)
            await meet.end(world)


async def test_a_snapshot_that_takes_too_long_says_where_it_waits() -> None:  # H46, H70
    coordinator = RecordingCoordinator(checkpoint_coordinator=Meeting())
    async with running_tasks(1, coordinator, snapshot_timeout_s=5.0) as (world, _):
        answer = world.begin_checkpoint()
        await world.advance(5.0)
        assert f"checkpoint_coordinator took longer than 5 s, waiting at {MEET}" in answer.reason()


async def test_no_timer_is_left_when_the_operator_has_stopped() -> None:  # H57, H70
    async with running_tasks(1) as (world, _):
        await world.stop()
        with capture_logs() as logged:
            await world.advance(100.0)
    assert reports(logged) == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_after_which_nothing_can_be_reported_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="method_report_s must be a positive number of seconds"):
        OperatorConfig("words", 1, method_report_s=seconds)


async def test_a_call_outside_of_any_coordinator_is_not_watched() -> None:
    assert current_watch.get() is None

    async def answer() -> int:
        return 7

    assert await call_user("answer", answer) == 7
    assert CallWatch().oldest is None
