# SPDX-License-Identifier: Apache-2.0

"""All failures between two resets cause one global failure (H7, H8, H15, H45)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.coordination import CheckpointFailed
from protocol.attempts import FailureKind, GlobalFailureRaised
from tests.actors.coordination.operator_world import RecordingCoordinator, raising, running_tasks


async def test_a_coordinator_that_fails_over_a_failed_checkpoint_adds_no_second_failure() -> None:  # H7, H45
    coordinator = RecordingCoordinator(notify_checkpoint_aborted=raising(ValueError("the coordinator's own")))
    async with running_tasks(1, coordinator, tolerated_failures=0) as (world, (task,)):
        task.declines = "disk full"
        await world.checkpoint()
        (report,) = world.reported(GlobalFailureRaised)
        assert "disk full" in report.cause
        (cause,) = world.failures
        assert isinstance(cause, CheckpointFailed)


@pytest.mark.parametrize("savepoint", [None, "backup"])
@pytest.mark.parametrize("why", ["a checkpoint has failed", "the coordinator fails the job", "a task has failed"])
async def test_a_request_after_a_failure_is_refused_and_the_end_of_the_run_waits_for_no_one(
    why: str, savepoint: str | None
) -> None:  # H43, H45, H48
    async with running_tasks(2, tolerated_failures=0) as (world, tasks):
        if why == "a checkpoint has failed":
            tasks[0].declines = "disk full"
            await world.checkpoint()
            early = await world.checkpoint(savepoint)
            assert "has failed" in early.reason(), "before the job has ended"
        elif why == "the coordinator fails the job":
            world.coordinator.context.fail_job("the input is gone")
        for task in tasks:
            world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        waits = await world.checkpoint(savepoint)
        world.end_run(False, "cancelled")
        assert (await world.await_settled()).values, "otherwise the action could not be called again"
        assert "has failed" in waits.reason()
        late = await world.checkpoint(savepoint)
        assert "has failed" in late.reason()
        assert (await world.await_settled()).values
        world.reset()
        await world.running(0, 1)
        assert (await world.checkpoint(savepoint)).values


async def test_a_checkpoint_that_fails_over_a_failed_coordinator_adds_no_second_failure() -> None:  # H8, H45
    async with running_tasks(1, tolerated_failures=0) as (world, (task,)):
        task.declines = "disk full"
        world.coordinator.context.fail_job("the input is gone")
        await world.checkpoint()
        (report,) = world.reported(GlobalFailureRaised)
        assert "the input is gone" in report.cause
        world.reset()
        (again,) = await world.running(0)
        again.declines = "disk full again"
        await world.checkpoint()
        assert "disk full again" in world.reported(GlobalFailureRaised)[-1].cause
        assert len(world.failures) == 2


async def test_a_failure_of_before_a_reset_that_is_decided_calls_for_no_other_one() -> None:  # H15
    gate = asyncio.Event()

    async def fail_late(*args: Any) -> None:
        await gate.wait()
        raise ValueError("of the past")

    coordinator = RecordingCoordinator(handle_event_from_operator=fail_late)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.send("x")
        await world.settle()
        world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset("a barrier stage restarts")
        await world.settle()
        gate.set()
        await world.settle()
        assert coordinator.calls[-1] == ("reset_to_checkpoint", -1, None)
        assert not world.reports
        (again,) = await world.running(0)
        again.send("y")
        await world.settle()
        assert len(world.reported(GlobalFailureRaised)) == 1
