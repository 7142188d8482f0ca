# SPDX-License-Identifier: Apache-2.0

"""A copy of a reading attempt, as Spark's speculation starts it, combined with checkpoints (H13, H56)."""

from __future__ import annotations

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from protocol.attempts import FailureKind
from tests.actors.coordination.operator_world import running_operator
from tests.actors.coordination.reader import ReaderTask


async def test_a_copy_that_registers_before_a_checkpoint_completes_reads_what_the_original_reads() -> None:  # H13, H56
    """The copy restores the checkpoint that was complete when it registered. If the later checkpoint also completed,
    the records would leave out the splits that it covers, and the copy would never read them."""
    splits = list(range(6))
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(splits, state))
    async with running_operator(coordinator, parallelism=1, tolerated_failures=0) as world:
        world.task_type = ReaderTask
        original = world.accept(0)
        assert isinstance(original, ReaderTask)
        await world.settle()
        for _ in range(4):  # ask, read, ask, read
            original.step()
            await world.settle()
        original.unresponsive = True
        pending = await world.checkpoint()
        copy = world.accept(0)
        assert isinstance(copy, ReaderTask)
        copy.opens_at_once = False
        await world.settle()
        assert "2 attempts at once" in pending.reason()
        original.unresponsive = False
        await world.settle()
        refused = await world.checkpoint()
        assert "2 attempts at once" in refused.reason()
        assert not world.failures, "a copy counts as no failure of a checkpoint"
        copy.open()
        await world.settle()
        world.fail(original, FailureKind.SUPERSEDED, reset=False)
        while not copy.is_over:
            copy.step()
            await world.settle()
        assert copy.done == splits
