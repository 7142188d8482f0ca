# SPDX-License-Identifier: Apache-2.0

"""An operator begins with its records after all events that ``subtask_ready`` sends (H66)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from actors.coordination import SubtaskGateway
from protocol.subtask.types import OperatorOpened
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import Method, RecordingCoordinator, World, raising, running_tasks


class WaitingTask(Task):
    """Begins after the signal to begin."""

    def open(self) -> None:
        self._drive(OperatorOpened(awaits_start=True))


@asynccontextmanager
async def a_waiting_task(subtask_ready: Method, **config: Any) -> AsyncIterator[tuple[World, Task]]:
    coordinator = RecordingCoordinator(subtask_ready=subtask_ready)
    async with running_tasks(1, coordinator, task_type=WaitingTask, **config) as (world, (task,)):
        yield world, task


async def send_rules(subtask: int, gateway: SubtaskGateway) -> None:
    for number in range(5):
        await gateway.send_event(number)


async def test_what_subtask_ready_sends_comes_first_even_if_it_had_to_wait_or_may_get_lost() -> None:  # H66, H27, H28
    async def send(subtask: int, gateway: SubtaskGateway) -> None:
        await send_rules(subtask, gateway)
        await gateway.send_event("loose", loss_tolerant=True)

    async with a_waiting_task(send, events_max=2) as (_, task):
        assert task.handled == [0, 1, 2, 3, 4, "loose", ("start",)]


async def test_a_coordinator_may_await_a_confirmation_inside_subtask_ready() -> None:  # H66, H23
    async def send(subtask: int, gateway: SubtaskGateway) -> None:
        await (await gateway.send_event("rule"))

    async with a_waiting_task(send) as (_, task):
        assert task.handled == ["rule", ("start",)]


async def test_an_operator_whose_subtask_ready_fails_does_not_begin() -> None:  # H66, H7
    async with a_waiting_task(raising(ValueError("no rules"))) as (world, task):
        assert [str(failure) for failure in world.failures] == ["no rules"]
        assert task.handled == []
        world.fail(task, reset=False)
        await world.settle()
        assert len(task.ended) == 1
        assert task.handled == []


async def test_a_subtask_that_opens_while_others_close_for_a_checkpoint_begins_after_it() -> None:  # H66, H11, H40
    async with a_waiting_task(send_rules) as (world, first):
        first.silent = True
        answer = await world.checkpoint()
        late = world.accept(1)
        await world.settle()
        assert late.handled == []  # its readiness is held back until all have closed
        first.speak()
        await world.settle()
        assert late.handled == [0, 1, 2, 3, 4, ("start",)]
        assert answer.values == [1]
