# SPDX-License-Identifier: Apache-2.0

"""Several concurrent checkpoints, if that is configured (H43)."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.barrier_tracker import AbortRequested
from tests.actors.coordination.operator_world import World, running_operator


class Disk:
    """A storage whose writes end when the test says so."""

    def __init__(self, world: World) -> None:
        self.writing: dict[int, asyncio.Event] = {}
        self.cancelled: list[int] = []
        world.on_store = self._write

    async def _write(self, checkpoint: Any) -> None:
        written = self.writing[checkpoint.checkpoint_id] = asyncio.Event()
        try:
            await written.wait()
        except asyncio.CancelledError:
            self.cancelled.append(checkpoint.checkpoint_id)
            raise


async def test_a_second_one_goes_its_way_while_the_first_is_written() -> None:  # H43
    async with running_operator(concurrent_max=2) as world:
        disk = Disk(world)
        await world.running(0, 1)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        assert sorted(disk.writing) == [1, 2]
        disk.writing[1].set()
        await world.settle()
        assert first.values == [1]
        assert second.open
        disk.writing[2].set()
        await world.settle()
        assert second.values == [2]
        assert world.coordinator.calls_of("notify_checkpoint_complete") == [
            ("notify_checkpoint_complete", 1),
            ("notify_checkpoint_complete", 2),
        ]


async def test_a_later_one_that_completes_first_ends_the_lower_one() -> None:  # H43
    async with running_operator(concurrent_max=2, tolerated_failures=0) as world:
        disk = Disk(world)
        (task,) = await world.running(0)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        disk.writing[2].set()
        await world.settle()
        assert "subsumed" in first.reason()
        assert second.values == [2]
        assert world.coordinator.calls[-3:] == [
            ("notify_checkpoint_aborted", 1),
            ("notify_checkpoint_complete", 2),
            ("notify_checkpoint_discarded", 1),  # H64: it was in doubt until then
        ]
        assert (disk.cancelled, world.discarded) == ([1], [1])
        assert task.handled[-2:] == [("aborted", 1), ("completed", 2)]
        assert not world.failures


async def test_giving_one_up_leaves_the_write_of_the_other_alone() -> None:  # H43, H44
    async with running_operator(concurrent_max=2) as world:
        disk = Disk(world)
        await world.running(0)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        world.tracker.tell(AbortRequested(2, "by the test"))
        await world.settle()
        assert second.errors
        assert (disk.cancelled, world.discarded) == ([2], [2])
        disk.writing[1].set()
        await world.settle()
        assert first.values == [1]
        assert [checkpoint.checkpoint_id for checkpoint in world.stored] == [1]
