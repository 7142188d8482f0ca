# SPDX-License-Identifier: Apache-2.0

"""An operator begins with its records after all events that ``subtask_ready`` sends (H66)."""

from __future__ import annotations

from actors.coordination import SubtaskGateway
from protocol.subtask.types import OperatorOpened
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import RecordingCoordinator, running_operator


class WaitingTask(Task):
    """Begins after the signal to begin."""

    def open(self) -> None:
        self._drive(OperatorOpened(awaits_start=True))


async def send_rules(subtask: int, gateway: SubtaskGateway) -> None:
    for number in range(5):
        await gateway.send_event(number)


async def test_what_subtask_ready_sends_comes_before_the_word_to_begin() -> None:  # H66
    coordinator = RecordingCoordinator(subtask_ready=send_rules)
    async with running_operator(coordinator) as world:
        world.task_type = WaitingTask
        (task,) = await world.running(0)
        assert task.handled == [0, 1, 2, 3, 4, ("start",)]


async def test_so_does_what_had_to_wait_for_room_or_may_get_lost() -> None:  # H66, H27, H28
    async def send(subtask: int, gateway: SubtaskGateway) -> None:
        await send_rules(subtask, gateway)
        await gateway.send_event("loose", loss_tolerant=True)

    async with running_operator(RecordingCoordinator(subtask_ready=send), events_max=2) as world:
        world.task_type = WaitingTask
        (task,) = await world.running(0)
        assert task.handled == [0, 1, 2, 3, 4, "loose", ("start",)]


async def test_a_coordinator_may_await_a_confirmation_inside_subtask_ready() -> None:  # H66, H23
    async def send(subtask: int, gateway: SubtaskGateway) -> None:
        await (await gateway.send_event("rule"))

    async with running_operator(RecordingCoordinator(subtask_ready=send)) as world:
        world.task_type = WaitingTask
        (task,) = await world.running(0)
        assert task.handled == ["rule", ("start",)]


async def test_an_operator_whose_subtask_ready_fails_does_not_begin() -> None:  # H66, H7
    async def fail(subtask: int, gateway: SubtaskGateway) -> None:
        raise ValueError("no rules")

    async with running_operator(RecordingCoordinator(subtask_ready=fail)) as world:
        world.task_type = WaitingTask
        (task,) = await world.running(0)
        assert [str(failure) for failure in world.failures] == ["no rules"]
        assert task.handled == []
        world.fail(task, reset=False)
        await world.settle()
        assert len(task.ended) == 1
        assert task.handled == []


async def test_a_subtask_that_opens_while_others_close_for_a_checkpoint_begins_behind_it() -> None:  # H66, H11, H40
    coordinator = RecordingCoordinator(subtask_ready=send_rules)
    async with running_operator(coordinator) as world:
        world.task_type = WaitingTask
        (first,) = await world.running(0)
        first.silent = True
        answer = await world.checkpoint()
        late = world.accept(1)
        await world.settle()
        assert late.handled == []  # its readiness is held back until all have closed
        first.speak()
        await world.settle()
        assert late.handled == [0, 1, 2, 3, 4, ("start",)]
        assert answer.values == [1]
