# SPDX-License-Identifier: Apache-2.0

"""How a coordinator learns of a checkpoint that was aborted while it was being written (H64)."""

from __future__ import annotations

import asyncio

import pytest

from actors.coordination import RecreateOnReset
from actors.coordination.engine.operator_config import DiscardRefused
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    raising,
    running_operator,
    running_tasks,
    waiting_for,
)

NOTIFICATIONS = ("notify_checkpoint_complete", "notify_checkpoint_aborted", "notify_checkpoint_discarded")


fail = raising(OSError("the storage does not answer"))


async def leave_one_in_doubt(world: World) -> None:
    """Abort checkpoint 1 while the storage neither stores nor discards it."""
    await world.running(0)
    world.on_store, world.on_discard = fail, fail
    await world.checkpoint()


async def test_a_coordinator_is_told_that_a_checkpoint_is_discarded_only_when_that_is_durable() -> None:  # H64
    async with running_operator() as world:
        await leave_one_in_doubt(world)
        assert world.coordinator.calls_of(*NOTIFICATIONS) == [("notify_checkpoint_aborted", 1)]
        assert world.coordinator.context.checkpoints_in_doubt == {1}
        world.on_discard = None
        await world.advance(1.1)
        assert world.coordinator.calls_of(*NOTIFICATIONS)[1:] == [("notify_checkpoint_discarded", 1)]
        assert world.coordinator.context.checkpoints_in_doubt == frozenset()


async def test_a_checkpoint_is_in_doubt_from_its_abort_until_its_discard() -> None:  # H64
    seen: list[tuple[str, frozenset[int]]] = []

    async def look(method: str) -> None:
        seen.append((method, coordinator.context.checkpoints_in_doubt))

    coordinator = RecordingCoordinator(
        notify_checkpoint_aborted=lambda _: look("aborted"), notify_checkpoint_discarded=lambda _: look("discarded")
    )
    async with running_operator(coordinator) as world:
        await leave_one_in_doubt(world)
        world.on_discard = None
        await world.advance(1.1)
    assert seen == [("aborted", frozenset({1})), ("discarded", frozenset())]


async def test_a_discard_that_fails_is_tried_again_and_again_with_growing_delays() -> None:  # H64, H48
    async with running_operator() as world:
        await leave_one_in_doubt(world)
        tries = []
        for _ in range(4):
            tries.append(len(world.discarded))
            await world.advance(10.0)
        assert tries[0] == 1
        assert tries[1] - tries[0] > tries[2] - tries[1] >= 1
        await world.advance(600.0)
        assert len(world.discarded) >= 10
        assert world.tracker.is_alive


async def test_no_further_try_is_made_once_the_storage_refuses() -> None:  # H64
    async with running_operator() as world:
        await leave_one_in_doubt(world)
        world.on_discard = raising(DiscardRefused("a later application has taken over"))
        await world.advance(600.0)
        assert len(world.discarded) == 2
        assert world.coordinator.context.checkpoints_in_doubt == {1}
        assert not world.coordinator.calls_of("notify_checkpoint_discarded")


async def test_a_later_completion_ends_the_doubt_and_the_tries() -> None:  # H64
    async with running_operator() as world:
        await leave_one_in_doubt(world)
        world.on_store = None
        await world.checkpoint()
        assert world.coordinator.calls_of(*NOTIFICATIONS)[1:] == [
            ("notify_checkpoint_complete", 2),
            ("notify_checkpoint_discarded", 1),
        ]
        assert world.coordinator.context.checkpoints_in_doubt == frozenset()
        assert world.completed == [2]
        tries = len(world.discarded)
        await world.advance(600.0)
        assert len(world.discarded) == tries


async def test_a_new_coordinator_finds_the_checkpoints_in_doubt() -> None:  # H64, R101
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator())
        return made[-1]

    async with running_operator(RecreateOnReset(make)) as world:
        await leave_one_in_doubt(world)
        world.reset()
        await world.settle()
        assert made[1].context.checkpoints_in_doubt == {1}
        world.on_discard = None
        await world.advance(10.0)
        assert made[1].calls[-1] == ("notify_checkpoint_discarded", 1)
        assert not made[0].calls_of("notify_checkpoint_discarded")


async def test_a_hanging_discard_blocks_nothing() -> None:  # H64, H48
    async with running_tasks(1) as (world, (task,)):
        world.on_store, world.on_discard = fail, waiting_for(asyncio.Event())
        await world.checkpoint()
        world.fail(task)
        world.end_run(False)
        settled = await world.await_settled()
        assert settled.values
        await world.stop()
    assert world.coordinator.calls[-1] == ("close",)


@pytest.mark.parametrize("reached", ["closing", "storing"])
async def test_a_savepoint_that_may_exist_is_named_to_the_one_who_asked_for_it(reached: str) -> None:  # H64, H49
    async with running_tasks(1) as (world, (task,)):
        world.on_store = fail
        task.declines = "not now" if reached == "closing" else ""
        answer = await world.checkpoint("backup/monday")
        assert ("may exist in backup/monday" in answer.reason()) == (reached == "storing")
        assert world.coordinator.calls_of(*NOTIFICATIONS) == [
            ("notify_checkpoint_aborted", 1),
            ("notify_checkpoint_discarded", 1),
        ]
