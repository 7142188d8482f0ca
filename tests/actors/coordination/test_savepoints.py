# SPDX-License-Identifier: Apache-2.0

"""A savepoint is stored elsewhere, reopens everything, and completes nothing (H49)."""

from __future__ import annotations

import asyncio

from actors.coordination.engine.messages import Settled
from protocol.barrier_tracker import AbortRequested
from tests.actors.coordination.operator_world import RecordingCoordinator, World, raising, running_tasks, waiting_for


async def assert_that_all_is_open(world: World, coordinator: RecordingCoordinator) -> None:
    for task in world.tasks:
        task.send("up")
        await coordinator.gateways[task.attempt.subtask].send_event("down")
    await world.settle()
    assert coordinator.events[-len(world.tasks) :] == ["up"] * len(world.tasks)
    assert all(task.events[-1] == "down" for task in world.tasks)


async def test_a_savepoint_goes_to_the_requested_directory_and_commits_nothing() -> None:  # H49
    async with running_tasks(2) as (world, tasks):
        answer = await world.checkpoint("backup/monday")
        assert answer.values == [1]
        ((directory, savepoint),) = world.savepoints
        assert (directory, savepoint.checkpoint_id, sorted(savepoint.subtask_states)) == ("backup/monday", 1, [0, 1])
        assert world.stored == []
        assert world.coordinator.calls[-1] == ("checkpoint_coordinator", 1)
        assert [task.handled for task in tasks] == [[("snapshot", 1)], [("snapshot", 1)]]
        assert world.statistics.savepoints_completed == 1
        assert world.statistics.checkpoints_completed == 0
        await assert_that_all_is_open(world, world.coordinator)


async def test_a_savepoint_that_cannot_be_written_is_its_askers_trouble() -> None:  # H49, H45
    async with running_tasks(1, tolerated_failures=0) as (world, (task,)):
        world.on_store = raising(OSError("no such bucket"))
        answer = await world.checkpoint("elsewhere")
        assert "no such bucket" in answer.reason()
        assert task.handled[-1] == ("aborted", 1)
        assert "may exist in elsewhere" in answer.reason()  # H64
        assert world.coordinator.calls[-2:] == [("notify_checkpoint_aborted", 1), ("notify_checkpoint_discarded", 1)]
        assert world.coordinator.context.checkpoints_in_doubt == frozenset()
        assert not world.failures
        await assert_that_all_is_open(world, world.coordinator)


async def test_a_savepoint_that_is_given_up_is_not_looked_for_among_the_checkpoints() -> None:  # H49, H44
    disk = asyncio.Event()

    async with running_tasks(1) as (world, _):
        world.on_store = waiting_for(disk)
        answer = await world.checkpoint("elsewhere")
        world.tracker.tell(AbortRequested(1, "changed my mind"))
        await world.settle()
        disk.set()
        await world.settle()
        assert "changed my mind" in answer.reason()
        assert (world.savepoints, world.discarded) == ([], [])


async def test_a_savepoint_after_a_run_does_not_stand_in_for_the_final_checkpoint() -> None:  # H49
    async with running_tasks(1, checkpoint_timeout_s=30.0) as (world, _):
        world.no_ids = OSError("the storage is gone")
        world.end_run()
        await world.settle()
        world.no_ids = None
        savepoint = world.begin_checkpoint("elsewhere")
        settled = await world.await_settled()
        assert savepoint.values == [1]
        assert settled.open
        await world.advance(30.1)
        assert settled.values == [Settled(2, "")]


async def test_a_savepoint_that_fails_after_a_run_leaves_its_output_committed() -> None:  # H49
    async with running_tasks(1) as (world, _):
        world.end_run()
        await world.settle()
        world.on_store = raising(OSError("no such bucket"))
        savepoint = world.begin_checkpoint("elsewhere")
        settled = await world.await_settled()
        assert "no such bucket" in savepoint.reason()
        assert settled.values == [Settled(1, "")]
