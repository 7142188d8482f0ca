# SPDX-License-Identifier: Apache-2.0

"""How a checkpoint is aborted, and which one a reset then refers to (H16, H18, H43 to H48)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from actors import ActorStopped
from actors.coordination.engine.messages import AwaitSettled, RequestCheckpoint, TrackerMessage
from protocol.attempts import GlobalFailureRaised
from protocol.barrier_tracker import AbortRequested
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import RecordingCoordinator, World, raising, running_tasks, waiting_for


async def assert_that_all_goes_on(world: World) -> None:
    """After an abort every valve is open, in both directions, and the next checkpoint completes."""
    coordinator = world.coordinator
    living = [task for task in world.tasks if not task.ended]
    for task in living:
        subtask = task.attempt.subtask
        task.send("up again")
        assert (await coordinator.gateways[subtask].send_event("down again")).done() is False
    await world.settle()
    for task in living:
        assert task.events[-1] == "down again"
    assert coordinator.events[-len(living) :] == ["up again"] * len(living)
    answer = await world.checkpoint()
    assert len(answer.values) == 1


async def test_a_subtask_that_declines_aborts_the_checkpoint_on_both_sides() -> None:  # H45
    async with running_tasks(2) as (world, (task, other)):
        task.declines = "my files are open"
        answer = await world.checkpoint()
        assert "declined: my files are open" in answer.reason()
        assert world.coordinator.calls[-2:] == [("notify_checkpoint_aborted", 1), ("notify_checkpoint_discarded", 1)]
        assert task.handled[-1] == ("aborted", 1)
        assert other.handled[-1] == ("aborted", 1)
        assert world.statistics.checkpoints_aborted == 1
        task.declines = ""
        await assert_that_all_goes_on(world)


async def test_a_checkpoint_that_takes_too_long_is_aborted_on_both_sides() -> None:  # H45, H48
    async with running_tasks(2, checkpoint_timeout_s=10.0) as (world, (task, other)):
        task.busy = True
        answer = world.begin_checkpoint()
        await world.advance(9.9)
        assert answer.open
        await world.advance(0.2)
        assert "10 s" in answer.reason()
        assert str(task.attempt) in answer.reason()
        task.busy = False
        await world.settle()
        assert world.coordinator.calls_of("notify_checkpoint_aborted") == [("notify_checkpoint_aborted", 1)]
        assert other.handled[-1] == ("aborted", 1)
        await assert_that_all_goes_on(world)


async def test_a_failing_attempt_aborts_the_checkpoint_before_the_failure_is_announced() -> None:  # H16, H45
    async with running_tasks(2) as (world, (task, other)):
        task.busy = True
        answer = await world.checkpoint()
        world.fail(task)
        await world.settle()
        assert [call[0] for call in world.coordinator.calls[-4:]] == [
            "notify_checkpoint_aborted",
            "notify_checkpoint_discarded",
            "subtask_failed",
            "subtask_reset",
        ]
        assert answer.errors
        assert other.handled[-1] == ("aborted", 1)
        await assert_that_all_goes_on(world)


async def test_storage_that_fails_aborts_the_checkpoint() -> None:  # H45
    async with running_tasks(1) as (world, (task,)):
        world.on_store = raising(OSError("no space left"))
        answer = await world.checkpoint()
        assert "OSError: no space left" in answer.reason()
        assert task.handled[-1] == ("aborted", 1)
        world.on_store = None
        await assert_that_all_goes_on(world)


async def test_a_checkpoint_aborted_while_it_is_stored_is_taken_back() -> None:  # H44, H51
    disk = asyncio.Event()

    async with running_tasks(1) as (world, (task,)):
        world.on_store, world.on_discard = waiting_for(disk), raising(OSError("it is gone already"))
        answer = await world.checkpoint()
        world.fail(task)
        await world.settle()
        assert answer.errors
        assert world.discarded == [1]
        disk.set()
        await world.settle()
        assert world.stored == []
        assert world.tracker.is_alive  # H48: storage that cannot delete stops no operator
        world.on_store = None
        await world.running(0)
        await assert_that_all_goes_on(world)


async def test_a_coordinator_that_returns_nothing_is_told_to_return_bytes() -> None:  # H46
    async def forget(checkpoint_id: int) -> None:
        return None

    coordinator = RecordingCoordinator(checkpoint_coordinator=forget)
    async with running_tasks(1, coordinator) as (world, _):
        answer = await world.checkpoint()
        assert "returned NoneType, not bytes" in answer.reason()
        (failure,) = world.reported(GlobalFailureRaised)
        assert "return b''" in failure.cause


@pytest.mark.parametrize("state", [b"", bytearray(b"x"), memoryview(b"y")])
async def test_any_bytes_will_do_and_empty_ones_too(state: Any) -> None:  # H46
    async def snapshot(checkpoint_id: int) -> Any:
        return state

    async with running_tasks(1, RecordingCoordinator(checkpoint_coordinator=snapshot)) as (world, _):
        await world.checkpoint()
        assert world.stored[0].coordinator_state == bytes(state)


async def test_a_coordinator_that_takes_too_long_for_its_snapshot_aborts_it() -> None:  # H46, H48
    async def never(checkpoint_id: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    coordinator = RecordingCoordinator(checkpoint_coordinator=never)
    async with running_tasks(1, coordinator, snapshot_timeout_s=5.0) as (world, (task,)):
        answer = world.begin_checkpoint()
        await world.advance(4.9)
        assert answer.open
        await world.advance(0.2)
        assert "longer than 5 s" in answer.reason()
        assert task.handled == [("aborted", 1)]
        assert not world.failures
        del coordinator.methods["checkpoint_coordinator"]
        await assert_that_all_goes_on(world)


async def test_a_timeout_of_the_coordinators_own_is_an_exception_like_any_other() -> None:  # H7, H46
    coordinator = RecordingCoordinator(checkpoint_coordinator=raising(TimeoutError("the broker did not answer")))
    async with running_tasks(1, coordinator) as (world, _):
        answer = await world.checkpoint()
        assert "the broker did not answer" in answer.reason()
        assert "the broker did not answer" in str(world.failures[0])


async def test_a_second_request_waits_for_the_first_and_a_third_is_refused() -> None:  # H43
    async with running_tasks(1) as (world, (task,)):
        task.busy = True
        first, second, third = (world.begin_checkpoint() for _ in range(3))
        await world.settle()
        assert "only one may" in third.reason()
        task.busy = False
        await world.settle()
        assert (first.values, second.values) == ([1], [2])
        assert not world.coordinator.calls_of("notify_checkpoint_aborted")  # the third never began


async def test_a_request_to_abort_ends_the_one_that_it_names_and_no_other() -> None:  # H44, H45
    async with running_tasks(1, tolerated_failures=0) as (world, (task,)):
        task.busy = True
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        world.tracker.tell(AbortRequested(7, "unknown"))
        world.tracker.tell(AbortRequested(2, "not needed"))
        await world.settle()
        assert "not needed" in second.reason()
        assert first.open
        world.tracker.tell(AbortRequested(1, "not needed"))
        world.tracker.tell(AbortRequested(1, "said twice"))
        await world.settle()
        assert "not needed" in first.reason()
        assert world.coordinator.calls_of("notify_checkpoint_aborted") == [("notify_checkpoint_aborted", 1)]
        assert not world.failures
        task.busy = False
        await assert_that_all_goes_on(world)


async def test_the_id_of_a_reset_is_the_last_one_that_the_coordinator_was_told() -> None:  # H18
    async with running_tasks(1) as (world, (task,)):
        await world.checkpoint()
        world.fail(task)
        (again,) = await world.running(0)
        assert world.coordinator.calls_of("subtask_reset") == [("subtask_reset", 0, 1)]
        again.busy = True
        await world.checkpoint()
        world.fail(again)
        await world.settle()
        assert world.coordinator.calls_of("subtask_reset")[-1] == ("subtask_reset", 0, 1)
        world.reset()
        await world.settle()
        assert world.coordinator.calls[-1] == ("reset_to_checkpoint", 1, b"state")


async def test_in_batch_mode_every_reset_goes_to_the_beginning() -> None:  # H18, H55
    async with running_tasks(1, mode=RestoreMode.BATCH) as (world, (task,)):
        await world.checkpoint()
        world.fail(task)
        (again,) = await world.running(0)
        world.reset()
        await world.settle()
        assert world.coordinator.calls_of("subtask_reset", "reset_to_checkpoint") == [
            ("subtask_reset", 0, -1),
            ("reset_to_checkpoint", -1, None),
        ]
        assert again.registered is not None
        assert (again.registered.checkpoint_id, again.registered.states) == (-1, ())


async def test_a_snapshot_that_waits_for_a_busy_coordinator_is_not_taken_once_its_checkpoint_is_aborted() -> None:
    """H160: nothing that was given up happens later."""
    free, asked = asyncio.Event(), list[int]()

    async def snapshot(checkpoint_id: int) -> bytes:
        asked.append(checkpoint_id)
        await free.wait()
        return b""

    async with running_tasks(1, RecordingCoordinator(checkpoint_coordinator=snapshot)) as (world, _):
        for checkpoint_id in (1, 2):
            await world.checkpoint()
            world.tracker.tell(AbortRequested(checkpoint_id, "not needed"))
        await world.settle()
        free.set()
        assert (await world.checkpoint()).values == [3]
        assert asked == [1, 3]


@pytest.mark.parametrize("request_type", [RequestCheckpoint, AwaitSettled])
async def test_a_request_that_is_pending_at_the_stop_is_failed(request_type: type[TrackerMessage]) -> None:  # H48
    ended: list[Exception] = []

    async def ask() -> None:
        try:
            await world.tracker.ask(request_type, timeout_s=1000.0)
        except ActorStopped as stopped:
            ended.append(stopped)

    async with running_tasks(1) as (world, (task,)):
        task.busy = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await world.settle()
            assert not ended
            await world.stop()
    assert len(ended) == 1


async def test_a_gateway_that_is_closed_during_the_snapshot_is_not_told_that_it_is_over() -> None:  # H14
    """A message to a stopped actor would be logged as a warning, although nothing is wrong."""
    taken = anyio.Event()

    async def slowly(checkpoint_id: int) -> bytes:
        await taken.wait()
        return b""

    async with running_tasks(2, RecordingCoordinator(checkpoint_coordinator=slowly)) as (world, (dies, _lives)):
        checkpoint = world.begin_checkpoint()
        await world.settle()
        world.fail(dies)
        await world.settle()
        taken.set()
        await world.settle()
        assert "failed" in checkpoint.reason()
        assert not world.kit.system.dead_letters.counts
