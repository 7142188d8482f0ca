# SPDX-License-Identifier: Apache-2.0

"""What can go wrong around an operator, each in one test: its storage, its tasks, its end, and a neighbour.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_troubles.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headgate import (
    CheckpointConfig,
    CoordinatorContext,
    FailureKind,
    FailureReason,
    GatewayLimits,
    OperatorCoordinator,
    Reply,
    SubtaskGateway,
)
from headgate.errors import CheckpointFailed
from headgate.testing import Task, World, running_operator


class Diary(OperatorCoordinator):
    """Notes what happens to it, and answers the driver's program when a task has said something."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.open_replies: list[Reply] = []
        self.gateways: dict[int, SubtaskGateway] = {}

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.notes.append(event)
        for reply in self.open_replies:
            reply.answer(event)

    async def handle_client_request(self, request: Any) -> Reply:
        self.open_replies.append(Reply())
        return self.open_replies[-1]

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.notes.append(reason.kind)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"notes"

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.notes.append(f"complete {checkpoint_id}")

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.notes.append(f"aborted {checkpoint_id}")

    async def close(self) -> None:
        self.notes.append("closed")


# --- the storage ------------------------------------------------------------------------------------------------------


async def test_a_slow_storage_delays_the_checkpoint() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1, mode="streaming") as world:
        await world.launch_all()
        world.storage_delay_s = 20.0
        answer = world.begin_checkpoint()
        await world.advance(19.0)
        assert answer.open
        await world.advance(1.0)
        assert diary.notes == [f"complete {answer.value}"]


async def test_a_checkpoint_fails_with_its_storage() -> None:
    diary = Diary()
    tolerant = CheckpointConfig(tolerated_failures=1)
    async with running_operator(diary, parallelism=1, mode="streaming", checkpoint=tolerant) as world:
        await world.launch_all()
        world.storage_error = OSError("no space left")
        with pytest.raises(CheckpointFailed, match="no space left"):
            await world.checkpoint()
        assert diary.notes == ["aborted 1"]


async def test_a_checkpoint_in_doubt_may_be_what_a_restart_finds() -> None:
    diary = Diary()
    tolerant = CheckpointConfig(tolerated_failures=1)
    async with running_operator(diary, parallelism=1, mode="streaming", checkpoint=tolerant) as world:
        (task,) = await world.launch_all()
        task.state = b"three"
        world.storage_error, world.storage_in_doubt = TimeoutError("no answer"), True
        with pytest.raises(CheckpointFailed):
            await world.checkpoint()
        assert diary.context.checkpoints_in_doubt == {1}
        maybe = world.in_doubt[-1]

    async with running_operator(Diary(), parallelism=1, mode="streaming", restored=maybe) as world:
        (task,) = await world.launch_all()
        assert task.restored_state == b"three"


async def test_the_doubt_ends_when_the_storage_answers_again() -> None:
    diary = Diary()
    tolerant = CheckpointConfig(tolerated_failures=1)
    async with running_operator(diary, parallelism=1, mode="streaming", checkpoint=tolerant) as world:
        await world.launch_all()
        world.storage_error, world.storage_in_doubt = TimeoutError("no answer"), True
        with pytest.raises(CheckpointFailed):
            await world.checkpoint()
        world.storage_error, world.storage_in_doubt = None, False
        await world.advance(60.0)
        assert world.in_doubt == []
        assert diary.context.checkpoints_in_doubt == frozenset()


async def test_a_storage_without_an_id_refuses_the_checkpoint() -> None:
    async with running_operator(Diary(), parallelism=1, mode="streaming") as world:
        await world.launch_all()
        world.id_error = OSError("the storage cannot be reached")
        with pytest.raises(CheckpointFailed, match="cannot be reached"):
            await world.checkpoint()


async def test_a_checkpoint_is_given_up() -> None:
    diary = Diary()
    tolerant = CheckpointConfig(tolerated_failures=1)
    async with running_operator(diary, parallelism=1, mode="streaming", checkpoint=tolerant) as world:
        (task,) = await world.launch_all()
        task.busy = True  # so that it does not answer
        answer = world.begin_checkpoint()
        await world.settle()
        await world.abort_checkpoint(answer)
        assert isinstance(answer.error, CheckpointFailed)
        assert diary.notes == ["aborted 1"]


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_a_mute_task_is_killed_when_it_has_not_confirmed_in_time() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1, gateway=GatewayLimits(confirm_timeout_s=5.0)) as world:
        (task,) = await world.launch_all()
        task.silent = True
        task.send("not heard")
        diary.gateways[0].send_event_nowait("do you hear me?")
        await world.advance(5.0)
        assert task.events == ["do you hear me?"]
        assert diary.notes == [FailureKind.CONFIRMATION_TIMEOUT]


async def test_confirmations_that_come_late_confirm_all_the_same() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1) as world:
        (task,) = await world.launch_all()
        task.late_confirmations = True
        sent = diary.gateways[0].send_event_nowait("an event")
        task.send("an answer")
        await world.advance(5.0)
        assert diary.notes == ["an answer"]
        assert not sent.done()
        task.late_confirmations = False
        await world.settle()
        assert sent.confirmed()
        assert task.outcome == ""


async def test_a_task_that_has_registered_is_ready_only_when_it_has_opened() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1) as world:
        task = await world.launch(0, opens=False)
        assert diary.gateways == {}
        task.awaits_start = True
        task.open()
        await world.settle()
        assert list(diary.gateways) == [0]
        assert task.handled == [("start",)]


async def test_a_revoked_success_is_a_failure_and_the_subtask_runs_again() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=2) as world:
        first, _ = await world.launch_all()
        first.finish()
        await world.settle()
        await world.revoke(first)
        assert diary.notes == [FailureKind.REVOKED]
        assert (await world.retry(first)).attempt.attempt == 1


class Echo(Task):
    """Sends back every event that it gets."""

    def work(self) -> None:
        heard = len(self.events)
        super().work()
        for event in self.events[heard:]:
            self.send(event)


async def test_tasks_of_an_own_class_behave_as_it_says() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1) as world:
        task = await world.launch(0, task_class=Echo)
        diary.gateways[0].send_event_nowait("hello")
        await world.settle()
        assert diary.notes == ["hello"]
        await world.kill(task)
        assert isinstance(await world.retry(task), Echo)


# --- the driver -------------------------------------------------------------------------------------------------------


async def test_the_programs_request_is_answered_when_a_task_has_spoken() -> None:
    async with running_operator(Diary(), parallelism=1) as world:
        (task,) = await world.launch_all()
        answer = world.begin_request("what is new?")
        await world.advance(100.0)
        assert answer.open
        task.send("news")
        await world.settle()
        assert answer.value == "news"


async def test_an_operator_is_stopped_while_a_task_runs() -> None:
    diary = Diary()
    async with running_operator(diary, parallelism=1) as world:
        (task,) = await world.launch_all()
        await world.stop()
        assert diary.notes[-1] == "closed"
        assert len(task.ended) == 1


async def test_two_operators_share_one_application() -> None:
    first, second = Diary(), Diary()
    async with (
        running_operator(first, parallelism=1) as world,
        running_operator(second, parallelism=2, operator_id="second", beside=world) as beside,
    ):
        (task,) = await world.launch_all()
        others = await beside.launch_all()
        task.send("one")
        others[1].send("two")
        await world.settle()  # moves both
        assert (first.notes, second.notes) == (["one"], ["two"])
        await world.advance(5.0)
        assert beside.now == 5.0


# --- with fixtures ----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with running_operator(Diary, parallelism=2) as world:
        yield world


async def test_a_world_can_be_a_fixture(world: World) -> None:
    first, second = await world.launch_all()
    first.finish()
    second.finish()
    await world.settle()
    assert [task.outcome for task in world.tasks] == ["success", "success"]
