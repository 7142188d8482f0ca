# SPDX-License-Identifier: Apache-2.0

"""``RecreateOnReset`` in a real operator, with gateways and checkpoints (R101, G16)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from actors.coordination.host.part import Part, RecreateOnReset
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator
from protocol.attempts import FailureKind, GlobalFailureRaised
from protocol.errors import AttemptOver
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import (
    Method,
    RecordingCoordinator,
    World,
    raising,
    running_operator,
    waiting_for,
)
from tests.actors.coordination.replacing import bench
from tests.actors.coordination.test_first_record import WaitingTask


class Coordinators(list[RecordingCoordinator]):
    """Records every coordinator that the factory creates, in order."""

    def __init__(self, methods: Callable[[int], dict[str, Method]]) -> None:
        super().__init__()
        self._methods_of = methods

    def make(self) -> RecordingCoordinator:
        self.append(RecordingCoordinator(**self._methods_of(len(self) + 1)))
        return self[-1]


@asynccontextmanager
async def running(
    methods: Callable[[int], dict[str, Method]] = lambda number: {}, **config: Any
) -> AsyncIterator[tuple[World, Coordinators]]:
    coordinators = Coordinators(methods)
    async with running_operator(RecreateOnReset(coordinators.make), **config) as world:
        yield world, coordinators


def fail_over(world: World, *tasks: Task) -> None:
    """Report every live attempt as failed, then reset the operator, as the ledger does (H15)."""
    for task in tasks:
        world.fail(task, FailureKind.KILLED, reset=False)
    world.reset()


async def test_the_next_run_of_attempts_talks_to_the_new_coordinator() -> None:  # R101, H10
    async with running() as (world, coordinators):
        (task,) = await world.running(0)
        task.send("a")
        await world.settle()
        fail_over(world, task)
        (again,) = await world.running(0)
        again.send("b")
        await world.settle()
        old, new = coordinators
        assert old.events == ["a"]
        assert new.events == ["b"]
        assert old.calls_of("reset_to_checkpoint") == []
        assert [call[0] for call in old.calls[-2:]] == ["subtask_failed", "close"]
        assert [call[0] for call in new.calls] == [
            "reset_to_checkpoint",
            "start",
            "subtask_ready",
            "handle_event_from_operator",
        ]


async def test_the_new_coordinator_is_restored_to_the_last_completed_checkpoint() -> None:  # R103, H18
    async def snapshot(checkpoint_id: int) -> bytes:
        return b"the old one's"

    async with running(lambda number: {"checkpoint_coordinator": snapshot}) as (world, coordinators):
        (task,) = await world.running(0)
        answer = await world.checkpoint()
        (checkpoint_id,) = answer.values
        fail_over(world, task)
        await world.settle()
        assert coordinators[1].calls[0] == ("reset_to_checkpoint", checkpoint_id, b"the old one's")


async def test_an_event_of_the_new_coordinator_arrives_and_one_of_the_old_does_not() -> None:  # G16, H14
    async with running() as (world, coordinators):
        (task,) = await world.running(0)
        fail_over(world, task)
        (again,) = await world.running(0)
        old, new = coordinators
        refused = old.gateways[0].send_event_nowait("from the old one")
        sent = new.gateways[0].send_event_nowait("from the new one")
        await world.settle()
        assert isinstance(refused.error(), AttemptOver)
        assert sent.confirmed()
        assert again.events == ["from the new one"]
        assert task.events == []


async def test_a_coordinator_that_cannot_begin_is_one_global_failure_until_the_next_reset() -> None:  # H7
    cause = ValueError("no such topic")
    async with running(lambda number: {"start": raising(cause)} if number == 2 else {}) as (world, coordinators):
        (task,) = await world.running(0)
        fail_over(world, task)
        (again,) = await world.running(0)
        assert len(world.reported(GlobalFailureRaised)) == 1
        assert world.failures == [cause]
        fail_over(world, again)
        await world.running(0)
        assert len(world.reported(GlobalFailureRaised)) == 1
        assert [call[0] for call in coordinators[2].calls] == ["reset_to_checkpoint", "start", "subtask_ready"]


async def test_a_checkpoint_that_would_wait_too_long_for_the_new_coordinator_fails_alone() -> None:  # H46, H48
    released = anyio.Event()
    async with running(
        lambda number: {"close": waiting_for(released)} if number == 1 else {}, snapshot_timeout_s=5.0
    ) as (world, coordinators):
        world.reset()
        answer = world.begin_checkpoint()
        await world.advance(5.0)
        assert "took longer than 5 s" in answer.reason()
        released.set()
        await world.settle()
        assert [call[0] for call in coordinators[1].calls[:2]] == ["reset_to_checkpoint", "start"]
        assert coordinators[1].calls_of("checkpoint_coordinator") == []
        assert world.failures == []


# --- calls --------------------------------------------------------------------------------------------------------


async def test_arguments_and_answers_are_handed_on() -> None:  # R101, R107
    async def answer(*args: Any) -> Any:
        return ["answer to", *args]

    class Answering(RecordingCoordinator):
        async def handle_client_request(self, request: Any) -> Any:
            return await self._called("handle_client_request", request)

    made: list[Answering] = []

    def make() -> Answering:
        made.append(Answering(handle_request=answer, handle_client_request=answer))
        return made[-1]

    calls: dict[str, tuple[Any, ...]] = {
        "handle_request": (1, 2, "request"),
        "handle_client_request": ("request",),
        "subtask_reset": (1, 3),
        "run_ended": (4, True, "fine"),
    }
    async with bench() as under_test:
        under_test.part = Part("", 0, RecreateOnReset(make))
        await under_test.start()
        for method, args in calls.items():
            await under_test.call(method, *args)
    assert made[0].calls == [("start",), *((method, *args) for method, args in calls.items()), ("close",)]
    assert under_test.outcomes[-4:-2] == [
        ("handle_request", ["answer to", 1, 2, "request"]),
        ("handle_client_request", ["answer to", "request"]),
    ]


def named_factory() -> OperatorCoordinator:
    return OperatorCoordinator()


@pytest.mark.parametrize(
    ("factory", "name"), [(named_factory, "named_factory"), (RecordingCoordinator, "RecordingCoordinator")]
)
async def test_the_factory_gives_the_name_where_the_user_does_not(  # R101
    factory: Callable[[], OperatorCoordinator], name: str
) -> None:
    async with bench() as under_test:
        under_test.part = Part("", 0, RecreateOnReset(factory))
        await under_test.start()
        await under_test.call("start", under_test.context)
        assert str(under_test.errors[-1][1]) == f"{name} was started before: make a new one for each operator"


class StartsSlowly(OperatorCoordinator[Any, Any]):
    """Overrides ``start`` alone, which waits."""

    def __init__(self, gate: anyio.Event) -> None:
        self._gate = gate

    async def start(self, context: CoordinatorContext) -> None:
        await self._gate.wait()


async def test_a_task_begins_after_its_coordinator_has_started_whatever_that_overrides() -> None:  # R101, H66
    gates = [anyio.Event(), anyio.Event()]
    gates[0].set()
    waiting = iter(gates)
    async with running_operator(RecreateOnReset(lambda: StartsSlowly(next(waiting)))) as world:
        world.task_type = WaitingTask
        (task,) = await world.running(0)
        fail_over(world, task)
        again = world.accept(0)
        await world.settle()
        assert again.handled == []
        gates[1].set()
        await world.settle()
        assert again.handled == [("start",)]
