# SPDX-License-Identifier: Apache-2.0

"""A caller that waits until an operator is settled learns what failed after a successful run (H71)."""

from __future__ import annotations

import pytest

from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import RecordingCoordinator, World, raising, running_operator

raise_error = raising(OSError("cannot publish"))


async def what_failed(world: World) -> str:
    answer = await world.await_settled()
    (settled,) = answer.values
    failed: str = settled.failed
    return failed


async def run_to_its_end(world: World, *, succeeded: bool = True) -> None:
    (task,) = await world.running(0)
    task.finish()
    await world.settle()
    world.finish(task)
    world.end_run(succeeded)
    await world.settle()


@pytest.mark.parametrize("method", ["notify_checkpoint_complete", "run_ended"])
async def test_a_coordinator_that_fails_after_a_good_run_says_so_when_it_is_settled(method: str) -> None:  # H71
    async with running_operator(RecordingCoordinator(**{method: raise_error})) as world:
        await run_to_its_end(world)
        assert await what_failed(world) == f"{method}: OSError: cannot publish"


async def test_the_next_run_forgets_it() -> None:  # H71
    coordinator = RecordingCoordinator(notify_checkpoint_complete=raise_error)
    async with running_operator(coordinator) as world:
        await run_to_its_end(world)
        coordinator.methods.clear()
        world.reset()
        await run_to_its_end(world)
        assert await what_failed(world) == ""


async def test_a_failure_of_a_run_that_ended_badly_is_told_by_its_job() -> None:  # H71
    async with running_operator(RecordingCoordinator(run_ended=raise_error)) as world:
        await run_to_its_end(world, succeeded=False)
        assert await what_failed(world) == ""


async def test_in_batch_mode_the_output_is_sparks() -> None:  # H71
    async with running_operator(RecordingCoordinator(run_ended=raise_error), mode=RestoreMode.BATCH) as world:
        await run_to_its_end(world)
        assert await what_failed(world) == ""
